"""Decide what the operator does about a job: plan(job, pods, feedback, now, nodes) -> Plan.

Nothing else in the operator decides; restarts in place are the launchers' (launcher/hub).
shell/reconciler.py calls it for each key of the queue, and shell/executor.py carries out the Plan.
It is level-triggered: it reads state and remembers nothing. First it works out the status to be
stored; if that differs, storing it is the whole plan, so every intent is on record before any
action. A planning round whose status is already stored acts: delete non-members, pass the barrier,
create what is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Final

from ddpjob_operator.core import actions, operators
from ddpjob_operator.core.actions import ApiFeedback, ConfirmGone, DeletePod, Plan
from ddpjob_operator.core.capacity import kueue, pod_group, refusals, template_guard
from ddpjob_operator.core.change import Change, Stall
from ddpjob_operator.core.gang import barrier, finish, handover, replacement, restart, start
from ddpjob_operator.core.loss import cause, verdict
from ddpjob_operator.core.nodes import avoid
from ddpjob_operator.core.objects import status as st
from ddpjob_operator.core.objects.nodes import Nodes
from ddpjob_operator.core.objects.observe import Job, Pod
from ddpjob_operator.core.objects.status import Status
from ddpjob_operator.core.report import conditions
from ddpjob_operator.core.view import View, build_view

_WANTED: Final = ("Pending", "Starting", "Running", "Restarting")


def plan(
    job: Job, pods: Sequence[Pod], feedback: ApiFeedback, now: datetime, nodes: Nodes | None = None
) -> Plan:
    """Decide what to do about one job.

    Args:
        job: the DDPJob as last seen.
        pods: pods that carry its uid; those with another owner are ignored.
        feedback: what the API answered to earlier plans of this process.
        now: the operator's clock, UTC.
        nodes: those that the pods are on; None before they could be read.
    """
    view = build_view(job, pods, feedback, now, nodes)
    todo = _leave(view) if job.deleting else _plan(view)
    todo = replace(todo, requeue_after=min(view.clock.wakes, default=None))
    return todo if job.deleting else operators.give_way(view, todo)


def _plan(view: View) -> Plan:
    job, status = view.job, view.status
    if job.status.get("attempt", 0) != status.attempt:  # forged
        return Plan((actions.WriteStatus(st.to_dict(status)),))
    if status.terminal:
        seen = pod_group.update(view, Change(replace(status, observed_generation=job.generation)))
        seen = operators.answer(status, view.feedback, view.clock, seen)
        if (written := conditions.write(view, seen)) is not None:
            return written
        # Nothing may be left of the job before its quota is given back.
        left = finish.clean_up(view)
        return left if left.actions else Plan(kueue.finish(view))
    change = operators.answer(status, view.feedback, view.clock, _decide(view))
    change = conditions.fill(view, pod_group.update(view, change))
    return conditions.write(view, change) or _act(view)


# --- The status that should be stored -----------------------------------------------------


def _decide(view: View) -> Change:
    """Work out the status: what ends the job, then what holds it back, then its gang."""
    spec, status, seats, change = view.spec, view.status, view.seats, Change(view.status)
    # Either our view of the job is old, and this write is refused, or etcd was restored.
    if seats.next_attempt > status.attempt + 1:
        held = template_guard.suspends(view) or template_guard.why(view)
        if status.phase == "Suspended" and not held:
            return start.begin_job(view, change)  # the active deadline does not count from before
        return restart.new_attempt(view, change, "Restarting", 0)
    # The hub's report is on record whatever is decided now: it may be its last one.
    change, polled = verdict.count_rounds(view, change), view.feedback.rounds
    change = replacement.record_hub_report(view.job, status, polled, change)
    # A success counts whatever deadline or suspend says by now.
    if len(seats.succeeded) == spec.replicas:
        return finish.succeed(view, change)
    over = finish.past_active_deadline(seats, view.clock)
    if over and seats.read_since(finish.active_deadline(seats)):
        what = f"activeDeadlineSeconds {spec.active_deadline:.10g} has passed"
        change, what = start.broken(view, change, what)
        return finish.fail(view, change, "DeadlineExceeded", what)
    change = template_guard.report(view, change)
    if (without_pods := _stop(view, change)) is not None:
        return without_pods
    if status.parked or status.attempt == 0:
        if template_guard.why(view):
            return change.with_status(phase=status.phase or "Pending")
        return start.begin_job(view, change)
    # Progress gives charges back before a loss is charged.
    change = verdict.heal(view, change)
    if (broken := _restart(view, change)) is not None:
        return broken
    change = _go_on(view, change)
    # Only a round without another decision says why nothing moves.
    if change.status.phase == status.phase:
        why = replacement.with_deadline(seats, view.now, _stalls(view, change.status))
        change = conditions.stall(view, change, why)
    return change


def _go_on(view: View, change: Change) -> Change:
    """Begin to create pods past the barrier; end the start once they run, or it takes too long."""
    if view.status.phase == "Starting" or replacement.runs_past_deadline(view.seats, view.clock):
        if cause.awaited(view):
            return change
        return start.advance(view, change, _stalls(view, change.status))
    return start.begin(view, change) if barrier.passed(view) else change


def _stalls(view: View, status: Status) -> Iterator[Stall]:
    """List why the gang does not run, the most telling first."""
    yield from kueue.stalls(view)
    yield from cause.stalls(view)
    yield from pod_group.stalls(view.spec, view.status, view.feedback)
    yield from conditions.of_pods(view)
    yield from refusals.stalls(view)
    yield from verdict.crash_loop(view, status)
    yield from operators.stalls(view.status, view.clock)


def _restart(view: View, change: Change) -> Change | None:
    """Answer a loss, a node about to go, or a replacement that gets nowhere; None: all is well."""
    status, seats = view.status, view.seats
    # A replacement gets nowhere: launchers wait only so long, so now all restart.
    why = _stalls(view, change.status)
    if status.replacing and (over := replacement.failed(seats, view.clock, why)):
        if any(not pod.node for pod in seats.members.values()):
            change = avoid.nothing(change, "no room elsewhere")
        return restart.restart_all(view, change, *over)
    # A member is lost: that is judged at once, since its pod tells why only as long as it is there.
    if (loss := cause.loss(view, change.status)) is not None:
        change = cause.clear_wait(change, view.now)
        if late := replacement.too_late(seats, loss):
            return restart.restart_all(view, change, "Restarting", late)
        return restart.after(view, change, loss)
    # A pod of this attempt may have been made unseen: a second one must not be (rule O5).
    if unsure := replacement.maybe_created(seats, view.feedback.begun):
        if status.replacing or status.phase == "Running":
            return replacement.retry_as_new_attempt(view, change, unsure)
        what = "cannot tell whether the pod of replica 0 was created"
        return restart.restart_all(view, change, "Restarting", what)
    # Nothing is lost: the time to leave nodes that are about to go.
    return handover.begin(view, change)


def _stop(view: View, change: Change) -> Change | None:
    """End the pods of a job that is suspended, or that Kueue does not admit; None: neither."""
    suspends = template_guard.suspends(view)
    words = "" if suspends else kueue.wait(view)
    if not (suspends or words):
        return None
    if _may_be_done(view):
        return change
    if not suspends:
        return start.hold(view, change, words)
    if view.status.phase == "Suspended":
        change = template_guard.suspended(view, change)
        return conditions.stall(view, change, barrier.undeleted(view))
    return start.suspend(view, change)


def _may_be_done(view: View) -> bool:
    """Tell whether pods to be suspended, or to wait, may have succeeded, unseen by a watch."""
    read = view.seats.read
    asked = read and read.generation == view.job.generation and not read.seats
    if not template_guard.suspends(view):
        asked = read and read.evicted  # no other reason while it runs
    return view.status.phase in ("Starting", "Running") and not asked


def _needs_all(view: View) -> bool:
    """Tell whether a final decision is due that needs a quorum read of all pods first."""
    seats = view.seats
    # The job's deadline fails it for good, and its last replica may have succeeded, unseen.
    over = finish.past_active_deadline(seats, view.clock)
    if over and not seats.read_since(finish.active_deadline(seats)):
        return True
    # A suspension ends pods that may have succeeded; once reported, others take their room.
    if template_guard.suspends(view) and _may_be_done(view):
        return True
    if template_guard.suspends(view) and template_guard.needs_proof(seats):
        return True
    # In a queue the same holds of pods that are to wait, and of quota to be given back.
    if kueue.needs_proof(view) or _evicted(view):
        return True
    # A late gang is released or charged for it, and the last pod may run by now.
    return start.late(view) and not seats.read_since(start.deadline(view))


def _evicted(view: View) -> bool:
    return bool(kueue.wait(view)) and _may_be_done(view)


# --- What to do about it ------------------------------------------------------------------


def _act(view: View) -> Plan:
    """Do the first thing that is due: the next round sees what came of it."""
    status, seats = view.status, view.seats
    # What is left of other attempts goes first: the barrier waits for it.
    leaving = barrier.deletions(seats, view.fence)
    if leaving:
        return Plan(leaving)
    if removals := pod_group.removals(view):
        return Plan(removals)
    # The next decision needs to know more than a watch shows.
    if _needs_all(view):
        return Plan((ConfirmGone(status.attempt, evicted=_evicted(view)),))
    if status.parked and (todo := kueue.parked(view)):
        return Plan(todo)
    if seats.loss_unproven or cause.waits_for_read(view):
        return Plan((barrier.read(seats),))
    if status.parked or status.phase not in _WANTED:
        return Plan(view.fence.reads(seats.pods))
    # A gang that lacks a pod trains no step, so that is made before anything is looked after.
    todo = () if seats.others else barrier.creations(view)
    todo = todo or view.fence.reads(seats.pods)
    todo = todo or (() if seats.others else handover.reads(view))
    return Plan(todo or kueue.running(view))


def _leave(view: View) -> Plan:
    """End the rest of a deleted job's gang once it is broken or late.

    The garbage collector removes what the job owns when the job is gone, but a finalizer may keep
    it for days. No event is sent: a deleted job has not failed.
    """
    seats = view.seats
    if view.status.terminal:
        todo = finish.clean_up(view).actions
        return Plan(tuple(one for one in todo if not isinstance(one, actions.DeleteJob)))
    if seats.loss_unproven:
        return Plan((ConfirmGone(view.status.attempt),))
    over = template_guard.suspends(view) or finish.past_active_deadline(seats, view.clock)
    going = seats.pods if over or cause.find(view) else seats.others
    left = [pod for pod in going if not (pod.deleting or pod.ended)]
    return Plan(tuple(DeletePod(pod.name, pod.uid, None) for pod in left))
