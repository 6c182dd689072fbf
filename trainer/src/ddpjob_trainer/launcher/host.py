"""Use what the launcher has from its host: signals, ports, a private directory.

Signals are collected while the launcher watches, and obeyed at once at its end. Sockets listen on
IPv4 and IPv6 at once where the machine has both. The directory holds workers' records per round,
and their metrics: in memory where there is room, else in any place that may be written. The
launcher locks it: a directory with a free lock was left by a killed launcher, and the next one
removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import random
import selectors
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Final

from ddpjob_trainer.environment import Key

# --- Signals --------------------------------------------------------------------------------------

ENDING: Final = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT))
_FORWARDED: Final = ENDING | {signal.SIGUSR1, signal.SIGUSR2}


class Signals:
    """``pending``: signals not handled yet, oldest first."""

    def __init__(self) -> None:
        self.pending: list[int] = []

    @contextlib.contextmanager
    def collected(self, selector: selectors.BaseSelector) -> Iterator[None]:
        """Collect signals and children's ends, and wake the selector for each.

        Afterwards signals are still collected, without effect until `end_at_once`. A signal ignored
        under nohup, or by a shell at `&`, ends neither the launcher nor the workers.
        """
        read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

        def received(signum: int, frame: FrameType | None) -> None:
            if signum != signal.SIGCHLD:
                self.pending.append(signum)

        def drain(now: float) -> None:
            with contextlib.suppress(BlockingIOError):
                os.read(read, 4096)

        selector.register(read, selectors.EVENT_READ, drain)
        for signum in _FORWARDED:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, received)
        old = signal.signal(signal.SIGCHLD, received)
        old_fd = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(old_fd)
            signal.signal(signal.SIGCHLD, old)
            os.close(read)
            os.close(write)

    def end_at_once(self, code: int) -> bool:
        """Make signals end the process with ``code``; return whether one is pending."""
        for signum in ENDING:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, lambda *_: os._exit(code))
        return not ENDING.isdisjoint(self.pending)


# --- Ports ----------------------------------------------------------------------------------------

#: Errors by which accept() fails though a connection waits: select() would return at once, for
#: ever.
FULL: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
#: Until the next try.
FULL_SECONDS: Final = 0.2
#: Below Linux's net.ipv4.ip_local_port_range, and outside the ports that the operator draws for
#: gangs on the host's network.
_QUIET: Final = range(10000, 20000)


def free_ports(count: int) -> list[int]:
    """Find distinct free ports for others to bind later; hold each until all are found.

    Outside the range that the kernel hands out for 0 or to connections: another program could get
    such a port before it is bound. Raises OSError where too few are free.
    """
    found: list[int] = []
    with contextlib.ExitStack() as held:
        for port in random.SystemRandom().sample(_QUIET, len(_QUIET)):  # independent of any seed
            with contextlib.suppress(OSError):
                # A port that another program holds without listening is taken.
                held.enter_context(bind(port, reuse=False))
                found.append(port)
            if len(found) == count:
                return found
    raise OSError(errno.EADDRINUSE, f"fewer than {count} free ports in {_QUIET}")


def bind(port: int, *, reuse: bool = True) -> socket.socket:
    """Bind a TCP socket to a port of all addresses. 0: any port. Raises OSError.

    ``reuse``: also where connections of an earlier one are left, or another holds it unused.
    """
    dual = socket.has_dualstack_ipv6()
    bound = socket.socket(socket.AF_INET6 if dual else socket.AF_INET)
    try:
        if reuse:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if dual:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind(("", port))
    except BaseException:
        bound.close()
        raise
    return bound


# --- Connections with other pods ------------------------------------------------------------------

_TABLES: Final = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_NO_CONNECTION: Final = ("02", "03", "07", "0A", "0C")  # states; one that closes was one
_MAPPED: Final = "0000000000000000FFFF0000"  # before an IPv4 address in a table of IPv6
_TRAINED_SECONDS: Final = 60.0  # from step to step, before it says that there was none


class Connections:
    """``met``: this round's processes had a connection with another pod; None: unknown.

    Pods of the gang are known by their links to the hub, whose ``port`` is open here, if any. What
    else they are connected by is the program's, at whatever port and by whatever library. A program
    that has connections elsewhere while it trains may have met on another network: unknown.
    """

    def __init__(self, port: int | None, metrics: int | None) -> None:
        self._hub, self._ours = port, {port, metrics}
        self.begin()

    def begin(self) -> None:
        """Start over with a round."""
        self.met: bool | None = None
        self._gang: set[str] = set()
        self._elsewhere = False
        self._reached: object = None
        self._since = math.inf  # when it was first seen to train
        self._due = 0.0

    def look(self, now: float, reached: Callable[[], object], *, last: bool = False) -> None:
        """Look once a second while workers run; what is ``reached`` differs after a step."""
        if self._hub is None or self.met or (now < self._due and not last):
            return
        self._due = now + 1.0
        before, self._reached = self._reached, reached()
        trained = before not in (None, self._reached)
        if trained:
            self._since = min(self._since, now)
        rows = list(_connections())
        here = {address for address, *_ in rows}
        self._gang |= {there for _, port, there, _ in rows if port == self._hub}
        others = {there for _, port, there, at in rows if self._ours.isdisjoint((port, at))}
        if others & self._gang:
            self.met = True
        elif others - here and now >= self._since:
            self.met, self._elsewhere = None, True
        elif self._gang and trained and now >= self._since + _TRAINED_SECONDS:
            self.met = None if self._elsewhere else False


def _connections() -> Iterator[tuple[str, int, str, int]]:
    """Yield address and port here, and there, of each of this network namespace."""
    for table in _TABLES:
        with contextlib.suppress(OSError, ValueError, IndexError):
            for row in table.read_text().splitlines()[1:]:
                _, *ends, state = row.split()[:4]
                if state not in _NO_CONNECTION:
                    (here, port), (there, at) = (end.split(":") for end in ends)
                    here, there = here.removeprefix(_MAPPED), there.removeprefix(_MAPPED)
                    yield here, int(port, 16), there, int(at, 16)


# --- Directory ------------------------------------------------------------------------------------

#: Another name than that of earlier versions' directories, which have no lock.
_PREFIX: Final = "ddpjob-launcher-"
#: A rank's state, its stacks, metrics and record of steps, which are mapped: without room it gets
#: SIGBUS.
_RANK_BYTES: Final = 768 * 1024


class NoRoomError(OSError):
    """No directory has room; ``strerror`` names the cure."""


class RuntimeDir:
    """``nproc``: how many ranks write here. A parent None: the temporary directory.

    Raises NoRoomError.
    """

    def __init__(
        self, nproc: int, parents: tuple[str | None, ...] = ("/dev/shm", None, ".")
    ) -> None:
        self._bytes = nproc * _RANK_BYTES
        self.path, self._lock = self._make(parents)
        self.metrics = self.path / "metrics"  # of prometheus-client's multiprocess mode
        self.replay = self.path / "replay"  # what the ranks of a round leave to the next

    def round_path(self, key: Key) -> Path:
        """Return the directory of a round's records."""
        return self.path / f"round-{key.number}-{key.round}"

    def begin(self, key: Key) -> Path:
        """Make a round's directory. Raises NoRoomError."""
        path = self.round_path(key)
        try:
            self._check_room(self.path)
            path.mkdir()
        except OSError as error:
            raise self._no_room([f"{self.path}: {error.strerror}"]) from None
        return path

    def close(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def _make(self, parents: tuple[str | None, ...]) -> tuple[Path, int]:
        problems = []
        for parent in parents:
            try:
                path = Path(tempfile.gettempdir() if parent is None else parent)
                _remove_left_behind(path)
                self._check_room(path)
                return _locked_directory(path)
            except OSError as error:
                problems.append(f"{parent or 'temporary directory'}: {error.strerror}")
        raise self._no_room(problems)

    def _no_room(self, problems: list[str]) -> NoRoomError:
        return NoRoomError(
            errno.ENOSPC,
            "no room for the launcher's files: make /dev/shm bigger or free it, or set TMPDIR to a"
            f" directory with {self._bytes >> 10} KiB ({'; '.join(problems)})",
        )

    def _check_room(self, path: Path) -> None:
        found = os.statvfs(path)
        # Some file systems count no blocks.
        if found.f_blocks and found.f_bavail * found.f_frsize < self._bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _locked_directory(parent: Path) -> tuple[Path, int]:
    """Make a directory, and give it the name of ours only once it is locked."""
    made = Path(tempfile.mkdtemp(dir=parent))
    (made / "metrics").mkdir()
    fd = os.open(made, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # without locks no launcher takes it for one left behind
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return made.rename(parent / f"{_PREFIX}{made.name}"), fd


def _remove_left_behind(parent: Path) -> None:
    """Remove directories of dead launchers, whose locks are free."""
    for path in parent.glob(f"{_PREFIX}*"):
        # A start must not fail because of foreign files.
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(fd)
