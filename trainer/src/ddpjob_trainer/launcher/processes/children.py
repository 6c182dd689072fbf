"""Start and end worker processes, with the descendants they leave behind.

The launcher is PID 1 in a pod; elsewhere it makes itself the reaper of its descendants, so that
orphans become its children in both places.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

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
    """Return a hook for the forked child: SIGKILL when the process ``parent`` dies.

    Precisely: when the thread that forked ends.
    """

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
    process = subprocess.Popen(
        command,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        pass_fds=pass_fds,
        cwd=cwd,
        process_group=0,
        # Safe beside our threads: between fork and exec it only calls into a loaded libc.
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
