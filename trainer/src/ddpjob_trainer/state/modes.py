"""What the loop switches as it goes: train and eval of modules, requires_grad of parameters.

A layer that is frozen after some steps, or a BatchNorm that is put into eval, is so after a resume
too. Only what differs from how the script began is kept, so that its code may begin otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_Flags = dict[str, bool]


class Modes:
    """Made before the first step. ``modules``: by name, whose parts and parameters count."""

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self._parts = {
            f"{prefix}.{name}": part
            for prefix, module in modules.items()
            for name, part in module.named_modules()
        }
        self._parameters = {
            f"{prefix}.{name}": parameter
            for prefix, module in modules.items()
            for name, parameter in module.named_parameters()
        }
        self._begun = self._now()

    def _now(self) -> dict[str, _Flags]:
        return {
            "training": {name: part.training for name, part in self._parts.items()},
            "requires_grad": {name: p.requires_grad for name, p in self._parameters.items()},
        }

    def changed(self) -> dict[str, _Flags]:
        """Return those that are not as they were, in what JSON can hold."""
        return {
            kind: {
                name: flag for name, flag in flags.items() if flag is not self._begun[kind][name]
            }
            for kind, flags in self._now().items()
        }

    def put_back(self, stored: Any) -> None:
        """Switch what changed() returned; names that there are no more are passed over."""
        for name, flag in _flags(stored, "training"):
            if name in self._parts:
                self._parts[name].training = flag
        for name, flag in _flags(stored, "requires_grad"):
            if name in self._parameters:
                self._parameters[name].requires_grad_(flag)


def _flags(stored: Any, kind: str) -> list[tuple[str, bool]]:
    found = stored.get(kind) if isinstance(stored, Mapping) else None
    flags = found.items() if isinstance(found, Mapping) else ()
    return [(name, flag) for name, flag in flags if isinstance(flag, bool)]
