"""Keep the launcher's private directory: workers' records per round, and their metrics.

In memory where there is room, else in any place that may be written. The launcher locks it: a
directory with a free lock was left by a killed launcher, and the next one removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from ddpjob_trainer.environment import Key

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
