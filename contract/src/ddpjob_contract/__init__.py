"""Define names and numbers for operator, trainer and plugin: environment, exit codes, reports.

Their wheels need exactly this version of it; the plugin's single file holds it. Pure: it imports
the standard library only, and does nothing.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, Literal, TypedDict

__version__ = "0.2.0"

# --- Environment of the trainer container -------------------------------------------------

#: Read by torchrun (PET_*, the defaults of its options) and by init_method="env://".
RENDEZVOUS_ENV: Final = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "PET_NNODES",
    "PET_NPROC_PER_NODE",
    "PET_NODE_RANK",
    "PET_MASTER_ADDR",
    "PET_MASTER_PORT",
    "PET_RDZV_ID",
)

#: Set by the operator with one process per pod only; otherwise by the launcher or torchrun,
#: because RANK and WORLD_SIZE always count processes.
PROCESS_ENV: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")

#: Prefix of all our variables.
OWN_PREFIX: Final = "DDPJOB_"

NAME: Final = "DDPJOB_NAME"
NAMESPACE: Final = "DDPJOB_NAMESPACE"
UID: Final = "DDPJOB_UID"
ATTEMPT: Final = "DDPJOB_ATTEMPT"  # from 1, one per incarnation of the gang's pods
ROUND: Final = "DDPJOB_ROUND"  # from 0, set by the launcher, one per incarnation of processes
REPLICA: Final = "DDPJOB_REPLICA"  # the pod's seat: 0..replicas+standby-1
REPLICAS: Final = "DDPJOB_REPLICAS"
NPROC_PER_NODE: Final = "DDPJOB_NPROC_PER_NODE"
SNAPSHOT_DIR: Final = "DDPJOB_SNAPSHOT_DIR"  # <spec.snapshot.path>/<job name>
SNAPSHOT_EVERY_STEPS: Final = "DDPJOB_SNAPSHOT_EVERY_STEPS"
SNAPSHOT_KEEP: Final = "DDPJOB_SNAPSHOT_KEEP"
SNAPSHOT_RESUME: Final = "DDPJOB_SNAPSHOT_RESUME"  # Auto | Never
#: Step of the newest snapshot that this job is known to have had on its volume; unset: none.
SNAPSHOT_STEP: Final = "DDPJOB_SNAPSHOT_STEP"
SNAPSHOT_EPHEMERAL: Final = "DDPJOB_SNAPSHOT_EPHEMERAL"  # 1: the volume ends with the pod
METRICS_PORT: Final = "DDPJOB_METRICS_PORT"
HUB_PORT: Final = "DDPJOB_HUB_PORT"
GRACE_SECONDS: Final = "DDPJOB_GRACE_SECONDS"
#: Rounds in a row without progress before the attempt ends; 0 or unset: no rounds.
IN_PLACE_MAX_WITHOUT_PROGRESS: Final = "DDPJOB_IN_PLACE_MAX_WITHOUT_PROGRESS"
#: Auto, Always or Never: whether the gang is restarted in place once to check a resume.
DRILL: Final = "DDPJOB_DRILL"
#: Exit codes that end the attempt at once, "3,42": those that spec.restart.rules answer with Fail.
IN_PLACE_FINAL_EXIT_CODES: Final = "DDPJOB_IN_PLACE_FINAL_EXIT_CODES"
#: Seconds without a failure that count as progress; 0 or unset: time never does.
HEAL_AFTER_SECONDS: Final = "DDPJOB_HEAL_AFTER_SECONDS"
#: A file or directory that the program writes: a newer mtime there is progress.
PROGRESS_PATH: Final = "DDPJOB_PROGRESS_PATH"
#: JSON, a list of words: more arguments of the program from the second start on.
RESUME_ARGS: Final = "DDPJOB_RESUME_ARGS"
#: Files or directories that are checkpoints, as a glob: without a match RESUME_ARGS are left out.
RESUME_WHEN: Final = "DDPJOB_RESUME_WHEN"
OUTPUT: Final = "DDPJOB_OUTPUT"  # spec.output as JSON
#: In RESUME_ARGS: the newest match of RESUME_WHEN.
NEWEST: Final = "{newest}"
#: The number of the hub that the pod was made for: it follows no hub with a smaller one.
HUB: Final = "DDPJOB_HUB"
#: Pods beyond ``replicas`` that wait to take a lost one's place; 0 or unset: none.
STANDBY: Final = "DDPJOB_STANDBY"
#: "1" in a pod that replaces a lost one, or a standby: it starts nothing before the hub says so.
REPLACEMENT: Final = "DDPJOB_REPLACEMENT"
#: So long launchers hold for a lost one's replacement; 0 or unset: the gang ends with it.
REPLACE_SECONDS: Final = "DDPJOB_REPLACE_SECONDS"
#: So few replicas train while others are away; 0 or unset: all are needed. Seconds: spec.elastic.
MIN_REPLICAS: Final = "DDPJOB_MIN_REPLICAS"
SHRINK_AFTER_SECONDS: Final = "DDPJOB_SHRINK_AFTER_SECONDS"
START_AFTER_SECONDS: Final = "DDPJOB_START_AFTER_SECONDS"
GROW_AFTER_SECONDS: Final = "DDPJOB_GROW_AFTER_SECONDS"
POD_UID: Final = "DDPJOB_POD_UID"
#: The last step that is known to have ended, of any incarnation: those up to it are repeated.
REACHED_STEP: Final = "DDPJOB_REACHED_STEP"
#: Launchers tell one another by it that they are of the job: key TOKEN_KEY of the job's Secret.
TOKEN: Final = "DDPJOB_TOKEN"
TOKEN_KEY: Final = "token"
HANG_STARTUP_SECONDS: Final = "DDPJOB_HANG_STARTUP_SECONDS"
HANG_STEP_SECONDS: Final = "DDPJOB_HANG_STEP_SECONDS"
HANG_SNAPSHOT_SECONDS: Final = "DDPJOB_HANG_SNAPSHOT_SECONDS"
HANG_OUTPUT_SECONDS: Final = "DDPJOB_HANG_OUTPUT_SECONDS"  # unset: a program may be silent

#: A template may set none of these, nor anything that starts with OWN_PREFIX but for USER_ENV.
RESERVED_ENV: Final = RENDEZVOUS_ENV + PROCESS_ENV

#: The user sets these, in a template or in a shell: where snapshots, events and curves go, and
#: whether survivors of a failure save the newest step (0: they do not).
USER_ENV: Final = (
    "DDPJOB_TRAINER_SNAPSHOT_UPLOAD",
    "DDPJOB_TRAINER_EVENTS",
    "DDPJOB_TRAINER_TENSORBOARD",
    "DDPJOB_TRAINER_RESCUE",
)

# --- Exit codes of the trainer container --------------------------------------------------


class ExitCode(IntEnum):
    """Meaning of an exit status of the trainer container; 128+n is death by signal n."""

    SUCCESS = 0
    USAGE = 2
    BAD_CONFIG = 64
    DIVERGED = 70  # ranks disagree, or the NaN policy said stop
    HARDWARE = 74  # a GPU failed, not the program: another machine may do better
    PEER_LOST = 75  # collateral: another rank died first
    HANG = 76
    CONFIG = 78
    NOT_EXECUTABLE = 126
    NOT_FOUND = 127
    SIGKILL = 137
    SIGTERM = 143


#: A restart cannot help: usage, configuration, not found.
PERMANENT_EXIT_CODES: Final = frozenset({2, 64, 78, 126, 127})

# --- Reports ------------------------------------------------------------------------------

TERMINATION_LOG: Final = "/dev/termination-log"
REPORT_VERSION: Final = 1
#: The kubelet shares 12 KiB among a pod's containers; ours stays far below.
REPORT_MAX_BYTES: Final = 2048
#: The operator reads no more than this from GET /state.
STATE_MAX_BYTES: Final = 64 * 1024
#: GET /state shows at most so many rounds, the newest.
STATE_MAX_ROUNDS: Final = 10
#: And so many replicas that are away.
STATE_MAX_AWAY: Final = 256
#: Stacks of a hang go to the log and to GET /state, never into the termination report.
STATE_MAX_STACKS_BYTES: Final = 16 * 1024

ReportKind = Literal[
    "success", "exit", "signal", "exception", "peerLost", "sigterm", "hang", "diverged", "hardware",
    "oom",  # the kernel killed that process, or a child of it, for lack of memory
]  # fmt: skip


class Round(TypedDict, total=False):
    """A round that ended and was followed by another one: restart in place, pods kept.

    What ended it is the first process that failed, as in the termination report; or a drill or
    growth, by which all processes end after the same step, as planned.
    """

    round: int  # the one that ended, from 0
    replica: int
    rank: int
    code: int  # exit status of that process, 128+n for signal n
    signal: int
    #: lost: the launcher of ``replica``, with its pod; grown: more launchers serve from then on.
    kind: ReportKind | Literal["drill", "lost", "grown"]
    exception: str
    step: int  # finished steps of that process
    snapshotStep: int  # step of the newest committed snapshot
    savedStep: int  # that a survivor saved before it was ended, and which one:
    savedBy: int
    at: str  # RFC 3339, UTC


class Resumed(TypedDict, total=False):
    """The snapshot that training resumes from, if it is another job's or another program's.

    The program is known by hashes, of the script's file and of its arguments.
    """

    step: int  # after which that snapshot was made
    uid: str  # of the other job that made it; absent: of this one
    changed: list[Literal["script", "arguments"]]  # differ from those that made it


#: The first difference in a step that was done again.
Differs = Literal["batch", "random numbers", "loss", "weights"]


class Proof(TypedDict, total=False):
    """Proof that steps done again after a restart are bitwise the same, or not.

    It is about the newest restart that did any again, from the launcher of rank 0.
    """

    equal: bool
    first: int  # of those that were compared, where all were equal
    last: int
    step: int  # the first that was not
    rank: int
    what: Differs
    unchecked: str  # alone: why nothing was compared, or no drill is made


class Spent(TypedDict, total=False):
    """Seconds of a launcher's life by what its gang did, as rank 0's clock has them.

    What is left of ``up`` belongs to a step that has not ended yet. Names: see LEDGER_STATES.
    """

    up: float
    warmup: float
    recovering: float
    held: float
    repeated: float
    data: float
    snapshot: float
    productive: float
    idle: float
    unknown: float  # of a program that reports no steps


class Straggler(TypedDict, total=False):
    """The rank for which the others wait; empty: there is none."""

    rank: int
    share: float  # of each step, so much longer than the others it works
    by: Literal["data", "compute"]  # what it does meanwhile: it waits for its input, or computes


#: Where a pod-second goes: status.ledger and ddpjob_pod_seconds_total name it so.
LEDGER_STATES: Final = (
    "productive",
    "repeated",  # steps done again after a resume
    "data",  # waiting for input
    "snapshot",  # training pauses for it
    "warmup",  # from the start of the processes to the end of their first step
    "recovering",  # after a failure; by its class
    "held",  # ready, while another pod is replaced
    "starting",  # image, volumes, containers
    "waiting",  # for a node, a quota
    "idle",  # after its own end, or standing by
    "unknown",
)


class Finished(TypedDict, total=False):
    """The round in which all ranks of an elastic gang have succeeded.

    ``round`` and ``size``, in replicas, only from a launcher that served in it.
    """

    number: int  # the hub's
    round: int
    size: int


class TerminationReport(TypedDict, total=False):
    """One JSON object that the launcher writes to the termination log when it ends.

    Only ``version`` and ``kind`` are certain. The operator treats it as data from a stranger.
    """

    version: int
    kind: ReportKind
    rank: int  # of the first process that failed
    localRank: int
    code: int  # exit status of that process, 128+n for signal n
    signal: int
    exception: str  # "ValueError: ...", at most a line
    log: list[str]  # last lines of that process; of a hang, then a line of stack per thread
    step: int  # finished steps
    loss: float
    round: int  # rounds before this one, hence restarts in place
    replica: int  # served in that round; -1: none, it stood by; absent: that of the pod's name
    snapshotStep: int  # step of the newest committed snapshot
    fileModifiedAt: str  # newest mtime at the progress path, RFC 3339, UTC
    rounds: list[Round]  # the newest, oldest first, as many as fit
    spent: Spent  # of the launcher of replica 0
    resumed: Resumed
    printed: dict[str, float]  # these three as in State
    metrics: dict[str, float]
    connected: bool
    finished: Finished


#: In an exception: no address of rank 0 was found; ranks ended early. exits.kind_of() reads it.
UNRESOLVED: Final = "does not resolve"
LEFT_EARLY: Final = "ended with exit code 0 while"


class State(TypedDict, total=False):
    """Body of GET /state?uid=UID on the metrics port of a launcher.

    ``uid``, ``rounds``, ``resumed``, ``proof`` and ``stacks`` are only for clients that name the
    job's uid; another uid gets status 409.
    """

    version: int
    uid: str  # of the job, if it is one's: another gang may have the address or port by now
    attempt: int  # the hub's number: the attempt in which its pod was made
    away: list[int]  # replicas whose launcher was linked to the hub and is not now
    holds: bool  # all launchers hold while a lost one is replaced; absent: they do not
    serving: str  # "2:4": replica 2 is served by the pod of seat 4; absent: each by its own
    size: int  # of an elastic gang: so many replicas serve in the round that runs
    parked: list[int]  # seats of its launchers that serve in none
    round: int  # rounds before this one, hence restarts in place
    phase: Literal["startup", "step", "snapshot", "done"]
    step: int
    totalSteps: int
    loss: float
    samplesPerSecond: float
    stepsPerSecond: float  # of the last minute
    snapshotStep: int
    snapshotEvery: int  # steps from one to the next, where the trainer chooses
    fileModifiedAt: str  # newest mtime at the progress path, RFC 3339, UTC
    updatedAt: str  # RFC 3339, UTC
    rounds: list[Round]  # the last ones that ended, oldest first
    resumed: Resumed
    proof: Proof
    spent: Spent  # of the launcher of replica 0
    straggler: Straggler
    silentSeconds: int  # since a rank of the gang printed a line, or made progress with the library
    #: step, totalSteps, loss, stepsPerSecond, as a program prints them that reports no steps.
    printed: dict[str, float]
    #: Processes of replica 0 had a connection with another pod of the gang; absent: nobody knows.
    connected: bool
    metrics: dict[str, float]  # the program's own numbers, by run.log() or as it prints them
    stacks: str  # of all threads of a process that hung
