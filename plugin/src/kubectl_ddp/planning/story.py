"""Play a gang's life through given failures: simulate.py draws them, expected() takes a script.

Between two failures nothing is random, so a whole stretch of steps is one look at cycle.py.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass

from kubectl_ddp.planning.cycle import Cycle
from kubectl_ddp.planning.parts import Case, Parts

#: (state, kind of the failure that brought it about, else "") -> pod-seconds.
Book = dict[tuple[str, str], float]


@dataclass(frozen=True, slots=True)
class Fault:
    """A failure, ``at`` seconds after the gang began to start, or after a step."""

    case: Case
    at: float = 0.0
    step: int | None = None  # instead: as soon as so many steps are done, the first time


@dataclass(frozen=True, slots=True)
class Account:
    """What became of all pod-seconds, those of standbys included."""

    book: Book  # its values add up to ``total``
    seconds: float
    total: float
    steps: int
    repeated: int  # steps
    failures: int

    @property
    def goodput(self) -> float:
        """Return the productive share."""
        return self.book.get(("productive", ""), 0.0) / self.total if self.total else 0.0


def expected(
    parts: Parts, faults: Iterable[Fault], *, seconds: float = math.inf, steps: int | None = None
) -> Account:
    """Tell where the time of a run goes that ends after ``seconds`` or with its last step.

    For a scripted run on a cluster: its faults in their order, its own measured parts.
    """
    if steps is None and math.isinf(seconds):
        raise ValueError("say when the run ends: seconds, steps or both")
    return play(parts, faults, seconds, steps)


def play(
    parts: Parts, faults: Iterable[Fault], seconds: float, steps: int | None = None
) -> Account:
    """Play a run through faults in the order of time."""
    story = _Story(parts, seconds, steps)
    for fault in faults:
        if not story.go_on(fault.at if fault.step is None else story.when(fault.step)):
            break
        story.fail(fault.case)
    story.go_on(math.inf)
    return story.account()


@dataclass(frozen=True, slots=True)
class _Phase:
    """Some seconds without steps; ``new`` pods are in a state of their own."""

    seconds: float
    state: str
    new: int = 0
    new_state: str = ""
    saves: int | None = None  # this many steps are durable at its end


@dataclass(frozen=True, slots=True)
class _Away:
    """A standby that has taken a lost pod's place, until the next one is parked."""

    kind: str
    made: float  # from when on it waits for room, and then starts
    room: float
    parked: float


class _Story:
    """A gang from its start on; ``now`` only grows, to the next failure or to the end."""

    def __init__(self, parts: Parts, seconds: float, steps: int | None) -> None:
        self._parts, self._ends, self._goal = parts, seconds, steps
        self._cycle = Cycle(parts)
        self._now = self._cut = 0.0
        self._book: Book = {}
        self._at = self._durable = self._reached = self._repeated = self._failures = 0
        self._kind = self._lost_by = ""
        self._over = False
        self._away: list[_Away] = []
        self._busy: list[float] = []  # heap: when standbys that are away will be there again
        self._coming: list[float] = []  # heap: when new pods will be there
        self._there = 0.0  # the last of them
        self._whole, self._warmup = True, parts.warmup  # of the recovery that is under way
        self._phases = [
            _Phase(parts.all_start(), "starting"),
            _Phase(parts.warmup, "warmup"),
        ]

    def go_on(self, until: float) -> bool:
        """Live until then; return False when the run has ended before."""
        until = min(until, self._ends)
        while self._phases and self._now < until:
            phase = self._phases[0]
            spent = min(phase.seconds, until - self._now)
            self._add(phase.state, self._kind, (self._parts.pods - phase.new) * spent)
            self._add(phase.new_state, self._kind, phase.new * spent)
            self._now += spent
            if spent < phase.seconds:
                break
            self._phases.pop(0)
            if phase.saves is not None:
                self._durable = phase.saves
            self._at, self._cut = self._durable, 0.0
        if self._now < until and not self._over:
            self._train(until)
        self._over = self._over or self._now >= self._ends
        return not self._over

    def when(self, step: int) -> float:
        """Tell the moment at which so many steps are done, if nothing fails before."""
        durable = max([self._durable, *(phase.saves or 0 for phase in self._phases)])
        down = sum(phase.seconds for phase in self._phases)
        return self._now + down + self._cycle.until(max(0, step - durable))

    def fail(self, case: Case) -> None:
        """Begin to recover, with what an earlier failure has left to do."""
        parts, phases = self._parts, list[_Phase]()
        self._failures += 1
        self._kind = case.kind
        if not self._phases:  # it trained
            self._coming, self._there, self._whole, self._warmup = [], 0.0, False, 0.0
            self._add("recovering", case.kind, self._cut * parts.pods)
            self._lost_by = case.kind
            if case.announced:
                phases = [_Phase(parts.stall + parts.write, "snapshot", saves=self._at)]
        begun = self._now + sum(phase.seconds for phase in phases)
        parked = parts.standby - _later(self._busy, begun)
        recovery = parts.recovery(case, standby=parked > 0)
        down = recovery.detection + recovery.teardown
        usual = parts.recovery(case)
        made = begun + usual.detection + usual.teardown
        there = made + usual.held
        if recovery.new:
            self._whole = self._whole or recovery.new == parts.pods
            heapq.heappush(self._coming, there)
            self._there = max(self._there, there)
        elif usual.new:
            self._away.append(_Away(case.kind, made, made + usual.wait, there))
            heapq.heappush(self._busy, there)
        self._warmup = max(self._warmup, recovery.warmup)
        self._phases = [
            *phases,
            _Phase(down, "recovering"),
            *self._hold(begun + down, recovery.wait),
            _Phase(self._warmup, "warmup"),
        ]

    def account(self) -> Account:
        """Return what became of the time."""
        parts, now = self._parts, self._now
        parked = parts.standby * now
        for one in self._away:
            for state, since, until in (
                ("waiting", one.made, one.room),
                ("starting", one.room, one.parked),
            ):
                spent = max(0.0, min(until, now) - since)
                self._add(state, one.kind, spent)
                parked -= spent
        self._add("idle", "", parked)
        total = (parts.pods + parts.standby) * now
        return Account(self._book, now, total, self._reached, self._repeated, self._failures)

    def _hold(self, since: float, wait: float) -> list[_Phase]:
        """List what the pods do until all new ones are there."""
        coming, left = _later(self._coming, since), self._there - since
        if not coming:
            return []
        count = self._parts.pods if self._whole else min(coming, self._parts.pods)
        return [
            _Phase(wait, "held", count, "waiting"),
            _Phase(max(0.0, left - wait), "held", count, "starting"),
        ]

    def _train(self, until: float) -> None:
        """Make steps until the next failure, or until the last step's snapshot is durable."""
        parts, cycle, began = self._parts, self._cycle, self._now
        last = None if self._goal is None else self._goal - self._durable
        self._over = last is not None and began + cycle.until(last) <= until
        if last is not None and self._over:
            self._now, steps, durable = began + cycle.until(last), last, 0
            stalled = cycle.until(last) - last * parts.step
        else:
            done = cycle.after(until - began)
            self._now, steps, durable, stalled = until, done.steps, done.durable, done.stalled
        self._at = self._durable + steps
        self._durable += durable
        new = max(0, self._at - self._reached)
        self._reached = max(self._reached, self._at)
        self._repeated += steps - new
        self._add("productive", "", new * (parts.step - parts.data) * parts.pods)
        self._add("data", "", new * parts.data * parts.pods)
        self._add("repeated", self._lost_by, (steps - new) * parts.step * parts.pods)
        self._add("snapshot", "", stalled * parts.pods)
        self._cut = max(0.0, self._now - began - steps * parts.step - stalled)
        if self._over:
            self._add("snapshot", "", (parts.stall + parts.write) * parts.pods)
            self._now += parts.stall + parts.write
        elif self._now >= self._ends:
            self._add("productive", "", self._cut * parts.pods)

    def _add(self, state: str, kind: str, pod_seconds: float) -> None:
        if pod_seconds:
            self._book[state, kind] = self._book.get((state, kind), 0.0) + pod_seconds


def _later(heap: list[float], now: float) -> int:
    """Drop the moments that are over; return how many are left."""
    while heap and heap[0] <= now:
        heapq.heappop(heap)
    return len(heap)
