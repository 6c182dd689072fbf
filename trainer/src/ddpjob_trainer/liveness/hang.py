"""Which worker hangs. Pure: signs of life in, at most one culprit out.

A rank that stands still makes all others wait for it in a collective. So whoever is waiting is
suspected later than whoever is at work: the cause is found first, on whichever machine it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import ddpjob_contract as contract
from ddpjob_trainer.liveness.heartbeat import Activity, Phase, RankState

#: In these a rank waits for others; standing still there proves nothing against it.
WAITING: Final[frozenset[Activity]] = frozenset({"rendezvous", "load", "backward", "agreement"})
#: What the waiting get on top: their peers' launchers must have had the time to act.
_WAITING_FACTOR: Final = 1.25
_WAITING_SECONDS: Final = 1.0
_LAST_RESORT_FACTOR: Final = 1.5


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds without a sign of life after which a rank hangs, by phase."""

    startup: float
    step: float
    snapshot: float

    def of(self, phase: Phase) -> float | None:
        """Seconds for a phase, None where nothing is watched: after the loop."""
        limits: dict[Phase, float] = {
            "startup": self.startup,
            "step": self.step,
            "snapshot": self.snapshot,
        }
        return limits.get(phase)

    @property
    def last_resort(self) -> float:
        """For a collective's timeout: the watchdog, which finds the culprit, comes first."""
        return max(self.startup, self.step, self.snapshot) * _LAST_RESORT_FACTOR

    @property
    def shortest(self) -> float:
        """The smallest of them."""
        return min(self.startup, self.step, self.snapshot)


@dataclass(frozen=True, slots=True)
class Sign:
    """What is known of one rank. ``silent``: seconds since its record last changed."""

    state: RankState
    silent: float
    stopped: bool = False  # by SIGSTOP: at fault wherever it stands

    @property
    def waiting(self) -> bool:
        """Whether it may stand still because of another rank."""
        return self.state.activity in WAITING and not self.stopped

    def deadline(self, deadlines: Deadlines) -> float | None:
        """Seconds of its phase, None where it is not watched."""
        if self.state.phase == "done" and self.stopped:  # the others wait for it in finish()
            return deadlines.step
        return deadlines.of(self.state.phase)

    def limit(self, deadlines: Deadlines) -> float | None:
        """Seconds that it may be silent."""
        limit = self.deadline(deadlines)
        if limit is None or not self.waiting:
            return limit
        return limit * _WAITING_FACTOR + _WAITING_SECONDS


@dataclass(frozen=True, slots=True)
class Hang:
    """The rank that hangs."""

    rank: int
    phase: Phase
    activity: Activity
    step: int
    silent: float
    limit: float
    stopped: bool

    def __str__(self) -> str:
        variable = {
            "startup": contract.HANG_STARTUP_SECONDS,
            "snapshot": contract.HANG_SNAPSHOT_SECONDS,
        }.get(self.phase, contract.HANG_STEP_SECONDS)
        how = "is stopped (SIGSTOP) and" if self.stopped else "hangs: it"
        return (
            f"rank {self.rank} {how} gave no sign of life for {self.silent:.1f} s in phase"
            f" {self.phase} ({self.activity}) after step {self.step}; the limit is"
            f" {variable}={self.limit:g}"
        )


def find(signs: Sequence[Sign], deadlines: Deadlines) -> Hang | None:
    """Return the culprit among the ranks of one machine, if any is overdue."""
    overdue: list[Sign] = []
    busy = False  # somebody whom the others may be waiting for still has time
    for sign in signs:
        limit = sign.limit(deadlines)
        if limit is None:
            continue
        if sign.silent > limit:
            overdue.append(sign)
        elif not sign.waiting:
            busy = True
    suspects = [sign for sign in overdue if not (sign.waiting and busy)]
    if not suspects:
        return None
    first = min(suspects, key=_order)
    limit = first.deadline(deadlines)
    assert limit is not None
    return Hang(
        rank=first.state.rank,
        phase=first.state.phase,
        activity=first.state.activity,
        step=first.state.step,
        silent=first.silent,
        limit=limit,
        stopped=first.stopped,
    )


def _order(sign: Sign) -> tuple[bool, bool, float, int]:
    """The stopped, then those at work, then those that wait; the longest silence first."""
    return (not sign.stopped, sign.waiting, sign.state.marked_at, sign.state.rank)
