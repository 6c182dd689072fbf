"""Bring the ranks of one incarnation together: the store, then the process group.

start() calls join(), which returns a World. A peer's pod may start half a minute later and its DNS
name may not resolve yet, so connecting is retried until the startup deadline. Rank 0 publishes its
incarnation (uid, attempt, round); ranks of another incarnation are refused.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as distributed_c10d
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from ddpjob_contract import UNRESOLVED
from ddpjob_trainer import failpoints
from ddpjob_trainer.comm import interfaces
from ddpjob_trainer.comm.peer_loss import brief, peer_loss
from ddpjob_trainer.comm.world import World, holds_group
from ddpjob_trainer.environment import WorkerEnvironment
from ddpjob_trainer.errors import ConfigError, PeerLostError
from ddpjob_trainer.gpu import accelerator
from ddpjob_trainer.telemetry.console import say

_NEWS_SECONDS = 10.0
_CONNECT_SECONDS = 60.0
#: The first pause of a wait; in a restart in place the other ranks are milliseconds away.
_FIRST_PAUSE_SECONDS = 0.001
_LONGEST_PAUSE_SECONDS = 0.5
#: All ranks that look together for the others, at rank 0's store.
_LOOKS_PER_SECOND = 250.0
_IDENTITY_KEY = "ddpjob/identity"
_NOT_READY = "rank 0 is not ready yet"
_FINE = "1"
#: Torch 2.13 has only the private name; 2.15 deprecates it.
_set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout


class _Waiting:
    """The deadline of a wait, and its log lines."""

    def __init__(self, rank: int, deadline: float) -> None:
        self.rank = rank
        self.deadline = deadline
        self._news = time.monotonic() + _NEWS_SECONDS
        self._pause = _FIRST_PAUSE_SECONDS

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def pause(self, reason: str, longest: float = _LONGEST_PAUSE_SECONDS) -> None:
        """Sleep a little, log the reason now and then, raise PeerLostError at the deadline."""
        if self.left() <= 0:
            raise PeerLostError(f"gave up after the startup deadline: {reason}")
        if time.monotonic() >= self._news:
            self._news += _NEWS_SECONDS
            say(self.rank, f"still waiting: {reason}")
        time.sleep(min(self._pause, longest, max(0.0, self.left())))
        self._pause = min(_LONGEST_PAUSE_SECONDS, self._pause * 1.3)

    def advanced(self) -> None:
        """Shorten the next pause: after progress, more may be near."""
        self._pause = _FIRST_PAUSE_SECONDS


def _store(address: str, port: int, **options: Any) -> TCPStore:
    """Create the store, without libuv where torch lacks it, as Debian's does."""
    try:
        return TCPStore(address, port, wait_for_workers=False, **options)
    except RuntimeError as error:
        if "without libuv" not in str(error):
            raise
        return TCPStore(address, port, wait_for_workers=False, use_libuv=False, **options)


def _server(env: WorkerEnvironment, waiting: _Waiting) -> TCPStore:
    """Serve the store; wait for a port that an ended attempt's process still holds."""
    assert env.master is not None
    # Inherited from our launcher, which keeps the port over all rounds.
    listener = os.dup(env.store_fd) if env.store_fd is not None else None
    while True:
        try:
            # By "localhost": this pod's own service name may not resolve yet.
            return _store(
                "localhost",
                env.master[1],
                is_master=True,
                timeout=timedelta(seconds=max(1.0, waiting.left())),
                master_listen_fd=listener,
            )
        except RuntimeError as error:
            if "EADDRINUSE" not in str(error) and "already in use" not in str(error):
                raise
            waiting.pause(f"port {env.master[1]} is in use")


def _client(env: WorkerEnvironment, waiting: _Waiting) -> TCPStore:
    assert env.master is not None
    address, port = env.master
    while True:
        try:
            socket.create_connection((address, port), timeout=3).close()
            patience = timedelta(seconds=max(1.0, min(10.0, waiting.left())))
            return _store(address, port, is_master=False, timeout=patience)
        except socket.gaierror as error:
            reason = f"{address} {UNRESOLVED} ({error.strerror}): is the job's Service there?"
        except OSError as error:
            reason = f"rank 0 does not answer at {address}:{port} yet ({error.strerror or error})"
        except RuntimeError as error:
            reason = brief(error)
        waiting.pause(reason)


def _ask(store: Store, name: str, env: WorkerEnvironment) -> str:
    """Compare rank 0's incarnation with ours; return why to retry, "" if they are equal."""
    try:
        if not store.check([name]):
            return _NOT_READY
        uid, attempt, round_, world_size = json.loads(store.get(name))
    except (RuntimeError, ValueError) as error:
        return f"rank 0's store broke off: {brief(error)}"
    own = env.identity
    if (uid, attempt, round_) == (own.uid, own.attempt, own.round):
        if world_size == env.world_size:
            return ""
        raise ConfigError(f"WORLD_SIZE is {env.world_size} here and {world_size} at rank 0")
    if uid == own.uid and (attempt, round_) > (own.attempt, own.round):
        raise PeerLostError(
            f"rank 0 belongs to attempt {attempt} round {round_}, this process to attempt"
            f" {own.attempt} round {own.round}: it is out of date and ends"
        )
    return f"another job or an earlier attempt answers: {uid}, attempt {attempt} round {round_}"


def _rendezvous(env: WorkerEnvironment, deadline: float, device: torch.device) -> Store:
    """Return a store that exactly the ranks of this incarnation have joined."""
    waiting = _Waiting(env.rank, deadline)
    own = env.identity
    connect = _server if env.rank == 0 and not env.agent_store else _client
    while True:
        tcp = connect(env, waiting)
        # torchrun keeps one store over its restarts, hence the key per incarnation.
        name = f"{_IDENTITY_KEY}/{own.key}" if env.agent_store else _IDENTITY_KEY
        if env.rank == 0:
            tcp.set(name, json.dumps([own.uid, own.attempt, own.round, env.world_size]))
            break
        waiting.advanced()
        while (reason := _ask(tcp, name, env)) == _NOT_READY:  # on the same connection
            waiting.pause(reason)
        if not reason:
            break
        waiting.pause(reason)
    waiting.advanced()
    store = PrefixStore(own.key, tcp)
    failpoints.reach("rendezvous")
    _gather_all(store, env, waiting, f"{device.type} {accelerator.of(device).name()}")
    return store


def _gather_all(store: Store, env: WorkerEnvironment, waiting: _Waiting, device: str) -> None:
    """Wait until every rank is here, so that later timeouts mean a lost peer.

    ``device``: its type, and a name unique to it. Raises ConfigError where two ranks share one.
    """
    store.set(f"here/{env.rank}", device)
    # A pod that replaces another one is the last to come, and all wait for it.
    longest = min(_LONGEST_PAUSE_SECONDS, env.world_size / _LOOKS_PER_SECOND)
    if env.rank == 0:
        missing = list(range(1, env.world_size))
        while True:
            before = len(missing)
            missing = [rank for rank in missing if not store.check([f"here/{rank}"])]
            if not missing:
                break
            if len(missing) < before:
                waiting.advanced()
            names = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            waiting.pause(f"{len(missing)} of {env.world_size} ranks are missing: {names}", longest)
        devices = [store.get(f"here/{rank}").decode() for rank in range(env.world_size)]
        store.set("all-here", _misfit(devices) or _FINE)
    while not store.check(["all-here"]):
        waiting.pause("rank 0 still waits for other ranks", longest)
    verdict = store.get("all-here").decode()
    if verdict != _FINE:
        raise ConfigError(verdict)


def _misfit(devices: Sequence[str]) -> str:
    """Explain why these devices cannot train together, "" if they can.

    NCCL itself would wait, or fail with another message.
    """
    first: dict[str, int] = {}
    kinds, names = zip(*(device.split(" ", 1) for device in devices), strict=True)
    for rank, (kind, name) in enumerate(zip(kinds, names, strict=True)):
        if kind != kinds[0]:
            return (
                f"rank {rank} trains on {kind} and rank 0 on {kinds[0]}: give every pod GPUs, or"
                " use start(device='cpu')"
            )
        if name and first.setdefault(name, rank) != rank:
            return (
                f"ranks {first[name]} and {rank} have the same GPU, {name}: give each process one"
                " of its own, by LOCAL_RANK or CUDA_VISIBLE_DEVICES"
            )
    return ""


def join(env: WorkerEnvironment, started: float, device: torch.device) -> World:
    """Meet the other ranks; return this rank's World. ``started``: monotonic time from which the
    deadline counts.

    ``device``: that of this process, see accelerator.choose(). Raises ConfigError, PeerLostError.
    """
    if dist.is_initialized():
        raise ConfigError(
            "there is a process group already: leave dist.init_process_group() out, ddp.start()"
            " makes it; and end each run with run.finish() before the next one starts"
        )
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=env.deadlines.last_resort)
    # All ranks are here now: a rank that does not connect soon has died in between.
    connecting = min(timeout, timedelta(seconds=_CONNECT_SECONDS))
    if env.world_size == 1:
        store: Store = HashStore()
    else:
        store = _rendezvous(env, started + env.deadlines.startup, device)
        assert env.master is not None
        interfaces.choose(env.master[0])  # rank 0's name resolves by now
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
        _set_timeout(timeout, control)
        store.set_timeout(timeout)
    world = World(env.rank, env.world_size, device, env.identity, control, store)
    holds_group(world, "control", "store")
    return world
