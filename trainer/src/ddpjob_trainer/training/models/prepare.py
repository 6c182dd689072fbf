"""Check, wrap and register the models and optimizers that prepare() is given."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from ddpjob_trainer.comm.world import World
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.gradients.ddp import Wrapped
from ddpjob_trainer.gradients.elastic import Averaging
from ddpjob_trainer.optim.update import (
    Clip,
    Hook,
    Unit,
    Updater,
    autocast_forward,
    check_parameters,
    held_by,
    make_ema,
    match_schedulers,
)
from ddpjob_trainer.options import ModelOptions, Options
from ddpjob_trainer.snapshot.training_state import TrainingState
from ddpjob_trainer.state.stateful import Modes, Stateful
from ddpjob_trainer.training.rescue import Boundary

# --- Options that do not go together --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Facts:
    """All that the table looks at."""

    options: Options
    model: ModelOptions
    device: str  # cpu, cuda
    has_sync_batchnorm: bool = False
    several_models: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """``first`` and ``second`` do not go together ``when`` it holds."""

    first: str
    second: str
    when: Callable[[Facts], bool]
    reason: str
    cure: str


def _elastic(facts: Facts) -> bool:
    return facts.options.level == "elastic"


REFUSALS = (
    Refusal(
        "comm_hook",
        "level='elastic'",
        lambda f: _elastic(f) and f.model.comm_hook is not None,
        "elastic adds gradients up in its own order, past DDP's buckets and their hooks",
        "Use comm_hook=None, or level='resume'",
    ),
    Refusal(
        "static_graph=True",
        "level='elastic'",
        lambda f: _elastic(f) and f.model.static_graph,
        "elastic never lets DDP synchronise, so DDP would never see the graph it is to keep",
        "Use static_graph=False, or level='resume'",
    ),
    Refusal(
        "static_graph=True",
        "micro_batches",
        lambda f: f.model.static_graph and f.options.micro_batches > 1,
        "DDP must see the graph in a backward that it synchronises, and the first would not be",
        "Use static_graph=False, or micro_batches=1",
    ),
    Refusal(
        "SyncBatchNorm",
        "level='elastic'",
        lambda f: _elastic(f) and (f.model.sync_batchnorm or f.has_sync_batchnorm),
        "its statistics depend on how many processes there are",
        "Use GroupNorm or LayerNorm, or level='resume'",
    ),
    Refusal(
        "SyncBatchNorm",
        "training on the CPU",
        lambda f: f.device == "cpu" and (f.model.sync_batchnorm or f.has_sync_batchnorm),
        "PyTorch has it for CUDA only",
        "Use sync_batchnorm=False and BatchNorm, or GroupNorm",
    ),
    Refusal(
        "several models",
        "level='elastic'",
        lambda f: _elastic(f) and f.several_models,
        "their losses run through one another, past the order in which shards are added up",
        "Use level='resume', or one model",
    ),
    Refusal(
        "several models",
        "comm_hook or static_graph",
        lambda f: f.several_models and (f.model.comm_hook is not None or f.model.static_graph),
        "their gradients are averaged after backward, past DDP's buckets, hooks and graph",
        "Use comm_hook=None and static_graph=False, or one model",
    ),
    Refusal(
        "grad_scaler",
        "a precision other than 'fp16'",
        lambda f: f.model.grad_scaler is not None and f.options.precision != "fp16",
        "only fp16's small range needs one",
        "Use grad_scaler=None, or precision='fp16'",
    ),
)


def refuse_incompatible(facts: Facts) -> None:
    """Raise ConfigError for the first combination in the table that is asked for."""
    for refusal in REFUSALS:
        if refusal.when(facts):
            raise ConfigError(
                f"{refusal.first} and {refusal.second} do not go together: {refusal.reason}."
                f" {refusal.cure}"
            )


# --- Compilers ------------------------------------------------------------------------------------


def compile_in_place(module: torch.nn.Module, options: ModelOptions) -> None:
    """Compile a module in place. Parameters keep their names, the module stays the user's."""
    if not options.compile:
        return
    backend = "inductor" if options.compile is True else options.compile
    from torch._dynamo import config, trace_rules

    # Module.compile() looks at frames that are not torch's own: a Sequential has none, and nothing
    # would be compiled, silently.
    with config.patch(wrap_top_frame=bool(trace_rules.check(module.forward))):
        module.compile(backend=backend)


def keep_bits(level: str, device: torch.device) -> None:
    """Set the compilers, before anything runs, to keep the bits of all that they compile."""
    if level == "off" or "torch._dynamo" not in sys.modules:  # else there is nothing to compile
        return
    # The warm-up runs backward twice on one graph; donated buffers would be gone by then.
    import torch._functorch.config as functorch

    setattr(functorch, "donated_buffer", False)  # noqa: B010
    if device.type == "cpu":
        return
    # It would choose kernels by how long they take, and with them the order of additions.
    import torch._inductor.config as inductor

    if hasattr(inductor, "deterministic"):
        setattr(inductor, "deterministic", True)  # noqa: B010


# --- prepare() ------------------------------------------------------------------------------------

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Model:
    """One prepared model. ``name`` begins its parameters' names where there are several."""

    name: str
    module: torch.nn.Module
    wrapped: Wrapped
    options: ModelOptions
    ema: AveragedModel | None

    def weights(self, *, ema: bool) -> torch.nn.Module:
        """Return the bare model or its moving average. Raises ConfigError if there is none."""
        if not ema:
            return self.module
        if self.ema is None:
            raise ConfigError("there is no moving average: use prepare(ema=0.999)")
        average: torch.nn.Module = self.ema.module
        return average


class PreparedModels:
    """The loop's models and their means: everything given to prepare(), in one call or several."""

    def __init__(self, options: Options, averaging: Averaging, world: World) -> None:
        self._options = options
        self._averaging = averaging
        self._world = world
        self._own: set[str] = set()  # names of what prepare() has registered
        self.models: list[Model] = []
        self.updater = Updater()
        self.state = TrainingState(torch.nn.Module())
        self.modes = Modes({})
        self.forwards = 0  # through a wrapper, with gradients, since the last update

    def add(
        self,
        models: Mapping[str, torch.nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
        schedulers: Sequence[Any],
        options: ModelOptions,
        before_update: Hook | None,
    ) -> list[Wrapped]:
        """Check, move, wrap, register. Raises ConfigError."""
        if before_update is not None and not callable(before_update):
            raise ConfigError(f"before_update={before_update!r} must be a function")
        found = match_schedulers(list(optimizers.values()), schedulers)
        if options.scheduler_every == "epoch" and not any(found):
            raise ConfigError("scheduler_every='epoch' needs prepare(scheduler=...)")
        self._check(models, optimizers, options)
        wrapped = [self._add_model(name, module, options) for name, module in models.items()]
        parameters = dict.fromkeys(p for module in models.values() for p in module.parameters())
        held = held_by(optimizers.values())  # another's share is clipped with that
        trained = [p for p in parameters if p.requires_grad and p in held]
        clip = Clip(options.clip_grad_norm, trained)
        for (name, optimizer), scheduler in zip(optimizers.items(), found, strict=True):
            place_state(optimizer)
            self._register(_name("optimizer", name, "optimizer"), optimizer)
            if scheduler is not None:
                self._register(_name("scheduler", name, "optimizer"), scheduler)
            self.updater.units.append(Unit(optimizer, scheduler, clip, options.scheduler_every))
        self._add_scaler(options.grad_scaler)
        if before_update is not None:
            self.updater.hooks.append((before_update, set(parameters)))
        self._join()
        return wrapped

    @property
    def module(self) -> torch.nn.Module:
        """Return the model, or all of them as parts of one module."""
        return self.state.module

    def model_of(self, given: torch.nn.Module | None) -> Model:
        """Return the model that a caller means, wrapped or not. Raises ConfigError."""
        if given is None and len(self.models) > 1:
            raise ConfigError("there are several models: say which one, model=...")
        for model in self.models:
            if given is None or given is model.module or given is model.wrapped:
                return model
        raise ConfigError("model=... is none that prepare() was given")

    def steady_buffers(self) -> list[torch.Tensor]:
        """Return the buffers that are not persistent, as all ranks can share them."""
        return [t for m in self.models if m.wrapped.steady for t in m.wrapped.steady.tensors()]

    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Return them by their names in a snapshot."""
        return {
            name: obj
            for name, obj in self.state.registered.items()
            if name in self._own and isinstance(obj, torch.optim.Optimizer)
        }

    def compared(self) -> dict[str, Stateful]:
        """Return what is registered and equal on all ranks: averages, and the script's own."""
        registered = self.state.registered
        return {
            name: obj
            for name, obj in registered.items()
            if name not in self._own or isinstance(obj, AveragedModel)
        }

    def boundary(self, best: Callable[[], Mapping[str, Any]]) -> Boundary:
        """Return what keeps the newest step boundary of all this, once begin() was called."""
        return Boundary(self.state, self._own, self.modes, best)

    def begin(self) -> None:
        """Begin the loop: what it switches from here on is in the snapshots."""
        keep_bits(self._options.level, self._world.device)
        self.state.begin()
        found: dict[str, torch.nn.Module] = {f"model {m.name}": m.wrapped for m in self.models}
        for name, obj in (self.state.registered | self.state.per_rank).items():
            if isinstance(obj, torch.nn.Module) and name not in self._own:
                found[f"registered {name}"] = obj
        self.modes = Modes(found)

    # --- One by one ------------------------------------------------------------------------

    def _add_model(self, name: str, module: torch.nn.Module, options: ModelOptions) -> Wrapped:
        move_to(module, self._world.device)
        module.zero_grad(set_to_none=True)  # what is left of before is not to be added to
        if options.sync_batchnorm:
            torch.nn.SyncBatchNorm.convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]
        ema = make_ema(module, options.ema)
        for part in (module, ema.module if ema is not None else None):
            if part is not None:
                autocast_forward(part, self._options.precision, self._world.device)
        compile_in_place(module, options)
        wrapped = self._averaging.wrap(module, options)
        self.models.append(Model(name, module, wrapped, options, ema))
        if ema is not None:
            self.updater.emas.append((module, ema))
            self._register(_name("ema", name, "model"), ema)
            self.state.averages.add(_name("ema", name, "model"))
        return wrapped

    def _add_scaler(self, given: torch.amp.GradScaler | None) -> None:
        """Make one scaler for the whole run. Its scale is that of all losses."""
        updater = self.updater
        if updater.scaler is None and self._options.precision == "fp16":
            updater.scaler = given or torch.amp.GradScaler(self._world.device.type)
            self._register("scaler", updater.scaler)
        elif updater.scaler is not None and given not in (None, updater.scaler):
            raise ConfigError("a run has one grad_scaler: give it to the first prepare() only")

    def _register(self, name: str, obj: Stateful) -> None:
        self.state.register(name, obj)
        self._own.add(name)

    def _join(self) -> None:
        """Join all models. A single one's parameters keep their names; several prefix theirs."""
        if len(self.models) == 1:
            self.state.module = self.models[0].module
        else:
            self.state.module = torch.nn.Module()
            for model in self.models:
                # Not add_module(), to which a name like "train" is taken.
                self.state.module._modules[model.name] = model.module
        self.updater.trains(dict(self.state.module.named_parameters()))

    # --- Checks ----------------------------------------------------------------------------

    def _check(
        self,
        models: Mapping[str, torch.nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
        options: ModelOptions,
    ) -> None:
        options.check()
        known = [*self.models, *models]
        for name, module in models.items():
            self._check_model(name, module)
        for optimizer in optimizers.values():
            if any(optimizer is unit.optimizer for unit in self.updater.units):
                raise ConfigError("prepare() was given the same optimizer twice")
        named = {
            (f"{prefix}.{name}" if len(known) > 1 else name): parameter
            for prefix, module in models.items()
            for name, parameter in module.named_parameters()
        }
        earlier = [unit.optimizer for unit in self.updater.units]
        check_parameters(named, list(optimizers.values()), earlier)
        parts = chain.from_iterable(module.modules() for module in models.values())
        has_sync = any(isinstance(part, torch.nn.SyncBatchNorm) for part in parts)
        for one in (*(model.options for model in self.models), options):
            device = self._world.device.type
            refuse_incompatible(Facts(self._options, one, device, has_sync, len(known) > 1))

    def _check_model(self, name: str, module: torch.nn.Module) -> None:
        if isinstance(module, DistributedDataParallel):
            raise ConfigError("give prepare() the plain model; it wraps it in DDP itself")
        if any(model.module is module for model in self.models):
            raise ConfigError(
                "prepare() was given the same model twice: give all its optimizers at once, as in"
                " run.prepare(model, [first, second])"
            )
        if any(model.name == name for model in self.models):
            raise ConfigError(f"prepare() was given two models of the name {name!r}")
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise ConfigError(
                "the model has no parameter that requires a gradient: freeze one that learns later"
                " in the loop; leave others out, or run.register(name, model) those that change"
            )


def named(value: Any, kind: type[T], base: str, taken: int) -> dict[str, T]:
    """Give each of one, several in a sequence, or several by name its name. Raises ConfigError.

    ``taken``: how many there are already.
    """
    if isinstance(value, kind):
        value = [value]
    if isinstance(value, Mapping):
        found = dict(value)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        names = (f"{base}{number if number > 1 else ''}" for number in count(taken + 1))
        found = dict(zip(names, value, strict=False))
    else:
        found = {}
    for name, one in found.items():
        if not isinstance(one, kind):
            raise ConfigError(f"prepare() got a {type(one).__name__} where it needs {_kinds(kind)}")
        if not isinstance(name, str) or not name or "." in name or "/" in name:
            raise ConfigError(f"prepare(): {name!r} is no name: use letters, such as 'generator'")
    if not found:
        raise ConfigError(f"prepare() needs {_kinds(kind)}, not {type(value).__name__}")
    if len({id(one) for one in found.values()}) < len(found):
        raise ConfigError(f"prepare() was given the same {base} twice")
    return found


def shaped_like(given: Any, values: Sequence[T]) -> Any:
    """Return the values as prepare() was given theirs: one, by name, or in a sequence."""
    if isinstance(given, Mapping):
        return dict(zip(given, values, strict=True))
    if isinstance(given, Sequence) and not isinstance(given, torch.nn.Module):
        return list(values)
    return values[0]


def move_to(module: torch.nn.Module, device: torch.device) -> None:
    """Move a model to this process's device, unless its user has put it on another, or several."""
    devices = {tensor.device.type for tensor in (*module.parameters(), *module.buffers())}
    if devices <= {"cpu"}:
        module.to(device)


def place_state(optimizer: torch.optim.Optimizer) -> None:
    """Move the state that an optimizer has made already, as Adagrad does, to its parameters.

    Counters stay where torch keeps them: on the CPU, unless a kernel reads them.
    """
    for group in optimizer.param_groups:
        kernel_counts = group.get("capturable") or group.get("fused")
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                moves = isinstance(value, torch.Tensor) and value.device != parameter.device
                if moves and (name != "step" or kernel_counts):
                    state[name] = value.to(parameter.device)


def _kinds(kind: type) -> str:
    return f"a {kind.__module__.partition('.')[0]} {kind.__name__}, or several in a list or dict"


def _name(what: str, name: str, base: str) -> str:
    """Name a part of the model or optimizer ``name``; ``base`` is the first one's name."""
    return what if name == base else f"{what}.{name}"
