"""The launcher's one loop: start the workers, forward signals, reap, stop, report.

Everything happens in the main thread, woken by signals; threads only pump output and serve
HTTP. When the loop ends no descendant of the launcher is alive.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

from ddpjob_trainer import contract
from ddpjob_trainer.launcher import report, server, verdict, workers
from ddpjob_trainer.launcher.metrics import LauncherMetrics
from ddpjob_trainer.launcher.output import OutputPump, stdout_is_terminal
from ddpjob_trainer.launcher.plan import Plan, worker_environment
from ddpjob_trainer.launcher.verdict import Exit
from ddpjob_trainer.rankstate import read_state

_FORWARDED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_TICK_SECONDS = 1.0
_HEALTHY_SECONDS = 10.0
#: After one worker failed the others cannot save anything; this is for their last words.
_LAST_WORDS_SECONDS = 1.0
_DRAIN_SECONDS = 1.0


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"launcher: {text}", file=sys.stderr, flush=True)


def _private_directory() -> Path:
    """For workers' state: memory where there is some, else any place that may be written."""
    for parent in ("/dev/shm", None, "."):
        try:
            path = Path(tempfile.mkdtemp(prefix="ddpjob-trainer-", dir=parent))
            (path / "metrics").mkdir()
        except OSError:
            continue
        return path
    raise OSError("no writable directory among /dev/shm, the temporary directory and the current")


class Supervisor:
    """One run of a plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._pids: dict[int, int] = {}  # pid -> local rank, of running workers
        self._exits: list[Exit] = []
        self._signals: list[int] = []
        self._ending_signal: int | None = None
        self._kill_at: float | None = None  # when all that runs is killed
        self._tick = time.monotonic()
        self._counted = LauncherMetrics(plan.round)

    def run(self) -> int:
        """Return the exit code of the launcher."""
        plan = self._plan
        state_dir = _private_directory()
        try:
            with self._signal_handling() as wakeup:
                pump = OutputPump(
                    prefixed=plan.world_size > 1 and (plan.nproc > 1 or stdout_is_terminal())
                )
                http = self._serve(state_dir)
                try:
                    self._start(pump, state_dir)
                    failure = self._watch(wakeup)
                finally:
                    self._leave_nobody()
                    if http is not None:
                        http.shutdown()
                pump.drain(_DRAIN_SECONDS)
                return self._finish(failure, pump, state_dir)
        finally:
            shutil.rmtree(state_dir, ignore_errors=True)

    # --- Start ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signal_handling(self):  # type: ignore[no-untyped-def]
        """Collect signals; yield a descriptor that is readable when one has come."""
        read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

        def received(signum: int, frame: FrameType | None) -> None:
            if signum != signal.SIGCHLD:
                self._signals.append(signum)

        old = {s: signal.signal(s, received) for s in (*_FORWARDED, signal.SIGCHLD)}
        old_fd = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        try:
            yield read
        finally:
            signal.set_wakeup_fd(old_fd)
            for signum, handler in old.items():
                signal.signal(signum, handler)
            os.close(read)
            os.close(write)

    def _serve(self, state_dir: Path):  # type: ignore[no-untyped-def]
        plan = self._plan
        if plan.metrics_port is None:
            return None
        try:
            return server.serve(
                plan.metrics_port,
                state_dir / "metrics",
                self._counted,
                lambda: server.state_body(
                    read_state(state_dir, plan.rank(0)), attempt=plan.attempt, round_=plan.round
                ),
                lambda: time.monotonic() - self._tick < _HEALTHY_SECONDS,
            )
        except OSError as error:
            _say(f"no /state and /metrics: port {plan.metrics_port}: {error.strerror}")
            return None

    def _start(self, pump: OutputPump, state_dir: Path) -> None:
        plan = self._plan
        workers.adopt_orphans()
        for local_rank in range(plan.nproc):
            rank = plan.rank(local_rank)
            out, err = pump.pipe(rank, 1), pump.pipe(rank, 2)
            try:
                pid = workers.spawn(
                    plan.command, worker_environment(plan, local_rank, state_dir), out, err
                )
                self._pids[pid] = local_rank
            except OSError as error:
                code = 1  # no memory, too many processes: may be better next time
                if isinstance(error, FileNotFoundError):
                    code = contract.ExitCode.NOT_FOUND
                elif isinstance(error, PermissionError) or error.errno == errno.ENOEXEC:
                    code = contract.ExitCode.NOT_EXECUTABLE
                _say(f"cannot start {plan.command[0]}: {error.strerror}")
                self._exits.append(Exit(rank, local_rank, code, time.monotonic()))
                return
            finally:
                os.close(out)
                os.close(err)

    # --- Watch ---------------------------------------------------------------------------

    def _watch(self, wakeup: int) -> Exit | None:
        """Until no worker is left. Return the first failure, or None."""
        stopped_for: Exit | None = None
        while self._pids:
            now = self._tick = time.monotonic()
            self._counted.workers = len(self._pids)
            self._reap(now)
            self._forward(now)
            cause = verdict.decide(self._exits, len(self._pids), now)
            if isinstance(cause, Exit) and stopped_for is None and self._ending_signal is None:
                stopped_for = cause
                self._stop_others(now)
            if self._kill_at is not None and now >= self._kill_at:
                for pid in self._pids:
                    workers.send(pid, signal.SIGKILL)
            deadlines = [now + _TICK_SECONDS]
            if self._kill_at is not None:
                deadlines.append(max(self._kill_at, now + 0.05))
            if isinstance(cause, float):
                deadlines.append(cause)
            if self._pids:
                self._sleep(wakeup, min(deadlines) - now)
        # Those that we stopped ourselves are no causes, whatever their exit codes say.
        return stopped_for or verdict.first_failure(self._exits)

    def _sleep(self, wakeup: int, seconds: float) -> None:
        if self._signals:
            return
        readable, _, _ = select.select([wakeup], [], [], max(0.0, seconds))
        if readable:
            with contextlib.suppress(BlockingIOError):
                os.read(wakeup, 4096)

    def _reap(self, now: float) -> None:
        for pid, status in workers.reap():
            local_rank = self._pids.pop(pid, None)
            if local_rank is not None:  # else an orphan that we adopted
                self._exits.append(Exit(self._plan.rank(local_rank), local_rank, status, now))

    def _forward(self, now: float) -> None:
        while self._signals:
            signum = self._signals.pop(0)
            for pid in self._pids:
                workers.send(pid, signum)
            if signum not in _ENDING:
                continue
            if self._ending_signal is None:
                self._ending_signal = signum
                # The last tenth of the grace period, at least 1 s, is for our own end.
                grace = self._plan.grace_seconds
                self._kill_at = now + max(0.5, grace - max(1.0, grace / 10))
            elif signum == signal.SIGINT:
                self._kill_at = now  # a second Ctrl-C means it

    def _stop_others(self, now: float) -> None:
        for pid in self._pids:
            workers.send(pid, signal.SIGTERM)
        self._kill_at = min(self._kill_at or now + _LAST_WORDS_SECONDS, now + _LAST_WORDS_SECONDS)

    # --- End -----------------------------------------------------------------------------

    def _leave_nobody(self) -> None:
        """Kill and reap every descendant: each one's children come to us when it dies."""
        while True:
            left = workers.children()
            if not left:
                break
            for pid in left:
                workers.send(pid, signal.SIGKILL)
            self._reap(time.monotonic())
            time.sleep(0.001)

    def _finish(self, failure: Exit | None, pump: OutputPump, state_dir: Path) -> int:
        plan = self._plan
        terminated = self._ending_signal is not None
        rank = failure.rank if failure else plan.rank(0)
        states = {r: read_state(state_dir, r) for r in map(plan.rank, range(plan.nproc))}
        content = report.make_report(
            failure,
            states[rank],
            pump.tail(rank) if failure else [],
            round_=plan.round,
            terminated=terminated,
            # Any rank's word is good: none claims a snapshot that is not durable.
            snapshot_step=max((s.snapshot_step for s in states.values() if s), default=-1),
        )
        path = plan.termination_log
        problem = report.write(
            content, path or Path(contract.TERMINATION_LOG), create=path is not None
        )
        if problem:
            _say(f"no termination report: {problem}")
        if failure is None:
            return contract.ExitCode.SUCCESS
        how = f"signal {-failure.status}" if failure.status < 0 else f"exit code {failure.status}"
        after = f" after step {content['step']}" if "step" in content else ""
        _say(f"rank {failure.rank} ended first, with {how} ({content['kind']}){after}")
        if content["kind"] == "sigterm" and self._ending_signal == signal.SIGTERM:
            return contract.ExitCode.SIGTERM  # also when our own SIGKILL ended it
        return failure.code
