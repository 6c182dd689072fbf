"""Time the next try of a creation that the API server refused.

shell/executor.py records the API's answers, plan() asks here what to try. A taken name concerns one
object and passes soon. Any other refusal (rights, PodSecurity, a missing ServiceAccount, a webhook
that is down) meets every pod of the job alike: one pod tests it alone, after a wait that doubles as
long as the words stay the same and that differs between jobs. What is invalid (400, 422) or over
quota is given back at once: gang/start.py, advance().
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import takewhile
from typing import Final

from ddpjob_contract.crd import KIND
from ddpjob_operator.core.actions import ApiFeedback, Refusal
from ddpjob_operator.core.capacity import pod_group
from ddpjob_operator.core.change import Clock, Stall
from ddpjob_operator.core.nodes import fence
from ddpjob_operator.core.objects import status as st
from ddpjob_operator.core.objects.observe import Job, Pod
from ddpjob_operator.core.view import PATIENCE, View

#: For a taken name: its object is ours and about to go, or another's.
_OURS: Final = timedelta(seconds=2)
_FOREIGN: Final = timedelta(seconds=10)
#: A name taken for long frees no sooner for being asked: wait a tenth of that time, at most this.
_TAKEN_LONG: Final = timedelta(seconds=30)
#: For any other refusal, in seconds.
_FIRST: Final = 2.0
_MOST: Final = 300.0
#: Words of a refusal, its author, and the cure.
_REFUSERS: Final = (
    (
        "violates PodSecurity",
        "the namespace's Pod Security level",
        "set what it names in the template, or ask for another level for the namespace",
    ),
    (
        "exceeded quota",
        "a ResourceQuota of the namespace",
        "the operator tries again; the quota must have room for all pods at once",
    ),
    (
        "error looking up service account",
        "the API server",
        "create that ServiceAccount, or fix serviceAccountName in the template",
    ),
    (
        " cannot create resource ",
        "the rights of the operator's own account",
        "the operator's chart gives them in the namespaces that its value `namespaces` lists",
    ),
    (
        "no PriorityClass with name ",
        "the API server",
        "create it (the operator tries again), or delete the job and apply it with another",
    ),
    (" usage per ", "a LimitRange of the namespace", "change requests and limits to fit it"),
    ("' denied request", "an admission policy of the cluster", "change what it names"),
    ("admission webhook", "a webhook of the cluster", "ask those who run it"),
)
#: The API server's words before those that say what is wrong: the object's name is ours.
_OBJECT: Final = re.compile(
    r'^(\S+ "\S+" is (forbidden|invalid)'
    r'|Pod in version "v1" cannot be handled as a Pod(: strict decoding error)?): '
)
#: The scheduler's words before and after its reasons.
_SCHEDULER: Final = re.compile(
    r"^\d+/\d+ nodes are available: |[,.]? (no new claims to \w+, )?preemption: .*$"
)


@dataclass(frozen=True, slots=True)
class Row:
    """The newest creations, refused ``count`` times in a row in the same words."""

    last: Refusal
    count: int


def row(known: ApiFeedback) -> Row | None:
    """Return the row of refusals that hold up every creation of the job alike, if any."""
    alike = [refusal for refusal in known.refused if _meets_all(refusal)]
    if not alike:
        return None
    said = [(refusal.pattern, refusal.generation) for refusal in reversed(alike)]
    return Row(alike[-1], sum(1 for _ in takewhile(said[0].__eq__, said)))


def _meets_all(refusal: Refusal) -> bool:
    """Tell whether other pods would meet it too.

    A quota is left to start.py, which has its own waits. While the gang runs it was a standby pod,
    perhaps of a class that is not there: no other pod must wait for that.
    """
    of_standby = refusal.phase == "Running" and 400 <= refusal.code < 500
    return refusal.existing is None and not quota_exceeded(refusal) and not of_standby


def quota_exceeded(refusal: Refusal) -> bool:
    """Tell a ResourceQuota's 403 Forbidden from that of RBAC, by its words."""
    return refusal.code == 403 and "exceeded quota" in refusal.message


def next_try_at(view: View) -> datetime | None:
    """Return when one pod may be tried after a row of refusals; None: at once.

    A new generation of the job may have cured it.
    """
    found = row(view.feedback)
    if found is None or found.last.generation != view.job.generation:
        return None
    doubled = _FIRST * 2.0 ** min(found.count - 1, 20)
    seconds = min(_MOST, doubled * (0.75 + 0.5 * view.chance(found.count)))
    return found.last.at + timedelta(seconds=seconds)


def resting(view: View, refusal: Refusal | None = None) -> bool:
    """Tell whether it is too early to try again, all alike or what was refused so."""
    at = next_try_at(view)
    return (at is not None and not view.clock.reached(at)) or _rests(view, refusal)


def _rests(view: View, refusal: Refusal | None) -> bool:
    """Tell whether it is too early for an object whose name was taken."""
    if refusal is None:
        return False
    foreign = refusal.existing is not None and not is_passing(view.job, refusal)
    stood = min(_TAKEN_LONG, (refusal.at - (view.begun_at or refusal.at)) / 10)
    until = refusal.at + max(_FOREIGN if foreign else _OURS, stood)
    return not view.clock.reached(until)


def ready(view: View) -> list[int]:
    """List the missing seats to try now.

    While a name is taken only that one is tried: the gang cannot be whole without it, and if a pod
    of ours has it the barrier was not passed.
    """
    if resting(view):  # once: there may be 10,000 seats
        return []
    refusals = view.refusals
    taken = [r for r, refusal in refusals.items() if refusal.existing]
    return [r for r in taken or view.seats.not_created if not _rests(view, refusals.get(r))]


def stalls(view: View) -> Iterator[Stall]:
    """Explain why a restarting gang is not created yet: the last refusal is still resting."""
    at, found = next_try_at(view), row(view.feedback)
    waits = view.status.phase in ("Restarting", "Starting")  # start.py tells it in Pending
    if at is None or found is None or view.clock.reached(at) or not waits:
        return  # of_attempt() reports this attempt's refusals first
    if not view.fresh():
        what = f"the attempt before was refused: {found.last.pattern}"
        what += f", tried again at {at:%H:%M:%S} UTC"
        yield Stall("CreationFailed", what)


def of_attempt(view: View) -> Iterator[Stall]:
    """Report what the API refuses of this attempt."""
    for refusal in (view.network_refusal, *view.refusals.values()):
        if refusal and not (is_ours(view.job, refusal) and view.fresh()):
            yield stall(view.job, refusal, view.clock)


def stall(job: Job, refusal: Refusal, clock: Clock) -> Stall:
    """Report a refusal."""
    found = refusal.existing
    if found and is_passing(job, refusal):
        what = f"{found.kind} {found.name} of an earlier attempt or job is still there"
        stuck = found.deletion_at and clock.reached(found.deletion_at + PATIENCE)
        cure = f" on node {found.node}" if found.node else ""
        cure += f": {fence.cure(found.node)}" if found.node and stuck else ""
        known: st.Known = "Cure" if found.node and stuck else "Cause"
        return Stall("WaitingForDeletion", what + cure, known)
    if found:
        what = f"{found.kind} {found.name} exists and is not ours: delete or rename one of them"
        return Stall("NameConflict", what)
    # A reason that is no word, as of a proxy's error page, would make the status invalid.
    word = refusal.reason.isascii() and refusal.reason.isalnum() and refusal.reason[0].isalpha()
    return Stall(refusal.reason if word else "CreationFailed", explained(refusal))


def explained(refusal: Refusal) -> str:
    """Put after the API server's words, where known, who refused and what helps."""
    said = _OBJECT.sub("", refusal.message)
    for words, who, cure in _REFUSERS:
        if words in refusal.message:
            return f"{said} (refused by {who}): {cure}"
    return said


def is_ours(job: Job, refusal: Refusal) -> bool:
    """Tell whether an object of this very job, about to go, has the name."""
    return refusal.existing is not None and refusal.existing.owner_uid == job.uid


def is_passing(job: Job, refusal: Refusal) -> bool:
    """Tell whether the name frees by itself: ours, or of a deleted job's object."""
    namesake = f"{KIND} {job.name}"
    left = refusal.existing is not None and refusal.existing.owner == namesake
    return left or is_ours(job, refusal)


def no_room(pod: Pod, more: str = "") -> Stall:
    """Report a pod that has no node, in the scheduler's words if it has any."""
    said = pod.unschedulable
    if not said:
        what = f"{pod_group.UNSEEN}: does the one of spec.schedulerName run?"
        return Stall("Unschedulable", f"pod {pod.name}: {what}", known="", brief=what)
    brief = _SCHEDULER.sub("", said) or said
    known: st.Known = "" if pod_group.only_waits(pod) else "Cause"
    return Stall("Unschedulable", f"pod {pod.name}: {said}{more}", known, brief=brief + more)
