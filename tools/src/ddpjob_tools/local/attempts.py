"""Start all replicas, again where the manifest allows it, and leave no process behind.

command.py calls run(). Each replica has a launcher, as pods have: rounds run among them over the
hub, and a replica that dies is what it is in a cluster. They die with this process.
"""

from __future__ import annotations

import math
import os
import signal
import time
from types import FrameType

from ddpjob_contract.exits import CAUSE_SECONDS, DEAD_GANG_SECONDS
from ddpjob_tools.local import restarts
from ddpjob_tools.local.job import Job
from ddpjob_trainer.launcher import sockets
from ddpjob_trainer.launcher.log import Log
from ddpjob_trainer.launcher.output import OutputPump
from ddpjob_trainer.launcher.processes import children
from ddpjob_trainer.launcher.reports.progress_path import ProgressPath
from ddpjob_trainer.snapshot.ondisk import manifest as snapshot

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOOK_SECONDS = 0.05
_END_SECONDS = 60.0  # a killed process may have a GPU to give back
_NAMED = 5  # of the files that are gone


class Attempts:
    """One job from its first attempt to its end."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._signals: list[int] = []
        self._log = Log()
        self._pump = OutputPump(self._log, prefixed=True, whose=f"{job.manifest.name}-")
        self._progress = ProgressPath(job.progress_path)

    def run(self) -> int:
        """Run to the end; return 0, the first failure's code, or 128 + our signal."""
        for signum in _SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, self._received)
        children.adopt_orphans()
        try:
            code = self._run()
            self._tell_lost()
            return code
        finally:
            children.end_all(lambda pid, status: None, _END_SECONDS, ())
            self._log.flush(hurry=bool(self._signals))

    def _run(self) -> int:
        for note in self._job.notes:
            self._say(note)
        budget, number = restarts.Budget(self._job.limits), 0
        while True:
            number += 1
            began = time.monotonic()
            codes, stopped = self._attempt(number)
            if not any((codes | stopped).values()):
                self._say(f"{self._job.manifest.name} succeeded")
                return 0
            if self._signals:
                return 128 + self._signals[0]
            failed = {replica: code for replica, code in codes.items() if code}
            replica = min(failed, key=lambda one: restarts.severity(failed[one]))
            code = failed[replica]
            self._progress.poll(1.0)
            progress = (self._snapshot_step(), self._progress.newest)
            delay, then = budget.after(code, time.monotonic() - began, progress)
            name = f"{self._job.manifest.name}-{replica}"
            self._say(f"attempt {number} ended: {name} with exit code {code}; {then}")
            if delay < 0:
                return code
            until = time.monotonic() + delay
            while time.monotonic() < until and not self._signals:
                time.sleep(_LOOK_SECONDS)
            if self._signals:
                return 128 + self._signals[0]

    def _attempt(self, number: int) -> tuple[dict[int, int], dict[int, int]]:
        """Run once; return exit codes by replica, in order: by themselves, and after our signal."""
        running = self._start(number)
        codes: dict[int, int] = {}
        stopped: dict[int, int] = {}
        told, stop_at, kill_at = 0, math.inf, math.inf
        while running:
            for pid, status in children.reap():
                if pid in running:
                    replica = running.pop(pid)
                    self._pump.collect(replica)
                    code = status if status >= 0 else 128 - status
                    (stopped if told or stop_at < 0 else codes)[replica] = code
            now = time.monotonic()
            failed = [code for code in codes.values() if code]
            if failed and stop_at > 0:
                patience = CAUSE_SECONDS if all(map(restarts.collateral, failed)) else 0.0
                stop_at = min(stop_at, now + patience)
                if now >= stop_at:
                    self._tell(running, signal.SIGTERM)
                    stop_at, kill_at = -1, now + DEAD_GANG_SECONDS
            if told < len(self._signals):
                told += 1
                if told == 1:
                    self._say(f"ending, within {self._job.grace_seconds} s; Ctrl-C again: at once")
                self._tell(running, signal.SIGTERM)  # as the kubelet does
                kill_at = now if told > 1 else min(kill_at, now + self._job.grace_seconds)
            if now >= kill_at:
                self._tell(running, signal.SIGKILL)
            time.sleep(_LOOK_SECONDS)
        children.end_all(lambda pid, status: None, _END_SECONDS, ())  # what they left behind
        return codes, stopped

    def _start(self, number: int) -> dict[int, int]:
        """Start a launcher per replica; return pid -> replica."""
        job = self._job
        ports = sockets.free_ports(job.ports())
        where = f"http://127.0.0.1:{ports[2]}/state?uid={job.uid}"
        self._say(
            f"attempt {number}: replicas {job.replicas}, processes in each {job.nproc};"
            f" progress: {where}"
        )
        running: dict[int, int] = {}
        for replica in range(job.replicas):
            environment = job.environment(number, replica, ports)
            ends = self._pump.pipes(replica)
            try:
                cwd = str(job.work.enter(replica)) if job.work else job.directory
                command = job.command(job.variables(number, replica, ports))
                pid = children.spawn(command, environment, *ends, cwd=cwd)
                running[pid] = replica
            finally:
                for end in ends:
                    os.close(end)
        return running

    def _snapshot_step(self) -> int:
        found = self._job.snapshots.glob("*/step-*.json") if self._job.snapshots else ()
        return max((snapshot.step_of(path.name) or 0 for path in found), default=-1)

    def _tell_lost(self) -> None:
        """List what is gone, as it would be with the pods."""
        if lost := self._job.work.lost() if self._job.work else []:
            more = f" and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
            self._say(
                f"gone with the working directory, as with a pod: {', '.join(lost[:_NAMED])}{more};"
                " ddpjob init --output DIR keeps what is written below DIR"
            )

    def _tell(self, running: dict[int, int], signum: int) -> None:
        for pid in running:
            children.send(pid, signum)

    def _received(self, signum: int, frame: FrameType | None) -> None:
        self._signals.append(signum)

    def _say(self, text: str) -> None:
        self._log.put(2, f"local: {text}\n".encode(errors="replace"))
