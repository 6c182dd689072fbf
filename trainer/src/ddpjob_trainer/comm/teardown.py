"""Leave the process group, so that its threads end before the interpreter does.

gloo's threads may drop the last reference to a tensor of a collective long after the caller has
gone on. One that runs only when Python has begun to finalize cannot take the GIL any more and
aborts the process: "terminate called without an active exception", exit code 134, with all the work
done. The threads are joined when the group is freed; destroy_process_group() frees it only if
nothing else holds it, and DDP, its hooks and our objects do: they register here.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

#: Global as torch's default process group is.
_holders: list[tuple[object, tuple[str, ...]]] = []


def holds_group(holder: object, *attributes: str) -> None:
    """Have these attributes of an object set to None when this process leaves the group."""
    _holders.append((holder, attributes))


def holds_ddp(model: DistributedDataParallel) -> None:
    """Register DDP, whose C++ parts hold the group as well."""
    holds_group(model, "reducer", "logger", "process_group")


def leave_group(*, together: bool) -> None:
    """Leave and free the group, and so wait for its threads. Safe to repeat.

    ``together``: all ranks leave now. NCCL waits for queued work, on this rank and on its machine's
    others, and for ever if one of them does not take part; a rank that leaves alone aborts that
    work.
    """
    if not together and dist.is_initialized() and dist.get_backend() == "nccl":
        world: Any = dist.group.WORLD
        world.abort()
    while _holders:
        holder, attributes = _holders.pop()
        for name in attributes:
            setattr(holder, name, None)
    if dist.is_initialized():
        dist.destroy_process_group()
