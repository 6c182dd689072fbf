"""Book the job's pod-seconds whenever the status is written: each once, by where it went.

plan() calls book() last. While the hub lives, its own account says how the gang's time was spent:
each answer of GET /state, and its last words, are booked by the difference to the one before, for
all replicas. The time without a hub is booked by the times in the pods' objects. So the sums are
exact whenever and wherever an operator writes them, and cost no write of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from ddpjob_operator.core import evidence
from ddpjob_operator.core.actions import Measurement
from ddpjob_operator.core.change import Change
from ddpjob_operator.core.objects.ledger import DRILL, UNKNOWN, UP, LauncherAccount, Ledger
from ddpjob_operator.core.objects.observe import Pod, Rounds
from ddpjob_operator.core.objects.status import Eta, Status
from ddpjob_operator.core.view import View, recovers_from

#: What went on at the last answer is believed to have gone on for so long after it.
_BELIEVED: Final = 20.0
#: The launcher's rate of steps is the mean of so long.
_RATED: Final = timedelta(seconds=60)
#: A shorter wait for a node is the scheduler's own time.
_SCHEDULING: Final = 2.0
#: Where an account overlaps with what is booked already, it gives way in this order.
_YIELDS: Final = (
    "warmup", "held", "recovering", "unknown", "idle", "productive", "data", "repeated", "snapshot",
)  # fmt: skip
#: States of a launcher whose gang makes steps.
_STEPS: Final = ("productive", "repeated", "data")
#: A gang has its pods in all states but this one.
_WITHOUT_PODS: Final = "waiting"
#: Reasons of a stall that are no want of room: it is a recovery that takes long.
_RECOVERS: Final = ("CrashLooping", "WaitingForDeletion", "NodeNotReady", "NodesNotReady")


def book(view: View, change: Change) -> Change:
    """Book the time since the last write, and estimate when training ends."""
    status, ledger = view.status, view.status.ledger
    if ledger.since is None or ledger.until is None:
        return change.with_status(ledger=Ledger(since=view.now, until=view.now))
    if ledger.until > view.now or status.terminal:  # another clock has written it
        return change if change.status.phase == "Running" else change.with_status(eta=None)
    books = _LedgerUpdate(view, change.status)
    if status.parked:
        seen, left = view.feedback.seen_since, books.left(view.now)
        if seen and seen > ledger.until and not change.status.replicas.active:
            left = min(left, _BELIEVED)  # the pods ended while no operator looked
        books.add("snapshot", status.replicas.active * left)
        if status.queued:
            rest = view.spec.replicas * books.left(view.now) - status.replicas.active * left
            books.add("waiting", max(0.0, rest))
        books.until = view.now
    else:
        _book(view, change.status, books)
    for state, seconds in books.counted():
        change = change.measure(Measurement("pod_seconds_total", seconds, state))
        if gpus := view.spec.template.gpu_count:
            change = change.measure(Measurement("gpu_seconds_total", seconds * gpus, state))
    ledger = books.closed()
    had = sum(ledger.seconds.values()) - ledger.seconds.get(_WITHOUT_PODS, 0.0)
    goodput = round(ledger.seconds.get("productive", 0.0) / had, 4) if had > 0 else None
    change = change.with_status(ledger=ledger, goodput=goodput)
    return change.with_status(eta=_eta(change.status, view.spec.replicas, view.now))


def _book(view: View, new: Status, books: _LedgerUpdate) -> None:
    status, hub, pod = view.status, view.status.hub, view.seats.members.get(0)
    report, polled = pod.trainer.report if pod else None, view.feedback.spent
    known = books.ledger.hub_seconds.get(UP, 0.0) if books.ledger.hub == hub else 0.0
    final = False
    if pod and pod.attempt == hub and report and report.spent:
        books.add_account(replace(report.spent, hub=hub, at=pod.trainer.finished_at))
        final = True  # its last words
    elif polled and polled.hub == hub and polled.up > known:
        books.add_account(polled)
    over = new.terminal or new.parked or new.hub != hub
    if books.ledger.hub == hub > 0:
        if over:
            books.end(final=final)
    elif status.phase != "Running" and status.timings.running_at is None:
        books.start(view.now)
    elif over or new.phase != status.phase == "Running":
        books.spend({"unknown": books.left(view.now)}, view.now)


class _LedgerUpdate:
    """The entries of one booking. ``until``: what is before that is booked."""

    def __init__(self, view: View, new: Status) -> None:
        self._view, self._new = view, new
        self.ledger = view.status.ledger
        assert self.ledger.until is not None
        self.until = self.ledger.until
        self.entries: dict[str, float] = defaultdict(float)
        self._causes: dict[str, float] = defaultdict(float)

    def left(self, until: datetime) -> float:
        """Return the seconds that are not booked before that time."""
        return max(0.0, (until - self.until).total_seconds())

    def add(self, state: str, seconds: float, cause: str | None = None) -> None:
        """Add pod-seconds. ``cause``: of a recovery, in place of the state."""
        self.entries["recovering" if cause else state] += seconds
        if cause:
            self._causes[cause] += seconds

    def spend(self, seconds: Mapping[str, float], until: datetime, cause: str = "") -> None:
        """Book seconds of the whole gang up to a time; pods beyond it stand by."""
        view, status = self._view, self._view.status
        pods, rounds = view.spec.replicas, view.feedback.rounds
        # The seats that the others wait for, one at least.
        newest = list(status.min_attempt_by_seat.values()).count(status.attempt)
        lost = min(pods, max(1, newest or len(view.feedback.away)))
        restarted = recovers_from(status)
        for state, each in seconds.items():
            if state == "held":
                self.add("held", each * (pods - lost))
                why = cause or _cause(status, rounds, self._new, held=True)
                self.add("", each * lost, why)
            elif state == "recovering":
                self.add("", each * pods, cause or _cause(status, rounds, self._new))
            elif state == "warmup" and restarted:
                self.add("", each * pods, restarted.cls)
            else:
                self.add(state, each * pods)
        beyond = max(0, len(view.seats.members) - pods)
        self.add("idle", beyond * self.left(until))
        self.until = max(self.until, until)

    def add_account(self, found: LauncherAccount) -> None:
        """Add the increase of the launcher's counters since its last report."""
        ledger, new = self.ledger, self.ledger.hub != found.hub
        since = found.at or self._view.now
        began = since - timedelta(seconds=found.up)
        if not new and ledger.hub_at is not None:
            began = ledger.hub_at
        self.ledger = replace(ledger, hub=found.hub, hub_at=began, hub_seconds=found.seconds)
        until = min(self._view.now, began + timedelta(seconds=sum(found.booked.values())))
        if new:
            self.start(min(began, self._view.now))
            if ledger.since and began < ledger.since - timedelta(seconds=1):
                # The ledger began while the hub lived: nobody knows which part of it came after.
                self.spend({"unknown": self.left(until)}, until)
                return
        before = {} if new else ledger.hub_seconds
        more = {name: value - before.get(name, 0.0) for name, value in found.booked.items()}
        more |= {n: -value for n, value in before.items() if n != UP and n not in found.booked}
        over = sum(more.values()) - self.left(until)
        for name in _YIELDS:
            cut = min(max(0.0, over), max(0.0, more.get(name, 0.0)))
            more[name] = more.get(name, 0.0) - cut
            over -= cut
        if over < 0:
            more["unknown"] -= over
        self.spend(more, until)

    def end(self, *, final: bool) -> None:
        """Book the time from the hub's last account to its end, and to now."""
        view, new = self._view, self._new
        left = self.left(view.now)
        loss = new.last_loss if new.failures != view.status.failures else None
        # Training went on until an exit or a deletion was seen.
        seen = loss and (loss.exit_code is not None or loss.reason == "PodDeleted")
        if final:
            state = "snapshot" if new.parked else "recovering"
            state = "idle" if new.phase == "Succeeded" else state
            self.spend({state: left}, view.now, loss.cls if loss else "")
        elif loss is not None and not (seen and loss.cls != "Hang"):
            self.spend({"recovering": left}, view.now, loss.cls)
        else:
            trained = any(self.ledger.hub_seconds.get(one) for one in _STEPS)
            state = "held" if view.status.replacing else "productive" if trained else "unknown"
            believed = left if state == "unknown" else min(left, _BELIEVED)
            self.spend({"unknown": left - believed} | {state: believed}, view.now)

    def start(self, until: datetime) -> None:
        """Book the time up to then by the pods' own times: no hub counts it."""
        view, loss = self._view, recovers_from(self._view.status)
        members = view.seats.members
        for seat in range(view.spec.replicas):
            for state, seconds in _of_pod(view.status, members.get(seat), self.until, until):
                recovers = loss is not None and state in ("starting", "warmup")
                self.add(state, seconds, loss.cls if loss and recovers else None)
        self.until = max(self.until, until)

    def counted(self) -> list[tuple[str, float]]:
        """List what counters add: they never fall, so what is booked elsewhere now is left out."""
        owed = -sum(seconds for seconds in self.entries.values() if seconds < 0)
        found = []
        for state, seconds in self.entries.items():
            cut = min(owed, max(0.0, seconds))
            owed -= cut
            if seconds > cut:
                found.append((state, seconds - cut))
        return found

    def closed(self) -> Ledger:
        """Return the ledger with these entries; a recovery whose cause is known now has it."""
        old, causes = self.ledger, dict(self.ledger.recovering)
        for cause, seconds in self._causes.items():
            causes[cause] = causes.get(cause, 0.0) + seconds
        newest = self._new.last_failure
        if newest is not None and newest != self._view.status.last_failure:
            causes[newest.cls] = causes.get(newest.cls, 0.0) + causes.pop(UNKNOWN, 0.0)
        sums = dict(old.seconds)
        for state, seconds in self.entries.items():
            sums[state] = max(0.0, sums.get(state, 0.0) + seconds)
        return replace(old, until=self.until, seconds=sums, recovering=causes)


def _of_pod(
    status: Status, pod: Pod | None, since: datetime, until: datetime
) -> list[tuple[str, float]]:
    """Divide the time of one seat by the times in its pod's object."""
    stalled = status.condition("Stalled")
    stall = stalled.reason if stalled and stalled.status == "True" else ""
    scarce = status.restarts.released > 0 or stall not in ("", *_RECOVERS)
    if pod is None:
        return [("waiting" if scarce else "starting", _seconds(since, until))]
    if status.replacing and (pod.attempt or 0) < status.attempt and evidence.running(pod):
        return [("held", _seconds(since, until))]
    made = min(max(pod.created_at or since, since), until)
    placed = min(max(pod.scheduled_at or (made if pod.node else until), made), until)
    queued = _seconds(made, placed)
    began = min(max(pod.trainer.started_at or until, placed), until)
    waits = bool(pod.unschedulable) or queued > _SCHEDULING
    return [
        ("waiting" if scarce else "starting", _seconds(since, made)),
        ("waiting" if waits else "starting", queued),
        ("starting", _seconds(placed, began)),
        ("warmup", _seconds(began, until)),
    ]


def _seconds(since: datetime, until: datetime) -> float:
    return max(0.0, (until - since).total_seconds())


def _cause(status: Status, polled: Rounds | None, new: Status, *, held: bool = False) -> str:
    """Name the cause of a recovery that the hub tells of."""
    newest = new.last_failure
    known = polled.known if polled is not None and polled.attempt == status.hub else ()
    if known and known[-1].kind == "drill" and not held:
        return DRILL
    if newest is None or (held and newest.in_place):
        return UNKNOWN  # until it is recorded
    return newest.cls


def _eta(status: Status, replicas: int, now: datetime) -> Eta | None:
    """Estimate the end: the present rate, and what failures have cost so far, continued."""
    progress, sums = status.progress, status.ledger.seconds
    rate, (step, total) = progress.steps_per_second, progress.shown
    if status.phase != "Running" or rate is None or rate <= 0:
        return None
    if total is None or step is None or step >= total:
        return None
    stalled = status.condition("Stalled")
    if stalled and stalled.status == "True":
        return None
    ran = sum(sums.get(name, 0.0) for name in ("productive", "data", "snapshot"))
    # The rate is that of the last minute, which counts if no restart was in it.
    times = (status.timings.running_at, status.timings.last_round_at)
    since = max((at for at in times if at is not None), default=now)
    if now - since < _RATED and ran > 0 and step > 0:
        rate = step * replicas / ran  # the mean of the whole run
    left = (total - step) / rate
    lost = sum(sums.get(name, 0.0) for name in ("recovering", "repeated", "held"))
    left += left * lost / ran if ran > 0 else 0.0
    try:
        at = now + timedelta(seconds=left)
    except OverflowError:
        return None
    return Eta(at.replace(microsecond=0), _words(left))


def _words(seconds: float) -> str:
    """Word a duration in its two largest units."""
    minutes, days = round(seconds / 60), round(seconds / 3600) // 24
    if days:
        return f"{days}d{round(seconds / 3600) % 24}h"
    if minutes >= 60:
        return f"{minutes // 60}h{minutes % 60}m"
    return f"{minutes}m" if seconds >= 60 else f"{seconds:.0f}s"
