"""The process group: rendezvous, small exchanges between ranks, peer loss.

A peer's pod may start half a minute later and its DNS name may not resolve yet, so connecting
is retried until the startup deadline. Rank 0 publishes which incarnation (uid, attempt, round)
it belongs to; a rank of another one is refused. Whatever says that a peer is gone becomes
PeerLostError, hence exit 75.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as distributed_c10d

# Loaded after the group began, its default arguments would hold the group: see parting.py.
import torch.distributed.nn
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from ddpjob_trainer import failpoints
from ddpjob_trainer.environment import Identity, WorkerEnvironment
from ddpjob_trainer.errors import ConfigError, PeerLostError
from ddpjob_trainer.parting import holds_group

_NEWS_SECONDS = 10.0
_CONNECT_SECONDS = 60.0
_IDENTITY_KEY = "ddpjob/identity"
#: What gloo and NCCL say when the other end is gone; they have no exception type for it.
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
_LOST_TYPES = (PeerLostError, dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
_TRANSPORT_CODE = tuple(os.path.dirname(f) + os.sep for f in (torch.__file__, __file__))  # noqa: PTH120


@dataclass(slots=True)  # not frozen: parting.py takes control back
class World:
    """This rank's place, and the groups it talks through."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    identity: Identity
    control: dist.ProcessGroup | None  # gloo, for CPU tensors, also where gradients go through NCCL
    store: Store | None  # for what must not wait for all ranks

    def sum(self, values: Sequence[float]) -> list[float]:
        """Add up a few numbers over all ranks; the order of additions is always the same."""
        tensor = torch.tensor(values, dtype=torch.float64)
        if self.size > 1:
            with peer_loss():
                dist.all_reduce(tensor, group=self.control)
        result: list[float] = tensor.tolist()
        return result

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Give every rank the bytes of rank 0."""
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
            flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            with peer_loss():
                dist.broadcast(flat, source, group=self.control)
            if self.rank != source:
                tensor.detach().copy_(flat.view(tensor.dtype).view(tensor.shape))

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Give every rank the bytes of each rank."""
        if self.size == 1:
            return [data]
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


def agree(world: World, facts: Mapping[str, Any]) -> None:
    """Raise ConfigError on every rank when a fact is not the same on all of them.

    Otherwise the ranks would train on other data, or wait in different collectives.
    """
    gathered = [json.loads(blob) for blob in world.gather_bytes(json.dumps(facts).encode())]
    for rank, theirs in enumerate(gathered):
        for name, value in gathered[0].items():
            if theirs.get(name) != value:
                raise ConfigError(
                    f"{name} is {theirs.get(name)} on rank {rank} and {value} on rank 0: every"
                    " rank must be given the same"
                )


# --- Peer loss ------------------------------------------------------------------------------


def is_peer_loss(error: BaseException) -> bool:
    """Tell a transport's complaint about a peer from a mistake in this process."""
    if isinstance(error, _LOST_TYPES):
        return True
    text = str(error)
    if not isinstance(error, RuntimeError) or not any(words in text for words in _LOST):
        return False
    # The user's own "Connection refused", of a database say, is no peer.
    return re.search("gloo|nccl", text, re.IGNORECASE) is not None or _raised_by_torch(error)


def _raised_by_torch(error: BaseException) -> bool:
    """Whether it comes out of torch's Python, or out of C++ that this package called."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(_TRANSPORT_CODE)


@contextlib.contextmanager
def peer_loss() -> Iterator[None]:
    """Turn a transport's errors into PeerLostError."""
    try:
        yield
    except RuntimeError as error:
        if is_peer_loss(error):
            raise PeerLostError(brief(error)) from error
        raise


def brief(error: BaseException) -> str:
    """First line of an error, without gloo's source path and advice."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else type(error).__name__
    text = re.sub(r"^\[[^\]]*\.(cc|cpp|h):\d+\] ", "", text)
    return text.partition(". This is typically")[0][:300]


def leave(code: int) -> NoReturn:
    """End this process now: closing its sockets is what tells the peers.

    An orderly exit would run destructors of process groups that may wait for dead peers.
    """
    for stream in (sys.stdout, sys.stderr):
        # RuntimeError: a signal handler that interrupted a print must not enter it again.
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            stream.flush()
    os._exit(code)


# --- Rendezvous -----------------------------------------------------------------------------


def say(rank: int, text: str) -> None:
    """One line to the log of this rank."""
    who = f"rank {rank}: " if rank else ""
    print(f"ddpjob: {who}{text}", file=sys.stderr, flush=True)


class _Waiting:
    """Deadline and news of one wait."""

    def __init__(self, rank: int, deadline: float) -> None:
        self.rank = rank
        self.deadline = deadline
        self._news = time.monotonic() + _NEWS_SECONDS
        self._pause = 0.05

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def pause(self, reason: str) -> None:
        """Sleep a little, tell the reason now and then, raise PeerLostError at the deadline."""
        if self.left() <= 0:
            raise PeerLostError(f"gave up after the startup deadline: {reason}")
        if time.monotonic() >= self._news:
            self._news += _NEWS_SECONDS
            say(self.rank, f"still waiting: {reason}")
        time.sleep(min(self._pause, max(0.0, self.left())))
        self._pause = min(0.5, self._pause * 1.5)


def _reachable(address: str, port: int) -> str:
    """Try rank 0's store; return why it cannot be reached, "" if it can."""
    try:
        socket.create_connection((address, port), timeout=3).close()
    except socket.gaierror as error:
        return f"{address} does not resolve yet ({error.strerror})"
    except OSError as error:
        return f"rank 0 does not answer at {address}:{port} yet ({error.strerror or error})"
    return ""


def _server(env: WorkerEnvironment, waiting: _Waiting) -> TCPStore:
    """Serve the store. A process of an ended attempt may still hold the port for a moment."""
    assert env.master is not None
    while True:
        try:
            # By "localhost": this pod's own service name may not resolve yet.
            return TCPStore(
                "localhost",
                env.master[1],
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=max(1.0, waiting.left())),
            )
        except RuntimeError as error:
            if "EADDRINUSE" not in str(error) and "already in use" not in str(error):
                raise
            waiting.pause(f"port {env.master[1]} is in use")


def _client(env: WorkerEnvironment, waiting: _Waiting) -> TCPStore:
    assert env.master is not None
    address, port = env.master
    while True:
        reason = _reachable(address, port)
        if not reason:
            try:
                return TCPStore(
                    address,
                    port,
                    is_master=False,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=max(1.0, min(10.0, waiting.left()))),
                )
            except RuntimeError as error:
                reason = brief(error)
        waiting.pause(reason)


def _card(env: WorkerEnvironment) -> dict[str, str | int]:
    who = env.identity
    place = {"attempt": who.attempt, "round": who.round, "worldSize": env.world_size}
    return {"uid": who.uid, **place}


def _ask(store: Store, name: str, mine: dict[str, str | int]) -> str:
    """Compare rank 0's card with ours; return why to try again, "" if they are equal."""
    try:
        if not store.check([name]):
            return "rank 0 is not ready yet"
        theirs = json.loads(store.get(name))
    except (RuntimeError, ValueError) as error:
        return f"rank 0's store broke off: {brief(error)}"
    if mine == theirs:
        return ""
    same = all(mine[key] == theirs.get(key) for key in ("uid", "attempt", "round"))
    if same:
        raise ConfigError(
            f"WORLD_SIZE is {mine['worldSize']} here and {theirs.get('worldSize')} at rank 0"
        )
    if mine["uid"] == theirs.get("uid"):
        ours = (int(mine["attempt"]), int(mine["round"]))
        other = (int(theirs["attempt"]), int(theirs["round"]))
        if other > ours:
            raise PeerLostError(
                f"rank 0 belongs to attempt {other[0]} round {other[1]}, this process to attempt"
                f" {ours[0]} round {ours[1]}: it is out of date and ends"
            )
    return f"another job or an earlier attempt answers: {theirs}"


def _rendezvous(env: WorkerEnvironment, deadline: float) -> Store:
    """Return a store that all ranks of this incarnation, and no others, have joined."""
    waiting = _Waiting(env.rank, deadline)
    card = _card(env)
    serves = env.rank == 0 and not env.agent_store
    while True:
        tcp = _server(env, waiting) if serves else _client(env, waiting)
        # torchrun keeps one store over its restarts, hence the key per incarnation there.
        name = f"{_IDENTITY_KEY}/{env.identity.key}" if env.agent_store else _IDENTITY_KEY
        if env.rank == 0:
            tcp.set(name, json.dumps(card))
            break
        reason = _ask(tcp, name, card)
        if not reason:
            break
        waiting.pause(reason)
    store = PrefixStore(env.identity.key, tcp)
    failpoints.reach("rendezvous")
    _gather_all(store, env, waiting)
    return store


def _gather_all(store: Store, env: WorkerEnvironment, waiting: _Waiting) -> None:
    """Wait until every rank is here, so that later timeouts mean a lost peer."""
    store.set(f"here/{env.rank}", "1")
    if env.rank == 0:
        missing = list(range(1, env.world_size))
        while missing:
            missing = [rank for rank in missing if not store.check([f"here/{rank}"])]
            if missing:
                names = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
                waiting.pause(f"{len(missing)} of {env.world_size} ranks are missing: {names}")
        store.set("all-here", "1")
        return
    while not store.check(["all-here"]):
        waiting.pause("rank 0 still waits for other ranks")


def _device(env: WorkerEnvironment) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if env.local_rank >= count:
        raise ConfigError(
            f"LOCAL_RANK={env.local_rank}, but this machine shows {count} GPUs: lower nprocPerNode"
            " or hide the GPUs with CUDA_VISIBLE_DEVICES="
        )
    device = torch.device("cuda", env.local_rank)
    torch.cuda.set_device(device)
    return device


def join(env: WorkerEnvironment, started: float) -> World:
    """Meet the other ranks. ``started``: monotonic time from which the deadline counts.

    Raises ConfigError, PeerLostError.
    """
    device = _device(env)
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=env.deadlines.last_resort)
    # All ranks are here now: one that does not connect soon has died in between.
    connecting = min(timeout, timedelta(seconds=_CONNECT_SECONDS))
    if env.world_size == 1:
        store: Store = HashStore()
    else:
        store = _rendezvous(env, started + env.deadlines.startup)
        store.set_timeout(connecting)
    with peer_loss():
        dist.init_process_group(
            backend,
            store=store,
            rank=env.rank,
            world_size=env.world_size,
            timeout=connecting if backend == "gloo" else timeout,
            device_id=device if device.type == "cuda" else None,
        )
        control = dist.group.WORLD
        if backend != "gloo":
            control = dist.new_group(backend="gloo", timeout=connecting)
        assert control is not None
        distributed_c10d._set_pg_timeout(timeout, control)
        store.set_timeout(timeout)
    world = World(env.rank, env.world_size, env.local_rank, device, env.identity, control, store)
    holds_group(world, "control", "store")
    return world
