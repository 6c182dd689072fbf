"""Count each round (a restart in place that the gang's launchers report) once.

plan() calls count() in each planning round. The operator only counts them, names the failure, and
charges nothing; a drill is a round without a failure, reported in one Event. So is a round that a
lost pod ended: its loss is counted as such. status.restarts.round holds the number counted under
the current hub, so a second report of a round, from a poll, a launcher's end or another operator,
changes nothing.
"""

from __future__ import annotations

from dataclasses import replace

from ddpjob_operator.core import evidence
from ddpjob_operator.core.actions import Measurement
from ddpjob_operator.core.change import Change
from ddpjob_operator.core.failure_text import describe, plural
from ddpjob_operator.core.objects.observe import Round, Rounds
from ddpjob_operator.core.objects.status import MAX_FAILURES, Failure, Status
from ddpjob_operator.core.seats import Seats
from ddpjob_operator.core.view import View

_INT32_MAX = 2**31 - 1
_UNKNOWN = "Unknown"
_SO = "processes restarted in place"
_DRILL = "processes restarted in place to check that they resume; charged to nothing"


def count(view: View, change: Change) -> Change:
    """Add the rounds of the current hub that are not counted yet."""
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
            what += f"; {again} repeated: saved by rank {found.saved_by} after step"
            what += f" {found.saved_step}"
        change = change.event("Warning", "RestartedInPlace", f"{what}; {_SO}")
        change = change.measure(Measurement("rounds_total", 1, loss.cls))
        if found.step is not None:
            change = change.measure(Measurement("lost_steps", _repeated(found)))
    for found in drills:
        after = "" if found.step is None else f" after step {found.step}"
        what = f"round {found.number} of attempt {hub} ended{after}, as planned"
        change = change.event("Normal", "Drill", f"{what}: {_DRILL}")
    unexplained = now - counted - len(causes) - free
    if unexplained:
        which = plural(unexplained, "round")
        what = f"{which} of attempt {hub} ended, cause unknown"
        change = change.event("Warning", "RestartedInPlace", f"{what}; {_SO}")
        change = change.measure(Measurement("rounds_total", unexplained, _UNKNOWN))
    old, failed = change.status.restarts, now - counted - free
    in_place = min(old.in_place + failed, _INT32_MAX)
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
