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
    library's bytes. Each sample is an int64 tensor of shape (context + 1,). Every EVERY-th sequence
    is held out of training: those are the samples if ``held_out``, else all others are.
    """

    EVERY = 300

    def __init__(self, context: int, file: Path | None, skip: int, *, held_out: bool) -> None:
        self.length, self.held_out = context + 1, held_out
        if file is None:
            self.ids = numpy.frombuffer(library(), dtype=numpy.uint8)
        else:
            self.ids = numpy.memmap(file, dtype="<u2", mode="r", offset=skip)

    def __len__(self) -> int:
        whole = len(self.ids) // self.length
        held_out = -(-whole // self.EVERY)  # sequences 0, EVERY, 2 EVERY, ...
        return held_out if self.held_out else whole - held_out

    def __getitem__(self, index: int) -> torch.Tensor:
        trained = index + index // (self.EVERY - 1) + 1  # leaves out those that are held out
        at = self.length * (index * self.EVERY if self.held_out else trained)
        return torch.from_numpy(self.ids[at : at + self.length].astype(numpy.int64))

    def checksum(self) -> int:
        """Of the length and the first millions of tokens: other Pythons have other libraries."""
        return zlib.crc32(self.ids[: 1 << 23].tobytes(), len(self.ids))
