"""Choose what a launcher starts: the command, and each worker's environment, as torchrun names it.

cli.py calls make_launch_config(); the supervisor and its parts read the config.
"""

from __future__ import annotations

import os
import pwd
import shutil
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ddpjob_contract as contract
from ddpjob_contract import ExitCode
from ddpjob_contract.crd import DEFAULTS
from ddpjob_trainer import arguments, environment
from ddpjob_trainer.environment import Elastic, Key, LauncherEnvironment
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.gpu import devices
from ddpjob_trainer.launcher import host
from ddpjob_trainer.launcher.host import RuntimeDir
from ddpjob_trainer.launcher.processes import numa
from ddpjob_trainer.launcher.processes.fork_server import Program
from ddpjob_trainer.launcher.processes.source import calls_start, uses_our_library

#: A killed process that waits for a disk or device without an answer may end later.
_EXIT_SECONDS = 10.0
#: Longer than replaceSeconds, so that the operator's decision on all pods comes first.
_HOLD_SECONDS = 30.0
#: With a GPU it frees GPU memory first: seconds, and more after an error of the GPU.
_EXIT_SECONDS_WITH_GPUS = 60.0


class CannotStartError(Exception):
    """The program is missing (127) or not executable (126)."""

    def __init__(self, code: ExitCode, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """One launcher's share of a gang. ``env``: what the operator has set, as it was read.

    ``replica``: its pod's seat until a Go of the hub names the one that it serves; of an elastic
    job ``replicas``, too.
    """

    env: LauncherEnvironment
    program: Program
    command: tuple[str, ...]
    nproc: int
    replica: int
    replicas: int
    master: tuple[str, int]
    run_id: str  # of a launcher without a job
    uid: str
    pod: str  # its uid
    exit_seconds: float  # how long a killed process may take to end
    metrics_port: int | None
    termination_log: Path | None
    standalone: bool
    #: So many rounds may follow one another without progress; 0: no rounds.
    rounds_without_progress: int
    heal_after: int  # a round that lasts so many seconds is progress too; 0: never
    hub_port: int | None  # None: alone, or no rounds
    spares: int
    preload: tuple[str, ...]  # modules that spares import for the script
    first_round_from_spares: bool  # else it starts fresh interpreters
    uses_our_library: bool  # then rank 0 takes the store's port from us
    calls_start: bool
    events: Path | None
    resume_args: tuple[str, ...]  # more arguments from the second start on
    resume_when: str  # glob of checkpoints; "": they need none
    output: Mapping[str, Any]  # how the program prints its numbers, as spec.output
    numa_binding: str  # see processes/numa.py; "": none

    @property
    def attempt(self) -> int:
        """Return the attempt in which this pod was made."""
        return self.env.identity.attempt

    @property
    def holds(self) -> bool:
        """Return whether the launcher waits while a lost one is replaced."""
        return self.hub_port is not None and self.env.replace_seconds > 0

    @property
    def hold_seconds(self) -> float:
        """Return for how long it waits at most."""
        hold = self.env.replace_seconds + _HOLD_SECONDS
        # A whole gang waits for its first Go as long as its ranks would for one another.
        return max(hold, self.env.deadlines.startup) if self.goes_on else hold

    @property
    def elastic(self) -> Elastic | None:
        """Return how the number of replicas may change, None: it does not."""
        return self.env.elastic if self.hub_port is not None else None

    @property
    def watched_at_start(self) -> bool:
        """Return whether a process must come to ddp.start() in time: others wait for it there."""
        return self.calls_start and self.world_size > 1

    @property
    def goes_on(self) -> bool:
        """Return whether its first start is a later one of a program that resumes by arguments."""
        return bool(self.resume_args) and self.attempt > 1

    @property
    def replacement(self) -> bool:
        """Return whether nothing starts before Go: it replaces a lost one, or is a standby.

        Or the hub has to choose who serves (E9), or the checkpoint from which all go on.
        """
        waits = self.env.replacement or self.elastic is not None
        return (self.hub_port is not None and waits) or self.goes_on

    @property
    def first(self) -> Key:
        """Return the round that begins without a hub's Go, or that no Go has begun yet."""
        if self.replacement:
            return Key(self.env.least_hub, -1)
        return Key(self.attempt, 0)

    def others(self) -> dict[int, tuple[str, int]]:
        """Return where the other launchers listen for calls of the new hub here, by seat."""
        job, port, seats = self.env.name, self.hub_port or 0, self.replicas + self.env.standby
        names = {i: f"{job}-{i}.{job}.{self.env.namespace}.svc" for i in range(1, seats)}
        return {i: (name, port) for i, name in names.items()}

    @property
    def world_size(self) -> int:
        """Return the number of training processes in the gang."""
        return self.replicas * self.nproc

    def resume_words(self, newest: str) -> tuple[str, ...]:
        """Return the program's further arguments. ``newest``: its checkpoint, "" for none."""
        if self.resume_when and not newest:
            return ()
        return tuple(word.replace(contract.NEWEST, newest) for word in self.resume_args)

    def rank(self, local_rank: int) -> int:
        """Return the global rank of a local one."""
        return self.replica * self.nproc + local_rank


def command_line(program: Program) -> tuple[str, ...]:
    """Return the argv of a script, module or executable. Raises CannotStartError, ConfigError."""
    name = program.name
    if program.module:
        return (sys.executable, "-u", "-m", name, *program.arguments)
    path = Path(name)
    arguments.check_notebook(path)
    script = name.endswith(".py")
    if script and path.is_file():
        return (sys.executable, "-u", name, *program.arguments)
    found = None if script else shutil.which(name)
    if found:
        return (found, *program.arguments)
    code = ExitCode.NOT_EXECUTABLE
    if path.is_dir():  # also one with a __main__.py, which `python` would run
        why = " is a directory: name the script in it, or a module with -m"
    elif path.exists() and not script:
        why = " is not executable: chmod +x it, or name it *.py"
    else:
        code, why = ExitCode.NOT_FOUND, ": no such script" if script else ": not found"
    raise CannotStartError(code, name + why)


def _nproc(env: LauncherEnvironment, given: int | None) -> int:
    if given is not None:
        arguments.whole("--nproc", given, least=1, most=arguments.MOST_PROCESSES)
        if env.replica is not None and env.nproc not in (None, given):
            raise ConfigError(
                f"--nproc {given} contradicts nprocPerNode {env.nproc} of the DDPJob: leave it out"
            )
    return given or env.nproc or 1


def _rounds(env: LauncherEnvironment, given: int | None, *, standalone: bool) -> int:
    """Choose the rounds' budget: the command line, else the operator's, else the default.

    Between pods rounds need the hub's port from the operator.
    """
    if given is not None:
        arguments.whole("--max-rounds-without-progress", given)
    if env.replicas > 1 and env.hub_port is None:
        return 0
    if (asked := env.rounds_without_progress if given is None else given) is not None:
        return asked
    return int(DEFAULTS["restart.inPlace.maxWithoutProgress"]) if standalone else 0


def _spares(given: str, program: Program, nproc: int, rounds: int, *, ours: bool) -> int:
    """Choose the number of spares: of a script only, one per worker if it uses our library."""
    if given != "auto" and not given.isdigit():
        raise ConfigError(f"--spares {given!r} must be a number or auto")
    python = program.module or program.name.endswith(".py")
    if not rounds or not python:
        return 0
    return (nproc if ours else 0) if given == "auto" else min(int(given), nproc)


def _preload(given: str) -> tuple[str, ...]:
    names = tuple(filter(None, map(str.strip, given.split(","))))
    for name in names:
        if not all(map(str.isidentifier, name.split("."))):
            raise ConfigError(f"--preload: {name!r} must be a module's name, as in torchvision,PIL")
    return names


def make_launch_config(
    env: LauncherEnvironment,
    program: Program,
    *,
    nproc: int | None = None,
    metrics_port: int | None = None,
    termination_log: Path | None = None,
    rounds_without_progress: int | None = None,
    events: Path | None = None,
    spares: str = "auto",
    preload: str = "",
    master_port: int | None = None,
    resume_args: str | None = None,
    resume_when: str | None = None,
    read: Sequence[str] = (),
    numa_binding: str = "",
) -> LaunchConfig:
    """Build the config from environment and command line. Raises ConfigError, CannotStartError."""
    command = command_line(program)
    if numa_binding:
        command = (sys.executable, "-P", "-m", numa.__name__, *command)
    standalone = env.replica is None
    if metrics_port is not None:
        arguments.whole("--metrics-port", metrics_port, most=65535)
    events = events or env.events
    words = env.resume_args if resume_args is None else arguments.resume_words(resume_args)
    when = env.resume_when if resume_when is None else resume_when
    arguments.check_resume(words, when)
    run_id = uuid.uuid4().hex
    rounds = _rounds(env, rounds_without_progress, standalone=standalone)
    if (env.replica or 0) >= env.replicas and not (rounds and env.hub_port):
        raise ConfigError(
            "a standby pod needs restarts in place: set restart.inPlace.maxWithoutProgress"
            " above 0, or spec.standby to 0"
        )
    nproc = _nproc(env, nproc)
    ours = uses_our_library(program)
    if env.elastic is not None:
        _check_elastic(env, env.elastic, ours=ours, rounds=rounds)
    unsaid = int(DEFAULTS["restart.healAfterSeconds"]) if standalone else 0
    # Without a binding: a spare cannot ask its GPU where it is, see numa.py.
    warm = _spares(spares, program, nproc, 0 if numa_binding else rounds, ours=ours)
    return LaunchConfig(
        env=env,
        program=program,
        command=command,
        numa_binding=numa_binding,
        nproc=nproc,
        replica=env.replica or 0,
        replicas=env.replicas,
        master=env.master or ("127.0.0.1", master_port or host.free_ports(1)[0]),
        run_id=run_id,
        uid=run_id if standalone else env.identity.uid,
        pod=env.pod_uid or run_id,
        exit_seconds=_EXIT_SECONDS_WITH_GPUS if devices.any_here() else _EXIT_SECONDS,
        metrics_port=metrics_port or env.metrics_port,
        termination_log=termination_log,
        standalone=standalone,
        rounds_without_progress=rounds,
        heal_after=unsaid if env.heal_after is None else env.heal_after,
        hub_port=env.hub_port if rounds and not standalone and env.replicas > 1 else None,
        spares=warm,
        preload=_preload(preload),
        first_round_from_spares=warm == nproc and ours,
        uses_our_library=ours,
        calls_start=calls_start(program),
        events=events.absolute() if events is not None else None,
        resume_args=words,
        resume_when=when,
        output=arguments.output_of(env.output, read),
    )


def _check_elastic(env: LauncherEnvironment, elastic: Elastic, *, ours: bool, rounds: int) -> None:
    """Refuse what spec.minReplicas cannot go with (E10). Raises ConfigError."""
    if not ours:
        raise ConfigError(
            "spec.minReplicas needs a program that trains with ddpjob_trainer at level='elastic':"
            " import it in the script itself, or leave minReplicas out"
        )
    if not (rounds and env.hub_port and env.replace_seconds) or env.standby:
        raise ConfigError(
            "spec.minReplicas needs restarts in place and restart.replaceSeconds above 0, and"
            " spec.standby at 0: set these, or leave minReplicas out"
        )
    if elastic.least > env.replicas:
        raise ConfigError(
            f"spec.minReplicas {elastic.least} is above spec.replicas {env.replicas}: lower it"
        )


def common_environment(
    config: LaunchConfig, base: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the part of a worker's environment that all ranks and rounds share."""
    env = dict(base)
    env.pop(contract.TOKEN, None)  # programs may log their environment
    env.setdefault("OMP_NUM_THREADS", "1")
    env.setdefault("PYTHONUNBUFFERED", "1")
    # Ask NVML whether there is CUDA: the driver survives no fork.
    env.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    try:
        tempfile.gettempdir()
    except FileNotFoundError:  # a read-only root file system; torch cannot be imported without one
        env["TMPDIR"] = "/dev/shm"  # in a DDPJob a volume that the operator mounts
    _give_home(env)
    if config.numa_binding:
        env[environment.NUMA_BINDING] = config.numa_binding
    if config.events is not None:
        env[environment.EVENTS] = str(config.events)
    if config.standalone:
        # Every rank is on this machine; its host name may resolve to an address it lacks.
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
        env[environment.RUN_ID] = config.run_id
    return env


def _give_home(env: dict[str, str]) -> None:
    """Give a user id unknown to the image a name and a home for caches.

    Clusters run containers under any user id; Python's getpass fails then, and torch with it.
    """
    try:
        home = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        home = "/"
        env.setdefault("USER", str(os.getuid()))
    if not os.access(env.get("HOME") or home, os.W_OK):
        env["HOME"] = env.get("TMPDIR") or tempfile.gettempdir()


def rank_environment(
    config: LaunchConfig, local_rank: int, key: Key, runtime_dir: RuntimeDir
) -> dict[str, str]:
    """Return the variables that torchrun sets, and those of our library.

    The hub may be newer than the pod, whose own variables name its first attempt and its seat.
    """
    address, port = config.master
    rank, size, replica = config.rank(local_rank), config.world_size, config.replica
    found: dict[str, object] = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "GROUP_RANK": replica,
        "ROLE_RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": config.nproc,
        "GROUP_WORLD_SIZE": config.replicas,
        "ROLE_WORLD_SIZE": size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        environment.MASTER: f"{address} {port}",
        "TORCHELASTIC_RESTART_COUNT": key.round,
        contract.ROUND: key.round,
        "TORCHELASTIC_MAX_RESTARTS": config.rounds_without_progress,
        "TORCHELASTIC_USE_AGENT_STORE": False,
        "PROMETHEUS_MULTIPROC_DIR": runtime_dir.metrics,
        environment.STATE_DIR: runtime_dir.round_path(key),
        environment.REPLAY_DIR: runtime_dir.replay,
    }
    if config.env.snapshot_dir:  # absolute: a script may change its directory before ddp.start()
        found[contract.SNAPSHOT_DIR] = config.env.snapshot_dir
    if config.elastic is not None:
        found[environment.MOST_RANKS] = config.env.replicas * config.nproc
    if config.standalone:
        found["TORCHELASTIC_RUN_ID"] = config.run_id
    else:
        found |= {
            contract.ATTEMPT: key.number,
            contract.REPLICA: replica,
            "PET_NODE_RANK": replica,
            "PET_NNODES": config.replicas,
            "PET_RDZV_ID": f"{config.uid}-{key.number}",
            "TORCHELASTIC_RUN_ID": f"{config.uid}-{key.number}-{key.round}",
        }
    return {name: str(value) for name, value in found.items()}
