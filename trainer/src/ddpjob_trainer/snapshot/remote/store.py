"""An object store as snapshots use it: list, read, put, remove, below one URL. No torch.

fsspec knows the protocols. Objects are never overwritten by another content: every name is drawn,
or belongs to one incarnation alone.
"""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddpjob_trainer.errors import ConfigError

_PIECE = 4 << 20


class Store:
    """What lies below a URL. Its methods raise OSError, and what the protocol's library raises."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._fs, self._root = _file_system(url)

    def names(self, *folder: str) -> list[str]:
        """Names in a folder, none where it does not exist."""
        path = self._path(*folder)
        self._fs.invalidate_cache()  # other processes write there
        try:
            found = self._fs.ls(path, detail=False)
        except FileNotFoundError:
            return []
        return [posixpath.basename(str(name).rstrip("/")) for name in found if name != path]

    def size(self, folder: str, name: str) -> int | None:
        """Bytes of an object, None where there is none."""
        try:
            return int(self._fs.info(self._path(folder, name), refresh=True)["size"])
        except (FileNotFoundError, TypeError):
            return self._plain_size(folder, name)

    def _plain_size(self, folder: str, name: str) -> int | None:
        """Not every protocol can be asked to forget what it knows."""
        self._fs.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            return int(self._fs.info(self._path(folder, name))["size"])
        return None

    def read(self, folder: str, name: str, most: int) -> bytes:
        """The beginning of an object, at most so many bytes and one more."""
        return bytes(self._fs.cat_file(self._path(folder, name), start=0, end=most + 1))

    def pieces(self, folder: str, name: str) -> Iterator[bytes]:
        """An object's content, bit by bit."""
        with self._fs.open(self._path(folder, name), "rb", block_size=_PIECE) as file:
            while piece := file.read(_PIECE):
                yield piece

    def put(self, source: Path, folder: str, name: str) -> None:
        """Copy a file there."""
        self._fs.makedirs(self._path(folder), exist_ok=True)
        self._fs.put_file(str(source), self._path(folder, name))

    def write(self, folder: str, name: str, content: bytes) -> None:
        """Put a small object there, whole or not at all where the store can."""
        self._fs.makedirs(self._path(folder), exist_ok=True)
        self._fs.pipe_file(self._path(folder, name), content)

    def remove(self, folder: str, name: str) -> None:
        """Remove an object that may be gone already."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(folder, name))

    def remove_folder(self, folder: str) -> None:
        """Remove all below a folder."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._path(folder), recursive=True)

    def _path(self, *parts: str) -> str:
        return posixpath.join(self._root, *parts)


def _file_system(url: str) -> tuple[Any, str]:
    import fsspec  # an extra: it is not needed without a URL

    try:
        fs, root = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"snapshot_upload={url!r} cannot be used: {error}") from error
    return fs, str(root).rstrip("/")
