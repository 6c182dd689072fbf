"""What the GPT reads: text that is wherever this runs, or a file of tokens."""

import importlib.metadata
import sysconfig
import zlib
from pathlib import Path

import numpy
import torch
from torch.utils.data import Dataset


def library() -> bytes:
    """Python's own library and torch's licences, some 5 MB, in the same order everywhere."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    files = importlib.metadata.files("torch") or []
    licences = sorted(Path(f.locate()) for f in files if f.name in ("LICENSE", "NOTICE"))
    return b"\n".join(path.read_bytes() for path in [*sources, *licences])


class Sequences(Dataset):
    """Of context + 1 tokens: each token is to be foretold from those before it.

    ``file``: token ids as little-endian uint16, one after another, after ``skip`` bytes; None: the
    library's bytes. Each sample is an int64 tensor of shape (context + 1,).
    """

    def __init__(self, context: int, file: Path | None, skip: int) -> None:
        self.length = context + 1
        if file is None:
            self.ids = numpy.frombuffer(library(), dtype=numpy.uint8)
        else:
            self.ids = numpy.memmap(file, dtype="<u2", mode="r", offset=skip)

    def __len__(self) -> int:
        return len(self.ids) // self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        at = index * self.length
        return torch.from_numpy(self.ids[at : at + self.length].astype(numpy.int64))

    def checksum(self) -> int:
        """Of the length and the first millions of tokens: other Pythons have other libraries."""
        return zlib.crc32(self.ids[: 1 << 23].tobytes(), len(self.ids))
