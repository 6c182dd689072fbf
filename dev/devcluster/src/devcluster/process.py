"""Processes that outlive the command: started, recorded, recognised and ended.

A record holds the pid, its start time and the boot it was started in, so that a pid that the
kernel has given to another program since is never taken for ours, nor killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from devcluster.cachedir import write_whole


@dataclass(frozen=True, slots=True)
class Identity:
    """One incarnation of a process; ``spec`` is a hash of its command and configuration."""

    pid: int
    started: int
    boot: str
    spec: str = ""


def boot_id() -> str:
    """Return the identity of this boot of the kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def parse_stat(stat: str) -> tuple[str, int]:
    """Return (state letter, start time in clock ticks) from /proc/PID/stat.

    The command's name, in brackets, may hold spaces and brackets: count from the last one.
    """
    fields = stat.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def identify(pid: int, spec: str = "") -> Identity | None:
    """Return the identity of a running process, None when there is none (or only a zombie)."""
    try:
        state, started = parse_stat(Path(f"/proc/{pid}/stat").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return None
    gone = state in "ZX" and not _lives_on(pid)
    return None if gone else Identity(pid, started, boot_id(), spec)


def _lives_on(pid: int) -> bool:
    """Tell whether a thread is left of a process whose main thread has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                if parse_stat((thread / "stat").read_text())[0] not in "ZX":
                    return True
    return False


def is_alive(identity: Identity | None) -> bool:
    """Tell whether that very process runs."""
    return identity is not None and identify(identity.pid, identity.spec) == identity


def end(
    identities: Iterable[Identity], seconds: float = 5.0, polite: bool = True
) -> list[Identity]:
    """End processes: SIGTERM and, past ``seconds``, SIGKILL; at once SIGKILL unless polite.

    Returns those that were still there a further ``seconds`` after SIGKILL.
    """
    left = [one for one in identities if is_alive(one)]
    for number in (signal.SIGTERM, signal.SIGKILL) if polite else (signal.SIGKILL,):
        for one in left:
            _signal(one, number)
        left = _wait_gone(left, seconds)
    return left


def _signal(identity: Identity, number: signal.Signals) -> None:
    """Signal through a pidfd, which stays bound to the process that was checked."""
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(identity.pid)
        try:
            if is_alive(identity):
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)


def _wait_gone(identities: list[Identity], seconds: float) -> list[Identity]:
    deadline = time.monotonic() + seconds
    left, over = identities, False
    while left and not over:
        time.sleep(0.02)
        over = time.monotonic() >= deadline  # before the last look, however late that comes
        left = [one for one in left if is_alive(one)]
    return left


@dataclass(frozen=True, slots=True)
class Register:
    """The records of one cluster's processes, a small JSON file each."""

    directory: Path

    def read(self, name: str) -> Identity | None:
        """Return the record of ``name``; None when there is none or it is unreadable."""
        try:
            return Identity(**json.loads((self.directory / f"{name}.json").read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def write(self, name: str, identity: Identity) -> None:
        """Store a record, whole or not at all."""
        self.directory.mkdir(parents=True, exist_ok=True)
        write_whole(self.directory / f"{name}.json", json.dumps(asdict(identity)))

    def names(self) -> list[str]:
        """Return the names of all records."""
        return sorted(path.stem for path in self.directory.glob("*.json"))

    def running(self, name: str) -> Identity | None:
        """Return the record of ``name`` if that process runs."""
        identity = self.read(name)
        return identity if is_alive(identity) else None

    def forget(self, name: str) -> None:
        """Remove a record."""
        (self.directory / f"{name}.json").unlink(missing_ok=True)


def start(argv: Sequence[str], log: Path, environment: Mapping[str, str]) -> int:
    """Start a process in a new session on the host, output appended to ``log``."""
    log.parent.mkdir(parents=True, exist_ok=True)
    # Not all of the caller's: a proxy set there would come between the components.
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    with log.open("ab") as output:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd="/",
            env={**kept, **environment},
            start_new_session=True,
        )
    return process.pid


def last_lines(log: Path) -> str:
    """Return the last lines of a log, on one line, for an error message."""
    try:
        with log.open("rb") as handle:
            handle.seek(max(0, log.stat().st_size - 4096))
            lines = handle.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return "(no log)"
    return " | ".join(line.strip() for line in lines[-3:] if line.strip()) or "(empty log)"
