"""Bring the ranks of one incarnation together: the store, then the process group.

start() calls join(), which returns a World. A peer's pod may start half a minute later and its DNS
name may not resolve yet, so connecting is retried until the startup deadline. Rank 0 publishes its
incarnation (job, attempt, round); ranks of another incarnation are refused. What decides is sealed
(sealed.py), and no key or value holds the job's uid.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as distributed_c10d
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from ddpjob_contract import UNRESOLVED
from ddpjob_trainer import failpoints
from ddpjob_trainer.comm.peer_loss import brief, peer_loss
from ddpjob_trainer.comm.sealed import Board, Seal, data_of, forgery, read
from ddpjob_trainer.comm.world import Links, World, holds_group
from ddpjob_trainer.environment import Identity, StoreKey, WorkerEnvironment
from ddpjob_trainer.errors import ConfigError, PeerLostError
from ddpjob_trainer.gpu import accelerator
from ddpjob_trainer.liveness.hang import MEETING_FACTOR
from ddpjob_trainer.printing import say

# --- gloo's interface -----------------------------------------------------------------------------
# For choose_interface(): gloo listens at the address of the host's name: in a pod the pod's; on the
# host's network that in the node's /etc/hosts, on Debian and Ubuntu 127.0.1.1, which no other node
# reaches.

INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915


def choose_interface(master: str) -> None:
    """Have gloo listen on the address by which this process reaches ``master``, rank 0.

    Does nothing where gloo finds a usable address, or all ranks are on this machine.
    """
    if INTERFACE in os.environ or not _is_loopback(_own()):
        return
    own = _towards(master)
    for _, name in socket.if_nameindex():
        if own == _address(name) and not _is_loopback(own):
            os.environ[INTERFACE] = name


def _own() -> str:
    """Return the address that gloo takes, the loopback where this host's name has none."""
    try:
        return str(socket.getaddrinfo(socket.gethostname(), None)[0][4][0])
    except OSError:
        return "127.0.0.1"


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")


def _towards(host: str) -> str:
    """Return this host's IPv4 address on the way to another host, "" without a way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((host, 9))  # sends nothing
        return str(probe.getsockname()[0])
    return ""


def _address(interface: str) -> str | None:
    """Return an interface's IPv4 address, if it has one."""
    request = struct.pack("256s", interface.encode()[:15])  # a struct ifreq, and more
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    return None


# --- Rendezvous -----------------------------------------------------------------------------------

_NEWS_SECONDS = 10.0
_CONNECT_SECONDS = 60.0
_local_socket = partial(socket.socket, socket.AF_UNIX, socket.SOCK_SEQPACKET)
#: The first pause of a wait; in a restart in place the other ranks are milliseconds away.
_FIRST_PAUSE_SECONDS = 0.001
_LONGEST_PAUSE_SECONDS = 0.5
#: All ranks that look together for the others, at rank 0's store.
_LOOKS_PER_SECOND = 250.0
_IDENTITY_KEY = "ddpjob/identity"
_IDENTITY_BYTES = 1024  # at most
_RUNS = itertools.count()  # of this process, as of each other rank's
_NOT_READY = "rank 0 is not ready yet"
#: Torch 2.13 has only the private name; 2.15 deprecates it.
_set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout


class _Waiting:
    """The deadline of a wait, and its log lines. ``named``: until when an address must resolve."""

    def __init__(self, rank: int, deadline: float, named: float) -> None:
        self.rank = rank
        self.deadline = deadline
        self._named = named
        self._news = time.monotonic() + _NEWS_SECONDS
        self._pause = _FIRST_PAUSE_SECONDS

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def pause(
        self, reason: str, longest: float = _LONGEST_PAUSE_SECONDS, *, nameless: bool = False
    ) -> None:
        """Sleep a little, log the reason now and then, raise PeerLostError at the deadline."""
        if self.left() <= 0 or (nameless and time.monotonic() >= self._named):
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
                # Nobody else is involved yet, so a restart would meet it again.
                raise ConfigError(
                    f"rank 0 cannot serve at MASTER_PORT={env.master[1]}: {brief(error)}"
                ) from error
            waiting.pause(f"port {env.master[1]} is in use")


def _client(env: WorkerEnvironment, waiting: _Waiting) -> TCPStore:
    assert env.master is not None
    address, port = env.master
    while True:
        nameless = False
        try:
            socket.create_connection((address, port), timeout=3).close()
            patience = timedelta(seconds=max(1.0, min(10.0, waiting.left())))
            return _store(address, port, is_master=False, timeout=patience)
        except socket.gaierror as error:
            nameless = True
            reason = f"{address} {UNRESOLVED} ({error.strerror}): is the job's Service there?"
        except OSError as error:
            reason = f"rank 0 does not answer at {address}:{port} yet ({error.strerror or error})"
        except RuntimeError as error:
            reason = brief(error)
        waiting.pause(reason, nameless=nameless)


class _Card:
    """What rank 0 says of its incarnation to all who ask, sealed for its own ranks."""

    def __init__(self, env: WorkerEnvironment, seal: Seal, run: int) -> None:
        self._env = env
        self._seal = seal
        own = env.identity
        self._number = [own.attempt, own.round, run]
        # torchrun keeps one store over its restarts, hence the key per incarnation.
        self._key = f"{_IDENTITY_KEY}/{seal.prefix}" if env.agent_store else _IDENTITY_KEY
        self._warned = False

    def show(self, store: Store) -> None:
        """Publish it, as rank 0. Others of the job know it by a hash of the uid."""
        salt = secrets.token_hex(8)
        facts = [_hash(salt, self._env.identity), *self._number, self._env.world_size, salt]
        anyhow: Any = store  # its stub has no bytes
        anyhow.set(self._key, self._seal.close(self._key, 0, json.dumps(facts).encode()))

    def compare(self, store: Store) -> str:
        """Compare rank 0's with ours; return why to ask again, "" if they are equal."""
        try:
            note = read(store, self._key)
        except RuntimeError as error:
            return f"rank 0's store broke off: {brief(error)}"
        if note is None:
            return _NOT_READY
        if self._seal.open(self._key, note):
            world_size = json.loads(data_of(note))[4]
            if world_size == self._env.world_size:
                return ""
            raise self._seal.refusal(
                f"WORLD_SIZE is {self._env.world_size} here and {world_size} at rank 0"
            )
        return self._other(note)

    def _other(self, note: bytes) -> str:
        """Say whose it may be. Raises PeerLostError for a younger incarnation of this job."""
        own = self._env.identity
        if _is_unsigned(note, own):
            raise PeerLostError(
                "rank 0 runs an older ddpjob-trainer, which signs nothing: all pods of a gang need"
                " one image. New pods of all of them have that"
            )
        try:
            job, *facts, _, salt = json.loads(data_of(note[:_IDENTITY_BYTES]))
            numbers = [int(one) for one in facts]
            attempt, round_, _ = numbers
            same = job == _hash(str(salt), own)
        except (ValueError, TypeError, OverflowError, RecursionError):
            same, numbers = True, self._number  # not even one of ours
        if same and numbers > self._number:
            raise PeerLostError(
                f"rank 0 belongs to attempt {attempt} round {round_}, this process to attempt"
                f" {own.attempt} round {own.round}: it is out of date and ends"
            )
        if not same or numbers != self._number:
            return f"another job or an earlier attempt answers: attempt {attempt} round {round_}"
        if not self._warned:
            self._warned = True
            say(self._env.rank, forgery(self._key))
        return "rank 0 does not show that it is of this job: do all pods have the same image?"


def _is_unsigned(note: bytes, own: Identity) -> bool:
    """Tell whether version 0.1.0 has written it for this incarnation."""
    try:
        found: object = json.loads(note[:_IDENTITY_BYTES])
    except (ValueError, RecursionError):
        return False
    return isinstance(found, list) and found[:3] == [own.uid, own.attempt, own.round]


def _hash(salt: str, own: Identity) -> str:
    return hashlib.sha256(f"{salt} {own.uid}".encode()).hexdigest()


def _rendezvous(
    env: WorkerEnvironment, seal: Seal, card: _Card, deadline: float, device: torch.device
) -> Store:
    """Return a store that exactly the ranks of this incarnation have joined."""
    # Our launchers look after ranks that do not come, and end this one with them.
    watched = env.state_dir is not None and not env.agent_store
    patience = env.deadlines.startup * (MEETING_FACTOR - 1) if watched else 0.0
    waiting = _Waiting(env.rank, deadline + patience, deadline)
    connect = _server if env.rank == 0 and not env.agent_store else _client
    while True:
        tcp = connect(env, waiting)
        if env.rank == 0:
            card.show(tcp)
            break
        waiting.advanced()
        while (reason := card.compare(tcp)) == _NOT_READY:  # on the same connection
            waiting.pause(reason)
        if not reason:
            break
        waiting.pause(reason)
    waiting.advanced()
    store = PrefixStore(seal.prefix, tcp)
    failpoints.reach("rendezvous")
    name = f"{device.type} {accelerator.of(device).name()}"
    _gather_all(Board(store, seal, env.rank), env, waiting, name)
    return store


def _gather_all(board: Board, env: WorkerEnvironment, waiting: _Waiting, device: str) -> None:
    """Wait until every rank is here, so that later timeouts mean a lost peer.

    ``device``: its type, and a name unique to it. Raises ConfigError where two ranks share one.
    """
    board.post("here", 0, env.rank, device.encode())
    # A pod that replaces another one is the last to come, and all wait for it.
    longest = min(_LONGEST_PAUSE_SECONDS, env.world_size / _LOOKS_PER_SECOND)
    if env.rank == 0:
        devices = {0: device}
        while True:
            missing = [rank for rank in range(env.world_size) if rank not in devices]
            found = {rank: board.poll("here", 0, rank) for rank in missing}
            devices |= {rank: name.decode() for rank, name in found.items() if name is not None}
            missing = [rank for rank in missing if rank not in devices]
            if not missing:
                break
            if len(missing) < len(found):
                waiting.advanced()
            names = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            waiting.pause(f"{len(missing)} of {env.world_size} ranks are missing: {names}", longest)
        verdict = _misfit([devices[rank] for rank in range(env.world_size)])
        board.post("all-here", 0, 0, verdict.encode())
    while (said := board.poll("all-here", 0, 0)) is None:
        waiting.pause("rank 0 still waits for other ranks", longest)
    if said:
        raise board.refusal(said.decode())


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
                f"ranks {first[name]} and {rank} have the same GPU, {name}: give each process"
                " its own, by LOCAL_RANK or CUDA_VISIBLE_DEVICES"
            )
    return ""


def join(env: WorkerEnvironment, key: StoreKey, started: float, device: torch.device) -> World:
    """Meet the other ranks; return this rank's World. ``started``: monotonic time from which the
    deadline counts.

    ``device``: that of this process, see accelerator.choose(). Raises ConfigError, PeerLostError.
    """
    if dist.is_initialized():
        raise ConfigError(
            "there is a process group already: leave dist.init_process_group() out, ddp.start()"
            " makes it; and end each run with run.finish() before the next one starts"
        )
    timeout = timedelta(seconds=env.deadlines.last_resort)
    # All ranks are here now: a rank that does not connect soon has died in between.
    connecting = min(timeout, timedelta(seconds=_CONNECT_SECONDS))
    run = next(_RUNS)
    seal = Seal(key, env.identity, run)
    if env.world_size == 1:
        store: Store = HashStore()
    else:
        card = _Card(env, seal, run)
        store = _rendezvous(env, seal, card, started + env.deadlines.startup, device)
        assert env.master is not None
        choose_interface(env.master[0])  # rank 0's name resolves by now
        store.set_timeout(connecting)
    control = _group(store, env, device, connecting, timeout)
    board = Board(store, seal, env.rank)
    world = World(env.rank, env.world_size, device, env.identity, control, board)
    if env.state_dir is not None and env.local_size == env.world_size > 1:
        world.links = _link(world, env.state_dir)
    holds_group(world, "control", "board", "links")
    return world


def _link(world: World, directory: Path) -> Links | None:
    """Link the ranks of one launcher; None if one of them cannot. Raises PeerLostError."""
    paths = [str(directory / f"rank-{rank}.link") for rank in range(world.size)]
    with _local_socket() as listener:
        try:
            Path(paths[world.rank]).unlink(missing_ok=True)  # of an earlier run of this process
            listener.bind(paths[world.rank])
            listener.listen(world.size)
            listening = 1.0
        except OSError:
            listening = 0.0
        if world.sum([listening])[0] < world.size:
            return None
        others = [_local_socket() for _ in range(world.rank)]
        listener.settimeout(_CONNECT_SECONDS)
        with peer_loss():
            for other, path in zip(others, paths, strict=False):
                other.connect(path)
            others += [listener.accept()[0] for _ in range(world.rank + 1, world.size)]
    return Links(others)


def _group(
    store: Store,
    env: WorkerEnvironment,
    device: torch.device,
    connecting: timedelta,
    timeout: timedelta,
) -> dist.ProcessGroup:
    """Make the process groups; return the one for control. Raises ConfigError, PeerLostError."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
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
    except (ValueError, MemoryError) as error:
        # What gloo itself leaves in the store has no MAC: this may be a stranger's.
        what = f"an address that a rank left in torch's store cannot be read: {brief(error)}"
        raise PeerLostError(what) from error
    return control
