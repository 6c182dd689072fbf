"""ZeroRedundancyOptimizer in snapshots: each rank holds a part of the state, a snapshot all of it.

Its own consolidate_state_dict() gathers on one rank, by pickle; here every rank gets every part,
as tensors, so that all ranks capture the same state at the same step.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from ddpjob_trainer.comm.world import World
from ddpjob_trainer.state.codec import (
    DTYPES,
    TORCH_DTYPES,
    Flat,
    UnstorableError,
    flatten,
    unflatten,
)
from ddpjob_trainer.state.stateful import lay_out_like_parameters

_MODULE = "torch.distributed.optim.zero_redundancy_optimizer"


def is_zero(optimizer: object) -> bool:
    """Whether it is one. Who has not imported it has none: importing it takes a while."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def is_overlapped(optimizer: Any) -> bool:
    """Whether it updates parameters during backward."""
    return is_zero(optimizer) and bool(getattr(optimizer, "_overlap_with_ddp", False))


def inner(optimizer: Any) -> torch.optim.Optimizer:
    """What holds the state: the optimizer itself, but of this one."""
    found: torch.optim.Optimizer = optimizer.optim if is_zero(optimizer) else optimizer
    return found


def has_views(optimizer: Any) -> bool:
    """Whether it has made views of the parameters, which must not move then."""
    return is_zero(optimizer) and bool(getattr(optimizer, "parameters_as_bucket_view", False))


class ZeroState:
    """Stands for the optimizer in the training state. Every rank must call both methods."""

    def __init__(self, optimizer: Any, world: World) -> None:
        self._optimizer = optimizer
        self._world = world

    def state_dict(self) -> dict[str, Any]:
        """Return the whole optimizer state, in the form of a plain optimizer's."""
        optimizer = self._optimizer
        optimizer._sync_param_groups(optimizer.param_groups, optimizer.optim.param_groups)
        # Where consolidate_state_dict() puts the parts, on one rank.
        optimizer._all_state_dicts = self._gather(optimizer.optim.state_dict())
        try:
            state: dict[str, Any] = optimizer.state_dict()
        finally:
            optimizer._all_state_dicts = []
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back this rank's part."""
        self._optimizer.load_state_dict(state)
        lay_out_like_parameters(self._optimizer.optim)

    def _gather(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        flat, problem = Flat(), ""
        try:
            flat = flatten(mine)
        except UnstorableError as error:  # the others wait for this rank all the same
            problem = str(error)
        shapes = [[n, DTYPES[t.dtype], list(t.shape)] for n, t in flat.tensors.items()]
        head = json.dumps([flat.tree, flat.aliases, shapes, problem]).encode()
        heads = [
            json.loads(received)
            for received in self._world.gather_bytes("a ZeroRedundancyOptimizer's state", head)
        ]
        if problem := next((text for *_, text in heads if text), ""):
            raise UnstorableError(problem)
        states = []
        for rank, (tree, aliases, shapes, _) in enumerate(heads):
            part = flat if rank == self._world.rank else _empty(tree, aliases, shapes)
            tensors = {n: self._broadcast(t, rank) for n, t in part.tensors.items()}
            states.append(unflatten(Flat(part.tree, tensors, part.aliases)))
        return states

    def _broadcast(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        plain = tensor.detach().cpu().contiguous()
        self._world.broadcast_tensor(plain, rank)
        return plain


def _empty(tree: Any, aliases: dict[str, str], shapes: list[Any]) -> Flat:
    tensors = {n: torch.empty(shape, dtype=TORCH_DTYPES[d]) for n, d, shape in shapes}
    return Flat(tree, tensors, aliases)
