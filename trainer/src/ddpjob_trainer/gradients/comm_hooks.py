"""Send gradients as bf16 or fp16, in half the bytes, by DDP's communication hooks.

Both keep no state from step to step and add in a fixed order, so they resume bit for bit. PowerSGD
is left out: its state differs on every rank, and runs with it were seen to end in other bits.
"""

# Not `from __future__ import annotations`: DDP compares a hook's annotations with types.
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.nn.parallel import DistributedDataParallel

from ddpjob_trainer.comm.world import holds_group
from ddpjob_trainer.options import ModelOptions


class _Cast:
    """torch's hook and the group that it sends through."""

    def __init__(self, dtype: str) -> None:
        self.group: dist.ProcessGroup | None = dist.group.WORLD
        holds_group(self, "group")
        self.hook: Any = bf16_compress_hook if dtype == "bf16" else fp16_compress_hook


def _hook(state: _Cast, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    assert state.group is not None, "no backward after the run is closed"
    future: torch.futures.Future[torch.Tensor] = state.hook(state.group, bucket)
    return future


def compress(model: DistributedDataParallel, options: ModelOptions) -> None:
    """Register the chosen hook with the model, if there is one."""
    if options.comm_hook is not None:
        model.register_comm_hook(_Cast(options.comm_hook), _hook)
