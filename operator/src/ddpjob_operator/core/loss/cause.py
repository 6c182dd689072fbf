"""Find the loss that ended an attempt, and give its cause time to show.

plan() asks in each planning round. The first loss seen is often not the cause: peers of a dead
machine end within seconds, each program with its own code, and Kubernetes reports the machine most
of a minute later. A restart does not wait; the end of a job is final, so it waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from ddpjob_contract import ExitCode
from ddpjob_contract.exits import CAUSE_SECONDS
from ddpjob_operator.core import evidence
from ddpjob_operator.core.change import Change, Stall
from ddpjob_operator.core.failure_text import describe, left_early, shorten
from ddpjob_operator.core.loss import verdict
from ddpjob_operator.core.objects.observe import Pod, clean
from ddpjob_operator.core.objects.status import Failure, Status
from ddpjob_operator.core.seats import Seats
from ddpjob_operator.core.view import View

CAUSE_WAIT: Final = timedelta(seconds=CAUSE_SECONDS)
#: Kubernetes calls a node not ready 40 to 55 s after the last sign of life of its kubelet.
NODE_WAIT: Final = timedelta(seconds=60)
WAITING: Final = "WaitingForCause"
#: The ends of peers of a lost member. Other classes have their own causes, or are free anyway.
_BY_PEERS: Final = ("Hang", "Killed", "User")
#: Exit codes of a process that has lost a peer or waits for one.
_WITHOUT_PEERS: Final = (ExitCode.PEER_LOST, ExitCode.HANG)
_PERHAPS_PEERS: Final = (*_BY_PEERS, "Collateral")


def loss(view: View, status: Status) -> Failure | None:
    """Return the failure that ends this attempt, or None; one per attempt."""
    found = _seen(view)
    # The intent raises the least attempt of each missing seat (gang/replacement.py), so first it
    # must be known who is there.
    if found is None or view.seats.need_read:
        return None
    if found.cls not in _PERHAPS_PEERS:
        return found
    guessed = found.cls == "Collateral" or found.reason == evidence.PROBE_FAILED
    if guessed and _wait_left(view, CAUSE_WAIT) > 0:
        return None
    if is_same_incident(view.status, found, view.now):
        return found
    if found.cls == "Collateral" and (found := evidence.without_cause(found)).cls not in _BY_PEERS:
        return found
    # A node deleted while no operator watched is unreported, as a new one is.
    unknown = view.fence.guessed(view.seats.needed) and _wait_left(view, NODE_WAIT) > 0
    return None if unknown or _doubted(view, status, found) else found


def find(view: View) -> Failure | None:
    """Return the likely cause of a broken gang, for an end that waits for none."""
    found = _seen(view)
    return evidence.without_cause(found) if found and found.cls == "Collateral" else found


def awaited(view: View) -> bool:
    """Tell whether a member has ended whose consequence is still open; nothing else may act.

    Releasing the gang now (no capacity, deadline) would discard this failure.
    """
    return waits_for_read(view) or _wait_left(view, NODE_WAIT) > 0


def waits_for_read(view: View) -> bool:
    """Tell whether a loss waits for a quorum read of the missing seats."""
    return view.seats.need_read and _seen(view) is not None


def stalls(view: View) -> Iterator[Stall]:
    """Explain why the job has not failed yet, once the wait is news."""
    left = _wait_left(view, NODE_WAIT)
    if not (left > 0 and view.clock.waited(left - (NODE_WAIT - CAUSE_WAIT).total_seconds())):
        return
    first = _first(view)
    silent = first and _doubted(view, view.status, first)
    if first and silent:
        until = f"{view.now + timedelta(seconds=left):%H:%M:%S} UTC"
        unless = f"pod {silent.name}, which has not ended, is lost with node {silent.node}"
        what = f"{describe(first)} ends the job, unless {unless}: that shows by {until}"
        yield Stall(WAITING, what)


def clear_wait(change: Change, now: datetime) -> Change:
    """Clear the condition about the wait, which the gang's restart ends."""
    reported = change.status.condition("Stalled")
    if reported is None or reported.status != "True" or reported.reason != WAITING:
        return change
    return change.condition("Stalled", False, "Progressing", "", now)


def _seen(view: View) -> Failure | None:
    """Pick the loss seen; peers of a member that is going die of that."""
    first = _first(view)
    if first is None or first.cls not in _PERHAPS_PEERS:
        return first
    silent = view.fence.suspect(view.seats.needed)
    if silent:
        return view.fence.failure(silent)
    leaving = evidence.leaving(view.seats.needed.values())
    if leaving:
        return view.fence.named(evidence.removed(leaving, view.now), leaving)
    gone = _vanished(view)
    return gone[0] if gone else first


def _first(view: View) -> Failure | None:
    now, members = view.now, view.seats.needed
    # Where pods stand by a pod's seat is not its rank.
    nproc = 0 if view.spec.standby else view.spec.nproc_per_node
    found = [evidence.failure(pod, nproc, now) for pod in members.values()]
    if view.status.phase == "Starting" or view.status.replacing:
        # It never comes back, and before all run it has nothing to save.
        found += [evidence.removed(pod, now) for pod in members.values() if pod.deleting]
    losses = [one for one in found if one is not None] + view.fence.losses(members)
    losses += _vanished(view)
    finished = {r: evidence.decisive(pod).finished_at for r, pod in view.seats.members.items()}
    first = evidence.cause(losses, finished)
    if first is None:
        return None
    first = view.fence.named(first, view.seats.members.get(first.replica))
    return _named(view.seats, first) if view.seats.succeeded else first


def _named(seats: Seats, found: Failure) -> Failure:
    """Add the replicas that ended with 0 before it, if it needed them.

    Where one hub hears all launchers, it has named the ranks.
    """
    if found.exit_code not in _WITHOUT_PEERS or found.kind == "leftEarly":
        return found
    said = left_early(found.exception or found.reason, seats.succeeded, seats.members)
    message = clean(f"{said}\n{found.message}")
    return replace(found, exception=shorten(said), message=message)


def _vanished(view: View) -> list[Failure]:
    attempt, name = view.status.attempt, view.job.name
    return [evidence.vanished(replica, attempt, name, view.now) for replica in view.seats.gone]


def _doubted(view: View, status: Status, first: Failure) -> Pod | None:
    """Find a member on a machine that may be dead, where this loss would end the job.

    It has not ended, and no loss is reported of its node.
    """
    if first.cls not in _BY_PEERS or _wait_left(view, NODE_WAIT) <= 0:
        return None
    if view.nodes is not None and not view.nodes.readable:
        return None  # nothing would ever show
    pods = view.seats.members.values()
    reported = {pod.node for pod in pods if pod.trainer.state == "terminated"}
    unheard = (p for p in pods if p.node and p.node not in reported and not _ended(p))
    pod = next(unheard, None)
    if pod is None or verdict.ends(view, status, first) is None:
        return None
    return None if verdict.ends(view, status, view.fence.failure(pod)) else pod


def _wait_left(view: View, wait: timedelta) -> float:
    """Return the seconds that the cause of a loss may still take to show itself.

    Measured from when this process saw the first end: kubelets' clocks differ, and a wait cut short
    would charge the wrong party. Once as many have ended as train nothing more can show.
    """
    members = view.seats.members
    if sum(map(_ended, members.values())) >= min(len(members), view.spec.replicas):
        return 0.0
    lost = [pod for pod in view.seats.needed.values() if not evidence.succeeded(pod)]
    ends = (pod.end_seen_at or pod.trainer.finished_at for pod in lost)
    first = min((end for end in ends if end is not None), default=None)
    if first is None or first > view.now:
        return 0.0
    left = (first + wait - view.now).total_seconds()
    return 0.0 if view.clock.waited(left) else left


def _ended(pod: Pod) -> bool:
    return evidence.succeeded(pod) or evidence.failed(pod)


def is_same_incident(status: Status, loss: Failure, now: datetime) -> bool:
    """Tell whether this loss is of the incident that is counted already (rule O2).

    A launcher waited no longer, or ended with the first, as its kubelet reports only now.
    """
    if not has_waited(status, loss) or not _incident(status):
        return False
    reported_late = (now - status.replacing_since(now)).total_seconds() <= CAUSE_SECONDS
    return loss.cls == "Collateral" or (reported_late and _kind(loss) == _kind(status.last_loss))


def has_waited(status: Status, loss: Failure) -> bool:
    """Tell whether the lost pod waited for others: it is older than they will be."""
    return status.replacing and status.min_attempt(loss.replica) <= ended_attempt(status)


def ended_attempt(status: Status) -> int:
    """Return the attempt that the incident ended: pods of later ones have waited for nobody."""
    if not status.replacing:
        return status.attempt
    return min((loss.attempt for loss in _incident(status)), default=status.attempt - 1)


def _incident(status: Status) -> list[Failure]:
    """List the losses that are being made good; retry_as_new_attempt() begins without one."""
    since = status.timings.replacing_since
    return [f for f in status.failures if f.replaced and since and f.detected_at >= since]


def _kind(loss: Failure | None) -> tuple[object, ...]:
    return (loss.cls, loss.reason, loss.exit_code) if loss else ()
