"""Decide whether another round follows.

The hub notes in an Outcome what it hears of a round, and calls decide() after all workers of the
gang have ended; both are pure. A round is one incarnation of the gang's processes within an
attempt; the first is 0.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from ddpjob_contract import PERMANENT_EXIT_CODES, STATE_MAX_ROUNDS, ExitCode, Round
from ddpjob_contract.exits import SAME_EXCEPTION, alike
from ddpjob_trainer.environment import Elastic
from ddpjob_trainer.launcher.hub import root_cause
from ddpjob_trainer.launcher.hub.root_cause import Exit

#: A fresh start would meet the same: fail at once.
FINAL_EXIT_CODES = PERMANENT_EXIT_CODES | {ExitCode.DIVERGED}
#: A program that reports no steps and fails so soon has, likely, done none.
_START_SECONDS = 300.0
#: How workers end that were asked to stop together, or that another one has asked.
_STOPPED = {ExitCode.SIGTERM, ExitCode.PEER_LOST}
#: An attempt has so many drills at most.
_DRILLS = 2


@dataclass(frozen=True, slots=True)
class History:
    """The rounds of this hub. ``round`` runs now, or is to be decided about; -1: none began.

    ``snapshot_step``: the newest known, -1: none. ``modified``: newest mtime at the progress path,
    ns since the epoch, -1: none. ``failures``: since the last progress.
    ``records``: of rounds that ended and were followed by another, the newest, oldest first.
    ``at_start``: by which exception all processes ended the last round before their first step.
    """

    round: int = 0
    snapshot_step: int = -1
    modified: int = -1
    failures: int = 0
    records: tuple[Round, ...] = ()
    at_start: str = ""

    def followed_by(self, record: Round) -> History:
        """Return it with another round begun. ``record``: of the one before."""
        records = (*self.records, record)[-STATE_MAX_ROUNDS:]
        return replace(self, round=self.round + 1, records=records)


@dataclass(frozen=True, slots=True)
class Limits:
    """``budget``: so many rounds may follow one another without progress; 0: no rounds.

    ``heal_after``: a round that lasted so many seconds was progress; 0: never. ``final``: exit
    codes after which the user wants no restart, besides FINAL_EXIT_CODES. ``hold``: so many seconds
    the gang waits for the replacement of a lost launcher. ``elastic``: None: no other size.
    """

    budget: int
    heal_after: float = 0.0
    final: frozenset[int] = frozenset()
    hold: float = 0.0
    elastic: Elastic | None = None


@dataclass(frozen=True, slots=True)
class Loss:
    """A launcher by whose loss a round ended. ``replaced``: a new pod takes its place."""

    replica: int
    replaced: bool


@dataclass(slots=True)
class Outcome:
    """What is known of a round of ``replicas`` launchers with ``nproc`` workers each."""

    replicas: int
    nproc: int
    exits: dict[int, Exit] = field(default_factory=dict)  # by rank
    done: set[int] = field(default_factory=set)  # seats where all workers have ended with 0
    snapshot_step: int = -1  # the newest that a worker knows of
    lasted: float = 0.0  # seconds from its begin to Stop
    lost: dict[int, str] = field(default_factory=dict)  # replicas without their launcher -> its pod
    saved: tuple[int, int] | None = None  # by a survivor at the end: its rank, the step
    lost_first: bool = False  # a loss, and no worker's failure, ended the round
    wait_until: float | None = None  # for the replacement of the first that was lost
    late: bool = False  # it was ended because its first step did not come in time

    @property
    def cause(self) -> Exit | None:
        """Return the failure that came first as far as is known."""
        return root_cause.first_failure(self.exits.values())

    def note(self, replica: int, exits: Collection[Exit], now: float) -> None:
        """Record exits by the hub's clock: the launchers' clocks cannot be compared."""
        for exit_ in exits:
            # Without rounds the hub hears its own launcher only, whose ranks are the gang's.
            if self.replicas > 1 and exit_.rank // self.nproc != replica:
                raise ValueError(f"rank {exit_.rank} is not of replica {replica}")
            if exit_.rank not in self.exits:
                said = exit_.exception[:400]
                self.exits[exit_.rank] = replace(exit_, at=now, exception=said)

    def is_success(self) -> bool:
        """Return whether all have succeeded, also beside one that leaves after the last step.

        Else some programs save and end with 0 together, unfinished.
        """
        ends = self.exits.values()
        finished = all(one.done and not one.status for one in ends)
        everybody = len(ends) == self.replicas * self.nproc
        return len(self.done) == self.replicas or (finished and everybody)

    def loss(self, idle_pods: Collection[str]) -> Loss | None:
        """Return the loss that ended the round, None if a worker's failure did."""
        if not self.lost:
            return None
        cause = self.cause
        collateral = cause is None or cause.lost_peer or cause.rank // self.nproc in self.lost
        if not collateral and not self.lost_first:
            return None
        back = set(idle_pods).issuperset(self.lost.values())
        return Loss(next(iter(self.lost)), replaced=not back)


@dataclass(frozen=True, slots=True)
class Verdict:
    """``next`` None: the attempt ends. ``why`` goes to the log.

    ``code``: what the cause's launcher ends with, 0: the cause's own.
    """

    next: History | None
    cause: Exit | None
    why: str
    code: int = 0


def decide(
    history: History,
    outcome: Outcome,
    limits: Limits,
    *,
    at: str,
    modified: int = -1,
    loss: Loss | None = None,
    free: bool = False,
) -> Verdict:
    """Decide on another round, or the end of the attempt.

    ``at``: now, RFC 3339. ``modified``: newest mtime at the progress path. ``loss``: what ended the
    round, rather than a worker. ``free``: it costs nothing of the budget.
    """
    exits, snapshot_step = outcome.exits.values(), outcome.snapshot_step
    cause = root_cause.first_failure(exits) if loss is None else None
    if cause and limits.budget and (step := _drilled(exits)) and drills_left(history.records):
        return Verdict(_after_drill(history, step, snapshot_step, at), None, "a drill")
    progress = (
        snapshot_step > history.snapshot_step
        or modified > history.modified
        or 0 < limits.heal_after <= outcome.lasted
    )
    # The operator counts a lost pod. One that only lost its link may do so again and again.
    counts = not free and (loss is None or not loss.replaced)
    failures = (0 if progress else history.failures) + counts
    newest = max(snapshot_step, history.snapshot_step)
    if limits.budget == 0:
        return Verdict(None, cause, "restart in place is off")
    if cause is not None and cause.code in FINAL_EXIT_CODES:
        return Verdict(None, cause, f"exit code {cause.code} cannot be cured by a restart")
    if cause is not None and cause.code == ExitCode.HARDWARE:
        said = "exit code 74 says that " * cause.foreign
        why = f"{said}a GPU failed; a restart in place would fail again"
        return Verdict(None, cause, why)
    if cause is not None and cause.code in limits.final:
        return Verdict(None, cause, f"a rule of the job ends it at exit code {cause.code}")
    at_start = "" if progress or cause is None else _at_start(exits, cause, outcome.lasted)
    # Its numbers count: where they differ a program has got on, which shows no steps.
    if at_start and at_start == history.at_start:
        why = (
            f"exit code {ExitCode.BAD_CONFIG:d}: all processes raised this twice before their"
            " first step, in the script itself; a restart would fail again"
        )
        return Verdict(None, cause, why, ExitCode.BAD_CONFIG)
    if failures > limits.budget:
        why = f"failed {failures} times without progress in between"
        early = root_cause.ended_early(exits, cause)
        return Verdict(None, cause, f"{why}; {early}" if early else why)
    record = _record(history.round, cause, newest, nproc=outcome.nproc, at=at)
    record |= {"kind": "hang"} if outcome.late else {}
    if loss is not None:
        record |= {"kind": "lost", "replica": loss.replica}
    if outcome.saved is not None:
        record["savedBy"], record["savedStep"] = outcome.saved
    if early := root_cause.ended_early(exits, cause):
        record["exception"] = root_cause.failure_text(early, cause)
    if _same_again(history.records, record, newest):
        why = f"the same exception {SAME_EXCEPTION} times in a row at step {record['step']}"
        return Verdict(None, cause, f"{why}; a restart would fail again")
    following = replace(
        history.followed_by(record),
        snapshot_step=newest,
        failures=failures,
        at_start=at_start,
        modified=max(modified, history.modified),
    )
    return Verdict(following, cause, "restart in place")


def _at_start(exits: Collection[Exit], cause: Exit, lasted: float) -> str:
    """Return the exception by which the script ended all processes before their first step."""
    soon = lasted <= _START_SECONDS
    in_script = all(one.in_script and (soon or not one.foreign) for one in exits)
    same = all(alike(one.exception, cause.exception) for one in exits)
    return cause.exception if in_script and same else ""


def is_final(outcome: Outcome, limits: Limits) -> bool:
    """Return whether no start follows, or a drill's, which repeats steps on purpose."""
    final, cause = FINAL_EXIT_CODES | limits.final | {ExitCode.HARDWARE}, outcome.cause
    known = cause is not None and not _drilled(outcome.exits.values())
    return not known or (cause is not None and cause.code in final)


def drills_left(records: Collection[Round]) -> bool:
    """Return whether the round that follows these may end by a drill."""
    return sum(record.get("kind") == "drill" for record in records) < _DRILLS


def _drilled(exits: Collection[Exit]) -> int:
    """Return the step after which a drill ended the gang, 0 without a drill.

    A worker that lost its peers to the drill, or was stopped, is no cause; any other end is one.
    """
    cause = root_cause.first_failure(exits)
    ended = [exit_.step for exit_ in exits if exit_.drill]
    return max(ended, default=0) if cause and cause.code == ExitCode.PEER_LOST else 0


def _after_drill(history: History, step: int, snapshot_step: int, at: str) -> History:
    """Begin the next round, with failures and progress as they were before."""
    record: Round = {"round": history.round, "at": at, "kind": "drill", "step": step}
    if snapshot_step >= 0:
        record["snapshotStep"] = snapshot_step
    return history.followed_by(record)


def grown(history: History, outcome: Outcome, *, at: str) -> History | None:
    """Begin a larger round at the snapshot that all have saved together.

    None: a launcher was lost meanwhile, or a worker failed by itself, so decide() has to.
    """
    if outcome.lost or (outcome.cause and outcome.cause.code not in _STOPPED):
        return None
    newest = max(outcome.snapshot_step, history.snapshot_step)
    record: Round = {"round": history.round, "at": at, "kind": "grown", "snapshotStep": newest}
    return replace(history.followed_by(record), snapshot_step=newest, failures=0)


def _same_again(records: tuple[Round, ...], record: Round, snapshot_step: int) -> bool:
    """Return whether one exception has ended one step SAME_EXCEPTION times in a row.

    Without a step since the newest snapshot the start itself may fail, which can pass.
    """
    if record.get("kind") != "exception" or record.get("step", 0) <= max(snapshot_step, 0):
        return False
    same = [
        (old.get("kind"), old.get("step")) == (record["kind"], record.get("step"))
        and alike(old.get("exception", ""), record.get("exception", ""))  # whatever its numbers are
        for old in records[1 - SAME_EXCEPTION :]
    ]
    return len(same) == SAME_EXCEPTION - 1 and all(same)


def _record(round_: int, cause: Exit | None, snapshot_step: int, *, nproc: int, at: str) -> Round:
    record: Round = {"round": round_, "at": at}
    if cause is not None:
        how = root_cause.kind(cause, exception=cause.exception, terminated=False)
        record |= {
            "replica": cause.rank // nproc,
            "rank": cause.rank,
            "code": cause.code,
            "kind": how,
        }
        if cause.status < 0:
            record["signal"] = -cause.status
        if cause.exception:
            record["exception"] = cause.exception
        if cause.step >= 0:
            record["step"] = cause.step
    if snapshot_step >= 0:
        record["snapshotStep"] = snapshot_step
    return record
