"""Say why a wanted gang does not run.

plan() calls stall() in rounds without another decision. Any stall has a condition with a reason
from a closed list; silence is a defect.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Final, get_args

from ddpjob_contract import exits
from ddpjob_operator.core import evidence
from ddpjob_operator.core.capacity import pod_group, refusals
from ddpjob_operator.core.change import Change, Clock, Stall
from ddpjob_operator.core.failure_text import after_step, initializing, replicas
from ddpjob_operator.core.gang import barrier
from ddpjob_operator.core.nodes import avoid
from ddpjob_operator.core.objects import status as st
from ddpjob_operator.core.objects.observe import clean
from ddpjob_operator.core.objects.ranges import format_ranges
from ddpjob_operator.core.objects.status import Status
from ddpjob_operator.core.seats import Seats
from ddpjob_operator.core.view import PATIENCE, View

#: A claim may be bound, or a node join, moments after the first scheduling attempt.
SCHEDULING_PATIENCE = timedelta(seconds=5)
INIT_PENDING: Final = "InitContainerPending"
#: Characters of a list of replicas.
_LISTED: Final = 400
_KNOWN: Final = get_args(st.Known)


def stall(view: View, change: Change, why: Iterator[Stall]) -> Change:
    """Set or clear Stalled, by the first reason, while a wanted gang does not run."""
    old, said = view.status.condition("Stalled"), view.status.stalled
    found = next(why, None)
    if found is None:
        # Kept over the waits and first moments of retries, or it would flap with each.
        phase, stalled = change.status.phase, old and old.status == "True"
        if not stalled or phase == "Pending" or (phase != "Running" and view.fresh()):
            return change
        return change.condition("Stalled", False, "Progressing", "", view.now)
    more = _KNOWN.index(found.known) > _KNOWN.index(said.known)
    news = more or (found.until is None) != (said.until is None)
    news = news and view.feedback.pruned is None  # an older CRD drops what was known
    if old and old.status == "True" and old.reason == found.reason and not news:
        return change  # the same trouble in other words
    return change.stall(found, view.now)


def of_pods(view: View) -> Iterator[Stall]:
    """List the reasons that hold up this attempt, the most telling first."""
    yield from refusals.of_attempt(view)
    yield from view.fence.stalls(view.seats.pods)
    yield from barrier.undeleted(view)
    yield from _older(view)
    # One that has to stand by keeps nobody waiting.
    whole, members = view.spec.standby > 0 and view.seats.all_running, view.seats.members.values()
    pods = [pod for pod in members if evidence.running(pod) or not whole]
    for pod in pods:
        if pod.waiting_reason:
            said = pod.waiting_message
            yield Stall(pod.waiting_reason, f"pod {pod.name}: {said}", brief=said)
    for pod in pod_group.in_order(pods):
        if pod.unschedulable and not pod.node and not view.fresh(SCHEDULING_PATIENCE):
            yield refusals.no_room(pod, avoid.words(view.status) + pod_group.words(view))
    for pod in pods:
        started = evidence.running(pod) or pod.trainer.state == "terminated"
        if started or not pod.node or view.fresh():
            continue
        if pod_group.just_placed(view.status, view.clock, PATIENCE):
            continue
        where = f"pod {pod.name} on {pod.node}"
        if pod.awaits:
            yield Stall(INIT_PENDING, f"{initializing(pod.awaits)}, in {where}")
        # Events outlive the pod, which the end of the wait removes.
        hint = f"kubectl get events -n {pod.namespace}"
        hint += f" --field-selector involvedObject.name={pod.name}"
        yield Stall("ContainerCreating", f"{where} does not start: {hint}")
    for pod in pods:
        # Two clocks: good for a message, never for a decision.
        unseen = not pod.node and not pod.unschedulable and pod.phase == "Pending"
        if unseen and pod.created_at and view.clock.reached(pod.created_at + PATIENCE):
            yield refusals.no_room(pod)
    yield from _unresolved(view.status)
    yield from _lingering(view.seats, view.clock)


def _unresolved(status: Status) -> Iterator[Stall]:
    """Report rounds whose processes do not find one another, until one of them progresses."""
    last, reported = status.last_failure, status.progress.updated_at
    if last is None or not last.in_place or last.attempt != status.hub:
        return
    quiet = reported is None or reported <= last.detected_at
    if last.reason == exits.UNRESOLVED_NAMES and quiet:
        what = f"processes were restarted in place and do not find one another: {last.message}"
        yield Stall(exits.UNRESOLVED_NAMES, what)


def _lingering(seats: Seats, clock: Clock) -> Iterator[Stall]:
    if clock.reached(seats.lingering_at):
        # With thousands of replicas each list must leave room for the other.
        done = seats.succeeded
        left = frozenset(range(seats.spec.replicas)) - done
        which = clean(format_ranges(left), _LISTED)
        have, others_have = ("has" if len(some) == 1 else "have" for some in (done, left))
        after = after_step(done, seats.members)
        what = f"{replicas(done, _LISTED)} {have} succeeded{after}"
        yield Stall("WaitingForReplicas", f"{what}, and {which} {others_have} not ended")


def _older(view: View) -> Iterator[Stall]:
    """Report old pods that hold up this attempt."""
    for pod in view.seats.others:
        if not view.fresh():
            where = f"pod {pod.name} of attempt {pod.attempt} on {pod.node or 'no node'}"
            yield Stall("WaitingForDeletion", f"{where} is still being deleted")
    if pod_group.removals(view) and not view.fresh():
        what = f"PodGroup {view.status.pod_group} of an earlier attempt cannot be removed"
        yield Stall("WaitingForDeletion", f"{what}: see the operator's log")
