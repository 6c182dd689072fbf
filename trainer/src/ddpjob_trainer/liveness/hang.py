"""Find the rank that hangs: signs of life in, at most one culprit out. Pure.

The launcher's hangs.py and the watchdog call find(). A rank that hangs makes all others wait in a
collective, so a waiting rank is suspected later than a busy one: the cause is found first, on
whichever machine it is.
"""

from __future__ import annotations

import faulthandler
import math
import os
import select
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import ddpjob_contract as contract
from ddpjob_contract import ExitCode
from ddpjob_trainer.liveness.heartbeat import Activity, Phase, RankState, RankStateWriter

# --- The rank that hangs --------------------------------------------------------------------------

#: Activities in which a rank waits for others: silence there proves nothing against it.
WAITING: Final[frozenset[Activity]] = frozenset({"rendezvous", "load", "backward", "agreement"})
#: Extra time of a waiting rank: its peers' launchers must have had the time to act.
_WAITING_FACTOR: Final = 1.25
_WAITING_SECONDS: Final = 1.0
#: In start() each rank has so many times its startup deadline for the others to come: their pods
#: may have begun as much later, and one that does not come is found by its own launcher first.
MEETING_FACTOR: Final = 2.0


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds without a sign of life after which a rank hangs, by phase.

    ``output``: without a line of any rank, in any phase; a launcher alone reads those.
    """

    startup: float
    step: float
    snapshot: float
    output: float = math.inf

    @property
    def last_resort(self) -> float:
        """Return a collective's timeout, so long that the watchdog finds the culprit first."""
        return max(self.startup, self.step, self.snapshot) * 1.5

    @property
    def shortest(self) -> float:
        """Return the smallest of them."""
        return min(self.startup, self.step, self.snapshot)


@dataclass(frozen=True, slots=True)
class Sign:
    """A rank's last record. ``silent``: seconds since the record last changed."""

    state: RankState
    silent: float
    stopped: bool = False  # by SIGSTOP: at fault in any activity

    @property
    def waiting(self) -> bool:
        """Return whether it may be waiting for another rank."""
        return self.state.activity in WAITING and not self.stopped

    def deadline(self, deadlines: Deadlines) -> float:
        """Return the seconds of its phase, without end after the loop."""
        if self.state.phase == "done":
            # In finish() the others wait for one that is stopped.
            return deadlines.step if self.stopped else math.inf
        found: float = getattr(deadlines, self.state.phase)
        return found

    def limit(self, deadlines: Deadlines) -> float:
        """Return the seconds that it may be silent."""
        limit = self.deadline(deadlines)
        if not self.waiting:
            return limit
        meeting = self.state.activity == "rendezvous"
        return limit * (MEETING_FACTOR if meeting else _WAITING_FACTOR) + _WAITING_SECONDS


@dataclass(frozen=True, slots=True)
class Hang:
    """The rank that hangs. ``limit``: the deadline of its phase."""

    sign: Sign
    limit: float

    @property
    def rank(self) -> int:
        """Return its number."""
        return self.sign.state.rank

    @property
    def phase(self) -> Phase:
        """Return the phase that it hangs in."""
        return self.sign.state.phase

    def __str__(self) -> str:
        variable = {
            "startup": contract.HANG_STARTUP_SECONDS,
            "snapshot": contract.HANG_SNAPSHOT_SECONDS,
        }.get(self.phase, contract.HANG_STEP_SECONDS)
        how = "is stopped (SIGSTOP) and" if self.sign.stopped else "hangs: it"
        state = self.sign.state
        if state == RankState(self.rank):  # it has no record yet
            return (
                f"rank {self.rank} hangs: it has not come to ddp.start() within"
                f" {self.sign.silent:.1f} s; the limit is {variable}={self.limit:g}: raise it if"
                " the script was at work"
            )
        return (
            f"rank {self.rank} {how} gave no sign of life for {self.sign.silent:.1f} s in phase"
            f" {self.phase} ({state.activity}) after step {state.step}; the limit is"
            f" {variable}={self.limit:g}"
        )


def find(signs: Sequence[Sign], deadlines: Deadlines) -> Hang | None:
    """Return the culprit among the ranks of one machine, if any is overdue."""
    # A rank that the others may be waiting for still has time.
    busy = any(
        not sign.waiting and sign.silent <= sign.limit(deadlines) < math.inf for sign in signs
    )
    overdue = [sign for sign in signs if sign.silent > sign.limit(deadlines)]
    suspects = [sign for sign in overdue if not (sign.waiting and busy)]
    if not suspects:
        return None
    # Stopped ranks first, then busy, then waiting; the longest silence first.
    first = min(suspects, key=lambda s: (not s.stopped, s.waiting, s.state.marked_at, s.state.rank))
    return Hang(first, first.deadline(deadlines))


# --- The watchdog, where torchrun is the launcher -------------------------------------------------
# A thread reads the signs of life that the launcher would, prints all stacks and ends the process
# with exit code 76. A C call that holds the GIL blocks the thread; then the other ranks end, by
# their collectives' timeout.

_LONGEST_LOOK_SECONDS: Final = 1.0


def watch(writer: RankStateWriter, deadlines: Deadlines) -> None:
    """Watch this process from now to its end."""
    threading.Thread(target=_run, args=(writer, deadlines), name="watchdog", daemon=True).start()


def _run(writer: RankStateWriter, deadlines: Deadlines) -> None:
    interval = min(_LONGEST_LOOK_SECONDS, deadlines.shortest / 10)
    marks, since, looked = -1, 0.0, 0.0
    while True:
        now = time.monotonic()
        state = writer.state
        if state.marks != marks:
            marks, since = state.marks, now
        elif looked and now - looked > 2 * interval:  # this machine was suspended
            since += now - looked - interval
        looked = now
        hang = find([Sign(state, now - since)], deadlines)
        if hang is not None:
            _end(str(hang))
        time.sleep(interval)


def _end(message: str) -> None:
    # print() may block on a lock of the hung thread, and a pipe without a reader blocks too.
    if select.select([], [2], [], 1.0)[1]:
        os.write(2, f"ddpjob: {message}, ending with exit code {ExitCode.HANG:d}\n".encode())
        faulthandler.dump_traceback(file=2, all_threads=True)
    os._exit(ExitCode.HANG)
