"""Watch the workers' signs of life, and end one that hangs.

The supervisor's loop calls it; the workers' records flow in. Deadlines are measured on the
launcher's clock from when it saw a record change, so a worker that holds the GIL or is stopped is
found too. A program that does not use our library keeps no record and is not watched.

A hanging worker ends with the exit code of a hang; its stacks go to the log, to GET /state and, as
far as there is room, to the termination report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ddpjob_contract import STATE_MAX_STACKS_BYTES, ExitCode
from ddpjob_trainer.launcher.log import Log
from ddpjob_trainer.launcher.processes import children
from ddpjob_trainer.launcher.watch.names import Names
from ddpjob_trainer.launcher.worker_group import WorkerGroup
from ddpjob_trainer.liveness import stacks
from ddpjob_trainer.liveness.hang import Deadlines, Hang, Sign, find
from ddpjob_trainer.liveness.heartbeat import RankState, read_state

_LONGEST_POLL_SECONDS: Final = 1.0
#: The answer is written within milliseconds, unless the process is stopped or swapped out.
_STACKS_SECONDS: Final = 1.0
_STACKS_SETTLED_SECONDS: Final = 0.05

#: Running workers: rank -> pid.
Pids = Mapping[int, int]


@dataclass(slots=True)
class _Seen:
    """A record as it was when it last changed."""

    identity: tuple[int, int]  # pid, marks
    at: float


class HangWatch:
    """Looks at the records of one round's workers."""

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self.interval = min(_LONGEST_POLL_SECONDS, deadlines.shortest / 10)
        self._seen: dict[int, _Seen] = {}
        self._polled = 0.0

    def poll(self, directory: Path, pids: Pids, now: float) -> Hang | None:
        """Return the hanging worker, if one hangs. Cheap when called more often."""
        if now < self._polled + self.interval:
            return None
        pause = now - self._polled - 2 * self.interval
        if self._polled and pause > 0:
            # The launcher was stopped or starved itself, and so, likely, were the workers.
            for seen in self._seen.values():
                seen.at += pause
        self._polled = now
        states = {rank: read_state(directory, rank) for rank in pids}
        signs = [self._sign(state or RankState(rank), now) for rank, state in states.items()]
        # One record shows that the program uses our library; without one no worker reached start().
        used = any(states.values())
        return find(signs, self._deadlines) if used else None

    def _sign(self, state: RankState, now: float) -> Sign:
        identity = (state.pid, state.marks)
        seen = self._seen.get(state.rank)
        if seen is None or seen.identity != identity:
            seen = self._seen[state.rank] = _Seen(identity, now)
        if state.phase == "done" and not _is_stopped(state.pid):
            seen.at = now  # after the loop silence is fine, but a stopped process never ends
        silent = now - seen.at
        late = silent > self._deadlines.shortest
        return Sign(state, silent, stopped=late and _is_stopped(state.pid))


def _is_stopped(pid: int) -> bool:
    """Return whether SIGSTOP holds a process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] == "T"


class StackRequest:
    """Asks workers for the stacks of all their threads; reads them a moment later."""

    def __init__(self, directory: Path, pids: Pids, now: float) -> None:
        self._directory = directory
        self._until = now + _STACKS_SECONDS
        self._asked = [rank for rank, pid in pids.items() if self._ask(rank, pid)]
        self._sizes: tuple[int, ...] = ()
        self._settled = now + _STACKS_SETTLED_SECONDS

    def _ask(self, rank: int, pid: int) -> bool:
        state = read_state(self._directory, rank)
        if state is None:  # without our library the signal would just kill it
            return False
        # The worker may be a shell around the process that trains: same process group.
        if children.group_of(state.pid) != pid:
            return False
        return stacks.request(self._directory, rank, state.pid)

    def due(self, now: float) -> float:
        """Return when to call is_done() next."""
        return min(self._until, now + _STACKS_SETTLED_SECONDS)

    def is_done(self, now: float) -> bool:
        """Return whether all answers are there, or the time for them is over."""
        if now >= self._until or not self._asked:
            return True
        limit = STATE_MAX_STACKS_BYTES
        sizes = tuple(len(stacks.read(self._directory, rank, limit)) for rank in self._asked)
        if sizes != self._sizes:
            self._sizes = sizes
            self._settled = now + _STACKS_SETTLED_SECONDS
        return all(sizes) and now >= self._settled

    def brief(self, rank: int) -> list[str]:
        """Return a rank's answer, a line per thread."""
        if rank not in self._asked:
            return []
        return stacks.brief(stacks.read(self._directory, rank, STATE_MAX_STACKS_BYTES))

    def text(self, first: int, limit: int = STATE_MAX_STACKS_BYTES) -> str:
        """Return all stacks by rank, ``first`` before the others, at most ``limit`` bytes."""
        parts = []
        for rank in sorted(self._asked, key=lambda rank: (rank != first, rank)):
            found = stacks.read(self._directory, rank, limit)
            parts.append(f"--- rank {rank}\n{found or 'no answer: it is stopped'}\n")
        if first not in self._asked:
            parts.insert(0, f"--- rank {first}\nno answer\n")
        return "".join(parts).encode()[:limit].decode(errors="ignore")


class HangResponse:
    """Finds and ends hanging workers over all rounds. ``stacks``: of the last hang.

    ``counted``: hangs by phase. It asks for stacks, waits a moment, and only then kills the worker;
    the supervisor's loop runs on meanwhile.
    """

    def __init__(self, deadlines: Deadlines, counted: Counter[str], log: Log, names: Names) -> None:
        self.stacks = ""
        self._names = names
        self._deadlines = deadlines
        self._counted = counted
        self._log = log
        self.begin()

    def begin(self) -> None:
        """Start over with a round."""
        self._names.begin()
        self._watch = HangWatch(self._deadlines)
        self._request: tuple[Hang, StackRequest] | None = None

    def tick(self, workers: WorkerGroup, now: float, *, terminating: bool) -> float:
        """Do the next due action; return when to call again.

        ``terminating``: the launcher is ending, and the grace period bounds every worker.
        """
        if self._request is not None:
            hang, request = self._request
            if not request.is_done(now):
                return request.due(now)
            self._answered(workers, hang, request, now)
            self._request = None
        elif not terminating and not workers.stopping and not workers.dying:
            found = self._watch.poll(workers.state_dir, workers.pids, now)
            if found is not None:
                self._counted[found.phase] += 1
                self._log.say(f"{found}; stacks of all threads follow")
                self._request = found, StackRequest(workers.state_dir, workers.pids, now)
                return now
        return now + self._watch.interval

    def _answered(
        self, workers: WorkerGroup, hang: Hang, request: StackRequest, now: float
    ) -> None:
        self.stacks = request.text(first=hang.rank)
        self._log.put(2, self.stacks.encode())
        if not workers.stopping:
            last_lines = request.brief(hang.rank)
            lost = self._names.trouble if hang.phase == "startup" else ""
            why = f"Hang: {lost}; {hang}" if lost else f"Hang: {hang}"
            workers.mark_hung(hang.rank, ExitCode.HANG, why, last_lines, now)
