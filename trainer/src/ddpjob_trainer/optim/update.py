"""The update at the end of a step: unscale, clip, optimizer, scaler, scheduler, EMA."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ddpjob_trainer.errors import ConfigError


class Updater:
    """Owns what changes the parameters. The same call on every rank, on equal gradients."""

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        *,
        clip: float | None,
        scaler: torch.amp.GradScaler | None,
        ema: AveragedModel | None,
    ) -> None:
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.scaler = scaler
        self.ema = ema
        self.grad_norm: torch.Tensor | None = None  # of the last step, before clipping
        self._module = module
        self._clip = clip
        self._parameters = [p for p in module.parameters() if p.requires_grad]

    def readings(self) -> dict[str, float]:
        """Gauges for the metrics, asked for now and then: on CUDA a float() waits for the GPU."""
        found = {"learning_rate": float(self.optimizer.param_groups[0]["lr"])}
        if self.grad_norm is not None:
            found["grad_norm"] = float(self.grad_norm)
        return found

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss to go backward from."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def measure(self) -> None:
        """Take the norm of all gradients together, if they are to be clipped."""
        if self._clip is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            self.grad_norm = torch.nn.utils.get_total_norm(gradients)

    def update(self) -> bool:
        """Apply the gradients and forget them. Return whether the parameters were updated.

        An overflow of fp16 leaves the update out; so the scheduler and the EMA stay, too.
        """
        if self._clip is not None and self.grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._clip, self.grad_norm)
        applied = self._step()
        if applied and self.scheduler is not None:
            self.scheduler.step()
        if applied and self.ema is not None:
            self.ema.update_parameters(self._module)
        self.forget()
        return applied

    def forget(self) -> None:
        """Drop the gradients, also those of parameters that the optimizer does not hold."""
        for parameter in self._parameters:
            parameter.grad = None

    def _step(self) -> bool:
        """Return whether the parameters were updated."""
        if self.scaler is None:
            self.optimizer.step()
            return True
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale() >= before  # it is lowered after an overflow only


def make_ema(module: torch.nn.Module, decay: float | None) -> AveragedModel | None:
    """Return an exponential moving average of the parameters; buffers are the newest."""
    if decay is None:
        return None
    ema = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(decay))  # type: ignore[no-untyped-call]
    ema.requires_grad_(False)
    return ema


def check_optimizer(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """An optimizer of another model would train nothing, silently."""
    known = set(module.parameters())
    for group in optimizer.param_groups:
        if any(parameter not in known for parameter in group["params"]):
            raise ConfigError("the optimizer holds parameters that are not the model's")


def check_scheduler(optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    """Raise ConfigError for a scheduler that commit() could not advance, or would in vain."""
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ConfigError(
            "prepare(scheduler=ReduceLROnPlateau): it needs a metric, which commit() does not"
            " have. Keep it with run.register('scheduler', scheduler) and call"
            " scheduler.step(metric) yourself"
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ConfigError("the scheduler belongs to another optimizer than prepare() was given")
