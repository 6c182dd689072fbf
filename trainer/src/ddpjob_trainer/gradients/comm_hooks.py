"""DDP communication hooks: gradients travel as bf16, fp16, or by PowerSGD.

PowerSGD remembers, per bucket, what it left out: a state that snapshots must hold. The warm-up
backward (determinism.py) goes around the hooks, so that it advances nothing.
"""

# Not `from __future__ import annotations`: DDP compares a hook's annotations with types.
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.nn.parallel import DistributedDataParallel

from ddpjob_trainer.comm.teardown import holds_group
from ddpjob_trainer.comm.world import World
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.options import ModelOptions
from ddpjob_trainer.state.stateful import Stateful


class Compression:
    """One model's hook. ``passive``: gradients travel as they are, and nothing is remembered."""

    def __init__(self, world: World) -> None:
        assert dist.group.WORLD is not None
        self.group: dist.ProcessGroup | None = dist.group.WORLD
        holds_group(self, "group")
        self.world = world
        self.passive = False

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Return a future of the averaged bucket."""
        raise NotImplementedError


class _Cast(Compression):
    def __init__(self, world: World, dtype: str) -> None:
        super().__init__(world)
        self._hook: Any = bf16_compress_hook if dtype == "bf16" else fp16_compress_hook

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = self._hook(self.group, bucket)
        return future


class PowerSgd(Compression):
    """torch's PowerSGD, with state_dict() and load_state_dict() for what it remembers."""

    def __init__(self, world: World, options: Mapping[str, Any]) -> None:
        super().__init__(world)
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

        try:
            self._state = power.PowerSGDState(self.group, **options)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"comm_hook_options: {error}") from error
        holds_group(self._state, "process_group")
        self._hook: Any = power.powerSGD_hook
        # Its callbacks start further collectives. With gloo they run on gloo's threads, so two
        # buckets under way could start theirs in different orders on different ranks.
        self._one_by_one = world.device.type == "cpu"

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Compress, and on gloo wait until this bucket is done."""
        future: torch.futures.Future[torch.Tensor] = self._hook(self._state, bucket)
        if self._one_by_one:
            future.wait()
        return future

    def state_dict(self) -> dict[str, Any]:
        """Return what all ranks remember; every rank must call it.

        What was left out differs from rank to rank and is gathered: as many bytes as the
        gradients, times the number of ranks.
        """
        state, gather = self._state, self.world.gather_tensor
        name, keys, position, has_gauss, gauss = state.rng.get_state(legacy=True)
        return {
            "iter": state.iter,
            "errors": {i: gather(error) for i, error in state.error_dict.items()},
            "p": dict(state.p_memory_dict),
            "q": dict(state.q_memory_dict),
            "rng": json.dumps([str(name), np.asarray(keys).tolist(), position, has_gauss, gauss]),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back this rank's part. Made by another number of ranks: what was left out is lost.

        The run then goes on as after a fresh start of PowerSGD's error feedback.
        """
        mine = self._state
        mine.iter = state["iter"]
        rank, device = self.world.rank, self.world.device
        for index, errors in state["errors"].items():
            same = len(errors) == self.world.size
            error = errors[rank] if same else torch.zeros_like(errors[0])
            mine.error_dict[index] = error.to(device)
        mine.p_memory_dict.update({i: p.to(device) for i, p in state["p"].items()})
        mine.q_memory_dict.update({i: q.to(device) for i, q in state["q"].items()})
        name, keys, position, has_gauss, gauss = json.loads(state["rng"])
        mine.rng.set_state((name, keys, position, has_gauss, gauss))


def _hook(state: Compression, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    if state.passive:
        assert state.group is not None, "no backward after the run is closed"
        future: torch.futures.Future[torch.Tensor] = allreduce_hook(state.group, bucket)
        return future
    return state.reduce(bucket)


def compress(
    model: DistributedDataParallel, world: World, options: ModelOptions
) -> Compression | None:
    """Give the model the hook that was asked for. Raises ConfigError."""
    if options.comm_hook is None:
        return None
    if options.comm_hook == "powersgd":
        compression: Compression = PowerSgd(world, options.comm_hook_options)
    else:
        compression = _Cast(world, options.comm_hook)
    model.register_comm_hook(compression, _hook)
    return compression


def memory_of(compression: Compression | None) -> Stateful | None:
    """What a snapshot must hold of it."""
    return compression if isinstance(compression, PowerSgd) else None
