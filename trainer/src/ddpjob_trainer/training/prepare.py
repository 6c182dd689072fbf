"""What prepare() makes of a model and an optimizer, and the checks on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpjob_trainer.comm.teardown import holds_group
from ddpjob_trainer.comm.world import World
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.gradients.ddp import Averaging
from ddpjob_trainer.optim import zero
from ddpjob_trainer.optim.amp import autocast_forward, make_scaler
from ddpjob_trainer.optim.update import Updater, check_optimizer, check_scheduler, make_ema
from ddpjob_trainer.options import ModelOptions, Options
from ddpjob_trainer.snapshot.training_state import TrainingState
from ddpjob_trainer.training import incompatible


@dataclass(slots=True)
class Trained:
    """What the loop trains, and with what."""

    model: DistributedDataParallel
    updater: Updater
    state: TrainingState
    options: ModelOptions
    forwards: int = 0  # through the wrapper, with gradients, since the last backward


def make_trained(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    *,
    options: Options,
    model_options: ModelOptions,
    averaging: Averaging,
    world: World,
) -> Trained:
    """Check, move, wrap, register. Raises ConfigError."""
    _check(module, optimizer, scheduler, options, model_options, world)
    module.to(world.device)
    if model_options.sync_batchnorm:
        torch.nn.SyncBatchNorm.convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]
    ema = make_ema(module, model_options.ema)
    for part in (module, ema.module if ema is not None else None):
        if part is not None:
            autocast_forward(part, options.precision, world.device)
    _compile(module, options, model_options)
    scaler = make_scaler(options.precision, model_options.grad_scaler, world.device)
    model = averaging.wrap(module, model_options)
    state = TrainingState(module)
    is_zero = zero.is_zero(optimizer)
    if is_zero:
        holds_group(optimizer, "process_group")
    state.register("optimizer", zero.ZeroState(optimizer, world) if is_zero else optimizer)
    for name, obj in (
        ("scheduler", scheduler),
        ("scaler", scaler),
        ("ema", ema),
    ):
        if obj is not None:
            state.register(name, obj)
    updater = Updater(
        module, optimizer, scheduler, clip=model_options.clip_grad_norm, scaler=scaler, ema=ema
    )
    return Trained(model, updater, state, model_options)


def _check(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    options: Options,
    model_options: ModelOptions,
    world: World,
) -> None:
    if isinstance(module, DistributedDataParallel):
        raise ConfigError("give prepare() the plain model; it wraps it in DDP itself")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigError("the model has no parameter that requires a gradient")
    model_options.check()
    check_optimizer(module, optimizer)
    check_scheduler(optimizer, scheduler)
    incompatible.refuse(
        incompatible.Facts(
            options,
            model_options,
            world.device.type,
            has_sync_batchnorm=any(
                isinstance(part, torch.nn.SyncBatchNorm) for part in module.modules()
            ),
            overlapped_zero=zero.is_overlapped(optimizer),
        )
    )


def _compile(module: torch.nn.Module, options: Options, model_options: ModelOptions) -> None:
    """Compile in place: parameters keep their names, the module stays the user's."""
    if not model_options.compile:
        return
    if options.level != "off":
        # The warm-up runs backward twice on one graph; donated buffers would be gone by then.
        import torch._functorch.config as functorch

        setattr(functorch, "donated_buffer", False)  # noqa: B010
    from torch._dynamo import config, trace_rules

    backend = "inductor" if model_options.compile is True else model_options.compile
    # Module.compile() looks at frames that are not torch's own: a Sequential has none, and nothing
    # would be compiled, silently.
    with config.patch(wrap_top_frame=bool(trace_rules.check(module.forward))):
        module.compile(backend=backend)
