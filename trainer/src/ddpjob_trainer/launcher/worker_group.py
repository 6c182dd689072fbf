"""Start, watch and stop this launcher's workers of one round, with their descendants.

The supervisor's loop calls it; exits flow out to the hub and the termination report.
"""

from __future__ import annotations

import errno
import os
import re
import signal
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from ddpjob_contract import ExitCode
from ddpjob_contract.exits import kind_of
from ddpjob_trainer import trace
from ddpjob_trainer.environment import Key
from ddpjob_trainer.gpu import devices
from ddpjob_trainer.launcher.host import ENDING
from ddpjob_trainer.launcher.hub.root_cause import Exit, because, signal_name
from ddpjob_trainer.launcher.launch_config import LaunchConfig
from ddpjob_trainer.launcher.output import OutputPump
from ddpjob_trainer.launcher.processes import children, source
from ddpjob_trainer.liveness.heartbeat import COMPILES, RankState, read_report, read_state
from ddpjob_trainer.tracebacks import shorten

#: Start a worker: (local rank, stdout, stderr) -> pid, or None: a spare will follow. Raises
#: OSError.
Start = Callable[[int, int, int], int | None]
#: Words of torch and Python for a child killed by SIGKILL, such as a DataLoader's worker.
_CHILD_KILLED = re.compile(
    r"killed by signal: Killed|SIGKILL|DataLoader worker .* exited unexpectedly|terminated abruptly"
)


class WorkerGroup:
    """The workers of one round, none before start().

    ``state_dir`` is the round's: it holds no earlier record. ``unresolved``: says that rank 0's
    name does not resolve, "" if it does.
    """

    def __init__(
        self,
        config: LaunchConfig,
        key: Key,
        state_dir: Path,
        pump: OutputPump,
        say: Callable[[str], None],
        unresolved: Callable[[], str] = str,
    ) -> None:
        self.key, self.state_dir = key, state_dir
        self.exits: list[Exit] = []
        self.unkillable: dict[int, str] = {}  # pid -> the fate of a worker counted as gone
        self._config, self._pump = config, pump
        self._say, self._unresolved = say, unresolved
        self._pids: dict[int, int] = {}  # pid -> local rank, of running workers
        self.awaited: set[int] = set()  # local ranks of spares that were called and have not come
        self._hung: dict[int, str] = {}  # local rank -> the exception of its exit
        self._killed: dict[int, float] = {}  # pid -> when first
        self.stopping = False  # the launcher has asked its workers to end
        self.kill_at: float | None = None  # when all that runs is killed
        self.first_word_by: float | None = None  # or then, see end_all_but()
        self._swept: set[int] = set()  # pids of other processes killed after the workers had ended
        self._cleaning = children.Cleaning()
        self._memory = children.read_memory()  # as it was when the round began
        self._training = False

    # --- Start ---------------------------------------------------------------------------

    def start(self, start: Start, now: float) -> None:
        """Start all workers; count one that cannot start as failed."""
        for local_rank in range(self._config.nproc):
            try:
                out, err = self._pump.pipes(self._config.rank(local_rank))
                try:
                    pid = start(local_rank, out, err)
                finally:
                    os.close(out)
                    os.close(err)
            except OSError as error:
                self.cannot_start(local_rank, error, now)
                return
            if pid is None:
                self.awaited.add(local_rank)
            else:
                self.arrived(local_rank, pid)

    def arrived(self, local_rank: int, pid: int) -> None:
        """Register a worker, which may have been promised."""
        self.awaited.discard(local_rank)
        self._pids[pid] = local_rank
        trace.mark("worker", rank=self._config.rank(local_rank), pid=pid)

    def cannot_start(self, local_rank: int, error: OSError, now: float) -> None:
        """Count a worker that cannot start as failed."""
        self.awaited.discard(local_rank)
        code = 1  # no memory, no room, too many processes: the next attempt may succeed
        if isinstance(error, FileNotFoundError):
            code = ExitCode.NOT_FOUND
        elif isinstance(error, PermissionError) or error.errno == errno.ENOEXEC:
            code = ExitCode.NOT_EXECUTABLE
        words = f"cannot start {self._config.command[0]}: {error.strerror}"
        self._say(words)
        why = shorten(f"OSError: {words}") if code == 1 else ""
        rank = self._config.rank(local_rank)
        self.exits.append(Exit(rank, local_rank, code, now, exception=why))

    # --- Watch ---------------------------------------------------------------------------

    @property
    def round(self) -> int:
        """Return how many rounds were before this one."""
        return max(0, self.key.round)

    @property
    def running(self) -> int:
        """Return how many workers run or are being started."""
        return len(self._pids) + len(self.awaited)

    @property
    def failed(self) -> bool:
        """Return whether a worker failed other than by this launcher's stop."""
        return any(exit_.status != 0 and not exit_.ours for exit_ in self.exits)

    @property
    def succeeded(self) -> bool:
        """Return whether all workers have ended with 0."""
        ended = bool(self.exits) and not self.running
        return ended and all(exit_.status == 0 for exit_ in self.exits)

    def ended(self, pid: int, status: int, now: float) -> None:
        """Record the exit of a reaped child, if it is a worker."""
        local_rank = self._pids.pop(pid, None)
        if local_rank is None:
            return
        ours = self.stopping and status in (-signal.SIGKILL, -signal.SIGTERM, 143)
        rank = self._config.rank(local_rank)
        self._pump.collect(rank)
        state = self.state(local_rank)
        ending = state.ending if state else ""
        exception = state.exception if state and not ending else ""
        finished = ending == "finished"
        drill = ending == "drill" and status == ExitCode.PEER_LOST and local_rank not in self._hung
        if local_rank in self._hung:
            ours = False
            status, exception = ExitCode.HANG, self._hung[local_rank]
        elif status < 0:
            exception = ""  # an exception before the signal is not the cause
        if not exception and status > 0 and not ours and not drill:
            exception = self._pump.exception(rank)
        by_itself = status not in (-signal.SIGKILL, -signal.SIGTERM, ExitCode.SIGTERM)
        if finished and status and by_itself and not ours and local_rank not in self._hung:
            how = signal_name(-status) if status < 0 else f"exit code {status}"
            self._say(
                f"rank {rank} ended with {how}{because(exception)} after run.finish():"
                " the run had succeeded by then, so this fails nothing"
            )
            status, exception = 0, ""
        foreign = state is None and local_rank not in self._hung
        if not ours:
            before = status
            status, exception = devices.judge(status, exception, self._pump.tail(rank))
            foreign = foreign and status == before
        if not exception and status < 0 and not ours:
            exception = self._pump.exception(rank, crashed=True)
        oom = "" if ours or local_rank in self._hung else self._oom(status, exception)
        if oom:
            exception = f"{oom}; {exception}" if exception else oom
            self._say(f"rank {rank}: {oom}")
        step = state.step if state and state.phase != "startup" else -1
        lost = self._unresolved() if status > 0 and not ours and step < 0 else ""
        if lost and kind_of("", exception) != "unresolved":  # torch tells of a socket only
            exception = f"{lost}; {exception}" if exception else lost
        exception = shorten(exception)
        done = state is not None and state.phase == "done"
        # Where it resumes by arguments its checkpoint may be half written, and an older one sound.
        judged = status == 1 and not ours and step < 0 and not self._config.resume_args
        repeats = judged and source.would_repeat(
            self._config.program, exception, self._pump.raised_in(rank)
        )
        self.exits.append(
            Exit(
                rank, local_rank, status, now, ours, exception, step, done, bool(oom), foreign,
                repeats, drill,
            )
        )  # fmt: skip

    def _oom(self, status: int, exception: str) -> str:
        """Explain an exit caused by the kernel's OOM kill, "" for any other.

        It kills the largest process: a worker, or its child, whose end then fails the worker.
        """
        by_kill = status in (-signal.SIGKILL, ExitCode.SIGKILL)
        if not by_kill and not (status > 0 and _CHILD_KILLED.search(exception)):
            return ""
        return children.oom_killed(self._memory, children.read_memory())

    @property
    def pids(self) -> dict[int, int]:
        """Return the running workers: rank -> pid. A thread may ask."""
        return {self._config.rank(local_rank): pid for pid, local_rank in [*self._pids.items()]}

    @property
    def wrote(self) -> float:
        """Return when a worker of any round last wrote to its output, by the monotonic clock."""
        return self._pump.wrote

    def state(self, local_rank: int) -> RankState | None:
        """Return a worker's last record in this round."""
        return read_state(self.state_dir, self._config.rank(local_rank))

    def snapshot_step(self) -> int:
        """Return the step of the newest snapshot; any rank's record counts. -1: none."""
        states = map(self.state, range(self._config.nproc))
        return max((state.snapshot_step for state in states if state), default=-1)

    def is_training(self) -> bool:
        """Return whether every worker has reached its first step in this round."""
        if not self._training:
            states = map(self.state, range(self._config.nproc))
            self._training = all(state and state.phase != "startup" for state in states)
        return self._training

    def compiles(self) -> bool:
        """Return whether a worker has loaded torch's compiler by its first step."""
        return read_report(self.state_dir, COMPILES) is not None

    # --- Stop ----------------------------------------------------------------------------

    def signal(self, signum: int, now: float) -> None:
        """Forward a signal to all workers; an ending one also cancels those still starting."""
        for pid, local_rank in self._pids.items():
            children.send(self._listener(pid, local_rank, signum), signum)
        if signum in ENDING:
            self._recall(signum, now)

    def _listener(self, pid: int, local_rank: int, signum: int) -> int:
        """Choose the process to signal: the worker, or the trainer in its process group.

        The latter where the worker is a shell that would die of the signal and leave the trainer to
        be killed without a snapshot. A worker that catches the signal has a trap, or passes it on;
        SIGINT is an exception, since bash and Python catch it by default: at a terminal every
        process gets it.
        """
        state = self.state(local_rank)
        if state is None or (signum != signal.SIGINT and children.catches(pid, signum)):
            return pid
        return state.pid if children.group_of(state.pid) == pid else pid

    def _recall(self, signum: int, now: float) -> None:
        """Count those that have not come as ended; the starter cancels their calls."""
        for local_rank in sorted(self.awaited):
            rank = self._config.rank(local_rank)
            self.exits.append(Exit(rank, local_rank, -signum, now, ours=self.stopping))
        self.awaited.clear()

    def mark_hung(self, rank: int, why: str, last_lines: Sequence[str], now: float) -> None:
        """Kill an overdue worker. ``last_lines`` count as the last of its output."""
        self._pump.add(rank, last_lines)
        for pid, local_rank in self._pids.items():
            if self._config.rank(local_rank) == rank:
                self._hung[local_rank] = why
                self._kill(pid, now)

    def stop(self, now: float, *, last_words: float) -> None:
        """End the workers: at once, or by SIGTERM and ``last_words`` seconds later."""
        self.stopping = True
        if last_words > 0:
            self.signal(signal.SIGTERM, now)
        self._recall(signal.SIGKILL, now)
        self.kill_by(now + last_words)

    def end_all_but(
        self, chosen: Collection[int], now: float, until: float, first_word_by: float
    ) -> None:
        """End all workers but these ranks, which have until then at most (monotonic).

        ``first_word_by``: where one has not been heard by then, none has longer.
        """
        self.stopping = True
        self._recall(signal.SIGKILL, now)
        for rank, pid in self.pids.items():
            if rank not in chosen:
                self._kill(pid, now)
        self.first_word_by = first_word_by
        self.kill_by(until)

    def kill_by(self, moment: float) -> None:
        """Kill all running workers at this monotonic time; the earliest time counts."""
        self.kill_at = min(self.kill_at or moment, moment)

    def kill_when_due(self, now: float) -> float | None:
        """Kill when due, give up on workers that survive; return when to call next."""
        dues = []
        if self.kill_at is not None and self.running:
            due = min(self.kill_at, self.first_word_by or self.kill_at)
            dues.append(max(due, now + 0.05))
            if now >= due:
                self.kill_by(due)
                for pid in self._pids:
                    self._kill(pid, now)
                self._recall(signal.SIGKILL, now)
        for pid in [pid for pid in self._pids if pid in self._killed]:
            due = self._killed[pid] + self._config.exit_seconds
            if now < due:
                dues.append(due)
            else:
                self._give_up(pid, now)
        return min(dues, default=None)

    @property
    def dying(self) -> bool:
        """Return whether a hung worker is still running."""
        return not self._hung.keys().isdisjoint(self._pids.values())

    def _kill(self, pid: int, now: float) -> None:
        self._killed.setdefault(pid, now)
        children.send(pid, signal.SIGKILL)

    def _give_up(self, pid: int, now: float) -> None:
        """Count a worker as gone that has survived SIGKILL for ``exit_seconds``."""
        rank = self._config.rank(self._pids[pid])
        words = (
            f"rank {rank} (pid {pid}) was killed, but has not ended for"
            f" {self._config.exit_seconds:g} s: it waits for a disk or device that does not answer"
            f" (state {children.state(pid)})"
        )
        self.unkillable[pid] = words
        self._say(words)
        self.ended(pid, -signal.SIGKILL, now)

    def is_gone(self, outliving: Collection[int]) -> bool:
        """Return whether all workers and descendants are gone; kill the descendants left.

        A process that a worker left behind, such as the uploader of its snapshots, has become the
        launcher's child. ``outliving``: children that outlive the round.
        """
        if self.running:
            return False
        # A spare killed before it was known as one will never be called.
        left = [pid for pid in children.children() if pid not in outliving or pid in self._swept]
        killed = [pid for pid in left if not self._cleaning.is_due(pid)]
        for pid in killed:
            children.send(pid, signal.SIGKILL)
        self._swept.update(killed)
        return not left
