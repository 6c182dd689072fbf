"""Average a model's parameters with exponentially decaying weights."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from ddpjob_trainer.errors import ConfigError


class Average(AveragedModel):
    """torch's average, bit by bit, without its wait for the GPU."""

    def __init__(self, module: torch.nn.Module, decay: float) -> None:
        self._average: Any = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        super().__init__(module, multi_avg_fn=self._average)

    @torch.no_grad()
    def update_parameters(self, model: torch.nn.Module) -> None:
        """Take in the model's current parameters; copy its buffers."""
        if not int(self.n_averaged):  # the counter is on the CPU, whatever the model's device
            super().update_parameters(model)
            return
        pairs: Any = [[p.detach() for p in module.parameters()] for module in (self, model)]
        for (ours, others), _ in _group_tensors_by_device_and_dtype(pairs).values():
            self._average(ours, others, self.n_averaged)
        for buffer, newest in zip(self.module.buffers(), model.buffers(), strict=True):
            buffer.detach().copy_(newest.detach(), non_blocking=True)
        self.n_averaged += 1


def make_ema(module: torch.nn.Module, decay: float | None) -> Average | None:
    """Return an exponential moving average of the parameters; its buffers are the newest.

    Raises ConfigError for a model that cannot be copied.
    """
    if decay is None:
        return None
    try:
        ema = Average(module, decay)
    except RuntimeError as error:
        if "deepcopy" not in str(error):
            raise
        raise ConfigError(
            "ema: the model cannot be copied, since a parametrization such as"
            " torch.nn.utils.weight_norm keeps a computed tensor in it: use"
            " torch.nn.utils.parametrizations.weight_norm, or ema=None"
        ) from error
    return ema.requires_grad_(False)


def begin_ema(module: torch.nn.Module, ema: AveragedModel) -> None:
    """Start an average without updates from the current weights."""
    if not int(ema.n_averaged):
        ema.module.load_state_dict(module.state_dict())
