"""Put a snapshot back into live objects, one by one, without a second copy.

All is compared before anything is overwritten. The model's tensors are read in place; an object
gets new tensors, since load_state_dict() may keep those that it is given: what shared memory within
it does so again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.snapshot.restore.load import Source
from ddpjob_trainer.snapshot.weights import uncompiled
from ddpjob_trainer.state.codec import Flat, has_memory, member, tensor_names, unflatten

_ANEW = "start anew in another snapshot directory or with snapshot.resume: Never"


@contextlib.contextmanager
def fitting(what: str) -> Iterator[None]:
    """Turn the errors of a state of another structure into ConfigError. Trying again is no use."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "loading state_dict" not in str(error):
            raise  # of a module's load_state_dict() only
        raise ConfigError(
            f"what the snapshot holds as {what} does not fit ({type(error).__name__}: {error}): use"
            f" the code that wrote it, or {_ANEW}"
        ) from error


class Loader:
    """One snapshot on its way into memory. Every rank makes the same calls in the same order."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def read_model(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Overwrite tensors of the model; they have the stored shapes. Raises ConfigError."""
        nodes = member(self._source.manifest.tree, "model")
        into: dict[str, torch.Tensor] = {}
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # to, from
        for name, tensor in targets.items():
            target = tensor.detach()
            stored = next(iter(member(nodes, name).values()))
            stored = self._source.manifest.aliases.get(stored, stored)
            if target.is_conj() or not has_memory(target):
                plain = torch.empty(target.shape, dtype=target.dtype, device=target.device)
                copies.append((target, plain))
                target = plain
            if target.is_complex():
                target = torch.view_as_real(target)
            if stored in into:
                copies.insert(0, (target, into[stored]))
            into.setdefault(stored, target)
        self._source.read(self._below("model/"), into)
        for target, source in copies:
            target.copy_(source)

    def _below(self, prefix: str) -> Callable[[str], bool]:
        """Tell whether a stored name, or an alias of it, is below a prefix."""
        aliases = self._source.manifest.aliases
        elsewhere = {target for name, target in aliases.items() if name.startswith(prefix)}
        return lambda name: name.startswith(prefix) or name in elsewhere

    def read_object(
        self,
        *path: str,
        into: Mapping[str, torch.Tensor] | None = None,
        device: torch.device | None = None,
    ) -> Any:
        """Return the state below a path, in memory that no tensor of the model has.

        ``into``: tensors that may be overwritten at once, by their names below the path, where they
        have the stored shape. ``device``: where all others are to be that are more than a number.
        """
        prefix = "/".join(path) + "/"
        manifest = self._source.manifest
        node = manifest.tree
        for name in path:
            node = member(node, name)
        wanted = {manifest.aliases.get(name, name) for name in tensor_names(node)}
        tensors = self._source.empty(wanted.__contains__, device)
        for name, tensor in (into or {}).items():
            found = tensors.get(prefix + name)
            if found is not None and (found.shape, found.dtype) == (tensor.shape, tensor.dtype):
                tensors[prefix + name] = tensor
        self._source.read(self._below(prefix), tensors)
        return unflatten(Flat(node, tensors, dict(manifest.aliases)))

    def read_named(self, prefix: str, wanted: str) -> dict[str, torch.Tensor]:
        """Read all below a prefix; return what is below ``wanted``, the others' is passed over."""
        tensors = self._source.empty(lambda name: name.startswith(wanted))
        self._source.read(lambda name: name.startswith(prefix), tensors)
        return tensors


def check_tensors(
    stored: Mapping[str, torch.Tensor], mine: Mapping[str, torch.Tensor], transient: Iterable[str]
) -> list[str]:
    """Compare names, shapes and types; return those to read. Raises ConfigError.

    ``transient``: caches that forward makes again as it needs them; they may differ.
    """
    caches = set(transient)
    odd = sorted((stored.keys() ^ mine.keys()) - caches)
    if odd and sorted(map(uncompiled, stored)) == sorted(map(uncompiled, mine)):
        raise ConfigError(
            "the snapshot belongs to a model that torch.compile() was given otherwise:"
            f" {odd[0]!r} is in only one of them. Compile as then, or {_ANEW};"
            " run.prepare(..., compile=True) changes no name"
        )
    if odd:
        raise ConfigError(
            f"the snapshot belongs to another model: {odd[0]!r} is in only one of them"
            f" ({len(odd)} such names). Restore the model's code, or {_ANEW}"
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
                f" {_ANEW}"
            )
    return found
