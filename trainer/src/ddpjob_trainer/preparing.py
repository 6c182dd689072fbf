"""What prepare() makes of a model and an optimizer, and the checks on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpjob_trainer.averaging import Averaging
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.options import ModelOptions
from ddpjob_trainer.state import TrainingState


@dataclass(slots=True)
class Trained:
    """What the loop trains, and with what."""

    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    scheduler: Any
    options: ModelOptions
    state: TrainingState
    forwards: int = 0  # through the wrapper, with gradients, since the last backward

    grad_norm: torch.Tensor | None = None  # before the last clipping

    def readings(self) -> dict[str, float]:
        """Gauges for the metrics, asked for now and then: on CUDA a float() waits for the GPU."""
        found = {"learning_rate": float(self.optimizer.param_groups[0]["lr"])}
        if self.grad_norm is not None:
            found["grad_norm"] = float(self.grad_norm)
        return found

    def update(self) -> None:
        """Clip, step, forget the gradients."""
        if self.options.clip_grad_norm is not None:
            self.grad_norm = torch.nn.utils.clip_grad_norm_(
                self.model.parameters(), self.options.clip_grad_norm
            )
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)


def make_trained(
    averaging: Averaging,
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    options: ModelOptions,
    device: torch.device,
) -> Trained:
    """Check, move, wrap, register. Raises ConfigError."""
    if isinstance(module, DistributedDataParallel):
        raise ConfigError("give prepare() the plain model; it wraps it in DDP itself")
    _check_optimizer(module, optimizer)
    module.to(device)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigError("the model has no parameter that requires a gradient")
    state = TrainingState(module)
    state.register("optimizer", optimizer)
    if scheduler is not None:
        state.register("scheduler", scheduler)
    return Trained(averaging.wrap(module, options), optimizer, scheduler, options, state)


def _check_optimizer(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """An optimizer of another model would train nothing, silently."""
    known = set(module.parameters())
    for group in optimizer.param_groups:
        if any(parameter not in known for parameter in group["params"]):
            raise ConfigError("the optimizer holds parameters that are not the model's")
