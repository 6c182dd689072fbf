"""Write weights as safetensors that need nothing of ours; read what others wrote.

No pickle is read but by torch's weights_only loader.
"""

from __future__ import annotations

import json
import os
import pickle
import secrets
import struct
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.snapshot.ondisk import disk

#: What DistributedDataParallel puts before every name of a state_dict.
_PREFIX = "module."
_MOST_TEXT = 2000  # characters of an error that lists names


def save(path: Path, module: torch.nn.Module, about: Mapping[str, str]) -> list[str]:
    """Write a module's state_dict to a safetensors file with write(), by its names uncompiled.

    Return the names of what is no tensor, which is not in the file. ``about`` becomes its
    metadata. Raises OSError.
    """
    tensors: dict[str, torch.Tensor] = {}
    left_out = []
    places: set[int] = set()
    for name, value in module.state_dict().items():
        if not isinstance(value, torch.Tensor):
            left_out.append(name)
            continue
        tensor = value.detach().cpu().contiguous()
        # safetensors refuses tensors that share memory, as tied weights do.
        if tensor.untyped_storage().data_ptr() in places:
            tensor = tensor.clone()
        places.add(tensor.untyped_storage().data_ptr())
        tensors[uncompiled(name)] = tensor
    write(path, tensors, about)
    return left_out


def write(path: Path, tensors: Mapping[str, torch.Tensor], about: Mapping[str, str]) -> None:
    """Write a safetensors file, atomically and durably; replace one that is there.

    Equal tensors and metadata become equal bytes. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for old in path.parent.glob(f"{path.name}.*.tmp"):
        old.unlink(missing_ok=True)  # of a process that was killed in here
    # Of a name that nobody can have put there: a link would be followed.
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        save_file(dict(tensors), temporary, metadata={"format": "pt", **about})
        _order_header(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        disk.sync_directory(path.parent)
    except SafetensorError as error:  # how it tells of a full disk
        raise OSError(f"{path} cannot be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def uncompiled(name: str) -> str:
    """Return a name in a state_dict without what torch.compile() of any module puts into it."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _order_header(path: Path) -> None:
    """Sort a safetensors file's metadata in place, so that equal weights are equal bytes.

    The library writes its keys in an order that is another one each time. Raises OSError.
    """
    with path.open("r+b") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        if len(text) <= length:  # else it was escaped in another way: what is there is valid
            file.seek(8)
            file.write(text.ljust(length))


def read(path: Path) -> dict[str, Any]:
    """Return a state_dict from a safetensors file or from what torch.save() wrote.

    Names lose the prefixes of DistributedDataParallel and torch.compile. Raises ConfigError.
    """
    if path.is_dir():
        raise ConfigError(
            f"resume={path} is a directory: give a file of weights; `ddpjob-trainer snapshot"
            " export` makes one of a snapshot"
        )
    try:
        try:
            state: Any = load_file(path)
        except SafetensorError:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ConfigError(f"resume={path} cannot be read: {error.strerror or error}") from error
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        first, _, _ = str(error).partition("\n")
        raise ConfigError(
            f"resume={path} is neither a safetensors file nor a state_dict that torch.load() reads"
            f" with weights_only=True: {first[:300]}"
        ) from error
    if not isinstance(state, Mapping) or not any(
        isinstance(value, torch.Tensor) for value in state.values()
    ):
        holds = f"a dict of {_some(state)}" if isinstance(state, Mapping) else type(state).__name__
        raise ConfigError(
            f"resume={path} holds {holds}: give a plain state_dict, as"
            " torch.save(model.state_dict(), path) writes it"
        )
    found = {uncompiled(str(name)): value for name, value in state.items()}
    while all(name.startswith(_PREFIX) for name in found):
        found = {name.removeprefix(_PREFIX): value for name, value in found.items()}
    return found


def load(path: Path, module: torch.nn.Module) -> None:
    """Put the weights of a file into a module, all of them. Raises ConfigError with the names."""
    names = {uncompiled(name): name for name in module.state_dict()}
    state = {names.get(name, name): value for name, value in read(path).items()}
    try:
        module.load_state_dict(state, strict=True)
    except RuntimeError as error:
        text = textwrap.shorten(str(error), _MOST_TEXT, placeholder="...")
        raise ConfigError(
            f"resume={path} does not hold this model's weights: {text} If only some are wanted,"
            " load them yourself before prepare(), with strict=False"
        ) from error


def _some(state: Mapping[Any, Any]) -> str:
    names = ", ".join(repr(name) for name in list(state)[:5])
    return f"{names or 'nothing'}{', ...' if len(state) > 5 else ''}"
