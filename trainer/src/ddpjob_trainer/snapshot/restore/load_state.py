"""Put a snapshot back into live objects, one after the other, without a second copy of the whole.

All is compared before anything is overwritten. The model's tensors are read in place; an object
gets new tensors, since load_state_dict() may keep those that it is given: what shared memory within
it does so again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.snapshot.restore.load import Source
from ddpjob_trainer.state.codec import Flat, member, tensor_names, unflatten

ANEW = "start anew in another snapshot directory or with snapshot.resume: Never"


@contextlib.contextmanager
def fitting(what: str) -> Iterator[None]:
    """Turn what a state of another structure leads to into ConfigError: trying again is no use."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "loading state_dict" not in str(error):
            raise  # of a module's load_state_dict() only
        raise ConfigError(
            f"what the snapshot holds as {what} does not fit ({type(error).__name__}: {error}): use"
            f" the code that wrote it, or {ANEW}"
        ) from error


class Loader:
    """One snapshot on its way into memory. Every rank makes the same calls in the same order."""

    def __init__(self, source: Source) -> None:
        self._source = source
        aliases = source.manifest.aliases
        # Read once, and needed again where another group's name stands for the same tensor.
        self._kept: dict[str, torch.Tensor | None] = {
            target: None for name, target in aliases.items() if _group(name) != _group(target)
        }

    @property
    def outline(self) -> dict[str, Any]:
        """Return the stored state; its tensors have shapes and types only. Raises ConfigError."""
        state = self._source.outline
        if not isinstance(state, dict) or not all(
            isinstance(state.get(name), dict) for name in ("model", "registered")
        ):
            raise ConfigError(f"the snapshot holds no training state; {ANEW}")
        return state

    def read_model(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Overwrite tensors of the model; they have the stored shapes. Raises ConfigError."""
        nodes = member(self._source.manifest.tree, "model")
        into: dict[str, torch.Tensor] = {}
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # to, from
        for name, tensor in targets.items():
            target = tensor.detach()
            stored = self._stored(member(nodes, name))
            if target.is_conj():  # its memory holds the conjugate of what was stored
                plain = torch.empty_like(target)
                copies.append((target, plain))
                target = plain
            if target.is_complex():
                target = torch.view_as_real(target)
            if stored in into:
                copies.insert(0, (target, into[stored]))
            into.setdefault(stored, target)
        self._read(lambda name: name.startswith("model/"), into)
        for target, source in copies:
            target.copy_(source)

    def _stored(self, node: Any) -> str:
        """Under which name a tensor of the model is stored."""
        name = next(iter(node.values()))
        name = self._source.manifest.aliases.get(name, name)
        if not name.startswith("model/"):
            raise ConfigError(f"the snapshot keeps a tensor of the model as {name!r}; {ANEW}")
        return str(name)

    def read_object(
        self,
        *path: str,
        into: Mapping[str, torch.Tensor] | None = None,
        device: torch.device | None = None,
        entries: Collection[int] | None = None,
    ) -> Any:
        """Return the part of the state below a path, in memory that no tensor of the model has.

        ``into``: tensors that may be overwritten at once, by their names below the path, where they
        have the stored shape. ``device``: where all others are to be that are more than a number.
        ``entries``: of an optimizer's "state" only these.
        """
        prefix = "/".join(path) + "/"
        manifest = self._source.manifest
        node = manifest.tree
        for name in path:
            node = member(node, name)
        if entries is not None:
            node = _only(node, entries)
        wanted = {manifest.aliases.get(name, name) for name in tensor_names(node)}
        tensors = self._source.empty(
            lambda name: name in wanted and name.startswith(prefix), device
        )
        for name, tensor in (into or {}).items():
            found = tensors.get(prefix + name)
            if found is not None and (found.shape, found.dtype) == (tensor.shape, tensor.dtype):
                tensors[prefix + name] = tensor
        self._read(lambda name: name.startswith(prefix), tensors)
        kept = {name: tensor for name, tensor in self._kept.items() if tensor is not None}
        return unflatten(Flat(node, {**kept, **tensors}, dict(manifest.aliases)))

    def read_named(self, prefix: str, wanted: str) -> dict[str, torch.Tensor]:
        """Read all below a prefix; return what is below ``wanted``, the others' is passed over."""
        tensors = self._source.empty(lambda name: name.startswith(wanted))
        self._read(lambda name: name.startswith(prefix), tensors)
        return tensors

    def _read(self, names: Callable[[str], bool], into: dict[str, torch.Tensor]) -> None:
        kept = self._source.empty(lambda name: name in self._kept and names(name))
        self._source.read(names, {**into, **kept})
        for name, tensor in kept.items():
            self._kept[name] = tensor
            if name in into:
                into[name].detach().copy_(tensor)


def _only(node: Any, entries: Collection[int]) -> Any:
    """Keep these entries of an encoded optimizer's state. Anything else stays as it is."""
    state = node.get("state") if isinstance(node, dict) else None
    if not isinstance(state, dict) or "$dict" not in state:
        return node
    found = [[n, one] for n, one in state["$dict"] if isinstance(n, int) and n in entries]
    return {**node, "state": {"$dict": found}}


def _group(name: str) -> tuple[str, ...]:
    """Name what is read together: the model, or one registered object."""
    first, *rest = name.split("/")
    return (first, *rest[:1]) if first == "registered" else (first,)


def check_tensors(
    stored: Mapping[str, torch.Tensor], mine: Mapping[str, torch.Tensor], transient: Iterable[str]
) -> list[str]:
    """Compare names, shapes and types; return those to read. Raises ConfigError.

    ``transient``: caches that forward makes again as it needs them; they may differ.
    """
    caches = set(transient)
    odd = sorted((stored.keys() ^ mine.keys()) - caches)
    if odd:
        raise ConfigError(
            f"the snapshot belongs to another model: {odd[0]!r} is in only one of them"
            f" ({len(odd)} such names). Restore the model's code, or {ANEW}"
        )
    found = []
    for name, tensor in mine.items():
        source = stored.get(name)
        if source is not None and source.shape == tensor.shape and source.dtype == tensor.dtype:
            found.append(name)
        elif name not in caches and source is not None:
            raise ConfigError(
                f"the snapshot's {name} is {source.dtype} {list(source.shape)}, the"
                f" model's is {tensor.dtype} {list(tensor.shape)}. Restore the model's code, or"
                f" {ANEW}"
            )
    return found
