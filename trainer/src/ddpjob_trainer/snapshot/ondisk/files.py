"""Write a rank's data file, commit a manifest, clean up, in its writer thread.

Commit protocol: data files under unique names, each written and fsynced; when all ranks' are
durable the manifest is written and fsynced under a temporary name, renamed, and the directory
fsynced. A process killed at any point leaves the snapshots that were valid before, and never
half a one that looks whole. Never imports torch.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ddpjob_trainer.snapshot.ondisk import disk, lineage, manifest

#: Small enough that the checksum finds the bytes in cache.
_PIECE = 4 << 20
#: A part of at least so many bytes is written past the page cache: copying it there and flushing
#: it costs the cores that train more than all else, and it would push the data set out. Smaller
#: ones cost nothing, and a restart in place reads them back from the cache.
PAST_CACHE_BYTES = 16 << 20


def data_name(step: int, nonce: str, rank: int) -> str:
    """Name a rank's data file. ``nonce``: the incarnation's own, so no two files share it."""
    return f"step-{step:012d}-{nonce}-{rank}.safetensors"


@dataclass(frozen=True, slots=True)
class SnapshotFiles:
    """One incarnation's directory. After an error older snapshots stand."""

    root: Path
    sequence: int
    nonce: str
    keep: int

    @property
    def directory(self) -> Path:
        """Return where all ranks of this incarnation write."""
        return lineage.directory(self.root, self.sequence)

    def write(self, name: str, content: memoryview) -> int:
        """Make a data file durable; return its CRC-32. Raises OSError."""
        crc = 0

        def pieces() -> Iterator[memoryview]:
            nonlocal crc
            for start in range(0, len(content), _PIECE):
                piece = content[start : start + _PIECE]
                crc = zlib.crc32(piece, crc)
                yield piece

        large = len(content) >= PAST_CACHE_BYTES
        disk.write_new(self.directory / name, pieces(), past_cache=large)
        return crc

    def commit(self, step: int, content: bytes) -> None:
        """Publish the manifest of a step whose data files are durable. Raises OSError."""
        try:
            disk.commit(self.directory / manifest.file_name(step), content)
        except BaseException:
            self.discard(step)
            raise

    def discard(self, step: int) -> None:
        """Remove all ranks' files of a step that was not committed.

        They stay if the rename, though perhaps not yet durable, was done.
        """
        with contextlib.suppress(OSError):
            final = manifest.file_name(step)
            if disk.exists(self.directory / final):
                return
            for name in disk.names(self.directory):
                if name.startswith((f"step-{step:012d}-", f"{final}.")):
                    with contextlib.suppress(OSError):
                        disk.remove(self.directory / name)
