"""Save ZeroRedundancyOptimizer, whose state the ranks share out, as one whole state.

The training state wraps it. Each rank writes its own part, under the names that a plain optimizer's
state would have. A request for the whole gives every rank all parts, as tensors; the optimizer's
own consolidate_state_dict() gathers on one rank, by pickle.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from typing import Any

import torch
from safetensors.torch import load, save

from ddpjob_trainer.comm.world import World
from ddpjob_trainer.state.codec import Flat, UnstorableError, flatten, unflatten
from ddpjob_trainer.state.stateful import Divided, lay_out_like_parameters

_MODULE = "torch.distributed.optim.zero_redundancy_optimizer"


def is_zero(optimizer: object) -> bool:
    """Return whether it is one. Does not import the class, which takes a while."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def is_overlapped(optimizer: Any) -> bool:
    """Return whether it updates parameters during backward."""
    return is_zero(optimizer) and bool(getattr(optimizer, "_overlap_with_ddp", False))


def inner(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer that holds the state: itself, or ZeRO's inner one."""
    found: torch.optim.Optimizer = optimizer.optim if is_zero(optimizer) else optimizer
    return found


class ZeroState(Divided):
    """Represents the optimizer in the training state."""

    def __init__(self, optimizer: Any, world: World) -> None:
        self._optimizer = optimizer
        self._world = world

    def state_dict(self) -> dict[str, Any]:
        """Return the whole optimizer state, in a plain optimizer's form. Collective."""
        return self._joined(self._gather(self._mine()))

    def part(self) -> dict[str, Any]:
        """Return the same with this rank's parameters only, without communication."""
        parts = self._optimizer._partition_parameters()
        states = [{"state": {}, "param_groups": groups} for groups in parts]
        states[self._world.rank] = self._mine()
        found, held = self._joined(states), self.held()
        # The optimizer's own load_state_dict() leaves an entry for every parameter.
        return {**found, "state": {n: s for n, s in found["state"].items() if n in held}}

    def held(self) -> Collection[int]:
        """Return the numbers of this rank's parameters."""
        groups = self._optimizer._partition_parameters()[self._world.rank]
        return {self._optimizer._param_to_index[p] for group in groups for p in group["params"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load this rank's part."""
        self._optimizer.load_state_dict(state)
        self._optimizer.state.clear()  # a second copy, which no update changes
        lay_out_like_parameters(self._optimizer.optim)

    def _mine(self) -> dict[str, Any]:
        optimizer = self._optimizer
        optimizer._sync_param_groups(optimizer.param_groups, optimizer.optim.param_groups)
        found: dict[str, Any] = optimizer.optim.state_dict()
        return found

    def _joined(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """Join the ranks' states; number their parameters as a plain optimizer would."""
        # consolidate_state_dict() puts the parts there, on one rank.
        self._optimizer._all_state_dicts = states
        try:
            joined: dict[str, Any] = self._optimizer.state_dict()
        finally:
            self._optimizer._all_state_dicts = []
        return joined

    def _gather(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        flat, problem = Flat(), ""
        try:
            flat = flatten(mine)
        except UnstorableError as error:  # the others wait for this rank all the same
            problem = str(error)
        head = json.dumps([flat.tree, flat.aliases, problem]).encode()
        what = "a ZeroRedundancyOptimizer's state"
        heads = [json.loads(received) for received in self._world.gather_bytes(what, head)]
        if problem := next((text for *_, text in heads if text), ""):
            raise UnstorableError(problem)
        plain = {n: t.detach().cpu().contiguous() for n, t in flat.tensors.items()}
        tensors = map(load, self._world.gather_bytes(what, save(plain)))
        return [
            unflatten(Flat(tree, part, aliases))
            for (tree, aliases, _), part in zip(heads, tensors, strict=True)
        ]
