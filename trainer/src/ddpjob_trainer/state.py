"""The training state: what goes into a snapshot, how it comes back, and its hashes."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch

from ddpjob_trainer import rng
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.snapshot.format import DTYPES, Flat, flatten, raw, unflatten
from ddpjob_trainer.snapshot.saving import Captured


class Stateful(Protocol):
    """Anything with state_dict and load_state_dict: optimizers, schedulers, EMA, your own."""

    def state_dict(self) -> dict[str, Any]:
        """Return tensors, numbers, strings, in lists, tuples and dicts."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any:
        """Take back what state_dict() returned."""
        ...


def model_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and buffer under every name it has; tied ones come several times."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def weights_sha256(module: torch.nn.Module) -> str:
    """Hash names, types, shapes and bytes of all parameters and buffers."""
    return _sha256(model_tensors(module))


def _sha256(tensors: Iterator[tuple[str, torch.Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, tensor in tensors:
        plain = tensor.detach()
        if plain.is_complex():
            plain = torch.view_as_real(plain.resolve_conj())
        digest.update(json.dumps([name, DTYPES[plain.dtype], list(plain.shape)]).encode())
        digest.update(raw(plain))
    return digest.hexdigest()


def flat_sha256(flat: Flat) -> str:
    """Hash a flattened state: the JSON and the tensors."""
    digest = hashlib.sha256(json.dumps(flat.tree, sort_keys=True).encode())
    digest.update(_sha256(iter(flat.tensors.items())).encode())
    return digest.hexdigest()


def _own_prefix(rank: int) -> str:
    """What begins the names of the tensors that only this rank has."""
    return f"rank/{rank}/"


def _own(rank: int, objects: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Generators and per-rank objects' states, under names that no other rank uses."""
    flat = flatten({"rng": json.loads(rng.capture()), "objects": dict(objects)})
    text = json.dumps([flat.tree, flat.aliases]).encode()
    prefix = _own_prefix(rank)
    own = {f"{prefix}tensor/{name}": tensor for name, tensor in flat.tensors.items()}
    own[f"{prefix}tree"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return own


class TrainingState:
    """The model and everything registered with it."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.registered: dict[str, Stateful] = {}
        self.per_rank: dict[str, Stateful] = {}

    def register(self, name: str, obj: Stateful, *, per_rank: bool = False) -> None:
        """Add an object to the state. Raises ConfigError.

        Rank 0's value counts for all ranks; with ``per_rank`` each rank keeps its own, which
        comes back at the same world size only.
        """
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(obj, method, None)):
                raise ConfigError(f"register({name!r}): {type(obj).__name__} has no {method}()")
        if name in self.registered or name in self.per_rank:
            raise ConfigError(f"register({name!r}): the name is taken; choose another")
        (self.per_rank if per_rank else self.registered)[name] = obj

    def capture(self, rank: int) -> Captured:
        """Return the whole state; its tensors are the live ones, not copies.

        Parameters and the optimizers' tensors are equal on all ranks, as DDP keeps them so.
        Raises UnstorableError.
        """
        state = {
            "model": dict(model_tensors(self.module)),
            "transient": sorted(_transient(self.module)),
            "extra": {n: part.get_extra_state() for n, part in _with_extra(self.module)},
            "registered": {n: obj.state_dict() for n, obj in self.registered.items()},
        }
        objects = {name: obj.state_dict() for name, obj in self.per_rank.items()}
        # A state_dict() may be collective: nothing is refused before all have been called.
        flat = flatten(state)
        return Captured(flat, self._shared(flat), _own(rank, objects))

    def _shared(self, flat: Flat) -> frozenset[str]:
        named = dict(self.module.named_parameters(remove_duplicate=False))
        parameters = {f"model/{name}" for name in named}
        known = set(named.values())
        optimizers = tuple(
            f"registered/{name}/"
            for name, obj in self.registered.items()
            if isinstance(obj, torch.optim.Optimizer)
            and all(p in known for group in obj.param_groups for p in group["params"])
        )
        return frozenset(n for n in flat.tensors if n in parameters or n.startswith(optimizers))

    def sha256(self, rank: int) -> str:
        """Hash all that a snapshot would hold of this rank; equal states hash equally."""
        captured, prefix = self.capture(rank), _own_prefix(rank)
        own = {f"own/{n.removeprefix(prefix)}": t for n, t in captured.own.items()}
        return flat_sha256(Flat(captured.flat.tree, {**captured.flat.tensors, **own}))

    def restore(self, flat: Flat, rank: int) -> None:
        """Put a state back. Raises ConfigError when it belongs to another model."""
        state = unflatten(flat)
        self._restore_model(state["model"], set(state.get("transient", ())))
        extra = state.get("extra", {})
        for name, part in _with_extra(self.module):
            if name in extra:
                part.set_extra_state(_owned(extra[name]))
        stored = state["registered"]
        if stored.keys() != self.registered.keys():
            raise ConfigError(
                f"the snapshot holds {sorted(stored)}, this program registers"
                f" {sorted(self.registered)}: register the same names"
            )
        for name, obj in self.registered.items():
            # load_state_dict may keep the very tensors it is given; these are copies of ours.
            obj.load_state_dict(_owned(stored[name]))
            lay_out_like_parameters(obj)
        self._restore_own(flat, _own_prefix(rank))

    def _restore_own(self, flat: Flat, prefix: str) -> None:
        tree = flat.tensors.get(f"{prefix}tree")
        if tree is None:  # there are more ranks now than when it was written
            return
        node, aliases = json.loads(tree.numpy().tobytes())
        inner = f"{prefix}tensor/"
        tensors = {n.removeprefix(inner): t for n, t in flat.tensors.items() if n.startswith(inner)}
        own = unflatten(Flat(node, tensors, aliases))
        for name, obj in self.per_rank.items():
            if name in own["objects"]:
                obj.load_state_dict(_owned(own["objects"][name]))
                lay_out_like_parameters(obj)
        rng.restore(json.dumps(own["rng"]).encode())

    def _restore_model(self, stored: Mapping[str, torch.Tensor], transient: set[str]) -> None:
        mine = dict(model_tensors(self.module))
        transient = transient | _transient(self.module)
        odd = sorted((stored.keys() ^ mine.keys()) - transient)
        if odd:
            raise ConfigError(
                f"the snapshot belongs to another model: {odd[0]!r} is in only one of them"
                f" ({len(odd)} such names). Restore the model's code, or start anew in another"
                " snapshot directory or with snapshot.resume: Never"
            )
        with torch.no_grad():
            for name, tensor in mine.items():
                source = stored.get(name, tensor)
                same = source.shape == tensor.shape and source.dtype == tensor.dtype
                if name in transient and not same:
                    continue  # a cache that forward makes again as it needs it
                if not same:
                    raise ConfigError(
                        f"the snapshot's {name} is {source.dtype} {list(source.shape)}, the"
                        f" model's is {tensor.dtype} {list(tensor.shape)}"
                    )
                tensor.copy_(source)


def lay_out_like_parameters(obj: object) -> None:
    """Give an optimizer's tensors their parameters' strides again; other objects stay.

    Snapshots hold elements in C order. Fused kernels walk through memory and expect an average
    to lie as its parameter does, channels_last for instance.
    """
    if not isinstance(obj, torch.optim.Optimizer):
        return
    for parameter, state in obj.state.items():
        for name, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                like = torch.empty_like(parameter, dtype=value.dtype, device=value.device)
                if like.stride() != value.stride():
                    state[name] = like.copy_(value)


def _transient(module: torch.nn.Module) -> set[str]:
    """Names of non-persistent buffers: caches, which forward may make, drop and reshape."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules(remove_duplicate=False)
        for name in part._non_persistent_buffers_set
    }


def _with_extra(module: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """The modules that keep state in get_extra_state()."""
    base = torch.nn.Module.get_extra_state
    return [(n, m) for n, m in module.named_modules() if type(m).get_extra_state is not base]


def _owned(value: Any) -> Any:
    """Copy every tensor, so that nothing that loads it shares memory with anything else."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        copied = copy.copy(value)  # a Counter stays one
        for key, part in value.items():
            copied[key] = _owned(part)
        return copied
    if isinstance(value, list):
        return [_owned(part) for part in value]
    if isinstance(value, tuple):
        return tuple(_owned(part) for part in value)
    return value
