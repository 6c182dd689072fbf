"""A function in place of a method of one model, which the model's copies and files do not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Instead:
    """``torch.save(model)`` and ``copy.deepcopy(model)`` take the method of the class itself."""

    def __init__(self, model: torch.nn.Module, name: str, call: Callable[..., Any]) -> None:
        self._place = model, name
        self._call = call
        setattr(model, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the method is called."""
        return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[torch.nn.Module, str]]:
        # By now the copy is there, without attributes of its own.
        return getattr, self._place
