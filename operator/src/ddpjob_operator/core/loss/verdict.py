"""Judge what follows a loss: the job's end, a charged or a free restart, after which delay.

gang/restart.py asks with the loss that cause.py found, and stores what is charged. A charged
restart is the user's doing; a free one is disruption, infrastructure, hardware. heal() gives both
back after progress: a newer snapshot of ours or, for programs with their own files, a newer mtime
at spec.restart.progressPath. Without either, time alone heals: healAfterSeconds of a gang that
runs. All are measured against the stored status. The first value reported may be older than the
job, so later ones have to be newer than that. Rounds (restarts in place) are only counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from math import inf
from typing import Final

from ddpjob_contract import exits
from ddpjob_operator.core import evidence
from ddpjob_operator.core.actions import Measurement
from ddpjob_operator.core.change import Change, Stall
from ddpjob_operator.core.failure_text import describe, plural
from ddpjob_operator.core.nodes import avoid
from ddpjob_operator.core.objects.json_read import INT32
from ddpjob_operator.core.objects.observe import Round, Rounds
from ddpjob_operator.core.objects.spec import Spec
from ddpjob_operator.core.objects.status import MAX_FAILURES, Failure, Restarts, Status
from ddpjob_operator.core.seats import Seats
from ddpjob_operator.core.view import View

CRASH_LOOPING: Final = "CrashLooping"
#: A loop is so many failures within so short a time, and ends after so long without one. Both
#: bounds are longer than the longest wait between two attempts, or it would flap. Failures
#: without a step may be further apart: a rendezvous gives up after ten minutes. Where the program
#: may train unseen, they are no more than that apart.
_FAILURES: Final = 3
_RATE: Final = timedelta(minutes=15)
_QUIET: Final = timedelta(minutes=10)
_UNSEEN: Final = timedelta(minutes=20)
#: An image, a name or a volume that fails a gang before its first step may take minutes to come
#: back. The three waits of the defaults (0, then twice this) are ten minutes.
STARTUP_SECONDS: Final = 300.0
#: Characters of an exception that every record has: a report cuts those of rounds.
_COMPARED: Final = 64
_SO = "processes restarted in place"
_DRILL = "processes restarted in place to check that they resume; costs no restart"


def ends(view: View, status: Status, loss: Failure) -> tuple[str, str] | None:
    """Return reason and message if this loss ends the job; None: it restarts."""
    old, limits = status.restarts, view.spec.restart
    follows = action(view, old, loss)
    if follows == "Fail":
        return "PermanentFailure", describe(loss)
    times = _in_same_way(status, loss, view.reported.snapshot_step)
    if times >= exits.SAME_EXCEPTION and _ruled(view.seats, loss) is None:
        return "SameFailure", (
            f"{loss.exception}: {times} times in a row after step {loss.step}. A restart would"
            " fail again. Fix the program or its data; to retry anyway, add a rule with action"
            f" Restart to spec.restart.rules; last: {describe(loss)}"
        )
    free = follows == "RestartFree"
    counted = count(view, old, free)
    if free and counted.disruptions > limits.max_disruptions:
        what = f"maxDisruptions {limits.max_disruptions} is used up; last: {describe(loss)}"
        return "MaxDisruptionsExceeded", what
    if not free and counted.charged > limits.max_restarts:
        what = f"maxRestarts {limits.max_restarts} is used up; last: {describe(loss)}"
        return "MaxRestartsExceeded", what
    return None


def action(view: View, old: Restarts, loss: Failure) -> str:
    """Return Restart, RestartFree or Fail: the user's rule counts before the class."""
    default: str = exits.action_of(loss.cls)
    if avoid.repeats(loss) and not avoid.is_free(view.status, in_a_row(view, old)):
        default = "Restart"
    return _ruled(view.seats, loss) or default


def _ruled(seats: Seats, loss: Failure) -> str | None:
    return seats.spec.restart.ruled(*evidence.names(loss, seats.members.get(loss.replica)))


def _in_same_way(status: Status, loss: Failure, snapshot_step: int) -> int:
    """Count how often in a row one exception has ended one step; 0: unknown.

    Without a step since the newest snapshot it may be the start that fails, which can pass.
    """
    guessed = loss.reason == evidence.PROBE_FAILED  # its words are ours: always the same
    trained = (loss.step or 0) > snapshot_step
    if loss.cls != "User" or guessed or not (loss.exception and trained):
        return 0
    since, count = status.timings.started_at, 1
    for old in reversed(status.failures):
        alike = exits.alike(old.exception, loss.exception, _COMPARED) and old.step == loss.step
        if not alike or old.cls != "User" or (since and old.detected_at < since):
            break
        count += 1
    return count


def count(view: View, old: Restarts, free: bool) -> Restarts:
    """Count one more restart, and mark from where progress is reckoned."""
    return replace(
        old,
        total=old.total + 1,
        charged=old.charged + (not free),
        disruptions=old.disruptions + free,
        consecutive=in_a_row(view, old) + 1,
        released=0,
        snapshot_step=view.reported.snapshot_step,
        file_at=view.reported.file_at,
    )


def in_a_row(view: View, old: Restarts) -> int:
    """Count restarts before this one without progress or a long run in between.

    A run longer than the longest backoff is no crash loop, so the next restart is immediate.
    """
    since = view.status.timings.running_at
    longest = timedelta(seconds=view.spec.restart.max_seconds)
    ran_long = since is not None and view.now - since > longest
    return 0 if ran_long else old.consecutive


def has_trained(view: View) -> bool:
    """Tell whether this attempt has reported a step beyond the snapshot that it began from."""
    reports = (pod.trainer.report for pod in view.seats.members.values())
    since, polled = view.begun_at, (view.feedback.progress, view.status.progress)
    now = [one for one in polled if one and one.updated_at and since and one.updated_at >= since]
    steps = [reported.step or 0 for reported in (*reports, *now) if reported]
    return max(steps, default=0) > view.status.restarts.snapshot_step


def backoff(spec: Spec, consecutive: int, least: float = 0.0) -> float:
    """Return the seconds before the n-th restart in a row: 0, then doubling."""
    restart = spec.restart
    return exits.backoff(consecutive, max(restart.initial_seconds, least), restart.max_seconds)


def crash_loop(view: View, status: Status) -> Iterator[Stall]:
    """Explain that the program fails again and again, in whatever phase the gang is."""
    counted = of_program(status)
    last = counted[-_FAILURES:]
    if len(last) < _FAILURES:
        return
    newest, within = last[-1], last[-1].detected_at - last[0].detected_at
    longest = max(new.detected_at - old.detected_at for old, new in pairwise(last))
    healed = longest.total_seconds() >= (view.spec.restart.heal_after or inf)
    unseen = longest > _UNSEEN and all(one.step is None for one in last)
    if healed or unseen or _trained(view, last):
        if within > _RATE:
            return
        longest = timedelta(0)
    if view.clock.reached(newest.detected_at + longest + _QUIET):
        return
    within = max(within, _RATE)
    counted = [one for one in counted if newest.detected_at - one.detected_at <= within]
    took = max(1.0, (newest.detected_at - counted[0].detected_at).total_seconds() / 60)
    rounds = sum(one.in_place for one in counted)
    often = f"{len(counted)} failures within {took:.0f} min, {rounds} of them restarted in place"
    alike = {one.exception for one in counted} == {newest.exception}
    each = ", each so" if newest.exception and alike else ""
    cure = "spec.suspend true stops it and keeps the snapshots"
    yield Stall(CRASH_LOOPING, f"{describe(newest)}: the last of {often}{each}; {cure}")


def _trained(view: View, row: Sequence[Failure]) -> bool:
    """Tell whether any failure of a row, or the gang of now, came after a step.

    Lines and files may show one of a program that reports none. Failures after different steps
    have one between them, also where it was saved.
    """
    shown, saved = view.status.progress, view.status.restarts.snapshot_step
    other = (shown.printed_step, shown.file_at, shown.loss, shown.metrics) != (None,) * 4
    steps = {one.step or 0 for one in row}
    return other or has_trained(view) or len(steps) > 1 or max(steps) > saved


def of_program(status: Status) -> list[Failure]:
    """List the program's failures since the start or resume, which may have cured older ones.

    And those of pods that no node would start, until one does.
    """
    since, runs = status.timings.started_at, status.phase == "Running"
    charged = [
        one
        for one in status.failures
        if one.cls not in exits.FREE
        or (not runs and exits.recurs(one.cls, one.reason, one.exit_code))
    ]
    return [one for one in charged if since is None or one.detected_at >= since]


def heal(view: View, change: Change) -> Change:
    """Give back the charges once there is a reason to; else change nothing."""
    old, stored, reported = change.status.restarts, view.status.progress, view.reported
    if not (old.charged or old.disruptions):
        return change
    # Store the first values reported: a job that had reported without one began with none.
    if not old.snapshot_step and stored.step is None:
        old = replace(old, snapshot_step=reported.snapshot_step)
    if old.file_at is None and stored.updated_at is None:
        old = replace(old, file_at=reported.file_at)
    change = change.with_status(restarts=old)
    why = _reason(view, change.status)
    if why is None:
        return change
    change = change.with_status(restarts=replace(old, charged=0, disruptions=0, consecutive=0))
    spent = f"spent until now: {old.charged} restarts charged, {old.disruptions} disruptions"
    return change.event("Normal", "BudgetHealed", f"{why}: the budget is full again; {spent}")


def _reason(view: View, status: Status) -> str | None:
    marks, file_at = status.restarts, view.reported.file_at
    if view.reported.snapshot_step > marks.snapshot_step:
        return f"a newer snapshot, of step {view.reported.snapshot_step}"
    if file_at and (marks.file_at is None or file_at > marks.file_at):
        return "spec.restart.progressPath was written"
    # The operator may have been away before it found the gang broken, so time heals only a whole
    # one. Only a gang in phase Running has a running_at; a failure of a round restarts the wait.
    seconds, timings = view.spec.restart.heal_after, status.timings
    if not seconds or timings.running_at is None or not view.seats.all_running:
        return None
    since = max(timings.running_at, timings.last_round_at or timings.running_at)
    healed = view.clock.reached(since + timedelta(seconds=seconds))
    return f"{seconds} s without a failure" if healed else None


def count_rounds(view: View, change: Change) -> Change:
    """Count each round once: a restart in place that the gang's launchers report.

    It charges nothing, but names the failure. A drill is a round without one, reported in one
    Event; so is a round that a lost pod ended: its loss is counted as such. status.restarts.round
    holds the number counted under the current hub, so a second report of a round, from a poll, a
    launcher's end or another operator, changes nothing.
    """
    hub, polled = view.status.hub, view.feedback.rounds
    reported = _reports(view.seats, polled)
    counted = change.status.restarts.round
    now = max((rounds.count for rounds in reported), default=0)
    if now <= counted:
        return change
    known = {found.number: found for rounds in reported for found in rounds.known}
    ended = [known[number] for number in range(counted, now) if number in known]
    causes = [(one, loss) for one in ended if (loss := _failure(view, one)) is not None]
    causes, drills = causes[-MAX_FAILURES:], [one for one in ended if one.kind == "drill"]
    free = len(drills) + sum(_by_lost_pod(view.status, polled, one) for one in ended)
    for found, loss in causes:
        what = f"round {found.number} of attempt {loss.attempt} ended: {describe(loss)}"
        if found.saved_step is not None and found.saved_by is not None:
            again = plural(_repeated(found), "step") if _repeated(found) else "nothing"
            what += (
                f"; {again} repeated: saved by rank {found.saved_by} after step {found.saved_step}"
            )
        change = change.event("Warning", "RestartedInPlace", f"{what}; {_SO}")
        change = change.measure(Measurement("rounds_total", 1, loss.cls))
        if found.step is not None:
            change = change.measure(Measurement("lost_steps", _repeated(found)))
    for found in drills:
        after = "" if found.step is None else f" after step {found.step}"
        what = f"round {found.number} of attempt {hub} ended{after}, as planned"
        change = change.event("Normal", "Drill", f"{what}: {_DRILL}")
    if unexplained := now - counted - len(causes) - free:
        what = f"{plural(unexplained, 'round')} of attempt {hub} ended, cause unknown"
        change = change.event("Warning", "RestartedInPlace", f"{what}; {_SO}")
        change = change.measure(Measurement("rounds_total", unexplained, "Unknown"))
    old, failed = change.status.restarts, now - counted - free
    in_place = min(old.in_place + failed, INT32 - 1)
    change = change.with_status(restarts=replace(old, round=now, in_place=in_place))
    if not failed:
        return change
    return change.with_status(
        failures=(*change.status.failures, *(loss for _, loss in causes))[-MAX_FAILURES:],
        timings=replace(change.status.timings, last_round_at=view.now),
    )


def _repeated(found: Round) -> int:
    return max(0, (found.step or 0) - max(found.snapshot_step or 0, found.saved_step or 0))


def _reports(seats: Seats, polled: Rounds | None) -> list[Rounds]:
    """Collect the hub's reports: replica 0's /state, and the last words of ended launchers.

    A launcher that is older than the hub may mean rounds of the hub before.
    """
    hub, newest = seats.status.hub, seats.status.attempt
    reported = [
        Rounds(hub, pod.trainer.report.number or 0, pod.trainer.report.rounds)
        for pod in seats.pods
        if pod.trainer.report and hub <= (pod.attempt or 0) <= newest
    ]
    return [polled, *reported] if polled and polled.attempt == hub else reported


def _failure(view: View, found: Round) -> Failure | None:
    replica, nproc, polled = found.replica, view.spec.nproc_per_node, view.feedback.rounds
    if replica is None and found.rank is not None:
        replica = found.rank // nproc
    if replica is None or replica not in range(view.spec.replicas):
        return None
    if _by_lost_pod(view.status, polled, found):
        return None
    loss = evidence.ended_round(found, view.status.hub, replica, nproc, view.now)
    before, now = _served_by(view.status, polled, replica)
    pod = view.seats.members.get(now) if before == now else None
    return replace(loss, pod=pod.name, node=pod.node) if pod else loss


def _by_lost_pod(status: Status, polled: Rounds | None, found: Round) -> bool:
    """Tell whether the round ended with a pod that was replaced, or promoted over, by this hub."""
    before, now = _served_by(status, polled, found.replica or 0)
    replaced = before != now or status.min_attempt_by_seat.get(before, 0) > status.hub
    return found.kind == "lost" and replaced


def _served_by(status: Status, polled: Rounds | None, replica: int) -> tuple[int, int]:
    """Return the seat that served the replica as it was last reported, and which one does now."""
    before = status.serving
    now = polled.serving if polled and polled.attempt == status.hub else before
    return before.get(replica, replica), now.get(replica, replica)
