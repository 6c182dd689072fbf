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
from ddpjob_trainer.snapshot.format import DTYPES, TORCH_DTYPES, Flat, flatten, raw, unflatten
from ddpjob_trainer.snapshot.store import Loaded
from ddpjob_trainer.world import World


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


class TrainingState:
    """The model and everything registered with it."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.registered: dict[str, Stateful] = {}

    def register(self, name: str, obj: Stateful) -> None:
        """Add an object to the state. Raises ConfigError."""
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(obj, method, None)):
                raise ConfigError(f"register({name!r}): {type(obj).__name__} has no {method}()")
        if name in self.registered:
            raise ConfigError(f"register({name!r}): the name is taken; choose another")
        self.registered[name] = obj

    def capture(self, random_states: list[bytes]) -> Flat:
        """Return the whole state; its tensors are the live ones, not copies."""
        return flatten(
            {
                "model": dict(model_tensors(self.module)),
                "transient": sorted(_transient(self.module)),
                "extra": {n: part.get_extra_state() for n, part in _with_extra(self.module)},
                "registered": {n: obj.state_dict() for n, obj in self.registered.items()},
                "rng": [json.loads(blob) for blob in random_states],
            }
        )

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
        if rank < len(state["rng"]):
            rng.restore(json.dumps(state["rng"][rank]).encode())

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


def share(world: World, loaded: Loaded | None) -> Loaded | None:
    """Give every rank rank 0's snapshot, so that all agree and only one reads the disk."""
    head = None
    if loaded is not None:
        flat = loaded.flat
        shapes = [[n, DTYPES[t.dtype], list(t.shape)] for n, t in flat.tensors.items()]
        about = [loaded.step, dict(loaded.config), flat.tree, flat.aliases, shapes]
        head = json.dumps(about).encode()
    received = world.broadcast_bytes(head)
    if not received:
        return None
    if loaded is None:
        step, config, tree, aliases, shapes = json.loads(received)
        empty = {n: torch.empty(shape, dtype=TORCH_DTYPES[d]) for n, d, shape in shapes}
        loaded = Loaded(step, config, Flat(tree, empty, aliases))
    for tensor in loaded.flat.tensors.values():
        world.broadcast_tensor(tensor)
    return loaded
