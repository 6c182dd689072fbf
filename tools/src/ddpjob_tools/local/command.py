"""Run the command `ddpjob local`: start all replicas, again where the manifest allows it.

Each replica has a launcher, as pods have: rounds run among them over the hub, and a replica that
dies is what it is in a cluster. All processes end with this one.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from ddpjob_contract.exits import CAUSE_SECONDS, DEAD_GANG_SECONDS
from ddpjob_tools import verb
from ddpjob_tools.local import job as local_job
from ddpjob_tools.local import manifest as manifests
from ddpjob_tools.local import restarts
from ddpjob_tools.local.job import Job
from ddpjob_trainer.arguments import check_notebook
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.launcher import host
from ddpjob_trainer.launcher.output import Log, OutputPump
from ddpjob_trainer.launcher.processes import children
from ddpjob_trainer.launcher.reports.state import ProgressPath
from ddpjob_trainer.snapshot.ondisk import manifest as snapshot

_DESCRIPTION = """\
Run the DDPJob of a manifest on this machine, without a cluster: a launcher for each replica, with
the variables, snapshots and restarts that the manifest asks for. Files of its ConfigMaps are where
they are mounted; the image is not used, this Python and the PATH are.
"""
_EPILOG = """\
examples:
  ddpjob local job.yaml
  ddpjob init train.py | ddpjob local -
  ddpjob local manifests/examples/digits.yaml --map /workspace=. --replicas 2

Ctrl-C ends the job as a pod is ended, with a last snapshot; a second one at once. The next run goes
on from the newest snapshot: remove the directory, or name another, to start over.
exit code: 0, that of the replica that failed first, or 128+n after signal n
"""


_OPTIONS: tuple[verb.Option, ...] = (
    ("--replicas N", int, None, "instead of spec.replicas"),
    ("--nproc N", int, None, "instead of spec.nprocPerNode"),
    ("--snapshots DIR", Path, None, "takes the place of the snapshot volume (./NAME-snapshots)"),
    ("--map PATH=DIR", list, [],
     "the folder here that is PATH in the pods, wherever the manifest names it; repeatable"),
)  # fmt: skip


def add(commands: Any) -> None:
    """Describe the command to argparse."""
    parser = verb.add(
        commands, "local", "run a DDPJob manifest on this machine, without a cluster", _OPTIONS,
        description=_DESCRIPTION, epilog=_EPILOG,
    )  # fmt: skip
    parser.add_argument(
        "file", metavar="FILE", help="the manifest, YAML or JSON; -: standard input"
    )


def main(options: argparse.Namespace) -> int:
    """Run it; return the exit code."""
    return verb.ended("ddpjob", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="ddpjob-local-") as scratch:
        job = _job(options, Path(scratch))
        job.write()
        with contextlib.nullcontext() if job.snapshots is None else alone(job.snapshots):
            return Attempts(job).run()


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Make the folder, as a volume is there too. Keep other runs of the manifest out of it."""
    folder.mkdir(parents=True, exist_ok=True)
    held = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{folder}: another run of this manifest has its snapshots here: end it, or give"
                " this one its own folder with --snapshots DIR"
            ) from None
        yield
    finally:
        os.close(held)


def _job(options: argparse.Namespace, scratch: Path) -> local_job.Job:
    check_notebook(Path(options.file))
    if options.file.endswith(".py"):
        raise ConfigError(
            f"{options.file}: a script, where a manifest is expected: ddpjob init"
            f" {options.file} | ddpjob local -"
        )
    try:
        # YAML is UTF-8, whatever the locale is.
        if options.file == "-":
            text = sys.stdin.buffer.read().decode()
        else:
            text = Path(options.file).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(
            f"{options.file}: neither YAML nor JSON, but other bytes: give a manifest of a DDPJob,"
            " saved as UTF-8"
        ) from None
    manifest = manifests.read(text)
    snapshots = options.snapshots or Path(f"{manifest.name}-snapshots")
    return local_job.make(
        manifest,
        os.environ,
        scratch,
        snapshots,
        dict(map(_folder, options.map)),
        replicas=options.replicas,
        nproc=options.nproc,
    )


def _folder(given: str) -> tuple[str, Path]:
    path, _, folder = given.partition("=")
    if not path.startswith("/") or not path.strip("/") or not folder or not Path(folder).is_dir():
        raise ConfigError(
            f"--map {given}: must be an absolute path below /, '=' and a folder that is here"
        )
    return path.rstrip("/"), Path(folder).absolute()


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
        sent, stop_at, kill_at = 0, math.inf, math.inf
        while running:
            for pid, status in children.reap():
                if pid in running:
                    replica = running.pop(pid)
                    self._pump.collect(replica)
                    code = status if status >= 0 else 128 - status
                    (stopped if sent or stop_at < 0 else codes)[replica] = code
            now = time.monotonic()
            failed = [code for code in codes.values() if code]
            if failed and stop_at > 0:
                patience = CAUSE_SECONDS if all(map(restarts.collateral, failed)) else 0.0
                stop_at = min(stop_at, now + patience)
                if now >= stop_at:
                    self._tell(running, signal.SIGTERM)
                    stop_at, kill_at = -1, now + DEAD_GANG_SECONDS
            if sent < len(self._signals):
                sent += 1
                if sent == 1:
                    self._say(f"ending, within {self._job.grace_seconds} s; Ctrl-C again: at once")
                self._tell(running, signal.SIGTERM)  # as the kubelet does
                kill_at = now if sent > 1 else min(kill_at, now + self._job.grace_seconds)
            if now >= kill_at:
                self._tell(running, signal.SIGKILL)
            time.sleep(_LOOK_SECONDS)
        children.end_all(lambda pid, status: None, _END_SECONDS, ())  # what they left behind
        return codes, stopped

    def _start(self, number: int) -> dict[int, int]:
        """Start a launcher per replica; return pid -> replica."""
        job = self._job
        ports = host.free_ports(job.ports())
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
