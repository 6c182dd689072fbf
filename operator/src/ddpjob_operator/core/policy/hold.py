"""Why no new pods are made for the time being, though the job is neither suspended nor at its end.

Pods that run are looked after as ever: losses are counted, successes honoured, deadlines kept. Only
what a new pod would be made of is not to be trusted. A job may be refused, never frozen.
"""

from __future__ import annotations

from typing import Final

from ddpjob_operator.core.status import TERMINAL
from ddpjob_operator.core.view import Change, View

SPEC_INVALID: Final = "SpecInvalid"
TEMPLATE_CHANGED: Final = "TemplateChanged"
SNAPSHOT_CHANGED: Final = "SnapshotChanged"
#: Told by startup.py, taken back here.
POD_REFUSED: Final = "PodRefused"


def why(view: View) -> tuple[str, str] | None:
    """Reason and message of the condition Invalid; None if pods may be made."""
    if view.spec.flaw:
        return SPEC_INVALID, view.spec.flaw
    # CEL refuses what it sees of that; it overlooks one field without a type in place of another.
    if view.status.snapshot_hash not in ("", view.spec.snapshot_hash):
        return SNAPSHOT_CHANGED, (
            "spec.snapshot.volume changed, which is immutable: pods that run go on, new ones, "
            "whose snapshots lie elsewhere, are not made; change it back, or create a new DDPJob"
        )
    if not _changed(view) or suspends(view) or view.status.phase in (None, "Suspended"):
        return None
    return TEMPLATE_CHANGED, (
        "spec.template changed while the job was not suspended: pods that run go on, new ones are "
        "not made; change it back, or set spec.suspend to true and to false again to take it"
    )


def suspends(view: View) -> bool:
    """Whether pods are to go: the job is suspended, or was so quicker than could be stored.

    Suspending and resuming are two generations. A template that has changed over two that nobody
    has acted on was mended as the message above says, only quickly.
    """
    unseen = view.job.generation - view.status.observed_generation
    return view.spec.suspend or (unseen >= 2 and not view.spec.flaw and _changed(view))


def acted_on(view: View, phase: str | None) -> int:
    """The generation to be stored: a suspension only with the phase that follows from it."""
    waits = suspends(view) and phase not in ("Suspended", *TERMINAL)
    return view.status.observed_generation if waits else view.job.generation


def _changed(view: View) -> bool:
    return view.status.template_hash not in ("", view.spec.template_hash)


def tell(view: View, change: Change) -> Change:
    """Set the condition Invalid, once with an Event, or take it back."""
    found, old = why(view), view.status.condition("Invalid")
    said = old.reason if old and old.status == "True" else ""
    if found is None:
        taken = view.status.phase in ("Starting", "Running") and not view.missing
        over = taken if said == POD_REFUSED else bool(said)
        return change.condition("Invalid", False, "Valid", "", view.now) if over else change
    reason, message = found
    change = change.condition("Invalid", True, reason, message, view.now)
    return change if said == reason else change.tell("Warning", reason, message)
