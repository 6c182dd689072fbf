"""Keep the numbers that the script logs itself: run.log({"accuracy": 0.5})."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from numbers import Real
from typing import SupportsFloat

import torch

from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.gpu.accelerator import Number

Keep = Callable[[torch.Tensor], Number]
Values = Mapping[str, SupportsFloat]  # converted when they are published


def checked(values: Mapping[str, object], keep: Keep = torch.Tensor.item) -> Values:
    """Return the values, ready to be kept. ``keep``: converts a tensor.

    Raises ConfigError for anything but numbers and tensors of one element.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"run.log() needs a dict of numbers by name, not {values!r:.80}")
    for name in values:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"run.log(): names must be strings, not {name!r}")
    return {name: number_of(f"run.log(): {name!r}", value, keep) for name, value in values.items()}


def number_of(what: str, value: object, keep: Keep = torch.Tensor.item) -> Number:
    """Return a script's number, or a kept tensor of one element. Raises ConfigError."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            raise ConfigError(
                f"{what} is a tensor {list(value.shape)} of {value.dtype}; give one real number, as"
                " value.mean()"
            )
        return keep(value.detach())
    if isinstance(value, Real):  # numpy's numbers, too
        try:
            return float(value)
        except OverflowError:  # a whole number that no float can hold
            return -math.inf if value < 0 else math.inf
    raise ConfigError(
        f"{what} is a {type(value).__name__}; give a number or a tensor of one element"
    )


class Pending:
    """Rank 0's logged values, until they are published."""

    def __init__(self) -> None:
        self.at_once = False  # outside of steps values are published at once
        self._rows: list[tuple[int, Values]] = []
        self._ended: deque[list[tuple[int, Values]]] = deque()  # of ended steps, not published yet
        self._names: set[str] = set()
        self._begun = False

    def begin(self, step: int) -> None:
        """Start after ``step``; drop rows of steps up to it, which are published already."""
        self._begun = True
        if step:
            self._rows = [row for row in self._rows if row[0] > step]

    def add(self, step: int, values: Values) -> None:
        """Add values; of equal steps and names the last one counts."""
        self._names.update(values)
        self._rows.append((step, values))

    @property
    def behind(self) -> bool:
        """Return whether an ended step still waits to be published."""
        return bool(self._ended)

    def step_ended(self) -> None:
        """End a step: later values belong to the next one."""
        self._ended.append(self._rows)
        self._rows = []

    def take(self, *, step: bool = False) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield the rows to publish now, as numbers: this may wait for the device.

        ``step``: only rows of the oldest ended step that is not published.
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
            yield number, {name: float(value) for name, value in values.items()}

    def without_users(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the run's own numbers, without names that the script uses itself."""
        return {name: value for name, value in values.items() if name not in self._names}
