"""What the loop switches as it goes: train and eval of modules, requires_grad of parameters, and
the settings of torch's own modules, such as the rate of a Dropout.

A layer that is frozen after some steps, or a BatchNorm that is put into eval, is so after a resume
too. Only what differs from how the script began is kept, so that its code may begin otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

_Flags = dict[str, bool]
_Setting = bool | int | float | str | None
_OWN = frozenset(vars(torch.nn.Module()))


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
        self._settings = self._settings_now()

    def _settings_now(self) -> dict[str, dict[str, _Setting]]:
        """By module. What a module of the script's own keeps may belong to what is not kept."""
        return {name: _settings(part) for name, part in self._parts.items() if _is_torchs(part)}

    def _now(self) -> tuple[_Flags, _Flags]:
        return (
            {name: part.training for name, part in self._parts.items()},
            {name: parameter.requires_grad for name, parameter in self._parameters.items()},
        )

    def changed(self) -> dict[str, Any]:
        """Those that are not as they were, in what JSON can hold."""
        training, learning = (
            {name: flag for name, flag in now.items() if flag is not begun[name]}
            for now, begun in zip(self._now(), self._begun, strict=True)
        )
        settings = {
            name: changed
            for name, now in self._settings_now().items()
            if (changed := _differing(now, self._settings.get(name, now)))
        }
        return {"training": training, "requires_grad": learning, "settings": settings}

    def put_back(self, stored: Any) -> None:
        """Switch what changed() returned; names that there are no more are passed over."""
        if not isinstance(stored, Mapping):
            return
        for name, flag in _flags(stored.get("training")):
            if name in self._parts:
                self._parts[name].training = flag
        for name, flag in _flags(stored.get("requires_grad")):
            if name in self._parameters:
                self._parameters[name].requires_grad_(flag)
        settings = stored.get("settings")
        for name, values in settings.items() if isinstance(settings, Mapping) else ():
            part = self._parts.get(name)
            if part is not None and _is_torchs(part) and isinstance(values, Mapping):
                vars(part).update({n: v for n, v in values.items() if n in _settings(part)})


def _is_torchs(part: torch.nn.Module) -> bool:
    """Not its wrappers, which count for themselves."""
    return type(part).__module__.startswith("torch.nn.modules.")


def _settings(part: torch.nn.Module) -> dict[str, _Setting]:
    return {
        name: value
        for name, value in vars(part).items()
        if isinstance(value, _Setting) and name not in _OWN and not _is_odd(value)
    }


def _is_odd(value: _Setting) -> bool:
    """Whether JSON has no word for it."""
    return isinstance(value, float) and not math.isfinite(value)


def _differing(now: dict[str, _Setting], begun: dict[str, _Setting]) -> dict[str, _Setting]:
    """What is new is a cache."""
    return {n: v for n, v in now.items() if n in begun and v != begun[n]}


def _flags(stored: Any) -> list[tuple[str, bool]]:
    found = stored.items() if isinstance(stored, Mapping) else ()
    return [(name, flag) for name, flag in found if isinstance(flag, bool)]
