"""Fill the status besides decisions, say why a wanted gang does not run, decide when it is stored.

plan() calls stall() in rounds without another decision: any stall has a condition with a reason
from a closed list; silence is a defect. It calls fill() last in each planning round, then write():
decisions are stored at once, reports now and then.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Final, get_args

from ddpjob_contract import exits
from ddpjob_contract.crd import TERMINAL_PHASES
from ddpjob_operator.core import actions, evidence, operators
from ddpjob_operator.core.actions import Plan
from ddpjob_operator.core.capacity import pod_group, refusals, template_guard
from ddpjob_operator.core.change import Change, Clock, Stall
from ddpjob_operator.core.failure_text import after_step, describe, initializing, replicas, shorten
from ddpjob_operator.core.gang import barrier, finish
from ddpjob_operator.core.loss import verdict
from ddpjob_operator.core.nodes import avoid
from ddpjob_operator.core.objects import status as st
from ddpjob_operator.core.objects.json_read import format_ranges
from ddpjob_operator.core.objects.nodes import Nodes
from ddpjob_operator.core.objects.observe import Pod, clean
from ddpjob_operator.core.objects.spec import Spec
from ddpjob_operator.core.objects.status import Failure, Progress, Status
from ddpjob_operator.core.report import ledger
from ddpjob_operator.core.seats import Seats
from ddpjob_operator.core.view import PATIENCE, View, began_from, received, recovers_from

#: Status writes that only report are held back until this long after the last write.
REPORT_INTERVAL: Final = timedelta(seconds=2)
#: The same for a gang that has run for 20 minutes: a thousand such jobs write 17 times a second.
PROGRESS_INTERVAL: Final = timedelta(seconds=60)
#: Characters of the message that is a column of `kubectl get`.
_BRIEF: Final = 80
#: A claim may be bound, or a node join, moments after the first scheduling attempt.
SCHEDULING_PATIENCE = timedelta(seconds=5)
INIT_PENDING: Final = "InitContainerPending"
#: Characters of a list of replicas.
_LISTED: Final = 400
_KNOWN: Final = get_args(st.Known)
#: The only phase in which each of these conditions is true.
_PHASE_OF: Final = {
    "Running": "Running",
    "Silent": "Running",
    "Apart": "Running",
    "Straggling": "Running",
    "Suspended": "Suspended",
    "Complete": "Succeeded",
    "Failed": "Failed",
}
#: Reasons of a job's end by its newest failure.
_BY_FAILURE: Final = (
    "PermanentFailure", "SameFailure", "MaxRestartsExceeded", "MaxDisruptionsExceeded",
)  # fmt: skip


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
        what = f"processes restarted in place cannot find one another: {last.message}"
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


def fill(view: View, change: Change) -> Change:
    """Fill in counts, progress, observedGeneration and the condition Ready."""
    change = change.with_status(conditions=_by_phase(change.status, view.now))
    status = change.status
    seats, polled = view.seats, view.feedback.progress
    # A suspension is acted on once it has taken effect.
    waits = template_guard.suspends(view) and status.phase not in ("Suspended", *TERMINAL_PHASES)
    acted_on = view.status.observed_generation if waits else view.job.generation
    parts: dict[str, Any] = {"observed_generation": acted_on}
    if not status.terminal:  # the end keeps its own last words
        parts |= {"progress": received(status.progress, polled)}
        other = polled is not None and polled.other_job
        change = began_from(view.status, change, parts["progress"].resumed, other_job=other)
    if status.phase == "Suspended" or status.queued:
        active = len([pod for pod in seats.pods if not pod.ended])
        still = _replicas(view.spec, seats.pods)
        parts |= {"replicas": replace(still, active=active, failed=0)}
    elif status.terminal or status.members_since == view.status.members_since:
        counts = _replicas(view.spec, seats.members.values(), len(seats.succeeded))
        counts = replace(counts, active=0, ready=0) if status.terminal else counts
        parts |= {"replicas": counts, "succeeded": seats.succeeded}
    else:
        parts |= {"replicas": st.Replicas(desired=view.spec.replicas)}
    change = _remarks(view, change)
    reason, message = _why(view.status, change)
    parts |= {"reason": reason, "message": message}
    change = change.with_status(**parts)
    change = _unsupported(view.spec, view.nodes, change, view.now)
    if status.terminal:
        return change
    return _straggling(view, _proven(polled, change, view.now))


def _by_phase(status: Status, now: datetime) -> tuple[st.Condition, ...]:
    """Clear conditions of another phase (etcd was restored, a person wrote them) and set Ready.

    kstatus, by which Helm, Flux and others wait, takes a job without Ready for finished; it follows
    the phase alone, so it costs no extra write.
    """
    phase, conditions = status.phase or "Pending", status.conditions
    for type_, only in _PHASE_OF.items():
        reported = status.condition(type_)
        if reported and reported.status == "True" and phase != only:
            conditions = st.with_condition(conditions, type_, False, phase, f"phase {phase}", now)
    ready = phase in ("Running", "Succeeded")
    return st.with_condition(conditions, "Ready", ready, phase, f"phase {phase}", now)


def _why(before: Status, change: Change) -> tuple[str, str]:
    """Summarize why the job is not as it should be; "" if all is well.

    Causes for the user come first, then those of the cluster, then the newest failure.
    """
    status = change.status
    if status.phase == "Succeeded":
        return "", ""
    for type_ in ("Failed", "Invalid", "Stalled"):
        found = status.condition(type_)
        if found and found.status == "True":
            # Where a failure is the cause, the reason says the rest already.
            if cause := _cause(status, found.reason):
                return found.reason, shorten(cause.exception or describe(cause), _BRIEF)
            if found == before.condition(type_) and found.reason == before.reason:
                return before.reason, before.message
            return found.reason, clean(change.briefs.get(type_) or found.message, _BRIEF)
    loss = recovers_from(status)
    if loss is None or status.phase != "Restarting":
        known = filter(None, map(status.condition, ("Apart", "Silent")))
        shown = ((one.reason, one.message) for one in known if one.status == "True")
        return next(shown, ("", ""))
    return loss.reason, shorten(loss.exception, _BRIEF)


def _cause(status: Status, reason: str) -> Failure | None:
    """Return the failure that a condition of this reason is about."""
    if reason == verdict.CRASH_LOOPING:
        return next(reversed(verdict.of_program(status)), None)
    loss = status.last_loss
    if reason == "DeadlineExceeded" and loss and loss.attempt == status.attempt:
        return None if loss.replaced else loss
    return status.last_failure if reason in _BY_FAILURE else None


def _replicas(spec: Spec, pods: Collection[Pod], succeeded: int = 0) -> st.Replicas:
    most = spec.replicas  # others stand by
    alive = [p for p in pods if p.phase in ("Pending", "Running") and not p.deleting]
    return st.Replicas(
        desired=most,
        active=min(most, len([p for p in alive if not evidence.succeeded(p)])),
        ready=min(most, len([p for p in alive if p.trainer.ready and evidence.running(p)])),
        succeeded=succeeded,
        failed=len(list(filter(evidence.failed, pods))),
    )


def _proven(polled: Progress | None, change: Change, now: datetime) -> Change:
    """Report whether the newest restart was proven; without news the condition stays."""
    found = polled.proof if polled is not None else None
    if found is None:
        return change
    reason = "StepsRepeatedEqual" if found.equal else "StepsDiffer"
    old = change.status.condition("ResumeProven")
    conditions = st.with_condition(  # False too where it never was true
        change.status.conditions, "ResumeProven", found.equal, reason, found.message, now
    )
    change = change.with_status(conditions=conditions)
    again = old is not None and old.reason == reason and found.equal
    if again or old == change.status.condition("ResumeProven"):
        return change
    return change.event("Normal" if found.equal else "Warning", reason, found.message)


def _straggling(view: View, change: Change) -> Change:
    """Report the rank that holds up the others; its place tells which pod and node."""
    polled, old = view.feedback.progress, change.status.condition("Straggling")
    found = polled.straggler if polled is not None and change.status.phase == "Running" else None
    if found is None:
        return change.condition("Straggling", False, "Progressing", "", view.now)
    replica = found.rank // view.spec.nproc_per_node
    pod = view.seats.members.get(change.status.serving.get(replica, replica))
    where = f"pod {pod.name} on {pod.node}" if pod else f"replica {replica}"
    does = "waits for its data" if found.fetching else "computes"
    reason = "SlowInput" if found.fetching else "SlowRank"
    # Without figures: the same rank, a little faster or slower, is no news.
    what = f"rank {found.rank} in {where} {does} so much longer than the others that they wait"
    change = change.condition("Straggling", True, reason, what, view.now)
    news = change.status.condition("Straggling") != old
    return change.event("Warning", reason, what) if news else change


def _remarks(view: View, change: Change) -> Change:
    """Report of a gang that runs that nobody prints or progresses, or that it is no gang."""
    polled, since = view.feedback.progress, view.status.timings.running_at
    if change.status.phase != "Running" or polled is None:
        return change
    of_this_gang = bool(polled.updated_at and since and polled.updated_at >= since)
    silent = f"no rank has printed a line, or made a step, for {polled.silent // 60} min"
    apart = finish.apart(view.spec, "train")
    for type_, seen, reason, what in (
        ("Silent", polled.silent > 0, "NoOutput", silent),
        ("Apart", finish.never_met(view.spec, polled), "NotConnected", apart),
    ):
        if not (seen and of_this_gang):
            change = change.condition(type_, False, "Progressing", "", view.now)
            continue
        old = change.status.condition(type_)
        change = change.condition(type_, True, reason, what, view.now)
        if old is None or old.status == "False":
            change = change.event("Warning", reason, what)
    return change


def _unsupported(spec: Spec, nodes: Nodes | None, change: Change, now: datetime) -> Change:
    if spec.fence_after is not None and nodes is None:
        return change  # not known yet
    if spec.fence_after is None or (nodes and nodes.readable):
        return change.condition("Unsupported", False, "AllSupported", "", now)
    what = "spec.nodeLost.policy Fence behaves as Wait, because the operator cannot read nodes"
    what += ": install its chart with rbac.nodes=true"
    return change.condition("Unsupported", True, "NodesNotReadable", what, now)


def write(view: View, change: Change) -> Plan | None:
    """Plan to store the status; None if there is nothing to store right now."""
    new, old = st.to_dict(change.status), st.to_dict(view.status)
    sent, stored = view.feedback.pruned or ({}, None)
    if new == old or (st.decided(new) == st.decided(sent) and stored == view.job.status):
        return None  # what an older CRD drops would be written for ever
    last = view.feedback.status_written_at
    if last is not None and _reports_only(change.status, view.status):
        interval = REPORT_INTERVAL
        if replace(view.status, progress=change.status.progress) == change.status:
            # The longer the gang has run, and the more gangs do, the less often a step is news.
            ran = last - (view.status.timings.running_at or last)
            seldom = max(ran / 20, view.feedback.report_after)
            interval = max(REPORT_INTERVAL, min(PROGRESS_INTERVAL, seldom))
        if not view.clock.reached(last + interval):
            return None
    begins = change.status.phase == "Starting" != view.status.phase
    change = operators.sign(view.feedback, ledger.book(view, change))  # with what is written anyway
    new = st.to_dict(change.status)
    return Plan((actions.WriteStatus(new, change.events, change.measurements, begins),))


def _reports_only(new: Status, old: Status) -> bool:
    """Tell whether only counts, progress, a stall or a remark (Silent, Apart) differ.

    A success is stored before its pod may go. Two operators that both act for a moment may report a
    stall in turns; only its first report is written at once.
    """

    def decided(status: Status) -> Status:
        rest = replace(status, replicas=st.Replicas(), progress=st.Progress(), serving={})
        rest = replace(rest, can_wait_for_replacement=False)
        heard = tuple(c for c in rest.conditions if c.type not in ("Silent", "Apart"))
        rest = replace(rest, conditions=heard)
        if old.condition("Stalled") is None:
            return rest
        reported = tuple(c for c in heard if c.type != "Stalled")
        return replace(rest, conditions=reported, reason="", message="", stalled=st.Stalled())

    return decided(new) == decided(old) and new.replicas.succeeded == old.replicas.succeeded
