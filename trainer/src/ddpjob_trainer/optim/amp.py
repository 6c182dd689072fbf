"""Compute the model's forward under autocast, its outputs and the loss in fp32.

prepare() calls it. Parameters, gradients and the optimizer stay in fp32. fp16's small range needs a
GradScaler.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from ddpjob_trainer.data import fetch

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast_forward(module: torch.nn.Module, precision: str, device: torch.device) -> None:
    """Make the module compute its forward in that precision, for every caller."""
    if precision == "fp32":
        return
    dtype = _DTYPES[precision]
    patched = vars(module).get("forward")  # by the user, instead of the class's own

    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, dtype):
            if patched is None:
                result = type(self).forward(self, *args, **kwargs)
            else:
                result = patched(*args, **kwargs)
        return fetch.map_tensors(result, _to_float)

    # A bound method, not a closure over the module, so that a deep copy calls itself.
    module.forward = types.MethodType(forward, module)


def make_scaler(
    precision: str, given: torch.amp.GradScaler | None, device: torch.device
) -> torch.amp.GradScaler | None:
    """Return the scaler of a precision, None for others than fp16."""
    if precision != "fp16":
        return None
    return given or torch.amp.GradScaler(device.type)


def _to_float(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
