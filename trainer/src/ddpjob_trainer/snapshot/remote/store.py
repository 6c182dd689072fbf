"""Adapt an object store to snapshots: numbered folders of objects below one URL. No torch.

fsspec knows the protocols. Objects are never overwritten by another content: every name is drawn,
or belongs to one incarnation alone. Store is a lineage.Folders, as a disk is.
"""

from __future__ import annotations

import contextlib
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddpjob_contract.text import without_credentials
from ddpjob_trainer.environment import Identity
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.snapshot.ondisk import lineage
from ddpjob_trainer.snapshot.ondisk.lineage import Start
from ddpjob_trainer.snapshot.ondisk.manifest import NewerFormatError

#: Drawn numbers grow by a million: the highest digit is free, and a folder that has one is foreign.
_FOLDER = re.compile("0[0-9]{14}")
_PIECE = 4 << 20


class Store:
    """What lies below a URL. Its methods raise OSError, and what the protocol's library raises."""

    def __init__(self, url: str) -> None:
        self.url = without_credentials(url, url)  # to be shown
        self._fs, self._root = file_system(url)

    def numbers(self) -> list[int]:
        """Return all numbers taken, ascending, with or without a start record."""
        return sorted(int(name) for name in listed(self._fs, self._root) if _FOLDER.fullmatch(name))

    def foreign(self) -> list[str]:
        """Name what has a number for its name and is no folder of ours, cut and printable."""
        found = filter(str.isdecimal, listed(self._fs, self._root))
        return sorted(ascii(name[:40]) for name in found if not _FOLDER.fullmatch(name))

    def names(self, number: int) -> list[str]:
        """Return the names in a folder, none where it does not exist."""
        return listed(self._fs, self._path(number))

    def starts(
        self, reader: Identity | None = None
    ) -> tuple[dict[int, Start], list[NewerFormatError]]:
        """Read every start record, and tell which only a newer program can read."""
        unread: dict[int, Exception] = {}
        known = lineage.read_starts(self, unread, reader=reader)
        for why in unread.values():
            if isinstance(why, OSError):
                raise why  # never begin from nothing for want of a network
        return known, [why for why in unread.values() if isinstance(why, NewerFormatError)]

    def size(self, number: int, name: str) -> int | None:
        """Return an object's bytes, None where there is none."""
        self._fs.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            return int(self._fs.info(self._path(number, name))["size"])
        return None

    def read(self, number: int, name: str, most: int) -> bytes:
        """Return an object's bytes, of a longer one the first ``most + 1``."""
        return bytes(self._fs.cat_file(self._path(number, name), start=0, end=most + 1))

    def pieces(self, number: int, name: str) -> Iterator[bytes]:
        """Yield an object's content bit by bit."""
        with self._fs.open(self._path(number, name), "rb", block_size=_PIECE) as file:
            while piece := file.read(_PIECE):
                yield piece

    def put(self, source: Path, number: int, name: str) -> None:
        """Copy a file there."""
        self._fs.makedirs(self._path(number), exist_ok=True)
        self._fs.put_file(str(source), self._path(number, name))

    def write(self, number: int, name: str, content: bytes) -> None:
        """Put a small object there, whole or not at all where the store can."""
        self._fs.makedirs(self._path(number), exist_ok=True)
        self._fs.pipe_file(self._path(number, name), content)

    def remove(self, number: int, name: str) -> None:
        """Remove an object that may be gone already."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(number, name))

    def remove_folder(self, number: int) -> None:
        """Remove a folder and all in it."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._path(number), recursive=True)

    def _path(self, number: int, *name: str) -> str:
        return posixpath.join(self._root, f"{number:015d}", *name)


def file_system(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it. Raises ConfigError."""
    import fsspec  # an extra: it is not needed without a URL

    try:
        fs, root = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        words = without_credentials(f"snapshots.upload={url!r} cannot be used: {error}", url)
        raise ConfigError(words) from None  # a traceback would quote it
    return fs, str(root).rstrip("/")


def listed(fs: Any, path: str) -> list[str]:
    """Return the names in a folder, none where it does not exist."""
    fs.invalidate_cache()  # other processes write there
    with contextlib.suppress(FileNotFoundError):
        found = fs.ls(path, detail=False)
        return [posixpath.basename(str(name).rstrip("/")) for name in found if name != path]
    return []
