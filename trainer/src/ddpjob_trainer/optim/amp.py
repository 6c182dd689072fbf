"""Compute the model's forward under autocast, its outputs and the loss in fp32.

prepare() calls it. Parameters, gradients and the optimizer stay in fp32. fp16's small range needs a
GradScaler.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from ddpjob_trainer.data import fetch


def autocast_forward(module: torch.nn.Module, precision: str, device: torch.device) -> None:
    """Make the module compute its forward in that precision, for every caller."""
    if precision == "fp32":
        return
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    patched = vars(module).get("forward")  # by the user, instead of the class's own

    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, dtype):
            compute = types.MethodType(type(self).forward, self) if patched is None else patched
            result = compute(*args, **kwargs)
        return fetch.map_tensors(result, _to_float)

    # A bound method, not a closure over the module, so that a deep copy calls itself.
    module.forward = types.MethodType(forward, module)


def _to_float(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
