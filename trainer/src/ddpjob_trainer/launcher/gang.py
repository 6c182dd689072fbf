"""This launcher's workers of one round: started, watched, stopped with all they left behind."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from ddpjob_trainer import contract
from ddpjob_trainer.launcher.hub.root_cause import Exit
from ddpjob_trainer.launcher.output import OutputPump, exception_in
from ddpjob_trainer.launcher.plan import Plan
from ddpjob_trainer.launcher.processes import children
from ddpjob_trainer.liveness.heartbeat import RankState, read_state

#: A worker that was killed has written all it will; its output is in the pipe already.
_DRAIN_SECONDS = 0.2

#: Start a worker: (local rank, stdout, stderr) -> pid, or None: it will come. Raises OSError.
Starter = Callable[[int, int, int], int | None]


class Gang:
    """``state_dir`` is this round's own, so no record of an earlier one can be taken for new."""

    def __init__(self, plan: Plan, round_: int, state_dir: Path, pump: OutputPump) -> None:
        self.round = round_
        self.state_dir = state_dir
        self.exits: list[Exit] = []
        self.problem = ""  # why a worker could not be started
        self._plan = plan
        self._pump = pump
        self._pids: dict[int, int] = {}  # pid -> local rank, of running workers
        self._coming: set[int] = set()  # local ranks whose pid is not known yet
        self._condemned: dict[int, tuple[int, str]] = {}  # local rank -> what counts: code, why
        self.stopping = False  # its workers have been told to end
        self.kill_at: float | None = None  # when all that runs is killed
        self._training = False
        state_dir.mkdir(parents=True)

    # --- Start ---------------------------------------------------------------------------

    def start(self, start: Starter, now: float) -> None:
        """Start all workers. One that cannot be started counts as one that failed."""
        for local_rank in range(self._plan.nproc):
            out, err = self._pump.pipes(self._plan.rank(local_rank))
            try:
                pid = start(local_rank, out, err)
            except OSError as error:
                self._cannot_start(local_rank, error, now)
                return
            finally:
                os.close(out)
                os.close(err)
            if pid is None:
                self._coming.add(local_rank)
            else:
                self._pids[pid] = local_rank

    def came(self, local_rank: int, pid: int) -> None:
        """A worker that was promised is there."""
        self._coming.discard(local_rank)
        self._pids[pid] = local_rank

    def never_came(self, local_rank: int, error: OSError, now: float) -> None:
        """A worker that was promised cannot be started."""
        self._coming.discard(local_rank)
        self._cannot_start(local_rank, error, now)

    def _cannot_start(self, local_rank: int, error: OSError, now: float) -> None:
        code = 1  # no memory, too many processes: may be better next time
        if isinstance(error, FileNotFoundError):
            code = contract.ExitCode.NOT_FOUND
        elif isinstance(error, PermissionError) or error.errno == errno.ENOEXEC:
            code = contract.ExitCode.NOT_EXECUTABLE
        self.problem = f"cannot start {self._plan.command[0]}: {error.strerror}"
        self.exits.append(Exit(self._plan.rank(local_rank), local_rank, code, now))

    # --- Watch ---------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """How many workers have not ended."""
        return len(self._pids) + len(self._coming)

    @property
    def failed(self) -> bool:
        """Whether a worker ended badly that was not stopped from here."""
        return any(exit_.status != 0 and not exit_.ours for exit_ in self.exits)

    @property
    def succeeded(self) -> bool:
        """Whether all workers have ended with 0."""
        return not self.running and all(exit_.status == 0 for exit_ in self.exits)

    def ended(self, pid: int, status: int, now: float) -> None:
        """A child of the launcher was reaped; it may be a worker."""
        local_rank = self._pids.pop(pid, None)
        if local_rank is None:
            return
        ours = self.stopping and status in (-signal.SIGKILL, -signal.SIGTERM, 143)
        rank = self._plan.rank(local_rank)
        state = self.state(local_rank)
        exception = state.exception if state else ""
        if local_rank in self._condemned:
            ours = False
            status, exception = self._condemned[local_rank]
        if not exception and status > 0 and not ours:
            self._pump.drain(_DRAIN_SECONDS, rank)
            exception = exception_in(self._pump.tail(rank))
        step = state.step if state and state.phase != "startup" else -1
        self.exits.append(Exit(rank, local_rank, status, now, ours, exception[:400], step))

    @property
    def pids(self) -> dict[int, int]:
        """Running workers: rank -> pid."""
        return {self._plan.rank(local_rank): pid for pid, local_rank in self._pids.items()}

    def state(self, local_rank: int) -> RankState | None:
        """What a worker last said of itself in this round."""
        return read_state(self.state_dir, self._plan.rank(local_rank))

    def snapshot_step(self) -> int:
        """Step of the newest snapshot; any rank's word is good, for none boasts. -1: none."""
        states = map(self.state, range(self._plan.nproc))
        return max((state.snapshot_step for state in states if state), default=-1)

    def is_training(self) -> bool:
        """Whether every worker has come as far as its first step in this round."""
        if not self._training:
            states = map(self.state, range(self._plan.nproc))
            self._training = all(state and state.phase != "startup" for state in states)
        return self._training

    # --- Stop ----------------------------------------------------------------------------

    def signal(self, signum: int) -> None:
        """Forward a signal to all workers."""
        for pid in self._pids:
            children.send(pid, signum)

    def condemn(self, rank: int, code: int, why: str, last_lines: Sequence[str]) -> None:
        """Kill a worker that is overdue; ``code`` counts as its exit code.

        ``last_lines`` count as the last of its output.
        """
        self._pump.add(rank, last_lines)
        for pid, local_rank in self._pids.items():
            if self._plan.rank(local_rank) == rank:
                self._condemned[local_rank] = (code, why)
                children.send(pid, signal.SIGKILL)

    def stop(self, now: float, *, last_words: float) -> None:
        """End the workers: at once, or SIGTERM first and ``last_words`` seconds."""
        self.stopping = True
        if last_words > 0:
            self.signal(signal.SIGTERM)
        self.kill_by(now + last_words)

    def kill_by(self, moment: float) -> None:
        """Whoever still runs at this monotonic time is killed; the earliest time counts."""
        self.kill_at = min(self.kill_at or moment, moment)

    def kill_when_due(self, now: float) -> float | None:
        """Kill when it is time; return when to call again."""
        if self.kill_at is None or not self.running:
            return None
        if now < self.kill_at:
            return self.kill_at
        self.signal(signal.SIGKILL)
        return now + 0.05

    def is_gone(self, spared: Collection[int]) -> bool:
        """Whether no worker and no descendant is left; kills descendants once workers ended.

        A process that a worker left behind, such as the keeper of its snapshots, has become our
        child. ``spared``: children that are to live.
        """
        if self.running:
            return False
        left = [pid for pid in children.children() if pid not in spared]
        for pid in left:
            children.send(pid, signal.SIGKILL)
        return not left
