"""Snapshots as torch.distributed.checkpoint (DCP) directories, and weights out of such.

DCP's own files are pickles: what is imported must come from somebody who may run code here.
"""

from __future__ import annotations

import contextlib
import pickle
import secrets
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ddpjob_trainer.snapshot.find import SnapshotToolError
from ddpjob_trainer.snapshot.ondisk import disk

#: Where training scripts keep the model in what they save.
_MODEL_KEYS = ("model", "module", "model_state_dict", "state_dict", "app.model")


def save(out: Path, state: Mapping[str, Any]) -> None:
    """Write {"model": state_dict, "optimizer": state_dict, ...} as a new directory, or nothing.

    Raises OSError.
    """
    # Importing it takes long, and nothing else needs it.
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint

    temporary = out.with_name(f"{out.name}.{secrets.token_hex(4)}.tmp")
    try:
        save_checkpoint(dict(state), storage_writer=FileSystemWriter(temporary), no_dist=True)
        temporary.rename(out)
        disk.sync_directory(out.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def convert(checkpoint: Path, out: Path, *, format_: str) -> int:
    """Write the weights of a DCP checkpoint to a safetensors file, or all of it to torch's.

    Return 0. The first is what start(resume=FILE) takes. Raises SnapshotToolError, OSError.
    """
    if out.exists():
        raise SnapshotToolError(f"{out} exists; choose another file or remove it")
    if not (checkpoint / ".metadata").is_file():
        raise SnapshotToolError(f"{checkpoint} is no DCP checkpoint: it has no file .metadata")
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    temporary = out.with_name(f"{out.name}.{secrets.token_hex(4)}.tmp")
    try:
        dcp_to_torch_save(checkpoint, temporary)
        if format_ == "safetensors":
            state = torch.load(temporary, map_location="cpu", mmap=True, weights_only=True)
            weights = _weights(state)
            temporary.unlink()  # what is mapped stays readable
            save_file(weights, temporary, metadata={"format": "pt"})
            print(f"{out}: {len(weights)} tensors", file=sys.stderr)
        temporary.rename(out)
        disk.sync_directory(out.parent)
    except (pickle.UnpicklingError, RuntimeError, ValueError, KeyError) as error:
        text = str(error).partition("\n")[0][:300]
        raise SnapshotToolError(f"{checkpoint} cannot be converted: {text}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return 0


def _weights(state: Any) -> dict[str, torch.Tensor]:
    """The model's part, else whatever tensors are at the top; each in memory of its own."""
    held = next((state[key] for key in _MODEL_KEYS if isinstance(state.get(key), dict)), state)
    found = {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}
    if not found:
        raise SnapshotToolError(f"no weights are in it; it holds {', '.join(map(repr, state))}")
    left_out = sorted(str(name) for name in held.keys() - found.keys())
    if left_out:
        print(f"warning: left out, as they are no tensors: {', '.join(left_out)}", file=sys.stderr)
    return {name: value.detach().clone().contiguous() for name, value in found.items()}
