"""Start and end worker processes, with the descendants they leave behind; read why one was killed.

The launcher is PID 1 in a pod; elsewhere it makes itself the reaper of its descendants, so that
orphans become its children in both places. SIGKILL does not name its sender: worker_group.py reads
the container's OOM kills, memory limit and peak from cgroups 1 and 2 when a round begins, and again
after a worker or its child was killed. Without these files the launcher reports no OOM.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

# --- Processes ------------------------------------------------------------------------------------

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
#: Python's for shared_memory and semaphores, and torch's for its sharing strategy file_system.
_CLEANERS = ("multiprocessing.resource_tracker", "torch_shm_manager")
_CLEANING_SECONDS = 5.0
_SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh", "busybox"})
_libc = ctypes.CDLL(None, use_errno=True)  # loaded here: nothing may be loaded after a fork


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent died."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with(parent: int) -> Callable[[], None]:
    """Return a hook for a forked child: SIGKILL when the thread of ``parent`` ends that forked."""

    def prepare() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the call above
            os._exit(1)

    return prepare


def spawn(
    command: Sequence[str],
    env: Mapping[str, str],
    stdout: int,
    stderr: int,
    pass_fds: Sequence[int] = (),
    cwd: str | None = None,
) -> int:
    """Start a worker in a new process group; return its pid. Raises OSError.

    Must be called from the main thread: the death signal follows the thread that forked.
    """
    # The hook is safe beside our threads: between fork and exec it only calls into a loaded libc.
    process = subprocess.Popen(
        command,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        pass_fds=pass_fds,
        cwd=cwd,
        process_group=0,
        preexec_fn=die_with(os.getpid()),  # noqa: PLW1509
    )
    # reap() waits for all children; a set returncode keeps Popen from waiting too.
    process.returncode = 0
    return process.pid


def reap() -> list[tuple[int, int]]:
    """Collect every child that has ended: (pid, exit code or -signal)."""
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, os.waitstatus_to_exitcode(status)))


def children() -> list[int]:
    """Return all children of this process, adopted orphans included."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has just ended
            found += map(int, (task / "children").read_text().split())
    return found


class Cleaning:
    """Gives processes that remove the shared memory of dead ones some seconds for it.

    They end by themselves once all that could use it have. Killed before, they leave files in
    /dev/shm: the next round finds their names taken, and the memory is lost.
    """

    def __init__(self) -> None:
        self._since: dict[int, float] = {}  # pid -> when first asked for; -inf: it is none

    def is_due(self, pid: int) -> bool:
        """Tell whether a process is one of these, and still has time."""
        now = time.monotonic()
        if pid not in self._since:
            cleans = any(name in _command(pid) for name in _CLEANERS)
            self._since[pid] = now if cleans else -math.inf
        return now - self._since[pid] < _CLEANING_SECONDS


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


def shell_above() -> str:
    """Name the shell that started this process and would end, or go on, at SIGTERM; "" if none."""
    pid = os.getppid()
    name = Path(_command(pid).partition("\0")[0]).name.lstrip("-")
    return f"{name} (pid {pid})" if name in _SHELLS and not catches(pid, signal.SIGTERM) else ""


def end_all(
    reaped: Callable[[int, int], None], seconds: float, hopeless: Collection[int]
) -> list[int]:
    """Kill and reap every descendant; orphans of a dead one become children.

    Returns the pids that have not ended after ``seconds``; it does not wait for ``hopeless`` ones.
    """
    until = time.monotonic() + seconds
    cleaning = Cleaning()
    while True:
        late = time.monotonic() > until  # before the look: this process may have been stopped
        for pid, status in reap():
            reaped(pid, status)
        left = children()
        for pid in left:
            if late or not cleaning.is_due(pid):
                send(pid, signal.SIGKILL)
        if late or set(left) <= set(hopeless):
            return left
        time.sleep(0.001)


def state(pid: int) -> str:
    """Return the kernel's letter for a process's state, such as T: stopped. "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def group_of(pid: int) -> int:
    """Return a process's group, 0 if it is gone or none can have that number."""
    try:
        return os.getpgid(pid)
    except (ProcessLookupError, OverflowError):
        return 0


def catches(pid: int, signum: int) -> bool:
    """Return whether a process has a handler for a signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    mask = status.partition("\nSigCgt:")[2].partition("\n")[0]
    return bool(int(mask or "0", 16) >> (signum - 1) & 1)


def send(pid: int, signum: int) -> None:
    """Send a signal to one process, which may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


# --- Memory ---------------------------------------------------------------------------------------

_ROOT: Final = Path("/sys/fs/cgroup")
_OWN: Final = Path("/proc/self/cgroup")
#: Events, limit and peak (2: since Linux 5.19), of version 1 and 2.
_V1: Final = ("memory.oom_control", "memory.limit_in_bytes", "memory.max_usage_in_bytes")
_V2: Final = ("memory.events", "memory.max", "memory.peak")
_KILLS: Final = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
#: Version 1 writes "none" as the largest number of whole pages.
_UNLIMITED: Final = 2**62
#: With a peak below that share of its limit it was the node that ran out of memory.
_AT_LIMIT: Final = 0.9


@dataclass(frozen=True, slots=True)
class Memory:
    """``kills``: processes that the kernel has OOM-killed here. Sizes in bytes.

    ``limit``: the lowest of this cgroup and those above it that can be seen, None: there is none.
    ``peak``: the most that was in use under that limit, None: unknown.
    """

    kills: int
    limit: int | None
    peak: int | None


def read_memory(root: Path = _ROOT, own: Path = _OWN) -> Memory | None:
    """Return the counters, None where there are none. ``own``: names this process's cgroup."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    found = [line.split(":", 2)[1:] for line in lines if line.count(":") >= 2]
    paths = {name: path for names, path in found for name in names.split(",")}
    # Where both versions are mounted, memory belongs to the one that lists it.
    base, files = (root / "memory", _V1) if "memory" in paths else (root, _V2)
    path = Path(paths.get("memory", paths.get("", "/")).lstrip("/"))
    place = base / path
    if ".." in path.parts or not (place / files[0]).is_file():
        place = base  # a container may see its own as the root, and its path as the node has it
    kills = _kills(place / files[0])
    if kills is None:
        return None
    around = [place, *(above for above in place.parents if above.is_relative_to(base))]
    limits = [(limit, one) for one in around if (limit := _number(one / files[1])) is not None]
    limit, place = min(limits, key=lambda found: found[0], default=(None, place))
    return Memory(kills, limit, _number(place / files[2]))


def oom_killed(before: Memory | None, now: Memory | None) -> str:
    """Explain an OOM kill between two readings, "" if there was none."""
    if before is None or now is None or now.kills <= before.kills:
        return ""
    limit = f"limit {_size(now.limit)}" if now.limit is not None else "no limit"
    peak = f"peak {_size(now.peak)}" if now.peak is not None else "peak unknown"
    what = f"out of memory ({limit}, {peak}): the kernel killed it"
    below = now.limit is None or (now.peak is not None and now.peak < _AT_LIMIT * now.limit)
    if below:
        return f"{what}, as its node had none left: raise resources.requests.memory"
    return f"{what}: raise resources.limits.memory, or let the program use less"


def _kills(path: Path) -> int | None:
    """Read the line ``oom_kill N`` of the events; kernels before 4.13 have none."""
    try:
        found = _KILLS.search(path.read_text())
    except OSError:
        return None
    return int(found[1]) if found else None


def _number(path: Path) -> int | None:
    try:
        found = int(path.read_text())
    except (OSError, ValueError):  # "max"
        return None
    return found if found < _UNLIMITED else None


def _size(size: int) -> str:
    """Format a size as in a pod template."""
    unit, name = (2**30, "GiB") if size >= 2**30 else (2**20, "MiB")
    return f"{size / unit:.4g} {name}"
