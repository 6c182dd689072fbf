"""Take samples of batches, weights and generators, small enough to be hashed in each step.

replay.py asks for them. What is on a GPU is not waited for: its samples are returned, to
travel to the host beside the step's losses.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from struct import pack
from typing import Any

import numpy as np
import torch

from ddpjob_trainer.gpu.accelerator import in_order

#: Elements that are looked at: of a tensor in a batch, and how many samples of it; of a parameter.
_ELEMENTS = 512
_ROWS = 64
_OF_PARAMETER = 64
_PARTS = 64  # of a list
_CHARACTERS = 256
_OF_NUMPY = {torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool}
#: Of a generator's words all change when the position comes to their end, so some will do.
_WORDS_BYTES = 128


class Digest:
    """A hash of what was added, in that order. ``later``: samples that a device still has."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=8)
        self.later: list[torch.Tensor] = []

    def add(self, value: Any) -> None:
        """Add a batch: tensors, arrays and plain values in nested lists, tuples and mappings."""
        if isinstance(value, torch.Tensor) and not value.is_nested:  # which may have no shape
            self.sample(value, _ELEMENTS, _ROWS)
        elif isinstance(value, list | tuple):
            self._note("list", len(value))
            for part in value[:_PARTS]:
                self.add(part)
        elif isinstance(value, np.ndarray):
            self._note("array", value.shape)
            if value.dtype.kind in "biufc":
                self._hash.update(value[_thinned(value.shape, _ELEMENTS, _ROWS)].tobytes())
        elif isinstance(value, Mapping):
            self._note("mapping", *map(str, value))
            for part in value.values():
                self.add(part)
        elif isinstance(value, str | bytes | int | float | complex | None):
            self._note(repr(value[:_CHARACTERS] if isinstance(value, str | bytes) else value))
        else:
            self._note(type(value).__qualname__)

    def sample(self, tensor: torch.Tensor, elements: int = _OF_PARAMETER, rows: int = 8) -> None:
        """Add a tensor: its shape, and evenly spaced elements."""
        self._note(tensor.dtype, tensor.shape)
        if tensor.layout is not torch.strided or tensor.is_quantized or not tensor.numel():
            return
        places = _thinned(tensor.shape, elements, rows)
        if tensor.device.type == "cpu" and tensor.dtype in _OF_NUMPY and not tensor.is_neg():
            self._hash.update(tensor.detach().numpy()[places].tobytes())  # a third of torch's time
            return
        thin = in_order(tensor.detach()[places])
        if thin.device.type == "cpu":
            self._hash.update(thin.view(torch.uint8).numpy().tobytes())
        else:
            self.later.append((torch.view_as_real(thin) if thin.is_complex() else thin).flatten())

    def value(self, came: Iterable[float] = ()) -> int:
        """Return the hash, never 0. ``came``: the numbers of ``later``."""
        numbers = list(came)
        self._hash.update(pack(f"<{len(numbers)}d", *numbers))
        return int.from_bytes(self._hash.digest(), "little") or 1

    def _note(self, *facts: object) -> None:
        self._hash.update(repr(facts).encode(errors="replace"))


@functools.lru_cache(maxsize=256)
def _thinned(sizes: tuple[int, ...], elements: int, rows: int) -> tuple[slice, ...]:
    """Index a view of about so many elements, from the midst of each dimension's parts.

    Of a batch's samples as many as there are, up to ``rows``, and a few elements of each.
    """
    places = []
    for dimension, size in enumerate(sizes):
        last = dimension == len(sizes) - 1
        wanted = max(1, elements if last else min(elements, rows if not dimension else 2))
        step = max(1, -(-size // wanted))
        places.append(slice(step // 2, None, step))
        elements //= max(1, min(size, wanted))
    return tuple(places)


def of_generators(device: torch.device) -> int:
    """Return a hash of the global generators of torch and the device.

    Those of `random` and numpy are left out: they take longer to be shown than all this takes.
    """
    torchs = torch.get_rng_state().numpy()
    found = blake2b(torchs[:_WORDS_BYTES].tobytes() + torchs[-_WORDS_BYTES:].tobytes())
    if device.type == "cuda":
        found.update(torch.cuda.get_rng_state(device).numpy().tobytes())  # the host has it
    return int.from_bytes(found.digest()[:8], "little") or 1
