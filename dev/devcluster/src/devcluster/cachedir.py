"""The cache of everything that is expensive to make: its place and its filling.

An entry is named after a hash of what it was made from, is made beside its final place
and renamed into it, so it is either absent or whole. A lock per entry lets two processes
want the same one at once: the second waits and finds it made.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Log = Callable[[str], None]
#: Locks on what the machine has once, whichever process asks and wherever its cache is.
LOCKS = Path("/run/lock/devcluster")


def cache_root() -> Path:
    """Return the cache's root: $DDPJOB_CACHE, else $XDG_CACHE_HOME/ddpjob, else ~/.cache/ddpjob."""
    own = os.environ.get("DDPJOB_CACHE")
    if own:
        return Path(own).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).absolute() / "ddpjob"


def digest(*parts: str | bytes) -> str:
    """Return 16 hex digits over ``parts``; where one part ends and the next starts counts."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "big"))
        total.update(data)
    return total.hexdigest()[:16]


@contextmanager
def locked(path: Path, log: Log) -> Iterator[None]:
    """Hold an exclusive lock on ``path`` (made when absent), waiting as long as it takes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            started = time.monotonic()
            log(f"waiting for another process that makes {path.stem}")
            fcntl.flock(handle, fcntl.LOCK_EX)
            log(f"waited {time.monotonic() - started:.0f} s for {path.stem}")
        yield


def ensure_dir(final: Path, make: Callable[[Path], None], log: Log) -> None:
    """Make directory ``final`` with ``make(temporary directory)`` unless it is there.

    The temporary directory lies beside ``final``, hence on the same filesystem; what an earlier,
    interrupted run left there is removed first.
    """
    if final.is_dir():
        return
    with locked(final.parent / f"{final.name}.lock", log):
        if final.is_dir():
            return
        for left_over in final.parent.glob(f".{final.name}.*"):
            shutil.rmtree(left_over, ignore_errors=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
        try:
            aside.chmod(0o755)
            make(aside)
            aside.rename(final)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise


def write_whole(path: Path, text: str) -> None:
    """Write a small file whole or not at all."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text)
    aside.rename(path)


@contextmanager
def timed(what: str, log: Log) -> Iterator[None]:
    """Say what is being done, and afterwards how long it took."""
    log(f"{what} ...")
    started = time.monotonic()
    yield
    log(f"{what}: {time.monotonic() - started:.1f} s")
