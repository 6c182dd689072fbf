"""start(resume=FILE): a fresh run begins with the weights of a file, on all ranks alike."""

from __future__ import annotations

import io
from pathlib import Path

import torch

from ddpjob_trainer.comm.world import World
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.snapshot import weights
from ddpjob_trainer.telemetry.console import say


def begin_with(path: Path, module: torch.nn.Module, world: World) -> None:
    """Load on rank 0, which alone must see the file, and give it to all. Collective.

    Raises ConfigError, on every rank.
    """
    problem = ""
    if world.rank == 0:
        try:
            weights.load(path, module)
        except ConfigError as error:
            problem = str(error)
    problem = world.broadcast_bytes(problem.encode()).decode()
    if problem:
        raise ConfigError(problem)
    state = module.state_dict()
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    for value in tensors.values():
        world.broadcast_tensor(value)
    if len(tensors) < len(state):  # get_extra_state() may be anything that can be pickled
        extra = {name: value for name, value in state.items() if name not in tensors}
        module.load_state_dict({**tensors, **_of_rank_0(extra, world)})
    if world.rank == 0:
        say(0, f"beginning with the weights of {path}")


def _of_rank_0(extra: dict[str, object], world: World) -> dict[str, object]:
    buffer = io.BytesIO()
    if world.rank == 0:
        torch.save(extra, buffer)
    received = world.broadcast_bytes(buffer.getvalue())
    found: dict[str, object] = torch.load(io.BytesIO(received), weights_only=True)
    return found
