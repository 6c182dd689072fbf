"""Keep what the loop switches: train and eval of modules, requires_grad of parameters.

A layer that is frozen after some steps, or a BatchNorm that is put into eval, is so after a resume
too. Only what differs from how the script began is kept, so that its code may begin otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
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
        self._begun = self.now()

    def now(self) -> Sequence[Sequence[bool]]:
        """Return all of them as they are: quick, for a rescue asks at each step."""
        return [list(map(attrgetter(kind), one.values())) for kind, one in self._owners.items()]

    def changed(self, now: Sequence[Sequence[bool]] | None = None) -> dict[str, _Flags]:
        """Return those that are not as they were, in what JSON can hold. ``now``: see now()."""
        pairs = zip(self._owners.items(), self._begun, now or self.now(), strict=True)
        found = {}
        for (kind, owners), begun, flags in pairs:
            both = zip(owners, begun, flags, strict=True)
            found[kind] = {name: on for name, was, on in both if on is not was}
        return found

    def put_back(self, stored: Mapping[str, _Flags]) -> None:
        """Switch what changed() returned; names that there are no more are passed over."""
        for kind, flags in stored.items():
            for name in flags.keys() & self._owners[kind].keys():
                setattr(self._owners[kind][name], kind, flags[name])
