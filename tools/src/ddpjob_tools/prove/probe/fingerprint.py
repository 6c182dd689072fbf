"""Hash tensors and whatever else a training step uses. recorder.py calls it, in the user's process.

It reads only: no random number is drawn, no tensor changes, and no value of a strange type is an
error. On a GPU the sum is made there, and eight bytes come back.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

#: Elements; of larger tensors that are no state every n-th one is hashed.
MOST: Final = 1 << 20
#: Samples of one batch that are hashed one by one.
ROWS: Final = 256
_DEPTH = 6
_BYTES = 8
#: Odd, so that each element's weight is another one and has an inverse.
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)


def tensors(value: Any, depth: int = _DEPTH) -> Iterator[torch.Tensor]:
    """Yield all tensors within a value, in its order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, Mapping):
        for one in value.values():
            yield from tensors(one, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for one in value:
            yield from tensors(one, depth - 1)


def digest(values: Iterable[Any], most: int | None = None) -> str:
    """Hash values in their order; ``most``: elements of one tensor, None: all."""
    found = hashlib.blake2b(digest_size=_BYTES)
    for value in values:
        for part in _parts(value, most, _DEPTH):
            found.update(part)
    return found.hexdigest()


def _parts(value: Any, most: int | None, depth: int) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor):
        yield _tensor(value, most)
    elif depth and isinstance(value, Mapping):
        for key, one in value.items():
            yield str(key).encode(errors="replace")
            yield from _parts(one, most, depth - 1)
    elif depth and isinstance(value, list | tuple):
        yield b"("
        for one in value:
            yield from _parts(one, most, depth - 1)
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes):
        yield repr(value).encode(errors="replace")
    else:  # its repr() may hold an address
        yield type(value).__qualname__.encode()


def _tensor(tensor: torch.Tensor, most: int | None) -> bytes:
    head = f"{tuple(tensor.shape)}{tensor.dtype}".encode()
    try:
        return head + _content(tensor.detach(), most)
    except (RuntimeError, TypeError, NotImplementedError, ValueError):
        return head + b"?"  # such as meta: it has no content to compare


def _content(tensor: torch.Tensor, most: int | None) -> bytes:
    local: Callable[[], torch.Tensor] | None = getattr(tensor, "to_local", None)  # a DTensor's
    if local is not None:
        tensor = local()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    flat = tensor.resolve_conj().resolve_neg().reshape(-1)
    if most is not None and flat.numel() > most:
        flat = flat[:: flat.numel() // most + 1]
    flat = flat.contiguous()
    if flat.numel() == 0:
        return b""
    if flat.device.type == "cpu":
        return hashlib.blake2b(_bytes(flat), digest_size=_BYTES).digest()
    return _sum(flat)


def _bytes(flat: torch.Tensor) -> memoryview:
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _sum(flat: torch.Tensor) -> bytes:
    """Add up the elements' bits, each with its place's weight: whole numbers, in any order."""
    raw = flat.view(torch.uint8)
    width = next(size for size in (4, 2, 1) if raw.numel() % size == 0)
    words = raw.view({4: torch.int32, 2: torch.int16, 1: torch.uint8}[width]).long()
    weights = torch.arange(1, words.numel() + 1, device=flat.device) * _ODD
    return int(((words + 1) * (weights ^ (weights >> 29))).sum().item()).to_bytes(
        9, "big", signed=True
    )


def samples(given: Sequence[torch.Tensor]) -> list[str]:
    """Hash each row of a batch over all tensors that have its number of rows."""
    batched = [one.detach() for one in given if one.dim() >= 1 and one.layout is torch.strided]
    if not batched:
        return []
    count = batched[0].shape[0]
    if count == 0:
        return []
    found = [hashlib.blake2b(digest_size=6) for _ in range(min(count, ROWS))]
    for one in batched:
        if one.shape[0] != count:
            continue
        flat = one[: len(found)].reshape(len(found), -1)
        flat = flat[:, :: flat.shape[1] * len(found) // MOST + 1] if flat.shape[1] else flat
        rows = flat.resolve_conj().cpu().contiguous()
        for row, hashed in zip(rows, found, strict=True):
            hashed.update(_bytes(row))
    return [one.hexdigest() for one in found]


def norm(given: Iterable[torch.Tensor]) -> float | None:
    """Return the length of all gradients as one vector; None where it cannot be had."""
    try:
        squares = [
            float(torch.linalg.vector_norm(one.detach().coalesce().values() if one.is_sparse
                                           else one.detach(), dtype=torch.float64).item())
            ** 2 for one in given
        ]  # fmt: skip
    except (RuntimeError, TypeError, NotImplementedError, ValueError):
        return None
    return math.sqrt(sum(squares))
