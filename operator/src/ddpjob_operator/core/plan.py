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
from datetime import datetime, timedelta
from functools import partial
from itertools import chain
from typing import Final

from ddpjob_contract.exits import DEAD_GANG_SECONDS
from ddpjob_operator.core import actions, operators, render
from ddpjob_operator.core.actions import Action, ApiFeedback, ConfirmGone, DeletePod, Plan
from ddpjob_operator.core.capacity import pod_group, queue, refusals, template_guard
from ddpjob_operator.core.failure_text import describe
from ddpjob_operator.core.gang import finish, handover, restart, start
from ddpjob_operator.core.gang import replace as replacement
from ddpjob_operator.core.loss import budgets, cause, rounds
from ddpjob_operator.core.nodes import avoid, fence
from ddpjob_operator.core.objects import status as st
from ddpjob_operator.core.objects.nodes import Nodes
from ddpjob_operator.core.objects.observe import Job, Pod
from ddpjob_operator.core.objects.ranges import counted
from ddpjob_operator.core.objects.status import Status
from ddpjob_operator.core.report import ledger
from ddpjob_operator.core.report import stall as report
from ddpjob_operator.core.view import Change, Stall, View, build_view

_WANTED: Final = ("Pending", "Starting", "Running", "Restarting")
#: Status writes that only report are held back until this long after the last write.
REPORT_INTERVAL: Final = timedelta(seconds=2)
#: The same for a gang that has run for 20 minutes: a thousand such jobs write 17 times a second.
PROGRESS_INTERVAL: Final = timedelta(seconds=60)
#: Missing seats whose pods alone are asked for: a label selector names each.
_FEW_SEATS: Final = 20
#: Pods rendered and created in one round, so that a gang of 10,000 leaves time to others.
_BATCH: Final = 500
#: Bytes of templates in one round: as objects they take up to 20 times as much.
_BATCH_BYTES: Final = 1024 * 1024


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
    todo = replace(todo, requeue_after=min(view.wakes, default=None))
    return todo if job.deleting else operators.give_way(view, todo)


def _plan(view: View) -> Plan:
    job, status = view.job, view.status
    if job.status.get("attempt", 0) != status.attempt:  # forged
        return Plan((actions.WriteStatus(st.to_dict(status)),))
    if status.terminal:
        seen = pod_group.settle(view, Change(replace(status, observed_generation=job.generation)))
        seen = operators.answer(view, seen)
        return _write(view, seen) or _end(view)
    change = report.fill(view, pod_group.settle(view, operators.answer(view, _decide(view))))
    return _write(view, change) or _act(view)


# --- The status that should be stored -----------------------------------------------------


def _decide(view: View) -> Change:
    status, change = view.status, Change(view.status)
    if view.next_attempt > status.attempt + 1:
        # Either our view of the job is old, and this write is refused, or etcd was restored.
        if status.phase == "Suspended" and not (
            template_guard.suspends(view) or template_guard.why(view)
        ):
            return _start(view, change)  # the active deadline does not count from before
        return restart.new_attempt(view, change, "Restarting", 0)
    change = replacement.hear(view, rounds.count(view, change))
    if len(view.succeeded) == view.spec.replicas:
        return finish.succeed(view, change)  # whatever deadline or suspend says by now
    if finish.past_active_deadline(view) and view.read_since(finish.active_deadline(view)):
        what = f"activeDeadlineSeconds {view.spec.active_deadline:.10g} has passed"
        change, what = _broken(view, change, what)
        return finish.fail(view, change, "DeadlineExceeded", what)
    change = template_guard.tell(view, change)
    if (without_pods := _stop(view, change)) is not None:
        return without_pods
    if status.parked or status.attempt == 0:
        if template_guard.why(view):
            return change.with_status(phase=status.phase or "Pending")
        return _start(view, change)
    change = budgets.budgets(view, change)
    if (broken := _restart(view, change)) is not None:
        return broken
    change = _go_on(view, change)
    if change.status.phase == status.phase:
        why = replacement.with_deadline(view, _stalls(view, change.status))
        change = report.stall(view, change, why)
    return change


def _go_on(view: View, change: Change) -> Change:
    """Begin to create pods past the barrier; end the start once they run, or it takes too long."""
    if view.status.phase == "Starting" or replacement.covered(view):
        if cause.awaited(view):
            return change
        return start.advance(view, change, _stalls(view, change.status))
    return start.begin(view, change) if _barrier_passed(view) else change


def _stalls(view: View, status: Status) -> Iterator[Stall]:
    """List why the gang does not run, the most telling first."""
    yield from queue.reasons(view)
    yield from cause.reasons(view)
    yield from pod_group.reasons(view)
    yield from report.reasons(view)
    yield from refusals.reasons(view)
    yield from report.loops(view, status)
    yield from operators.reasons(view)


def _restart(view: View, change: Change) -> Change | None:
    """Answer a loss, a node about to go, or a replacement that gets nowhere; None: all is well."""
    stalls = _stalls(view, change.status)
    if view.replacing and (over := replacement.over(view, stalls)):
        if any(not pod.node for pod in view.members.values()):
            change = avoid.nothing(change, "no room elsewhere")
        return restart.whole(view, change, *over)
    loss = cause.loss(view, change.status)
    if loss is not None:
        change = cause.clear_wait(view, change)
        if late := replacement.too_late(view, loss):
            return restart.whole(view, change, "Restarting", late)
        return restart.after(view, change, loss)
    if unmade := replacement.unmade(view):
        if view.replacing or view.status.phase == "Running":
            return replacement.again(view, change, unmade)
        what = "nobody knows whether there was a pod of replica 0"
        return restart.whole(view, change, "Restarting", what)
    return handover.begin(view, change)


def _start(view: View, change: Change) -> Change:
    """Begin after the creation or a resume; the active deadline counts from here."""
    resumed = view.status.parked and view.status.attempt > 0
    reason = "Resumed" if resumed else "Started"
    reason = "Admitted" if view.status.queued and view.job.queue else reason
    change = restart.new_attempt(view, change, "Restarting" if resumed else "Pending", 0)
    change = change.with_status(
        timings=replace(change.status.timings, started_at=view.now),
        restarts=replace(change.status.restarts, consecutive=0, released=0),
        handed_over=(),
    )
    change = avoid.nothing(change, f"the job was {reason.lower()}")
    message = f"creating {counted(view.spec.replicas, 'pod')}, attempt {change.status.attempt}"
    for type_ in ("Suspended", "Stalled"):
        change = change.condition(type_, False, reason, "", view.now)
    # The change of spec may have cured what was refused before.
    change = change.condition("Invalid", False, "Valid", "", view.now)
    change = change.tell("Normal", reason, message)
    if not (scarce := view.spec.template.scarce):
        return change
    what = f"the trainer container has {scarce}: importing torch takes more, so it crawls or is"
    cure = "killed; raise them in spec.template, which may change while the job is suspended"
    return change.tell("Warning", "TooFewResources", f"{what} {cure}")


def _broken(view: View, change: Change, what: str) -> tuple[Change, str]:
    """Name the failure that broke the gang before something else ends it, uncharged."""
    loss = cause.find(view)
    if loss is None:
        return change, what
    what = f"{what}; the gang was broken by then: {describe(loss)}"
    return restart.record(view, change, loss), what


def _stop(view: View, change: Change) -> Change | None:
    """End the pods of a job that is suspended, or that Kueue does not admit; None: neither."""
    suspends = template_guard.suspends(view)
    words = "" if suspends else queue.wait(view)
    if not (suspends or words):
        return None
    if _may_be_done(view):
        return change
    return _suspend(view, change) if suspends else _hold(view, change, words)


def _suspend(view: View, change: Change) -> Change:
    """End the pods, with their grace period for a snapshot unless the gang is broken."""
    if view.status.phase == "Suspended":
        return report.stall(view, template_guard.suspended(view, change), report.outlived(view))
    change, message = _broken(view, change, template_guard.why_suspended(view))
    change = _park(view, change, "Suspended", "Suspended", message)
    change = change.condition("Stalled", False, "Suspended", "", view.now)
    return template_guard.suspended(view, change, message)


def _hold(view: View, change: Change, words: str) -> Change:
    """End the pods in the same way, if any, and wait until Kueue admits the job."""
    if not view.status.queued:
        if not view.status.parked:
            change, words = _broken(view, change, words)
        elif not template_guard.why(view):
            made_of = {"template_hash": view.spec.template_hash}
            change = change.with_status(**made_of, snapshot_hash=view.spec.snapshot_hash)
        change = _park(view, change, "Pending", queue.QUEUED, words)
        change = change.tell("Normal", queue.QUEUED, words)
    reason = queue.QUEUED if view.feedback.workloads is not None else queue.UNAVAILABLE
    stall = next(report.outlived(view), Stall(reason, words))  # it keeps the quota
    return change.condition("Stalled", True, stall.reason, stall.message, view.now)


def _park(view: View, change: Change, phase: str, reason: str, message: str) -> Change:
    change = change.with_status(
        phase=phase,
        members_since=view.status.attempt + 1,
        births={},
        serving={},
        succeeded=frozenset(),
        timings=replace(
            view.status.timings, running_at=None, next_restart_at=None, replacing_since=None
        ),
    )
    return change.condition("Running", False, reason, message, view.now)


def _barrier_passed(view: View) -> bool:
    """Tell whether a quorum LIST shows no older object and the backoff is over."""
    if view.status.phase not in ("Pending", "Restarting"):
        return False
    passed = _confirmed(view) and not view.others and _due(view)
    return passed and (view.replacing or (pod_group.ready(view) and not any(queue.reasons(view))))


def _due(view: View) -> bool:
    return all(at is None or view.reached(at) for at in (restart.due(view), refusals.due(view)))


def _confirmed(view: View) -> bool:
    """Tell whether a valid quorum read shows no older pod (actions.QuorumRead)."""
    read = view.confirmed
    return read is not None and read.alone and all(map(read.asked, view.missing))


def _read(view: View) -> ConfirmGone:
    """Ask for the pods of missing seats alone where the other pods stay."""
    stay = view.replacing or view.status.phase == "Running"
    few = view.missing if stay and len(view.missing) <= _FEW_SEATS else ()
    return ConfirmGone(view.status.attempt, seats=frozenset(few))


def _may_be_done(view: View) -> bool:
    """Tell whether pods to be suspended, or to wait, may have succeeded, unseen by a watch."""
    read = view.confirmed
    asked = read and read.generation == view.job.generation and not read.seats
    if not template_guard.suspends(view):
        asked = read and read.hidden is not None  # no other reason while it runs
    return view.status.phase in ("Starting", "Running") and not asked


def _needs_all(view: View) -> bool:
    """Tell whether a final decision is due that needs a quorum read of all pods first."""
    if finish.past_active_deadline(view) and not view.read_since(finish.active_deadline(view)):
        return True
    if template_guard.suspends(view) and (_may_be_done(view) or template_guard.unsure(view)):
        return True
    if _queue_asks(view):
        return True
    return start.late(view) and not view.read_since(start.deadline(view))


def _queue_asks(view: View) -> bool:
    return queue.unproven(view) or (bool(queue.wait(view)) and _may_be_done(view))


def _write(view: View, change: Change) -> Plan | None:
    """Plan to store the status; None if there is nothing to store right now."""
    new, old = st.to_dict(change.status), st.to_dict(view.status)
    sent, stored = view.feedback.pruned or ({}, None)
    if new == old or (st.decided(new) == st.decided(sent) and stored == view.job.status):
        return None  # what an older CRD drops would be written for ever
    if _reports_only(change.status, view.status):
        last = view.feedback.status_written_at
        progress = replace(view.status, progress=change.status.progress) == change.status
        interval = _seldom(view) if progress else REPORT_INTERVAL
        if last is not None and not view.reached(last + interval):
            return None
    begins = change.status.phase == "Starting" != view.status.phase
    change = operators.sign(view, ledger.book(view, change))  # with what is written anyway
    new = st.to_dict(change.status)
    return Plan((actions.WriteStatus(new, change.events, change.measurements, begins),))


def _seldom(view: View) -> timedelta:
    """Return the time between writes of progress: the longer the gang has run, the longer."""
    written = view.feedback.status_written_at or view.now
    age = written - (view.status.timings.running_at or written)
    return max(REPORT_INTERVAL, min(PROGRESS_INTERVAL, age / 20))


def _reports_only(new: Status, old: Status) -> bool:
    """Tell whether only counts, progress or a stall differ.

    A success is stored before its pod may go. Two operators that both act for a moment may report a
    stall in turns; only its first report is written at once.
    """

    def decided(status: Status) -> Status:
        rest = replace(status, replicas=st.Replicas(), progress=st.Progress(), holds=False)
        rest = replace(rest, serving={})
        if old.condition("Stalled") is None:
            return rest
        told = tuple(c for c in status.conditions if c.type != "Stalled")
        return replace(rest, conditions=told, reason="", message="")

    return decided(new) == decided(old) and new.replicas.succeeded == old.replicas.succeeded


# --- What to do about it ------------------------------------------------------------------


def _act(view: View) -> Plan:
    leaving = (*_deletions(view), *finish.hidden(view, None))
    if leaving:
        return Plan(leaving)
    if removals := pod_group.removals(view):
        return Plan(removals)
    if _needs_all(view):
        by_name = template_guard.unsure(view) or _queue_asks(view)
        return Plan((ConfirmGone(view.status.attempt, by_name=by_name),))
    if view.status.parked and (todo := queue.parked(view)):
        return Plan(todo)
    if view.in_doubt or cause.unread(view):
        return Plan((_read(view),))
    if view.status.parked or view.status.phase not in _WANTED:
        return Plan(fence.reads(view))
    todo = () if view.others else _creations(view)
    todo = todo or fence.reads(view) or (() if view.others else handover.reads(view))
    return Plan(todo or queue.running(view))


def _end(view: View) -> Plan:
    """Clean up after the end, then give the quota back."""
    left = finish.clean_up(view)
    return left if left.actions else Plan(queue.finish(view))


def _leave(view: View) -> Plan:
    """End the rest of a deleted job's gang once it is broken or late.

    The garbage collector removes what the job owns when the job is gone, but a finalizer may keep
    it for days. No event is sent: a deleted job has not failed.
    """
    if view.status.terminal:
        todo = finish.clean_up(view).actions
        return Plan(tuple(one for one in todo if not isinstance(one, actions.DeleteJob)))
    if view.in_doubt:
        return Plan((ConfirmGone(view.status.attempt),))
    over = template_guard.suspends(view) or finish.past_active_deadline(view) or cause.find(view)
    going = view.pods if over else view.others
    left = [pod for pod in going if not (pod.deleting or pod.ended)]
    return Plan(tuple(DeletePod(pod.name, pod.uid, None) for pod in left))


def _deletions(view: View) -> tuple[Action, ...]:
    """Delete pods that are no members.

    Once a member is dead and the gang was not kept they can save nothing, so a longer grace period
    is cut short, but for those that hand over. Where all has ended there is nothing to wait for.
    """
    ends = (loss for loss in view.status.failures if not (loss.in_place or loss.replaced))
    dead = max((loss.attempt for loss in ends), default=0)
    todo: list[Action] = []
    for pod in view.others:
        replaced = view.status.births.get(-1 if pod.replica is None else pod.replica, 0)
        late = (pod.attempt or 0) < max(dead + 1, replaced)
        grace = DEAD_GANG_SECONDS if late and not handover.saves(view, pod) else None
        if fence.lost(view, pod) or (pod.stopped and not pod.deleting):
            grace = 0
        cut = grace is not None and pod.deletion_grace is not None and pod.deletion_grace > grace
        if not pod.deleting or cut:
            todo.append(DeletePod(pod.name, pod.uid, grace))
    return tuple(todo)


def _creations(view: View) -> tuple[Action, ...]:
    """Pass the barrier, then ensure network objects, then create pods: one stage a round."""
    attempt, feedback = view.status.attempt, view.feedback
    waiting = view.status.phase in ("Pending", "Restarting")
    if template_guard.why(view) or pod_group.refused(view):
        return ()
    if not _confirmed(view) and (waiting or view.missing):
        return (_read(view),) if _due(view) else ()
    again = view.reached(pod_group.looks_again(view))
    if waiting or not (view.unborn or again) or replacement.unmade(view):
        return ()
    if (asked := queue.reads(view)) is not None:
        return asked
    if view.status.phase == "Running" and not (view.confirmed and view.confirmed.begun):
        return ()
    if feedback.network_attempt != attempt or again:
        if refusals.resting(view, view.network_refusal):
            return ()
        if feedback.network_attempt == attempt:
            return (actions.EnsureNetwork(attempt, pod_group.bodies(view)),)
        # Where pods did not start somebody may have removed the Secret.
        unstarted = any(loss.cls == "Startup" for loss in view.status.failures[-1:])
        secret = feedback.network_attempt == 0 or unstarted
        bodies = render.network(view.job, view.spec, feedback.metrics_from, secret=secret)
        return (actions.EnsureNetwork(attempt, (*bodies, *pod_group.bodies(view))),)
    # After a refusal, create one pod alone to test whether the API accepts it again.
    due_now = refusals.ready(view)[: 1 if feedback.create_backoff else _batch(view)]
    make = partial(
        render.pod,
        avoided=avoid.at_once(view),
        suspected=avoid.suspected(view),
        since=view.status.members_since,
        hub=view.status.hub,
        reached=view.reached_step,
        saved=view.saved_step,
        group=pod_group.of(view),
        placements=queue.asked(view),
    )
    pods = ((r, make(view.job, view.spec, attempt, r)) for r in due_now)
    return (
        *chain.from_iterable(_unlabelled(view, view.refusals.get(r)) for r in due_now),
        *(actions.CreatePod(r, attempt, body) for r, body in pods),
    )


def _batch(view: View) -> int:
    volume = view.spec.snapshot.volume.size if view.spec.snapshot else 0
    size = view.spec.template.packed.size + volume
    return max(1, min(_BATCH, _BATCH_BYTES // max(1, size)))


def _unlabelled(view: View, refusal: actions.Refusal | None) -> tuple[DeletePod, ...]:
    """Delete a pod of ours that lost its labels and keeps the name."""
    found = refusal.existing if refusal else None
    if found is None or found.kind != "Pod" or found.owner_uid != view.job.uid:
        return ()
    if found.deleting or found.attempt == view.status.attempt:
        return ()
    return (DeletePod(found.name, found.uid, DEAD_GANG_SECONDS),)
