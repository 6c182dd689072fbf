"""Puts stored values back into the very objects that a script holds, where that can be done.

``mean = torch.zeros(5); run.register("mine", {"mean": mean})``: the loop goes on changing ``mean``,
so what comes back from a snapshot must come back into that tensor, list or dict, not beside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch


class InPlace:
    """One resume. ``theirs``: tensors that somebody else puts back, such as a model's own.

    What stands at two places is filled once: ``{"now": w, "best": w}`` may have come to hold two.
    """

    def __init__(self, theirs: Iterable[torch.Tensor] = ()) -> None:
        self._taken = {_memory(tensor) for tensor in theirs if tensor.numel()}
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
        if not isinstance(there, dict | list):
            return value
        self._meet(there)
        if isinstance(there, dict):
            found = {k: self.put(there[k], v) if k in there else v for k, v in value.items()}
            there.clear()
            there.update(found)
        else:
            there[:] = [self.put(there[i], v) if i < len(there) else v for i, v in enumerate(value)]
        return there

    def _meet(self, there: Any) -> None:
        self._ids.add(id(there))
        self._met.append(there)

    def _tensor(self, there: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        alike = there.dtype == value.dtype and there.layout == value.layout == torch.strided
        if not alike or not there.numel() or not value.numel() or there.is_inference():
            return value
        if _memory(there) in self._taken:
            return value
        self._taken.add(_memory(there))
        self._meet(there)
        with torch.no_grad():
            if there.shape == value.shape and 0 not in there.stride():
                there.copy_(value)
            else:
                there.data = value
        return there

    def _array(self, there: np.ndarray[Any, Any], value: np.ndarray[Any, Any]) -> Any:
        whole = there.base is None and there.flags.writeable
        if not whole or there.dtype != value.dtype or there.shape != value.shape:
            return value
        self._meet(there)
        there[...] = value
        return there


def _memory(tensor: torch.Tensor) -> int:
    """What tells memory from other memory; views of one tensor have the same."""
    return tensor.untyped_storage().data_ptr()
