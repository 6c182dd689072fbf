"""What a script imports first is imported once for all its workers, where none can tell.

Each import is tried in the fork server itself, under watch (watch.py), while a copy of the server
from before waits. A clean import stays; after any other the server ends, the copy goes on in its
place, and the workers import for themselves, as in a fresh interpreter.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from ddpjob_trainer.launcher.processes.watch import Import, Stamp, stamp, watched_import

#: An import that takes longer may wait for something that never comes.
_SECONDS = 30.0
_PR_SET_PDEATHSIG = 1
_OVER = signal.SIGUSR1
_libc = ctypes.CDLL(None, use_errno=True)
_getpid = os.getpid  # os.getpid itself is watched


@dataclass(frozen=True, slots=True)
class Shared:
    """The files that were read by what is shared; None: it was not there."""

    files: dict[str, Stamp | None] = field(default_factory=dict)

    def edited(self) -> bool:
        """Whether one of them is not what it was: then a worker has to import for itself."""
        return any(stamp(path) != found for path, found in self.files.items())


def share(
    imports: Iterable[Import], differing: Collection[str], seconds: float = _SECONDS
) -> Shared:
    """Import in this order, up to the first that cannot be shared.

    Returns in another process than the caller's where one could not. ``differing``: see
    watched_import().
    """
    shared = Shared()
    until = time.monotonic() + seconds
    with contextlib.suppress(Exception):  # no program, no Python: its worker says so
        for one in imports:
            if one.loaded:
                continue
            files = _try(one, differing, until - time.monotonic())
            if files is None:
                break
            shared.files.update(files)
    return shared


def _try(
    what: Import, differing: Collection[str], seconds: float
) -> dict[str, Stamp | None] | None:
    """Return the files that it read; None in the copy, when this process has ended."""
    importer = _getpid()
    copy = os.fork()
    if copy == 0:
        _outlive(importer, seconds)
        return None

    def refuse(why: str) -> None:
        if _getpid() == importer:  # not in a child that the import has forked
            os._exit(1)

    try:
        files = watched_import(what, differing, refuse)
    except BaseException:
        os._exit(1)
    os.kill(copy, signal.SIGKILL)
    os.waitpid(copy, 0)
    return files


def _outlive(importer: int, seconds: float) -> None:
    """Wait for its end; see to it after so many seconds. Success ends this process."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [_OVER])
    _libc.prctl(_PR_SET_PDEATHSIG, _OVER, 0, 0, 0)
    until = time.monotonic() + seconds
    while os.getppid() == importer:
        left = until - time.monotonic()
        if left <= 0:
            os.kill(importer, signal.SIGKILL)
        signal.sigtimedwait([_OVER], max(left, 0.01))
    _libc.prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)
    while signal.sigtimedwait([_OVER], 0):
        pass
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
