"""run.log(..., reduce="mean"): means over the ranks, which ride on the step's one exchange.

A name may be logged several times in a step, for each micro batch say: each call counts once. Every
rank sends as many numbers in every step, whatever is logged, since it cannot know what the others
log: places for sums and counts, and hashes of the names, whose sums show whether all are the same.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import SupportsFloat

import torch

from ddpjob_trainer.accelerator import Number
from ddpjob_trainer.comm.world import World
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.telemetry.run_log import Values

MOST = 16
_HASHES = 3  # of 16 bits each: the sums of their squares are exact for two million ranks


@dataclass(slots=True)
class Mean:
    """A number that is known when the step has ended. ``mine``: what this rank has logged."""

    mine: list[SupportsFloat] = field(default_factory=list)
    value: float = math.nan

    def __float__(self) -> float:
        return self.value


class LoggedMeans:
    """One process's side."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._means: dict[str, Mean] = {}
        self._told = False
        self._reported: deque[dict[str, Mean]] = deque()  # of steps that are not yet known

    def add(self, values: Values) -> Values:
        """Take values of a step; return the means to be of names that are new in it.

        Raises ConfigError.
        """
        if self._told:
            raise ConfigError(
                "run.log(reduce='mean') came after step.commit(), with which the ranks tell one"
                " another their values: call it before"
            )
        found = {name: Mean() for name in values if name not in self._means}
        count = len(self._means) + len(found)
        if count > MOST:
            raise ConfigError(
                f"run.log(reduce='mean') was given {count} names; {MOST} at most fit into a step"
            )
        self._means |= found
        for name, value in values.items():
            self._means[name].mine.append(value)
        return found

    def report(self) -> list[Number]:
        """Of this step, to be added up over all ranks."""
        self._told = True
        self._reported.append(self._means)
        if not self._means:  # as in nearly every step of most runs
            return [0.0] * (2 * _HASHES + 2 * MOST)
        names = sorted(self._means)
        digest = blake2b("\0".join(names).encode(), digest_size=2 * _HASHES).digest()
        hashes = [float(int.from_bytes(digest[2 * at : 2 * at + 2])) for at in range(_HASHES)]
        logged = [self._means[name].mine for name in names]
        free = [0.0] * (MOST - len(names))
        sums = [sum(map(self._number, values)) for values in logged]
        counts = [float(len(values)) for values in logged]
        return [*hashes, *(number**2 for number in hashes), *sums, *free, *counts, *free]

    def learn(self, step: int, sums: Sequence[float]) -> None:
        """Hear the others of the oldest step that is not known yet.

        Raises ConfigError on every rank when not all gave the same names.
        """
        means = self._reported.popleft()
        size = self._world.size
        pairs = zip(sums[:_HASHES], sums[_HASHES : 2 * _HASHES], strict=True)
        # The same test on all ranks: their hashes are equal if these have no variance.
        if any(size * int(squares) != int(total) ** 2 for total, squares in pairs):
            self._refuse(step, sorted(means))
        for place, name in enumerate(sorted(means), 2 * _HASHES):
            means[name].value = sums[place] / sums[place + MOST]

    def step_ended(self) -> None:
        """What is added from now on is of the next step."""
        self._means, self._told = {}, False

    def _number(self, value: SupportsFloat) -> Number:
        if isinstance(value, torch.Tensor):
            return self._world.accelerator.number(value)
        return float(value)

    def _refuse(self, step: int, mine: Sequence[str]) -> None:
        blobs = self._world.gather_bytes("run.log()", json.dumps(mine).encode())
        gathered = [json.loads(blob) for blob in blobs]
        other = next(rank for rank, names in enumerate(gathered) if names != gathered[0])
        raise ConfigError(
            f"step {step}: run.log(reduce='mean') was given {_list(gathered[other])} on rank"
            f" {other} and {_list(gathered[0])} on rank 0: give the same names on every rank, in"
            " every step"
        )


def means(within: LoggedMeans | None, reduce: str, values: Values) -> Values:
    """Return what run.log() is to tell instead of these values. Raises ConfigError."""
    if reduce != "mean":
        raise ConfigError(f"run.log(reduce={reduce!r}) must be None or 'mean'")
    if within is None:
        raise ConfigError(
            "run.log(reduce='mean') is of a step: call it in the loop's body, without step=;"
            " elsewhere run.sum() adds up over the ranks"
        )
    return within.add(values)


def _list(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "nothing"
