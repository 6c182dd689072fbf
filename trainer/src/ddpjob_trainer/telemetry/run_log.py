"""Numbers that the script logs itself: run.log({"accuracy": 0.5})."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from numbers import Real
from typing import Any, SupportsFloat

import torch

from ddpjob_trainer.accelerator import Number
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.telemetry.event_log import exact
from ddpjob_trainer.telemetry.sinks import Row

Keep = Callable[[torch.Tensor], Number]
Values = Mapping[str, SupportsFloat]  # read when they are told


def checked(values: Mapping[str, object], keep: Keep = torch.Tensor.item) -> Values:
    """Return what can be kept until it is told. ``keep``: makes that of a tensor.

    Raises ConfigError for anything but numbers and tensors of one element.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"run.log() needs a dict of numbers by name, not {values!r:.80}")
    return {
        _name(name): number_of(f"run.log(): {name!r}", value, keep)
        for name, value in values.items()
    }


def _name(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise ConfigError(f"run.log(): names must be strings, not {name!r}")
    return name


def number_of(what: str, value: object, keep: Keep = torch.Tensor.item) -> Number:
    """A number that a script gives, or what is kept of a tensor of one element.

    Raises ConfigError.
    """
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            raise ConfigError(
                f"{what} is a tensor {list(value.shape)} of {value.dtype}; give one real number, as"
                " value.mean()"
            )
        return keep(value.detach())
    if isinstance(value, Real):  # numpy's numbers, too
        return _as_float(value)
    raise ConfigError(
        f"{what} is a {type(value).__name__}; give a number or a tensor of one element"
    )


def packed(rows: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
    """Rows by sink for JSON; their values read back bit for bit."""
    return {
        sink: [[step, {name: exact(value) for name, value in row.items()}] for step, row in one]
        for sink, one in rows.items()
    }


def unpacked(stored: Any) -> dict[str, list[Row]]:
    """What packed() was given; nothing, if it is of another form."""
    try:
        return {
            sink: [(int(step), {n: float(v) for n, v in row.items()}) for step, row in rows]
            for sink, rows in stored.items()
        }
    except (TypeError, ValueError, AttributeError):
        return {}


class Pending:
    """What is logged and not told yet, on rank 0."""

    def __init__(self) -> None:
        self.at_once = False  # outside of steps there is nothing to wait for
        self._rows: list[tuple[int, Values]] = []
        self._ended: deque[list[tuple[int, Values]]] = deque()  # of steps that are not told yet
        self._names: set[str] = set()
        self._begun = False

    def begin(self, step: int) -> None:
        """Training goes on after ``step``; what came before the loop is known then already."""
        self._begun = True
        if step:
            self._rows = [row for row in self._rows if row[0] > step]

    def add(self, step: int, values: Values) -> None:
        """Of equal steps and names the last value holds."""
        self._names.update(values)
        self._rows.append((step, values))

    @property
    def behind(self) -> bool:
        """Whether a step has ended that is not told yet."""
        return bool(self._ended)

    def step_ended(self) -> None:
        """What comes from now on belongs to the next step."""
        self._ended.append(self._rows)
        self._rows = []

    def take(self, *, step: bool = False) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield what is to be told now, as numbers: this may wait for the device.

        ``step``: of the oldest step that has ended and is not told, only.
        """
        if not self._begun:
            return
        if step and self._ended:
            rows = self._ended.popleft()
        else:
            rows = [*chain(*self._ended), *self._rows]
            self._ended.clear()
            self._rows = []
        for number, values in rows:
            yield number, {name: _as_float(value) for name, value in values.items()}

    def without_users(self, values: Mapping[str, float]) -> dict[str, float]:
        """Of the run's own numbers, those whose names the script does not use itself."""
        return {name: value for name, value in values.items() if name not in self._names}


def _as_float(value: SupportsFloat) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number that no float can hold
        return math.inf
