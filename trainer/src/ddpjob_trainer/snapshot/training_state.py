"""Capture the training state for a snapshot, put it back, and hash it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ddpjob_trainer.data import generators
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.snapshot.restore.load import Loader, Source, check_tensors, fitting
from ddpjob_trainer.snapshot.save.layout import Captured
from ddpjob_trainer.state.codec import (
    DTYPES,
    Exact,
    Flat,
    flatten,
    has_memory,
    raw,
    unflatten,
)
from ddpjob_trainer.state.stateful import DictState, Keepable, Stateful, give, stateful

#: The text of a rank's own state is filled up to a multiple of this: numbers differ in length,
#: and what keeps its structure need not be divided and laid out again.
_TREE_BYTES = 4096


class _Inventory:
    """The parts of a model. Asked once: a large one has so many modules that walks show.

    Parameters and buffers come under every name they have; tied ones come several times.
    ``transient``: non-persistent buffers, caches that forward may make, drop and reshape.
    ``extra``: the modules that keep state in get_extra_state().
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.parameters = dict(module.named_parameters(remove_duplicate=False))
        self.tensors: dict[str, torch.Tensor] = {
            **self.parameters,
            **dict(module.named_buffers(remove_duplicate=False)),
        }
        self.transient: set[str] = set()
        self.extra: dict[str, torch.nn.Module] = {}
        usual, known = torch.nn.Module.get_extra_state, set()
        for path, part in module.named_modules(remove_duplicate=False):
            prefix = f"{path}." if path else ""
            self.transient.update(prefix + name for name in part._non_persistent_buffers_set)
            if type(part).get_extra_state is not usual and id(part) not in known:
                known.add(id(part))
                self.extra[path] = part

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of all that must be in a snapshot."""
        return {n: t.shape for n, t in self.tensors.items() if n not in self.transient}


def weights_sha256(module: torch.nn.Module) -> str:
    """Hash names, types, shapes and bytes of all parameters and buffers."""
    return _sha256(_Inventory(module).tensors.items())


def _sha256(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, tensor in tensors:
        plain = tensor.detach()
        if plain.is_complex():
            plain = torch.view_as_real(plain.resolve_conj())
        digest.update(json.dumps([name, DTYPES[plain.dtype], list(plain.shape)]).encode())
        digest.update(raw(plain))
    return digest.hexdigest()


def flat_sha256(flat: Flat) -> str:
    """Hash a flattened state: the JSON and the tensors, whether or not some share memory."""
    tensors = flat.tensors | {name: flat.tensors[of] for name, of in flat.aliases.items()}
    digest = hashlib.sha256(json.dumps(flat.tree, sort_keys=True).encode())
    digest.update(_sha256(sorted(tensors.items())).encode())
    return digest.hexdigest()


def _own(rank: int, flat: Flat) -> dict[str, torch.Tensor]:
    """Name generators' and per-rank objects' states as no other rank does."""
    # The generators' state is JSON already, and its thousand numbers would take flatten() long.
    text = json.dumps([{**flat.tree, "rng": generators.capture()}, flat.aliases]).encode()
    text += b" " * (-len(text) % _TREE_BYTES)
    prefix = f"rank/{rank}/"
    own = {f"{prefix}tensor/{name}": tensor for name, tensor in flat.tensors.items()}
    own[f"{prefix}tree"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return own


def _flat_of(own: Mapping[str, torch.Tensor], rank: int) -> Flat | None:
    """Return what _own() was made of. None: there are more ranks now than then."""
    tree = own.get(f"rank/{rank}/tree")
    if tree is None:
        return None
    node, aliases = json.loads(tree.numpy().tobytes())
    inner = f"rank/{rank}/tensor/"
    tensors = {n.removeprefix(inner): t for n, t in own.items() if n.startswith(inner)}
    return Flat(node, tensors, aliases)


class TrainingState:
    """The model and everything registered with it."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.registered: dict[str, Stateful] = {}
        self.per_rank: dict[str, Stateful] = {}
        self._begun: dict[str, torch.Size] | None = None  # the model's tensors before the loop
        self._groups: dict[str, list[list[int]]] = {}  # of optimizers then, with ids of parameters
        #: Names of averages that only updates change, from the parameters.
        self.averages: set[str] = set()

    def register(self, name: str, obj: Keepable, *, per_rank: bool = False) -> None:
        """Add an object to the state. Raises ConfigError.

        Rank 0's value counts for all ranks; with ``per_rank`` each rank keeps its own, which
        comes back at the same world size only.
        """
        if not isinstance(name, str) or not name:
            raise ConfigError(f"register({name!r}): a name must be a string")
        name, kept = str.__str__(name), stateful(obj)  # not of an Enum, as no key may be
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(kept, method, None)):
                raise ConfigError(f"register({name!r}): {type(obj).__name__} has no {method}()")
        if name in self.registered or name in self.per_rank:
            raise ConfigError(f"register({name!r}): the name is taken; choose another")
        (self.per_rank if per_rank else self.registered)[name] = kept

    def capture(self, rank: int, kept: Mapping[str, Any] | None = None) -> Captured:
        """Return the whole state; its tensors are the live ones, not copies.

        ``kept``: states by name, to be taken instead of what registered objects have now.

        Parameters, their averages and the optimizers' tensors are equal on all ranks, as DDP keeps
        them so. Raises UnstorableError, and ConfigError for a model that a resume would not know
        again.
        """
        model = _Inventory(self.module)
        self._check_begun(model)
        state = {
            "model": model.tensors,
            "transient": sorted(model.transient),
            "extra": {
                n: Exact(part.get_extra_state(), tensors_only=True)
                for n, part in model.extra.items()
            },
            "registered": {
                name: kept[name] if kept and name in kept else state_of(obj)
                for name, obj in self.registered.items()
            },
        }
        objects = {name: state_of(obj) for name, obj in self.per_rank.items()}
        # A state_dict() may be collective: nothing is refused before all have been called.
        flat, own = flatten(state), flatten({"objects": objects})
        return Captured(flat, self._shared(flat, model), _own(rank, own))

    def begin(self) -> None:
        """Note the model as the script has made it: a resume begins with this one."""
        self._begun = _Inventory(self.module).shapes()
        self._groups = self._groups_now()

    def _groups_now(self) -> dict[str, list[list[int]]]:
        return {
            name: [[id(p) for p in group["params"]] for group in obj.param_groups]
            for name, obj in self.registered.items()
            if isinstance(obj, torch.optim.Optimizer)
        }

    def _check_begun(self, model: _Inventory) -> None:
        now = self._groups_now()
        for name, groups in self._groups.items():
            if now.get(name, groups) != groups:
                raise ConfigError(
                    f"the loop has changed which parameters the groups of {name!r} hold, or their"
                    " order: after a resume the script makes them as before, and their state would"
                    " not fit. Make all groups before prepare(); in the loop change only their"
                    " values, such as group['lr']"
                )
        shapes = model.shapes()
        if self._begun is None or shapes == self._begun:
            return
        name = min({*shapes.items()} ^ {*self._begun.items()})[0]
        raise ConfigError(
            f"the model got another {name!r} in the loop ({_outline(self._begun.get(name))} before,"
            f" {_outline(shapes.get(name))} now): no resume could put it back into the model that"
            " the script makes. Give each tensor its name and shape before prepare(), by a first"
            " forward say; a buffer that is only a cache: register_buffer(..., persistent=False)"
        )

    def _shared(self, flat: Flat, model: _Inventory) -> frozenset[str]:
        parameters = {f"model/{name}" for name in model.parameters}
        known = set(model.parameters.values())
        optimizers = tuple(
            f"registered/{name}/"
            for name, obj in self.registered.items()
            if isinstance(obj, torch.optim.Optimizer)
            and all(p in known for group in obj.param_groups for p in group["params"])
        )
        for name in self.averages:
            average = self.registered[name]
            assert isinstance(average, torch.nn.Module)  # its buffers are of each rank's batches
            parameters.update(f"registered/{name}/{key}" for key, _ in average.named_parameters())
        return frozenset(n for n in flat.tensors if n in parameters or n.startswith(optimizers))

    def sha256(self, rank: int) -> str:
        """Hash all that a snapshot would hold of this rank. Collective."""
        captured = self.capture(rank)
        own = _flat_of(captured.own, rank) or Flat()
        return hashlib.sha256((flat_sha256(captured.flat) + flat_sha256(own)).encode()).hexdigest()

    def restore(self, source: Source, rank: int, *, ema_may_differ: bool = False) -> None:
        """Put a state back. Every rank calls it at the same point.

        ``ema_may_differ``: moving averages that it has not stay as they are, those that nobody
        has any more are left out. Raises ConfigError when it belongs to another model, before
        anything is overwritten.
        """
        loader, model = Loader(source), _Inventory(self.module)
        stored = source.outline
        with fitting("the model"):
            caches = model.transient | set(stored.get("transient", ()))
            names = check_tensors(stored["model"], model.tensors, caches)
            odd = stored["registered"].keys() ^ self.registered.keys()
        averages = all(map(_is_ema, odd))
        if odd and not (ema_may_differ and averages):
            cure = ", or snapshots=ddp.Snapshots(allow_changes='ema')" if averages else ""
            raise ConfigError(
                f"the snapshot holds {sorted(stored['registered'])}, this program registers"
                f" {sorted(self.registered)}: register the same names{cure}"
            )
        with fitting("the model"):
            loader.read_model({name: model.tensors[name] for name in names})
        extra = loader.read_object("extra") if stored.get("extra") else {}
        for name, part in model.extra.items():
            with fitting(f"the extra state of {name or 'the model'}"):
                if name in extra:
                    part.set_extra_state(extra[name])
        for name in stored["registered"]:
            if name not in self.registered:
                continue
            obj = self.registered[name]
            # Never a second copy of it all on the host: there are as many ranks as GPUs.
            value = loader.read_object(
                "registered", name, into=self._live(name), device=_device_of(obj)
            )
            with fitting(repr(name)):
                give(obj, value)
        found = loader.read_named("rank/", f"rank/{rank}/")
        with fitting(f"rank {rank}'s own"):
            if (own := _flat_of(found, rank)) is not None:
                self._restore_own(own)

    def _live(self, name: str) -> dict[str, torch.Tensor]:
        if name not in self.averages:
            return {}
        return {
            key: value
            for key, value in self.registered[name].state_dict().items()
            if isinstance(value, torch.Tensor) and has_memory(value)
        }

    def _restore_own(self, flat: Flat) -> None:
        own = unflatten(flat)
        for name, obj in self.per_rank.items():
            if name in own["objects"]:
                give(obj, own["objects"][name])
        generators.restore(own["rng"])


def state_of(obj: Stateful) -> Any:
    """Return what a snapshot keeps of an object."""
    state = obj.state_dict()
    if isinstance(obj, torch.nn.Module):  # it takes values into the tensors that it has
        return state
    return Exact(state, tensors_only=not isinstance(obj, DictState))


def _outline(shape: torch.Size | None) -> str:
    return "none" if shape is None else str(list(shape))


def _device_of(obj: Stateful) -> torch.device | None:
    """Return where an optimizer's state belongs, None: on the host, until the object moves it."""
    if not isinstance(obj, torch.optim.Optimizer):
        return None
    devices = {p.device for group in obj.param_groups for p in group["params"]}
    return devices.pop() if len(devices) == 1 else None


def _is_ema(name: str) -> bool:
    """Tell whether prepare(ema=...) has registered it: each model has another."""
    return re.fullmatch(r"ema(\d+|\..+)?", name) is not None
