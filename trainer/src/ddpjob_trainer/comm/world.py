"""Hold a rank's place in the world: small exchanges between ranks, peer loss.

rendezvous.join() makes the World; the rest of the package talks through it. Any error that means a
lost peer becomes PeerLostError, hence exit code 75.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

# Loaded after the group began, its default arguments would hold the group: see teardown.py.
import torch.distributed.nn
from torch._C._distributed_c10d import Store

from ddpjob_trainer import accelerator
from ddpjob_trainer.accelerator import Accelerator, in_order
from ddpjob_trainer.environment import Identity
from ddpjob_trainer.errors import ConfigError, PeerLostError

#: gloo's and NCCL's messages for a lost peer; they have no exception type for it.
_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "gloo/transport",
    "Timed out waiting",
    "Socket Timeout",
    "NCCL communicator was aborted",
    "remote process exited",
)
_NO_INTERFACE = "GLOO_SOCKET_IFNAME must name an interface that this machine has"
_OTHER_NCCL = "use the same image on every machine"
#: Messages of a backend for an error that a restart would meet again, with the cure.
_MISCONFIGURED = {
    "Duplicate GPU detected": "give each process a GPU of its own, that of LOCAL_RANK",
    "Mismatched NCCL version": _OTHER_NCCL,
    "NCCL version mismatch": _OTHER_NCCL,
    "ncclInvalidUsage": "NCCL_DEBUG=WARN tells more",
    "Unable to find address for": _NO_INTERFACE,
    "Unable to find interface for": _NO_INTERFACE,
}
#: Messages for a fault of this process or its GPU; a new process may do better.
_OWN = (
    "ncclInvalidArgument",
    "ncclUnhandledCudaError",
    "out of memory",
    "Cannot allocate memory",
    "shared memory segment",
    "No space left on device",
    "Too many open files",
    "nvmlDevice",
    "doesn't match expected size",
    "op.preamble.length",
)
_LOST_TYPES = (PeerLostError, dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
#: torch's and this package's code: an error raised there may be the transport's.
_TRANSPORT_CODE = tuple(
    f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1])
)


@dataclass(slots=True)  # not frozen: teardown.py clears control
class World:
    """A rank's place in the job, and the groups it talks through."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    identity: Identity
    control: dist.ProcessGroup | None  # gloo, for CPU tensors, also where gradients go through NCCL
    store: Store | None  # for exchanges that must not wait for all ranks
    accelerator: Accelerator = field(init=False)

    def __post_init__(self) -> None:
        self.accelerator = accelerator.of(self.device)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Add up a few numbers over all ranks, always in the same order."""
        tensor = torch.tensor(values, dtype=torch.float64)
        if self.size > 1:
            with peer_loss():
                dist.all_reduce(tensor, group=self.control)
        result: list[float] = tensor.tolist()
        return result

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Broadcast the bytes of rank 0 to every rank."""
        if self.size == 1:
            return data or b""
        length = torch.tensor([len(data) if data is not None else 0])
        with peer_loss():
            dist.broadcast(length, 0, group=self.control)
            buffer = torch.zeros(int(length), dtype=torch.uint8)
            if data:
                buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            if len(buffer):
                dist.broadcast(buffer, 0, group=self.control)
        return buffer.numpy().tobytes()

    def broadcast_tensor(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Overwrite a tensor with that of rank ``source``, in place."""
        if self.size > 1 and tensor.numel():
            flat = in_order(tensor).cpu().view(torch.uint8)
            with peer_loss():
                dist.broadcast(flat, source, group=self.control)
            shared = flat.device == tensor.device and flat.data_ptr() == tensor.data_ptr()
            if self.rank != source and not shared:  # else it was received in place
                tensor.detach().copy_(flat.view(tensor.dtype).view(tensor.shape))

    def gather_bytes(self, what: str, data: bytes) -> list[bytes]:
        """Gather each rank's bytes on every rank.

        ``what``: the call; ConfigError if calls differ.
        """
        if self.size == 1:
            return [data]
        mark = what.encode() + b"\0"
        found = self._gather(mark + data)
        for rank, other in enumerate(found):
            if not other.startswith(mark):
                there = other.partition(b"\0")[0].decode(errors="replace")
                raise other_call((rank, there), (self.rank, what))
        return [one[len(mark) :] for one in found]

    def _gather(self, data: bytes) -> list[bytes]:
        with peer_loss():
            length = torch.tensor([len(data)])
            lengths = [torch.zeros_like(length) for _ in range(self.size)]
            dist.all_gather(lengths, length, group=self.control)
            longest = max(int(n) for n in lengths)
            mine = torch.zeros(longest, dtype=torch.uint8)
            mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            parts = [torch.zeros_like(mine) for _ in range(self.size)]
            dist.all_gather(parts, mine, group=self.control)
        return [p[: int(n)].numpy().tobytes() for p, n in zip(parts, lengths, strict=True)]

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.sum([0.0])


def other_call(first: tuple[int, str], second: tuple[int, str]) -> ConfigError:
    """Build the error for two ranks that wait for each other in different calls."""
    return ConfigError(
        f"rank {first[0]} is in {first[1]} and rank {second[0]} in {second[1]}, so they would wait"
        " for each other: every rank makes these calls, in the same order; none of them may stand"
        " below an `if` that is true on one rank only, such as run.is_main"
    )


def agree(world: World, facts: Mapping[str, Any], told: Any = None) -> list[Any]:
    """Raise ConfigError on every rank unless each fact is equal on all of them.

    Otherwise the ranks would train on other data, or wait in different collectives. ``told``:
    values that may differ; the result has each rank's.
    """
    blob = json.dumps([facts, told]).encode()
    gathered = [json.loads(blob) for blob in world.gather_bytes("the start of run.steps()", blob)]
    for rank, (theirs, _) in enumerate(gathered):
        for name, value in gathered[0][0].items():
            if theirs.get(name) != value:
                raise ConfigError(
                    f"{name} is {theirs.get(name)} on rank {rank} and {value} on rank 0: every"
                    " rank must be given the same"
                )
    return [one for _, one in gathered]


# --- Peer loss ------------------------------------------------------------------------------


def is_peer_loss(error: BaseException) -> bool:
    """Distinguish a transport's complaint about a peer from a mistake in this process."""
    if isinstance(error, PeerLostError):
        return True
    text = str(error)
    if any(words in text for words in (*_MISCONFIGURED, *_OWN)) and "ncclRemoteError" not in text:
        return False
    if isinstance(error, _LOST_TYPES):
        return True
    if not isinstance(error, RuntimeError) or not any(words in text for words in _LOST):
        return False
    # A "Connection refused" of the user's own, from a database say, is no lost peer.
    return re.search("gloo|nccl", text, re.IGNORECASE) is not None or _raised_by_torch(error)


def is_misconfiguration(error: BaseException) -> bool:
    """Return whether a backend's complaint would recur in every new process."""
    text = str(error)
    return isinstance(error, RuntimeError) and any(words in text for words in _MISCONFIGURED)


def _raised_by_torch(error: BaseException) -> bool:
    """Return whether torch's Python raised it, or C++ that this package called."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(_TRANSPORT_CODE)


@contextlib.contextmanager
def peer_loss() -> Iterator[None]:
    """Turn a transport's errors into PeerLostError, or ConfigError."""
    try:
        yield
    except RuntimeError as error:
        if is_misconfiguration(error):
            cure = next(cure for words, cure in _MISCONFIGURED.items() if words in str(error))
            raise ConfigError(f"{brief(error)}: {cure}") from error
        if is_peer_loss(error):
            raise PeerLostError(brief(error)) from error
        raise


def brief(error: BaseException) -> str:
    """Return the first line of an error, without gloo's source path and advice."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else type(error).__name__
    text = re.sub(r"^\[[^\]]*\.(cc|cpp|h):\d+\] ", "", text)
    text = re.sub(r"^ifa != nullptr\. ", "", text)
    if last := re.search(r"^Last error: *\n?(.+)", str(error), re.MULTILINE):
        text = f"NCCL: {last[1].strip()}"  # the first line names a place in torch's source
    return text.partition(". This is typically")[0][:300]


def leave(code: int) -> NoReturn:
    """End this process at once: its closed sockets notify the peers.

    An orderly exit would run destructors of process groups that may wait for dead peers.
    """
    for stream in (sys.stdout, sys.stderr):
        # RuntimeError: a signal handler that interrupted a print must not enter it again.
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            stream.flush()
    os._exit(code)
