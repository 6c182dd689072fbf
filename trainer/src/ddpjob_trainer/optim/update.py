"""Update the parameters in a step: unscale, clip, optimizers, scaler, schedulers, EMA.

Loop calls it with equal gradients on every rank. A run may have several optimizers, and a step may
update with some of them only; the others do not advance.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, SupportsFloat

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from ddpjob_trainer.data import fetch
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.gpu.accelerator import Accelerator

# --- Precision ------------------------------------------------------------------------------------
# prepare() calls it. Parameters, gradients and the optimizer stay in fp32. fp16's small range
# needs a GradScaler.


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


# --- EMA ------------------------------------------------------------------------------------------


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
    """Return an exponential moving average of the parameters; its buffers are the newest."""
    return None if decay is None else Average(module, decay).requires_grad_(False)


def begin_ema(module: torch.nn.Module, ema: AveragedModel) -> None:
    """Start an average without updates from the current weights."""
    if not int(ema.n_averaged):
        ema.module.load_state_dict(module.state_dict())


# --- The update -----------------------------------------------------------------------------------

Parameters = list[torch.nn.Parameter]
#: Gets the parameters that an update is about to change, by their full names.
Hook = Callable[[Mapping[str, torch.nn.Parameter]], object]


@dataclass(slots=True, eq=False)
class Clip:
    """The parameters of one prepare(): an update clips their gradients by one norm."""

    bound: float | None
    parameters: Parameters  # in the order of the models
    norm: torch.Tensor | None = None  # of the last update, before clipping


@dataclass(slots=True, eq=False)
class Unit:
    """One optimizer with its scheduler. ``every``: what that counts; None: steps."""

    optimizer: torch.optim.Optimizer
    scheduler: Any
    clip: Clip
    every: str | None = None
    parameters: Parameters = field(init=False)

    def __post_init__(self) -> None:
        self.parameters = list(held_by([self.optimizer]))

    def has_gradients(self) -> bool:
        """Return whether a backward has reached one of its parameters."""
        return any(parameter.grad is not None for parameter in self.parameters)


class Updater:
    """Changes the parameters. Every rank makes the same calls, on equal gradients."""

    def __init__(self) -> None:
        self.units: list[Unit] = []
        self.scaler: torch.amp.GradScaler | None = None
        self.emas: list[tuple[torch.nn.Module, AveragedModel]] = []
        self.applying = False  # optimizers, schedulers, averages and scaler work now as they should
        #: The hook of each prepare() that has one, and its parameters.
        self.hooks: list[tuple[Hook, set[torch.nn.Parameter]]] = []
        self.parameters: Parameters = []  # of all models
        self._norm: SupportsFloat | None = None
        self._named: Mapping[str, torch.nn.Parameter] = {}
        self._unheld: dict[str, torch.nn.Parameter] = {}

    def trains(self, named: Mapping[str, torch.nn.Parameter]) -> None:
        """Register the models' parameters, under their full names."""
        held = held_by(unit.optimizer for unit in self.units)
        self.parameters = list(named.values())
        self._named = named
        self._unheld = {name: p for name, p in named.items() if p not in held}

    def readings(self, accelerator: Accelerator) -> dict[str, float]:
        """Return gauges for the metrics, read now and then.

        A GPU's norm is that of the call before, so that the host need not wait.
        """
        rate = self.units[0].optimizer.param_groups[0].get("lr")
        found = {} if not isinstance(rate, SupportsFloat) else {"learning_rate": float(rate)}
        norms = [unit.clip.norm for unit in self.units if unit.clip.norm is not None]
        if norms:
            before, self._norm = self._norm, accelerator.soon({"": norms[0]})[""]
            shown = before if accelerator.queues and before is not None else self._norm
            found["grad_norm"] = float(shown)
        return found

    def find(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[Unit]:
        """Return the units of these optimizers. Raises ConfigError for one of another run."""
        known = {unit.optimizer: unit for unit in self.units}
        for optimizer in optimizers:
            if optimizer not in known:
                raise ConfigError(
                    f"step.update() was given an optimizer, {type(optimizer).__name__}, that"
                    " prepare() was not: give it those that prepare() returned"
                )
        return [known[optimizer] for optimizer in dict.fromkeys(optimizers)]

    def check_gradients(self) -> None:
        """Raise ConfigError where trained parameters and those with gradients differ."""
        for unit in self.units:
            if sum(len(g["params"]) for g in unit.optimizer.param_groups) != len(unit.parameters):
                raise ConfigError(
                    f"{type(unit.optimizer).__name__} got other parameters after prepare(): their"
                    " gradients would not be averaged over the ranks. Make them a part of the model"
                    " and call add_param_group() before prepare()"
                )
        for name, parameter in self._unheld.items():
            if parameter.grad is not None:
                raise ConfigError(
                    f"{name!r} was frozen when prepare() was called, and now it has a gradient that"
                    " no optimizer applies: leave it frozen, or give prepare() an optimizer that"
                    " holds it"
                )

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the scaled loss to call backward() on."""
        if self.scaler is None:
            return loss
        self.applying = True
        try:
            return self.scaler.scale(loss)
        finally:
            self.applying = False

    def measure(self, units: Sequence[Unit]) -> list[tuple[Parameters, torch.Tensor | None]]:
        """Return the parameters to update, in groups with their gradients' norm for clipping."""
        self._unscale(unit for unit in units if unit.clip.bound is not None)
        return self._norms(units)

    def _unscale(self, units: Iterable[Unit]) -> None:
        if self.scaler is not None:
            for unit in units:
                self.scaler.unscale_(unit.optimizer)

    def _norms(self, units: Sequence[Unit]) -> list[tuple[Parameters, torch.Tensor | None]]:
        found = []
        for clip, parameters in self._clips(units):
            if clip.bound is not None:
                gradients = [p.grad for p in parameters if p.grad is not None]
                clip.norm = torch.nn.utils.get_total_norm(gradients)
            found.append((parameters, clip.norm))
        return found

    def multiply(self, units: Sequence[Unit], factor: float) -> None:
        """Multiply the gradients of these units, and the norms computed from them."""
        for clip, parameters in self._clips(units):
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
            if clip.norm is not None:
                clip.norm = clip.norm * factor

    def before_update(self, units: Sequence[Unit]) -> list[tuple[Parameters, torch.Tensor | None]]:
        """Call prepare()'s hooks, which may change the gradients; return what measure() does."""
        self._unscale(unit for unit in units if unit.clip.bound is None)  # else it is done
        if self.scaler is not None and any(map(self._overflowed, units)):
            return []  # the update will be skipped
        held = held_by(unit.optimizer for unit in units)
        for hook, parameters in self.hooks:
            chosen = {
                name: parameter
                for name, parameter in self._named.items()
                if parameter in parameters and parameter in held and parameter.grad is not None
            }
            if chosen:
                with torch.no_grad():
                    hook(chosen)
        return self._norms(units)

    def update(self, units: Sequence[Unit]) -> bool:
        """Apply the gradients, then drop all; return whether parameters were updated.

        An overflow of fp16 skips an optimizer, and with it its scheduler and the EMA.
        """
        for clip, parameters in self._clips(units):
            if clip.bound is not None and clip.norm is not None:
                torch.nn.utils.clip_grads_with_norm_(parameters, clip.bound, clip.norm)
        self.applying = True
        try:
            applied = [unit for unit in units if self._step(unit)]
            if self.scaler is not None and units:
                self.scaler.update()
            self._advance(applied)
        finally:
            self.applying = False
        self.forget()
        return bool(applied)

    def end_epoch(self) -> None:
        """Advance the schedulers that count epochs, whether or not its last step has updated."""
        self.applying = True
        try:
            for unit in self.units:
                if unit.scheduler is not None and unit.every == "epoch":
                    unit.scheduler.step()
        finally:
            self.applying = False

    def check_schedules(self, epoch_steps: int | None, total: int) -> list[str]:
        """Return what to say where nobody has chosen what schedules count.

        A warning for each that fits the run's epochs and not its steps, a word where none can tell:
        of a run of fewer epochs than a schedule was made for, or of one without a length.

        ``epoch_steps``: None where nobody knows when an epoch ends. Raises ConfigError there for a
        scheduler that counts epochs.
        """
        units = [unit for unit in self.units if unit.scheduler is not None]
        cure = "run.prepare(..., scheduler_every='epoch')"
        if epoch_steps is None:
            cure = (
                "keep it with run.register('scheduler', scheduler), and call its step() when"
                " step.epoch is another than in the step before"
            )
            if any(unit.every == "epoch" for unit in units):
                what = "prepare(scheduler_every='epoch'): a stream does not say where an epoch ends"
                raise ConfigError(f"{what}: {cure}")
        epochs, found = -(-total // epoch_steps) if epoch_steps else 0, []
        for unit in units:
            name, length = type(unit.scheduler).__name__, _length(unit.scheduler)
            if unit.every is not None or 2 * length > total or epochs in (1, total):
                continue
            if 0 < length <= epochs:
                found.append(
                    f"warning: {name} advances at every step, and its schedule has the length"
                    f" {length}: that fits the {epochs} epochs of this run and not its {total}"
                    f" steps. If it counts epochs: {cure}, else 'step'"
                )
            else:
                times = f"{epochs} times, with {cure}" if epochs else cure
                found.append(
                    f"{name} advances at every step, {total} times in this run; by the epoch,"
                    f" {times}"
                )
        return found

    def _advance(self, applied: Sequence[Unit]) -> None:
        for unit in applied:
            if unit.scheduler is not None and unit.every != "epoch":
                unit.scheduler.step()
        if self.emas and applied:
            changed = held_by(unit.optimizer for unit in applied)
            for module, ema in self.emas:
                if any(parameter in changed for parameter in module.parameters()):
                    ema.update_parameters(module)

    def forget(self) -> None:
        """Drop all gradients, also in models that the loss has only passed through."""
        for parameter in self.parameters:
            parameter.grad = None

    def _step(self, unit: Unit) -> bool:
        """Return whether the parameters were updated."""
        if self.scaler is None:
            unit.optimizer.step()
            return True
        # As step() does; asked before the update, so that a host waits less for a GPU.
        if not self.is_unscaled(unit):
            self.scaler.unscale_(unit.optimizer)
        applied = not self._overflowed(unit)
        self.scaler.step(unit.optimizer)
        return applied

    def is_unscaled(self, unit: Unit) -> bool:
        """Return whether the script itself has called the scaler's unscale_()."""
        states = dict(getattr(self.scaler, "_per_optimizer_states", {}))  # a defaultdict
        found = states.get(id(unit.optimizer), {})
        return getattr(found.get("stage"), "name", "") == "UNSCALED"

    def _overflowed(self, unit: Unit) -> bool:
        """Return whether a gradient of this unit overflowed; the scale would show it later."""
        assert self.scaler is not None
        found = self.scaler._found_inf_per_device(unit.optimizer)
        return any(float(value) for value in found.values())

    def _clips(self, units: Sequence[Unit]) -> list[tuple[Clip, Parameters]]:
        """Return the parameters of these units by clipping group, in the models' order."""
        found = []
        for clip in dict.fromkeys(unit.clip for unit in units):
            if all(unit in units for unit in self.units if unit.clip is clip):
                found.append((clip, clip.parameters))
                continue
            held = held_by(unit.optimizer for unit in units if unit.clip is clip)
            found.append((clip, [p for p in clip.parameters if p in held]))
        return found


def held_by(optimizers: Iterable[torch.optim.Optimizer]) -> dict[torch.nn.Parameter, None]:
    """Return the parameters that optimizers hold, in their order."""
    return {
        p: None for optimizer in optimizers for g in optimizer.param_groups for p in g["params"]
    }


def check_parameters(
    named: Mapping[str, torch.nn.Parameter],
    optimizers: Sequence[torch.optim.Optimizer],
    earlier: Iterable[torch.optim.Optimizer] = (),
) -> None:
    """Check that optimizers hold only the models' parameters, and all trained ones.

    ``earlier``: optimizers of former calls, which may hold parameters shared with former models.
    Raises ConfigError.
    """
    known = set(named.values())
    for optimizer in optimizers:
        if _needs_arguments(optimizer):
            raise ConfigError(
                f"{type(optimizer).__name__}.step() needs a closure that computes the loss again"
                " and again within one update, which commit() does not have: use an optimizer that"
                " takes one gradient per update, such as AdamW or SGD; of SAM the base optimizer,"
                " as in Recipes of docs/guides/data.md"
            )
        if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
            raise ConfigError(
                "ZeroRedundancyOptimizer keeps a part of its state on each rank, and a snapshot"
                " holds one state for all ranks: use the optimizer that it was given, such as"
                " torch.optim.AdamW; it makes the same weights and takes more memory"
            )
        if any(parameter not in known for parameter in held_by([optimizer])):
            raise ConfigError(
                "the optimizer holds parameters that are not the model's: give prepare() all models"
                " that it trains, as in run.prepare([model, other], optimizer)"
            )
    held = held_by([*optimizers, *earlier])
    for name, parameter in named.items():
        if parameter.requires_grad and parameter not in held:
            raise ConfigError(
                f"no optimizer given to prepare() holds the parameter {name!r}, so nothing would"
                " train it: give it to one, or to a second in run.prepare(model, [first, second]),"
                " or freeze it with requires_grad_(False)"
            )


def _needs_arguments(obj: Any) -> bool:
    """Return whether step() needs arguments, as LBFGS's does."""
    try:  # of the class: a scheduler hides an optimizer's own step() behind another
        inspect.signature(type(obj).step).bind(obj)
    except TypeError:
        return True
    return False


#: Where torch's schedulers keep their lengths: CosineAnnealingLR, LinearLR, OneCycleLR, StepLR,
#: CosineAnnealingWarmRestarts, MultiStepLR and SequentialLR.
_LENGTHS = ("T_max", "total_iters", "total_steps", "step_size", "T_0", "milestones", "_milestones")


def _length(scheduler: Any) -> int:
    """Return a schedule's length, the longest of those that it chains; 0: it has none."""
    if not isinstance(scheduler, LRScheduler):
        return 0
    held = vars(scheduler)
    found = [_length(part) for part in held.get("_schedulers", ())]
    for value in (held.get(name) for name in _LENGTHS):
        numbers = value if isinstance(value, Iterable) else (value,)
        found += [int(one) for one in numbers if isinstance(one, int | float)]
    return max(found, default=0)


def match_schedulers(
    optimizers: Sequence[torch.optim.Optimizer], schedulers: Sequence[Any]
) -> list[Any]:
    """Return each optimizer's scheduler or None. Raises ConfigError."""
    found: dict[int, Any] = {}
    for place, scheduler in enumerate(schedulers):
        if scheduler is None:
            continue
        owner = getattr(scheduler, "optimizer", None)
        if owner is None and len(schedulers) == len(optimizers):  # it has no reference
            owner = optimizers[place]
        if owner is None or owner not in optimizers:
            raise ConfigError("the scheduler belongs to another optimizer than prepare() was given")
        if hasattr(type(scheduler), "step") and _needs_arguments(scheduler):
            raise ConfigError(
                f"prepare(scheduler={type(scheduler).__name__}): commit() calls its step() without"
                " arguments, and it needs some, as ReduceLROnPlateau needs a metric. Keep it with"
                " run.register('scheduler', scheduler) and call it yourself, after step.commit()"
            )
        if id(owner) in found:
            raise ConfigError(
                "prepare() was given two schedulers for one optimizer: chain them with torch's"
                " ChainedScheduler or SequentialLR"
            )
        found[id(owner)] = scheduler
    return [found.get(id(optimizer)) for optimizer in optimizers]
