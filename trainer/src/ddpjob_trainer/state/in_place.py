"""Puts stored values back into the very objects that a script holds, where that can be done.

``mean = torch.zeros(5); run.register("mine", {"mean": mean})``: the loop goes on changing ``mean``,
so what comes back from a snapshot must come back into that tensor, list or dict, not beside it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.lib.array_utils import byte_bounds

_Extent = tuple[int, int]  # addresses


class InPlace:
    """One resume. ``theirs``: tensors that somebody else puts back, such as a model's own.

    What stands at two places is filled once: ``{"now": w, "best": w}`` may have come to hold two.
    """

    def __init__(self, theirs: Iterable[torch.Tensor] = ()) -> None:
        self._taken = [*map(_extent, filter(_is_plain, theirs))]
        self._met: list[Any] = []  # held, so that no other object gets the id of one
        self._ids: set[int] = set()

    def put(self, there: Any, value: Any) -> Any:
        """Return what belongs at this place now: ``there``, filled with the value, or the value.

        Tensors come from a snapshot on the CPU, and go to the device of those that they replace.
        """
        if isinstance(there, torch.Tensor) and isinstance(value, torch.Tensor):
            value = value.to(there.device)
        if type(there) is not type(value) or id(there) in self._ids:
            return value
        if isinstance(there, torch.Tensor):
            return self._tensor(there, value)
        if isinstance(there, np.ndarray):
            return self._array(there, value)
        if type(there) is tuple and len(there) == len(value):
            return tuple(map(self.put, there, value))
        if not isinstance(there, dict | list | deque):
            return value
        self._meet(there)
        if isinstance(there, dict):
            found = {k: self.put(there[k], v) if k in there else v for k, v in value.items()}
            there.clear()
            there.update(found)
        else:
            own = list(there)
            parts = [self.put(own[i], v) if i < len(own) else v for i, v in enumerate(value)]
            there.clear()
            there.extend(parts)
        return there

    def _meet(self, there: Any) -> None:
        self._ids.add(id(there))
        self._met.append(there)

    def _take(self, extent: _Extent) -> bool:
        """Whether nothing else has been put there, or is put there by others."""
        if any(extent[0] < end and start < extent[1] for start, end in self._taken):
            return False
        self._taken.append(extent)
        return True

    def _tensor(self, there: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        alike = there.dtype == value.dtype and _is_plain(there) and _is_plain(value)
        if not alike or there.is_inference() or not self._take(_extent(there)):
            return value
        self._meet(there)
        with torch.no_grad():
            if there.shape == value.shape and 0 not in there.stride():
                there.copy_(value)
            else:
                there.data = value
        return there

    def _array(self, there: np.ndarray[Any, Any], value: np.ndarray[Any, Any]) -> Any:
        alike = there.dtype == value.dtype and there.shape == value.shape
        if not alike or not there.flags.writeable or not self._take(byte_bounds(there)):
            return value
        self._meet(there)
        there[...] = value
        return there


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it has elements, and memory that can be asked for."""
    return tensor.layout == torch.strided and tensor.numel() > 0


def _extent(tensor: torch.Tensor) -> _Extent:
    """From its first byte to behind its last one. Rows of one tensor lie beside each other."""
    spans = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in spans)
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()
