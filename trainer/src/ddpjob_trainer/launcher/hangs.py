"""Watch the workers' signs of life, and end one that hangs.

The supervisor's loop calls it; the workers' records flow in. Deadlines are measured on the
launcher's clock from when it saw a record change, so a worker that holds the GIL or is stopped is
found too. A program that does not use our library keeps no record: its output alone is watched,
where a limit for that is set. A process for which others wait in ddp.start(), as the source shows,
is watched from its import of the library on.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import ClassVar, Final

import ddpjob_contract as contract
from ddpjob_contract import STATE_MAX_STACKS_BYTES, UNRESOLVED
from ddpjob_trainer.launcher.hub.messages import LastLine
from ddpjob_trainer.launcher.output import Log
from ddpjob_trainer.launcher.processes import children
from ddpjob_trainer.launcher.worker_group import WorkerGroup
from ddpjob_trainer.liveness import stacks
from ddpjob_trainer.liveness.hang import Deadlines, Hang, Sign, find
from ddpjob_trainer.liveness.heartbeat import RankState, read_state

# --- Rank 0's name: while it does not resolve, workers hang in silence ----------------------------
# HangResponse begins it with each round and reads ``trouble``; worker_group.py reads ``lasting``. A
# thread asks the resolver, which may block for long. Pods' names may take half a minute at a
# job's first start.

_PAUSE_SECONDS: Final = 2.0
_QUIET_TRIES: Final = 10


class Names:
    """The checks of all rounds. ``trouble``: why the name does not resolve, "" if it does.

    ``lasting``: the same once the name has been asked for long enough: one that is new takes time.
    ``address``: None where there is no other pod. ``say`` reports trouble once a round.
    """

    def __init__(self, address: str | None, say: Callable[[str], None]) -> None:
        self.trouble = self.lasting = ""
        self._address, self._say = address, say
        self._rounds = 0

    def begin(self) -> None:
        """Start over with a round."""
        self.trouble = self.lasting = ""
        self._rounds += 1
        if self._address is not None:
            task = (self._address, self._rounds)
            threading.Thread(target=self._ask, args=task, name="names", daemon=True).start()

    def _ask(self, address: str, of_round: int) -> None:
        for tries in count(1):
            trouble = ""
            try:
                socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
            except OSError as error:
                trouble = f"{address} {UNRESOLVED} ({error.strerror}): is the job's Service there?"
            if of_round != self._rounds:  # the next one asks for itself
                return
            self.trouble = trouble
            self.lasting = trouble if tries >= _QUIET_TRIES else ""
            if not trouble:
                return
            if tries == _QUIET_TRIES:
                self._say(f"workers cannot find one another: {trouble}")
            time.sleep(_PAUSE_SECONDS)


# --- Stacks in C, CUDA or NCCL: by py-spy or pystack, where one is installed ----------------------
# StackRequest starts a look, and takes the text before a worker that hangs is killed. The program
# runs in a thread, for some seconds at most.

#: Each stops the process, reads its stacks and lets it go on.
_PROGRAMS: Final[Mapping[str, tuple[str, ...]]] = {
    "py-spy": ("dump", "--native", "--pid"),
    "pystack": ("remote", "--native"),
}
SECONDS: Final = 5.0  # for all processes
_MOST: Final = 32 * 1024  # characters of each


class Look:
    """One look at some processes. ``pids``: rank -> pid, in the order of interest."""

    def __init__(self, pids: Mapping[int, int]) -> None:
        self._name = next(filter(shutil.which, _PROGRAMS), "")
        self._pids = pids
        self._texts: list[str] = []
        self._until = time.monotonic() + SECONDS
        self._thread = threading.Thread(target=self._run, name="native stacks", daemon=True)
        if self._name:
            self._thread.start()

    @property
    def busy(self) -> bool:
        """Return whether more text may come in time."""
        return self._thread.is_alive() and time.monotonic() < self._until

    def text(self) -> str:
        """Return what has come."""
        return "".join(self._texts)

    def _run(self) -> None:
        for rank, pid in self._pids.items():
            left = self._until - time.monotonic()
            if left > 0:
                words = [self._name, *_PROGRAMS[self._name], str(pid)]
                said = _said(words, left)[:_MOST].rstrip()
                self._texts.append(f"--- rank {rank}, by {self._name}\n{said}\n")


def _said(words: list[str], seconds: float) -> str:
    """Run a program; return its output, or why there is none."""
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no answer within {seconds:.0f} s"
    except OSError as error:
        return f"it does not start: {error.strerror}"
    return done.stdout.decode(errors="replace")


# --- Hangs ----------------------------------------------------------------------------------------

_LONGEST_POLL_SECONDS: Final = 1.0
#: The answer is written within milliseconds, unless the process is stopped or swapped out.
_STACKS_SECONDS: Final = 1.0
_LOOK_SECONDS: Final = 0.1  # between two looks whether native stacks have come
_PATIENT_SECONDS: Final = 10.0  # where no process is to be ended
#: All launchers find out within two seconds that the gang is silent: each has its stacks by then.
_SILENT_SECONDS: Final = 3.0


@dataclass(frozen=True, slots=True)
class Silence:
    """No rank of the gang has printed a line. ``rank`` is ended: which one hangs is not known.

    A stopped process is, since the others wait for it.
    """

    rank: int
    seconds: float
    limit: float
    phase: ClassVar = "output"

    def __str__(self) -> str:
        return (
            f"the gang hangs: no rank has printed a line for {self.seconds:.1f} s, or given another"
            f" sign of life; the limit is {contract.HANG_OUTPUT_SECONDS}={self.limit:g}: raise it"
            " if the program was at work"
        )


class HangWatch:
    """Looks at the records of one round's workers. ``pids``: rank -> pid of those that run.

    ``starts``: the program calls ddp.start().
    """

    def __init__(self, deadlines: Deadlines, *, starts: bool = False) -> None:
        self._deadlines, self._starts = deadlines, starts
        self.interval = min(_LONGEST_POLL_SECONDS, deadlines.shortest / 10)
        self._seen: dict[int, tuple[int, int]] = {}  # rank -> pid and marks of its record
        self._at: dict[int, float] = {}  # when that last changed
        self._polled = self.moved = 0.0  # moved: when any record last changed, or the round began

    def poll(self, directory: Path, pids: Mapping[int, int], now: float) -> Hang | None:
        """Return the hanging worker, if one hangs. Cheap when called more often."""
        if now < self._polled + self.interval:
            return None
        pause = now - self._polled - 2 * self.interval
        if self._polled and pause > 0:
            # The launcher was stopped or starved itself, and so, likely, were the workers.
            self._at = {rank: at + pause for rank, at in self._at.items()}
        self._polled = now
        states = {rank: read_state(directory, rank) for rank in pids}
        signs = [self._sign(state or RankState(rank), now) for rank, state in states.items()]
        # One record shows that the program uses our library; without one no worker reached start().
        arrived = (stacks.arrived(directory, rank) for rank in pids)
        used = any(states.values()) or (self._starts and any(arrived))
        return find(signs, self._deadlines) if used else None

    def _sign(self, state: RankState, now: float) -> Sign:
        mark, stopped = (state.pid, state.marks), children.state(state.pid) == "T"
        if self._seen.get(state.rank) != mark:
            self.moved = now
        # After the loop silence is fine, but a stopped process never ends.
        if self._seen.get(state.rank) != mark or (state.phase == "done" and not stopped):
            self._seen[state.rank], self._at[state.rank] = mark, now
        silent = now - self._at[state.rank]
        return Sign(state, silent, stopped and silent > self._deadlines.shortest)


_NONE: Final = "no answer: it has not imported ddpjob_trainer; py-spy in its image would show more"


class StackRequest:
    """Asks workers for the stacks of all threads; reads them later. ``native``: those in C."""

    def __init__(self, first: int, directory: Path, pids: Mapping[int, int]) -> None:
        self._first, self._directory = first, directory
        self._ranks = (first, *sorted(pids.keys() - {first}))
        self._asked: dict[int, int] = {}  # rank -> pid
        for rank in self._ranks:
            self._ask(rank, pids.get(rank))
        ranks = [rank for rank in self._ranks if rank in pids]
        self.native = Look({rank: self._asked.get(rank, pids[rank]) for rank in ranks})

    @property
    def waits(self) -> bool:
        """Return whether one that was asked has not answered."""
        return not all(map(self._answer, self._asked))

    def _ask(self, rank: int, group: int | None) -> None:
        state = read_state(self._directory, rank)
        pid = state.pid if state else stacks.arrived(self._directory, rank)
        # Without our library the signal would just kill it. The worker may be a shell around the
        # process that trains: same process group.
        ours = pid and children.group_of(pid) == group and children.catches(pid, stacks.REQUEST)
        if ours and stacks.request(self._directory, rank, pid):
            self._asked[rank] = pid

    def brief(self) -> list[str]:
        """Return the hanging rank's answer, a line per thread."""
        return stacks.brief(self._answer(self._first))

    def text(self, most: int = STATE_MAX_STACKS_BYTES) -> str:
        """Return all stacks by rank, that of the first one first, cut to so many bytes."""
        parts = []
        for rank in self._ranks:
            none = "no answer: it is stopped" if rank in self._asked else _NONE
            parts.append(f"--- rank {rank}\n{self._answer(rank) or none}\n")
        return "".join(parts).encode()[:most].decode(errors="ignore")

    def _answer(self, rank: int) -> str:
        asked = rank in self._asked
        return stacks.read(self._directory, rank, STATE_MAX_STACKS_BYTES) if asked else ""


def look(directory: Path, pids: Mapping[int, int]) -> str:
    """Return the stacks of workers that run now, by rank, once all are whole."""
    request, most = StackRequest(min(pids), directory, pids), len(pids) * STATE_MAX_STACKS_BYTES
    before, seen, until = "", request.text(most), time.monotonic() + _PATIENT_SECONDS
    while request.native.busy or ((request.waits or seen != before) and time.monotonic() < until):
        time.sleep(_LOOK_SECONDS)
        before, seen = seen, request.text(most)
    return seen + request.native.text()


class HangResponse:
    """Finds and ends hanging workers over all rounds. ``stacks``: of the last hang.

    ``found``: of this round, with native ones, for evidence.

    ``counted``: hangs by phase. It asks for stacks, waits a moment, and only then kills the worker;
    the supervisor's loop runs on meanwhile.
    """

    def __init__(
        self, deadlines: Deadlines, counted: Counter[str], log: Log, names: Names, *, starts: bool
    ) -> None:
        self.stacks = self.found = ""
        self.names, self._counted, self._log = names, counted, log
        self._deadlines, self._starts = deadlines, starts
        self.begin(time.monotonic())

    def begin(self, now: float) -> None:
        """Start over with a round."""
        self.found = ""
        self.names.begin()
        self._watch = HangWatch(self._deadlines, starts=self._starts)
        self._watch.moved = now
        self._request: StackRequest | None = None
        self._answer_at = 0.0

    def tick(
        self, workers: WorkerGroup, lines: LastLine, now: float, *, terminating: bool
    ) -> float:
        """Do the next due action; return when to call again. ``lines``: the last of the gang.

        ``terminating``: the launcher is ending, and the grace period bounds every worker.
        """
        if self._request is not None:
            if not workers.stopping:  # else the next round may begin at once
                if now < self._answer_at:
                    return self._answer_at
                if self._request.native.busy:
                    return now + _LOOK_SECONDS
            self._answered(workers, self._request, now)
            self._request = None
        elif not terminating and not workers.stopping and not workers.dying:
            found: Hang | Silence | None = self._watch.poll(workers.state_dir, workers.pids, now)
            lines.look(now, max(workers.wrote, self._watch.moved))
            silent, limit = now - lines.gang, self._deadlines.output
            if found is None and silent > limit and workers.pids:
                pids = workers.pids
                stopped = [rank for rank, pid in pids.items() if children.state(pid) == "T"]
                found = Silence(min(stopped or pids), silent, limit)
            if found is not None:
                self._counted[found.phase] += 1
                self._log.say(f"{found}; stacks of all threads follow")
                self._hang = found
                self._request = StackRequest(found.rank, workers.state_dir, workers.pids)
                slow = isinstance(found, Silence)
                self._answer_at = now + (_SILENT_SECONDS if slow else _STACKS_SECONDS)
                return self._answer_at
        return now + self._watch.interval

    def _answered(self, workers: WorkerGroup, request: StackRequest, now: float) -> None:
        self.stacks = request.text()
        self.found = self.stacks + request.native.text()
        self._log.put(2, self.found.encode(errors="replace"))
        if not workers.stopping:
            hang = self._hang
            lost = self.names.trouble if hang.phase == "startup" else ""
            why = f"Hang: {lost}; {hang}" if lost else f"Hang: {hang}"
            workers.mark_hung(hang.rank, why, request.brief(), now)
