"""Keep what the loop switches: train and eval of modules, requires_grad of parameters.

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
        self._owners: dict[str, dict[str, Any]] = {"training": {}, "requires_grad": {}}
        for prefix, module in modules.items():
            parts, parameters = module.named_modules(), module.named_parameters()
            self._owners["training"] |= {f"{prefix}.{name}": one for name, one in parts}
            self._owners["requires_grad"] |= {f"{prefix}.{name}": one for name, one in parameters}
        self._begun = self._now()

    def _now(self) -> dict[str, _Flags]:
        return {
            kind: {name: getattr(one, kind) for name, one in owners.items()}
            for kind, owners in self._owners.items()
        }

    def changed(self) -> dict[str, _Flags]:
        """Return those that are not as they were, in what JSON can hold."""
        return {
            kind: {name: on for name, on in flags.items() if on is not self._begun[kind][name]}
            for kind, flags in self._now().items()
        }

    def put_back(self, stored: Mapping[str, _Flags]) -> None:
        """Switch what changed() returned; names that there are no more are passed over."""
        for kind, flags in stored.items():
            for name in flags.keys() & self._owners[kind].keys():
                setattr(self._owners[kind][name], kind, flags[name])
