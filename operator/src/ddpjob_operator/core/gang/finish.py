"""End a job: Succeeded and Failed, clean-up, and the time to live.

plan() calls it. Both phases are absorbing, whatever the pods do later.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from ddpjob_contract.exits import DEAD_GANG_SECONDS
from ddpjob_operator.core import actions, evidence
from ddpjob_operator.core.actions import DeleteJob, DeletePod, Measurement, Plan
from ddpjob_operator.core.capacity import pod_group
from ddpjob_operator.core.change import Change, Clock
from ddpjob_operator.core.failure_text import every, plural
from ddpjob_operator.core.objects.observe import Pod, Report
from ddpjob_operator.core.objects.spec import Spec
from ddpjob_operator.core.objects.status import Progress
from ddpjob_operator.core.seats import Seats
from ddpjob_operator.core.view import View, began_from, received


def succeed(view: View, change: Change) -> Change:
    """End the job as Succeeded: all replicas of one attempt have succeeded."""
    started = view.status.timings.started_at or view.now
    took = (view.now - started).total_seconds()
    restarts = change.status.restarts
    message = (
        f"{every(view.spec.replicas, 'replica')} of attempt {view.status.attempt} succeeded "
        f"after {took:.0f} s; restarts: {restarts.total}, in place: {restarts.in_place}"
    )
    change = _end(view, change, "Succeeded")
    first = view.seats.members.get(0)
    report = first.trainer.report if first else None
    progress = _with_last_words(change.status.progress, first, view.now)
    if progress.resumed:
        message += f"; it began from {progress.resumed}"
    if report and never_met(view.spec, report):
        message += "; " + apart(view.spec, "have trained")
    change = change.with_status(progress=progress)
    reported = (view.feedback.progress, report)
    other = any(one.other_job for one in reported if one)
    change = began_from(view.status, change, progress.resumed, other_job=other)
    change = change.condition("Running", False, "Succeeded", message, view.now)
    change = change.condition("Complete", True, "Succeeded", message, view.now)
    return change.event("Normal", "Succeeded", message)


def never_met(spec: Spec, said: Progress | Report) -> bool:
    """Tell whether the launcher of replica 0 found no connection with another replica.

    Host network has the connections of other programs: nothing is said there.
    """
    return said.connected is False and spec.replicas > 1 and not spec.template.host_network


def apart(spec: Spec, train: str) -> str:
    """Word that the replicas are likely no gang."""
    who = plural(spec.replicas, "replica")
    return f"no connection between the {who} was seen: each may {train} by itself"


def fail(view: View, change: Change, reason: str, message: str) -> Change:
    """End the job as Failed; status.lastFailure has the cause if a member failed.

    Stalled is how kstatus recognizes the failure of any kind.
    """
    change = _end(view, change, "Failed")
    for type_, value in (("Stalled", True), ("Running", False), ("Failed", True)):
        change = change.condition(type_, value, reason, message, view.now)
    return change.event("Warning", "Failed", f"{reason}: {message}")


def past_active_deadline(seats: Seats, clock: Clock) -> bool:
    """Tell whether activeDeadlineSeconds ends the job now."""
    if seats.spec.suspend or seats.status.parked:
        return False  # the resume, or the admission, restarts the clock
    return clock.reached(active_deadline(seats))


def active_deadline(seats: Seats) -> datetime | None:
    """Count the deadline from the first start, or the last resume, as batch/v1 does."""
    seconds, since = seats.spec.active_deadline, seats.status.timings.started_at
    return None if seconds is None or since is None else since + timedelta(seconds=seconds)


def clean_up(view: View) -> Plan:
    """Delete pods that still run after the end; keep finished ones for their logs."""
    todo: list[actions.Action] = []
    loss = view.status.last_loss
    dead = loss is not None and loss.attempt == view.status.attempt
    grace = DEAD_GANG_SECONDS if dead else None
    for pod in view.seats.pods:
        keep = view.spec.clean_pod_policy == "Running" and (pod.ended or pod.ends)
        if view.fence.lost(pod):
            todo.append(DeletePod(pod.name, pod.uid, 0))
        elif not keep and not pod.deleting:
            todo.append(DeletePod(pod.name, pod.uid, grace))
    todo += [*pod_group.removals(view), *view.fence.reads(view.seats.pods)]
    ttl, since = view.spec.ttl, view.status.timings.completed_at
    if ttl is not None and since is not None and view.clock.reached(since + timedelta(seconds=ttl)):
        todo.append(DeleteJob(view.job.uid))
    return Plan(tuple(todo))


def _end(view: View, change: Change, phase: str) -> Change:
    old, now = view.status.timings, view.now
    timings = replace(old, completed_at=now, next_restart_at=None, replacing_since=None)
    change = change.condition("Stalled", False, phase, "", view.now)
    change = change.measure(Measurement("finished_total", 1, phase))
    progress = received(change.status.progress, view.feedback.progress)
    return change.with_status(phase=phase, timings=timings, progress=progress)


def _with_last_words(old: Progress, first: Pod | None, now: datetime) -> Progress:
    """Take the last words of replica 0, which are newer than the last poll."""
    last = first.trainer.report if first and evidence.succeeded(first) else None
    if last is None or (last.step, last.printed_step, last.metrics) == (None, None, None):
        return old
    said = Progress(
        step=last.step,
        total_steps=old.total_steps or last.step,
        printed_step=last.printed_step,
        printed_total_steps=last.printed_total_steps,
        loss=last.loss,
        metrics=last.metrics,
        snapshot_step=last.snapshot_step or None,
        file_at=last.file_at,
        resumed=last.resumed,
        updated_at=now,
    )
    return received(old, said)
