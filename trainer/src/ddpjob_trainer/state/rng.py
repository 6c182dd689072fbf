"""Reseed random numbers at every step from (seed, step, shard), and save them.

Reseeding makes dropout and augmentation a pure function of the position in the run. The states
are stored in snapshots all the same, for user code that draws between steps.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ddpjob_trainer.data.generators import seed_generators
from ddpjob_trainer.data.order import key64


def reseed(seed: int, step: int, *place: int) -> None:
    """Seed torch (all devices), numpy and random for a step's shard or its part."""
    key = key64("torch", seed, step, *place)
    seed_generators(key)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(key)


def _pack(tensor: torch.Tensor) -> str:
    return base64.b64encode(tensor.numpy().tobytes()).decode()


def _unpack(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def capture() -> dict[str, Any]:
    """Return the state of every generator of this process, in what JSON can hold.

    CUDA's only where the process uses it: to ask would begin to, also on a GPU that is broken.
    """
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, gauss_next = random.getstate()
    state: dict[str, Any] = {
        "torch": _pack(torch.get_rng_state()),
        "numpy": [str(name), np.asarray(keys).tolist(), position, has_gauss, gauss],
        "python": [version, list(internal), gauss_next],
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = _pack(torch.cuda.get_rng_state())
    return state


def restore(state: Mapping[str, Any]) -> None:
    """Put back what capture() returned."""
    torch.set_rng_state(_unpack(state["torch"]))
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), position, has_gauss, gauss))
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    if "cuda" in state and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.set_rng_state(_unpack(state["cuda"]))
