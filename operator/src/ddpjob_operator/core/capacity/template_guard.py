"""Hold back new pods of a job that is neither suspended nor at its end.

plan() asks before it creates. Running pods are looked after as ever: losses are counted, successes
honoured, deadlines kept. Only the template of a new pod is in doubt: a job may be refused, never
frozen.
"""

from __future__ import annotations

from typing import Final

from ddpjob_operator.core.change import Change
from ddpjob_operator.core.failure_text import describe
from ddpjob_operator.core.objects.observe import clean
from ddpjob_operator.core.objects.spec import Spec
from ddpjob_operator.core.objects.status import Status, with_condition
from ddpjob_operator.core.seats import Seats
from ddpjob_operator.core.view import View

SUSPENDING: Final = "Suspending"
_ENDING: Final = "pods are still ending; "
#: Before the failure of a gang that something else ends.
BROKEN: Final = "the gang had already failed: "
_WHY: Final = "spec.suspend is true: set it to false to go on"
_NEW_PODS: Final = (
    "spec.template changed while the job was suspended for a moment: replacing its pods"
)
#: Set by start.py, cleared here.
POD_REFUSED: Final = "PodRefused"


def why(view: View) -> tuple[str, str] | None:
    """Return reason and message of the condition Invalid; None if pods may be created."""
    spec, status = view.spec, view.status
    if spec.flaw:
        return "SpecInvalid", spec.flaw
    # CEL refuses most of it, but overlooks one untyped field in place of another.
    if status.snapshot_hash not in ("", spec.snapshot_hash):
        return "SnapshotChanged", (
            "spec.snapshot.volume changed, which is immutable: running pods continue, new ones are "
            "not created, as they lack the snapshots; change it back, or create a new DDPJob"
        )
    if not _changed(spec, status) or suspends(view) or status.phase in (None, "Suspended"):
        return None
    return "TemplateChanged", (
        "spec.template changed while the job was not suspended: running pods continue, new ones "
        "are not created; change it back, or apply it by setting spec.suspend to true, then false"
    )


def suspends(view: View) -> bool:
    """Tell whether pods are to go: suspended, or suspended too briefly to be stored.

    Suspending and resuming are two generations: a template that changed over two unseen ones was
    changed in the way that the message above asks for, only quickly.
    """
    spec, status = view.spec, view.status
    unseen = view.job.generation - status.observed_generation
    return spec.suspend or (unseen >= 2 and not spec.flaw and _changed(spec, status))


def suspended(view: View, change: Change, message: str | None = None) -> Change:
    """Report the suspension: done once the last pod has ended, until then in progress.

    Without a message the suspension was stored before. Others may wait for its room.
    """
    old, seats = change.status.condition("Suspended"), view.seats
    ending = view.status.attempt > 0 and seats.pods_left
    if message is None:
        if (old and old.status == "True") or ending or needs_proof(seats):
            return change
        message = why_suspended(view.spec, view.status)
    if not ending:
        change = change.condition("Suspended", True, "Suspended", message, view.now)
        return change.event("Normal", "Suspended", message)
    conditions, message = change.status.conditions, clean(_ENDING + message)
    reported = with_condition(conditions, "Suspended", False, SUSPENDING, message, view.now)
    return change.with_status(conditions=reported).event("Normal", SUSPENDING, message)


def why_suspended(spec: Spec, status: Status) -> str:
    """Say why the pods go, and what had broken the gang by then."""
    why, loss = _WHY if spec.suspend else _NEW_PODS, status.last_loss
    broken = loss is not None and loss.attempt == status.attempt and not loss.replaced
    return f"{why}; {BROKEN}{describe(loss)}" if loss and broken else why


def needs_proof(seats: Seats) -> bool:
    """Tell whether only a cache says that a suspended job's last pod has ended."""
    status, old = seats.status, seats.status.condition("Suspended")
    reported = status.phase != "Suspended" or (old is not None and old.status == "True")
    if reported or status.attempt == 0 or seats.pods_left:
        return False
    return not (seats.read and seats.read.over)


def _changed(spec: Spec, status: Status) -> bool:
    return status.template_hash not in ("", spec.template_hash)


def report(view: View, change: Change) -> Change:
    """Set the condition Invalid, once with an Event, or clear it."""
    found, old = why(view), view.status.condition("Invalid")
    known = old.reason if old and old.status == "True" else ""
    if found is None:
        taken = view.status.phase in ("Starting", "Running") and not view.seats.missing
        over = taken if known == POD_REFUSED else bool(known)
        return change.condition("Invalid", False, "Valid", "", view.now) if over else change
    reason, message = found
    change = change.condition("Invalid", True, reason, message, view.now)
    return change if known == reason else change.event("Warning", reason, message)
