"""Read the process environment, here and nowhere else.

Two readers: a worker (variables of the operator, our launcher or torchrun, or none) and the
launcher (the operator's, or none: then it is alone on this machine). Never imports torch.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import os
from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import ddpjob_contract as contract
from ddpjob_contract.crd import AUTO, DEFAULTS, GRACE_SECONDS
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.liveness import stacks
from ddpjob_trainer.liveness.hang import Deadlines

#: Between launcher and worker only, hence not in the contract.
STATE_DIR = "DDPJOB_TRAINER_STATE_DIR"
#: For files that outlive a round: the records of steps that a restart is compared with.
REPLAY_DIR = "DDPJOB_TRAINER_REPLAY_DIR"
RUN_ID = "DDPJOB_TRAINER_RUN_ID"  # of a launcher without a job: unique, as a job's uid
STORE_FD = "DDPJOB_TRAINER_STORE_FD"  # a bound socket for the store that rank 0 serves
MASTER = "DDPJOB_TRAINER_MASTER"  # MASTER_ADDR and MASTER_PORT, which scripts overwrite
MOST_RANKS = "DDPJOB_TRAINER_MOST_RANKS"  # of an elastic job; unset: their number is fixed
KEY_FD = "DDPJOB_TRAINER_KEY_FD"  # a file in memory, KEY_FILE, with the round's StoreKey
KEY_FILE = "ddpjob-store-key"
NUMA_BINDING = "DDPJOB_TRAINER_NUMA_BINDING"  # which CPUs torch binds this process to
#: Of a launcher, for a round: whether it allows a drill, its pid, when the round began (monotonic).
ROUND_DRILL = "DDPJOB_TRAINER_DRILL"
#: For benchmarks: a file to which launcher and workers append {t, event, rank, round}.
TRACE = "DDPJOB_TRAINER_TRACE"
#: Where `ddpjob chaos` wants records and arms fail points; only it sets this.
CHAOS = "DDPJOB_TRAINER_CHAOS"
#: Set by a user: a refusal shows its whole traceback, on every rank.
TRACEBACK = "DDPJOB_TRAINER_TRACEBACK"
#: A user may set these; arguments of start() come first.
SNAPSHOT_UPLOAD, EVENTS, TENSORBOARD, RESCUE = contract.USER_ENV

_HANG = (contract.HANG_STARTUP_SECONDS, contract.HANG_STEP_SECONDS, contract.HANG_SNAPSHOT_SECONDS)
MIN_KEEP = 2


@dataclass(frozen=True, slots=True)
class Identity:
    """The job and incarnation of this process.

    ``unique``: (uid, attempt, round) never comes twice, as the operator and our launcher guarantee.
    Otherwise rank 0 draws a new uid for the snapshot lineage.
    """

    uid: str
    attempt: int
    round: int
    unique: bool
    #: Derived from the job's token, hexadecimal: start records are signed with it. "": none.
    secret: str = field(default="", repr=False, compare=False)
    namespace: str = field(default="", compare=False)

    @property
    def key(self) -> str:
        """Return a prefix for rendezvous keys."""
        return f"{self.uid}/{self.attempt}/{self.round}"


@dataclass(frozen=True, slots=True)
class StoreKey:
    """By it the ranks of one incarnation know one another's words in torch's store.

    ``final``: no stranger has it, or there is no job that such words could end for good.
    """

    secret: bytes = field(repr=False)
    final: bool
    lineage: bytes = field(default=b"", repr=False)  # of the whole job, see Identity.secret


class Key(NamedTuple):
    """One incarnation of a gang's processes: the number of its hub, and the hub's round."""

    number: int
    round: int


@dataclass(frozen=True, slots=True)
class SnapshotSettings:
    """A worker's snapshot settings. ``directory`` None: no snapshots."""

    directory: Path | None
    every_steps: int | None  # None: Auto, see snapshot/interval.py
    keep: int
    resume: bool
    staging: str = "auto"  # see options.Snapshots
    hyperparameters: str = "snapshot"
    allow_changes: frozenset[str] = frozenset()  # see options.CHANGES
    upload: str = ""  # URL to copy finished snapshots to
    ends_with_pod: bool = False  # the volume does: only an uploaded snapshot outlives the pod
    known_step: int = 0  # of the newest snapshot that the job is known to have had


@dataclass(frozen=True, slots=True)
class DrillSettings:
    """What a launcher says of drills in a round that began at a monotonic time."""

    mode: str = "Never"
    launcher: int = 0  # its pid
    begun: float = 0.0


@dataclass(frozen=True, slots=True)
class Elastic:
    """Hold spec.minReplicas and the seconds of spec.elastic."""

    least: int
    shrink_after: float
    start_after: float
    grow_after: float


@dataclass(frozen=True, slots=True)
class WorkerEnvironment:
    """One training process's place in the job. ``master`` None: alone, no rendezvous."""

    rank: int
    world_size: int
    local_rank: int
    most: int  # ranks of an elastic job; 0: their number is fixed
    local_size: int  # processes of this launcher; 0: unknown
    master: tuple[str, int] | None
    agent_store: bool  # torchrun's agent already serves the store
    identity: Identity
    snapshot: SnapshotSettings
    deadlines: Deadlines
    threads: int | None
    state_dir: Path | None
    replay_dir: Path | None
    drill: DrillSettings
    store_fd: int | None
    reached: int  # the last step finished before, by any incarnation; 0: none is known
    trace: Path | None
    chaos: Path | None
    events: Path | None
    tensorboard_dir: str | None
    watch: bool  # look for hangs in this process, without a launcher of ours
    rescue: bool  # see RESCUE


@dataclass(frozen=True, slots=True)
class LauncherEnvironment:
    """The operator's settings of this pod. ``replica`` None: standalone.

    ``replica``: the pod's seat; those beyond ``replicas``, ``standby`` in number, are standbys.
    ``least_hub``: the launcher follows no hub with a smaller number. ``replacement``: the pod takes
    a lost one's place, or is a standby. ``replace_seconds`` 0: nobody holds while one is replaced.
    """

    replica: int | None
    replicas: int
    standby: int
    nproc: int | None
    master: tuple[str, int] | None
    identity: Identity
    name: str
    namespace: str
    pod_uid: str  # "": not a pod
    token: str = field(repr=False)  # of the job; "": none
    least_hub: int
    replacement: bool
    replace_seconds: int
    grace_seconds: float
    metrics_port: int | None
    hub_port: int | None
    rounds_without_progress: int | None  # None: not set by the operator
    heal_after: int | None  # seconds, 0: never; None: not set by the operator
    progress_path: Path | None
    final_exit_codes: frozenset[int]  # no round follows these
    drill: str  # Auto, Always or Never
    reached: int  # the last step that the operator knows to have been finished
    trace: Path | None
    deadlines: Deadlines
    events: Path | None
    resume_args: tuple[str, ...]
    resume_when: str
    output: Mapping[str, Any]  # spec.output
    snapshot_dir: Path | None  # for evidence of failures
    upload: str  # URL where that goes, too
    rescue: bool = False  # see RESCUE
    elastic: Elastic | None = None

    @property
    def reseats(self) -> bool:
        """Return whether a launcher may serve another replica than its seat's."""
        return self.standby > 0 or self.elastic is not None


def _integer(env: Mapping[str, str], name: str, default: int, *, least: int = 0) -> int:
    text = env.get(name, "")
    if not text:
        return default
    try:
        value = int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} is not a whole number") from None
    if value < least:
        raise ConfigError(f"{name}={value} is too small: at least {least}")
    return value


def _seconds(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(f"{name}={text!r} must be a positive number of seconds")
    return value


def _deadlines(env: Mapping[str, str]) -> Deadlines:
    fields = ("hang.startupSeconds", "hang.stepSeconds", "hang.snapshotSeconds")
    start, step, save = (_seconds(env, n, DEFAULTS[f]) for n, f in zip(_HANG, fields, strict=True))
    name = contract.HANG_OUTPUT_SECONDS
    return Deadlines(start, step, save, _seconds(env, name, 0) if env.get(name) else math.inf)


def _identity(env: Mapping[str, str]) -> Identity:
    restarts = _integer(env, "TORCHELASTIC_RESTART_COUNT", 0)
    if uid := env.get(contract.UID, ""):
        # torchrun's restarts inside a DDPJob: the operator's round stays, the count grows.
        round_ = _integer(env, contract.ROUND, restarts)
        attempt, namespace = _integer(env, contract.ATTEMPT, 1), env.get(contract.NAMESPACE, "")
        return Identity(uid, attempt, round_, unique=True, namespace=namespace)
    run = env.get("TORCHELASTIC_RUN_ID", "none")  # torchrun's default is "none" as well
    ours = run == env.get(RUN_ID)  # else a torchrun below our launcher, which restarts by itself
    round_ = _integer(env, contract.ROUND, 0) if ours else restarts
    return Identity(f"local-{run}", 1, round_, unique=ours)


def _snapshot(env: Mapping[str, str]) -> SnapshotSettings:
    directory = _path(env, contract.SNAPSHOT_DIR)
    if "://" in env.get(contract.SNAPSHOT_DIR, ""):
        raise ConfigError(
            f"{contract.SNAPSHOT_DIR} must be a directory, not a URL; finished snapshots are"
            f" copied to a URL when {SNAPSHOT_UPLOAD} names one"
        )
    resume = env.get(contract.SNAPSHOT_RESUME) or DEFAULTS["snapshot.resume"]
    if resume not in ("Auto", "Never"):
        raise ConfigError(f"{contract.SNAPSHOT_RESUME}={resume!r} must be Auto or Never")
    auto = env.get(contract.SNAPSHOT_EVERY_STEPS, "").lower() in ("", AUTO.lower())
    return SnapshotSettings(
        directory,
        None if auto else _integer(env, contract.SNAPSHOT_EVERY_STEPS, 0, least=1),
        max(MIN_KEEP, _integer(env, contract.SNAPSHOT_KEEP, DEFAULTS["snapshot.keep"], least=1)),
        resume == "Auto",
        upload=env.get(SNAPSHOT_UPLOAD, ""),
        ends_with_pod=env.get(contract.SNAPSHOT_EPHEMERAL) == "1",
        known_step=_integer(env, contract.SNAPSHOT_STEP, 0),
    )


def _elastic(env: Mapping[str, str]) -> Elastic | None:
    if not (least := _integer(env, contract.MIN_REPLICAS, 0)):
        return None
    seconds = (
        _integer(env, contract.SHRINK_AFTER_SECONDS, 5),
        _integer(env, contract.START_AFTER_SECONDS, 30),
        _integer(env, contract.GROW_AFTER_SECONDS, 60),
    )
    return Elastic(least, *seconds)


def _drill(env: Mapping[str, str]) -> DrillSettings:
    mode, _, rest = env.get(ROUND_DRILL, "Never 0 0").partition(" ")
    launcher, begun = rest.split()
    return DrillSettings(mode, int(launcher), float(begun))


def _place(env: Mapping[str, str]) -> tuple[int, int, int]:
    """Return rank, world size, local rank."""
    given = [name for name in ("RANK", "WORLD_SIZE") if env.get(name)]
    if not given:
        processes = _integer(env, "PET_NNODES", 1) * _integer(env, "PET_NPROC_PER_NODE", 1)
        if env.get(contract.REPLICA) and processes > 1:
            raise ConfigError(
                "RANK and WORLD_SIZE are not set, but this pod is one of a gang: start the script"
                " with `ddpjob-trainer run script.py` or with torchrun"
            )
        return 0, 1, 0
    if len(given) == 1:
        raise ConfigError(f"{given[0]} is set, so RANK and WORLD_SIZE must both be set")
    rank = _integer(env, "RANK", 0)
    world = _integer(env, "WORLD_SIZE", 1, least=1)
    if rank >= world:
        raise ConfigError(f"RANK={rank} must be below WORLD_SIZE={world}")
    return rank, world, _integer(env, "LOCAL_RANK", 0)


def _master(env: Mapping[str, str]) -> tuple[str, int] | None:
    address = env.get("MASTER_ADDR", "")
    return (address, _integer(env, "MASTER_PORT", DEFAULTS["port"], least=1)) if address else None


def _given_master(env: Mapping[str, str]) -> tuple[str, int] | None:
    """Return where our launcher, or the operator, has rank 0 serve; None: neither says so."""
    if _has_agent_store(env):
        return None
    address, _, port = env.get(MASTER, "").partition(" ")
    if not address and env.get(contract.REPLICA):
        address, port = env.get("PET_MASTER_ADDR", ""), env.get("PET_MASTER_PORT", "")
    return (address, int(port)) if address and port.isdecimal() else None


def overwritten_master(env: Mapping[str, str]) -> str:
    """Say what of a script's MASTER_ADDR and MASTER_PORT does not count, "" for nothing."""
    found, given = _master(env), _given_master(env)
    if given is None or found is None or found == given:
        return ""
    here, there = (f"{address}:{port}" for address, port in (found, given))
    return (
        f"warning: the script sets MASTER_ADDR and MASTER_PORT to {here}; rank 0 is at {there}, as"
        " the launcher or the operator has set them: leave these lines out"
    )


def _has_agent_store(env: Mapping[str, str]) -> bool:
    return env.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"


def outside_of_jobs(env: Mapping[str, str], keep: Collection[str] = ()) -> dict[str, str]:
    """Return a shell's variables without a job's, except ``keep``."""
    return {
        name: value
        for name, value in env.items()
        if name in keep
        or not (name.startswith(contract.OWN_PREFIX) or name in contract.RESERVED_ENV)
    }


def output_variable(output: Mapping[str, Any]) -> dict[str, str]:
    """Return the variable that hands spec.output to a launcher, if anything is in it."""
    return {contract.OUTPUT: json.dumps(output, sort_keys=True)} if output else {}


def state_directory(env: Mapping[str, str]) -> Path | None:
    """Return the directory of this rank's record, None without a launcher of ours."""
    return _path(env, STATE_DIR)


def arrive(env: Mapping[str, str]) -> None:
    """Let our launcher know that this process has the library: a script before ddp.start()."""
    directory, rank = state_directory(env), env.get("RANK", "")
    if directory is not None and rank.isdecimal():
        stacks.arrive(directory, int(rank))


def source_folders() -> str:
    """Return the import path of this package and the contract, joined by os.pathsep."""
    # One folder where they are installed, two in a checkout.
    return os.pathsep.join(
        {str(Path(file).parents[1]): "" for file in (__file__, contract.__file__)}
    )


def wants_traceback(env: Mapping[str, str]) -> bool:
    """Return whether a refusal shows its place in our code."""
    return env.get(TRACEBACK, "") not in ("", "0")


def round_secret(token: str, uid: str, attempt: int, round_: int) -> bytes:
    """Derive the secrets of a StoreKey from the job's token: the round's, and the job's."""
    of_round = hmac.digest(token.encode(), f"store {uid} {attempt} {round_}".encode(), "sha256")
    return of_round + hmac.digest(token.encode(), f"lineage {uid}".encode(), "sha256")


_SECRET = 32  # bytes
#: A later run of this process finds the environment without it.
_taken: dict[Identity, StoreKey] = {}


def take_key(env: MutableMapping[str, str], own: Identity) -> StoreKey:
    """Take the key out of a worker's environment: our launcher's, else by the pod's token."""
    fd, token = env.pop(KEY_FD, ""), env.pop(contract.TOKEN, "")
    found = _secret_from(fd)
    if token and not found:
        found = round_secret(token, own.uid, own.attempt, own.round)
    if found:
        _taken[own] = StoreKey(found[:_SECRET], final=True, lineage=found[_SECRET:])
    unknown = round_secret("", own.uid, own.attempt, own.round)[:_SECRET]
    return _taken.get(own) or StoreKey(unknown, final=not env.get(contract.UID))


def _secret_from(fd: str) -> bytes:
    """Read the launcher's file, b"" where a program in between has not handed it on."""
    with contextlib.suppress(OSError, ValueError):
        if KEY_FILE in os.readlink(f"/proc/self/fd/{int(fd)}"):  # noqa: PTH115
            secret = os.pread(int(fd), 2 * _SECRET, 0)
            os.close(int(fd))
            return secret
    return b""


def _path(env: Mapping[str, str], name: str) -> Path | None:
    text = env.get(name, "")
    return Path(text).absolute() if text else None  # the script may change its directory


def read_worker(env: Mapping[str, str]) -> WorkerEnvironment:
    """Read a worker's variables. Raises ConfigError where they contradict each other."""
    rank, world, local_rank = _place(env)
    master = _given_master(env) or _master(env)
    if world > 1 and master is None:
        raise ConfigError(f"WORLD_SIZE={world} needs MASTER_ADDR and MASTER_PORT")
    state_dir = _path(env, STATE_DIR)
    return WorkerEnvironment(
        rank=rank,
        world_size=world,
        local_rank=local_rank,
        most=_integer(env, MOST_RANKS, 0),
        local_size=_integer(env, "LOCAL_WORLD_SIZE", 0),
        master=master if world > 1 else None,
        agent_store=_has_agent_store(env),
        identity=_identity(env),
        snapshot=_snapshot(env),
        deadlines=_deadlines(env),
        threads=_integer(env, "OMP_NUM_THREADS", 0) or None,
        state_dir=state_dir,
        replay_dir=_path(env, REPLAY_DIR),
        drill=_drill(env),
        store_fd=_integer(env, STORE_FD, 0) if env.get(STORE_FD) else None,
        reached=_integer(env, contract.REACHED_STEP, 0),
        trace=_path(env, TRACE),
        chaos=_path(env, CHAOS),
        events=_path(env, EVENTS),
        tensorboard_dir=env.get(TENSORBOARD) or None,  # may be a URL
        # A single process without deadlines may well be a person with a debugger.
        watch=not env.get(STATE_DIR) and (world > 1 or any(env.get(name) for name in _HANG)),
        rescue=env.get(RESCUE) != "0",
    )


def read_launcher(env: Mapping[str, str]) -> LauncherEnvironment:
    """Read a launcher's variables. Raises ConfigError where a gang's are incomplete."""
    replica = env.get(contract.REPLICA, "")
    master = _master(env)
    if replica and master is None:
        raise ConfigError(f"{contract.REPLICA} is set, so MASTER_ADDR and MASTER_PORT must be too")
    name, heal = contract.IN_PLACE_MAX_WITHOUT_PROGRESS, contract.HEAL_AFTER_SECONDS
    replicas = _integer(env, "PET_NNODES", _integer(env, contract.REPLICAS, 1), least=1)
    nproc = _integer(env, "PET_NPROC_PER_NODE", _integer(env, contract.NPROC_PER_NODE, 0))
    final = env.get(contract.IN_PLACE_FINAL_EXIT_CODES)
    snapshots = env.get(contract.SNAPSHOT_DIR, "")
    drill = env.get(contract.DRILL) or "Auto"
    if drill not in ("Auto", "Always", "Never"):
        raise ConfigError(f"{contract.DRILL}={drill!r} must be one of Auto, Always, Never")
    return LauncherEnvironment(
        replica=_integer(env, contract.REPLICA, 0) if replica else None,
        replicas=replicas if replica else 1,
        standby=_integer(env, contract.STANDBY, 0),
        nproc=nproc or None,
        master=master if replica else None,
        identity=_identity(env),
        name=env.get(contract.NAME, ""),
        namespace=env.get(contract.NAMESPACE, ""),
        pod_uid=env.get(contract.POD_UID, ""),
        token=env.get(contract.TOKEN, ""),
        least_hub=_integer(env, contract.HUB, 0),
        replacement=env.get(contract.REPLACEMENT) == "1",
        replace_seconds=_integer(env, contract.REPLACE_SECONDS, 0),
        grace_seconds=_seconds(env, contract.GRACE_SECONDS, GRACE_SECONDS),
        metrics_port=_integer(env, contract.METRICS_PORT, 0) or None,
        hub_port=_integer(env, contract.HUB_PORT, 0) or None,
        rounds_without_progress=_integer(env, name, 0) if env.get(name) else None,
        heal_after=_integer(env, heal, 0) if env.get(heal) else None,
        progress_path=_path(env, contract.PROGRESS_PATH),
        final_exit_codes=frozenset(map(int, final.split(","))) if final else frozenset(),
        drill=drill,
        reached=_integer(env, contract.REACHED_STEP, 0),
        trace=_path(env, TRACE),
        deadlines=_deadlines(env),
        events=_path(env, EVENTS),
        resume_args=tuple(json.loads(env.get(contract.RESUME_ARGS) or "[]")),
        resume_when=env.get(contract.RESUME_WHEN, ""),
        output=json.loads(env.get(contract.OUTPUT) or "{}"),
        snapshot_dir=None if "://" in snapshots else _path(env, contract.SNAPSHOT_DIR),
        upload=env.get(SNAPSHOT_UPLOAD, ""),
        rescue=env.get(RESCUE) != "0",
        elastic=_elastic(env),
    )
