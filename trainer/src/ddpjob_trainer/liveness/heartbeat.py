"""Record a worker's state for its launcher, in a small file that outlives the worker.

The worker maps the file and overwrites fixed fields in it, well below a microsecond each, so a
SIGKILL at any instant leaves the last record. The launcher reads it for /state, the termination
report and the hang watchdog: unchanged marks mean a hanging worker. Never imports torch.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path
from struct import Struct, error
from typing import Any, Final, Literal, NamedTuple, TypedDict, Unpack, get_args

from ddpjob_contract import Proof, Resumed, Straggler
from ddpjob_trainer.tracebacks import words

Phase = Literal["startup", "step", "snapshot", "done"]

#: A worker's activity, finer than its phase.
Activity = Literal[
    "start",  # start() has been called
    "rendezvous",  # meeting the other ranks
    "build",  # the script builds model, optimizer, dataset
    "load",  # resuming from a snapshot, together
    "data",  # fetching a batch
    "forward",  # the script computes the loss
    "backward",  # gradients, and waiting for those of the others
    "update",  # clipping, optimizer, scheduler
    "body",  # the script between commit() and the end of the loop's body
    "agreement",  # waiting for the decision of all ranks
    "snapshot",
    "evaluation",
    "end",  # after the loop
]
ACTIVITIES: Final[tuple[Activity, ...]] = get_args(Activity)
_PHASES: Final[tuple[Phase, ...]] = get_args(Phase)
_PHASE_NUMBERS: Final = {phase: number for number, phase in enumerate(_PHASES)}
_ACTIVITY_NUMBERS: Final = {activity: number for number, activity in enumerate(ACTIVITIES)}

#: An end without an exception. finished: run.finish() is over on all ranks; nothing later fails it.
Ending = Literal["", "drill", "finished"]
_ENDINGS: Final[tuple[Ending, ...]] = get_args(Ending)
BLOCK: Final = 512
#: What training resumes from; whether the steps repeated after a restart were equal.
RESUMED: Final = "resumed.json"
PROOF: Final = "proof.json"
#: The rank that holds up the others.
STRAGGLER: Final = "straggler.json"
SNAPSHOTS: Final = "snapshots.json"  # how many steps apart
#: The newest of the script's own numbers, by name.
VALUES: Final = "values.json"
#: A worker has compiled its model.
COMPILES: Final = "compiles.json"
_MAX_EXCEPTION: Final = 384
_MAGIC: Final = 0x33504444  # "DDP3": written last, so a half-made file is none
_HEAD = Struct("<II")
_MARK = Struct("<QdBBB5x")
_BODY = Struct("<qqddqd")
_SPENT = Struct("<5d")
_TEXT = Struct("<H")
_MARK_AT: Final = _HEAD.size
_BODY_AT: Final = _MARK_AT + _MARK.size
_SPENT_AT: Final = _BODY_AT + _BODY.size
_TEXT_AT: Final = _SPENT_AT + _SPENT.size
#: The launcher writes it: 0: nobody looks there, 1: the loop does, N + 1: profile N steps.
_ORDER = Struct("<H")
_ORDER_AT: Final = BLOCK - _ORDER.size


class StepSeconds(NamedTuple):
    """Seconds of a rank's ended steps but the first, which is part of its start.

    ``repeated`` are those up to the step that was reached before; ``data`` and ``snapshot`` are
    parts of the others. ``last``: when the newest step ended, by this machine's monotonic clock;
    0: none has.
    """

    trained: float = 0.0
    repeated: float = 0.0
    data: float = 0.0
    snapshot: float = 0.0
    last: float = 0.0


NO_STEPS: Final = StepSeconds()


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank's progress. ``step`` counts finished steps; ``snapshot_step`` -1: none yet."""

    rank: int
    phase: Phase = "startup"
    step: int = 0
    total_steps: int = 0
    loss: float | None = None
    samples_per_second: float | None = None
    snapshot_step: int = -1
    exception: str = ""
    ending: Ending = ""
    updated_at: float = 0.0  # seconds since the epoch, of the last update()
    activity: Activity = "start"
    pid: int = 0
    marks: int = 0  # grows with every sign of life
    marked_at: float = 0.0  # monotonic seconds of the last mark, this machine's clock
    seconds: StepSeconds = NO_STEPS


class _Body(TypedDict, total=False):
    """What update() changes, in the order of the record."""

    step: int
    total_steps: int
    loss: float
    samples_per_second: float
    snapshot_step: int


def path_of(directory: Path, rank: int, what: str = "state") -> Path:
    """Return the path of a rank's record, or of what else it shares with its launcher."""
    return directory / f"rank-{rank}.{what}"


class RankStateWriter:
    """Writes a worker's record. Without a directory (no launcher) only this process sees it."""

    def __init__(self, directory: Path | None, rank: int) -> None:
        self._rank, self._directory = rank, directory
        self._block: mmap.mmap = mmap.mmap(-1, BLOCK)
        if directory is not None:
            self._block = mapped(path_of(directory, rank), BLOCK)
        self._phase: Phase = "startup"
        self._activity: Activity = "start"
        self._ending: Ending = ""
        self._marks = 0
        self._body: _Body = {
            "step": 0, "total_steps": 0, "loss": math.nan, "samples_per_second": math.nan,
            "snapshot_step": -1,
        }  # fmt: skip
        self.update()
        self._block[: _HEAD.size] = _HEAD.pack(_MAGIC, os.getpid())

    @property
    def state(self) -> RankState:
        """Return the record as a reader would find it now."""
        found = decode(self._block[:], self._rank)
        assert found is not None
        return found

    def mark(self, activity: Activity, now: float | None = None) -> None:
        """Give a sign of life, at almost no cost. ``now``: monotonic, where it was just read."""
        self._activity = activity
        self._marks += 1
        # Assigned, not pack_into: that clears the field first, and a reader would see zeros.
        self._block[_MARK_AT:_BODY_AT] = _MARK.pack(
            self._marks,
            time.monotonic() if now is None else now,
            _PHASE_NUMBERS[self._phase],
            _ACTIVITY_NUMBERS[activity],
            _ENDINGS.index(self._ending),
        )

    def update(self, *, phase: Phase | None = None, **changes: Unpack[_Body]) -> None:
        """Change the given fields and publish the record; this is a sign of life too."""
        self._phase = phase or self._phase
        self._body.update(changes)
        self._block[_BODY_AT:_SPENT_AT] = _BODY.pack(*self._body.values(), time.time())
        self.mark(self._activity)

    def spent(self, seconds: StepSeconds) -> None:
        """Publish the seconds of the steps so far."""
        self._block[_SPENT_AT:_TEXT_AT] = _SPENT.pack(*seconds)

    @property
    def ordered(self) -> int:
        """Return how many steps the launcher wants profiled, 0 mostly."""
        steps: int = _ORDER.unpack_from(self._block, _ORDER_AT)[0]
        return max(0, steps - 1)

    def take_orders(self) -> None:
        """Say that the loop looks at each step, and has done what was ordered."""
        self._block[_ORDER_AT:] = _ORDER.pack(1)

    def failed(self, exception: BaseException) -> None:
        """Record why this process ends, unless its run has finished."""
        if self._ending != "finished":
            text = words(f"{type(exception).__name__}: {exception}")
            data = text.encode(errors="replace")[:_MAX_EXCEPTION]
            self._block[_TEXT_AT : _TEXT_AT + _TEXT.size + len(data)] = _TEXT.pack(len(data)) + data
            self.update()

    def ends(self, ending: Ending) -> None:
        """Record that this process ends, or may end, without an exception."""
        self._ending = ending
        self.update()

    def report(self, name: str, facts: Resumed | Proof | Straggler | dict[str, Any]) -> None:
        """Report to the launcher, under one of the names above, unless the disk is full."""
        if self._directory is not None:
            with contextlib.suppress(OSError):
                (self._directory / name).write_text(json.dumps(facts))


def mapped(path: Path, size: int) -> mmap.mmap:
    """Map a new file: another process may still map the old one. Raises OSError."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Written, not truncated to size: so a full memory file system is an error here, and not a
        # SIGBUS at the first step.
        os.pwrite(fd, bytes(size), 0)
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)


def decode(data: bytes, rank: int) -> RankState | None:
    """Decode a record's bytes, which may be a stranger's; None if they are no record."""
    try:
        magic, pid = _HEAD.unpack_from(data)
        marks, marked_at, phase, activity, ending = _MARK.unpack_from(data, _MARK_AT)
        step, total, loss, rate, snapshot_step, updated_at = _BODY.unpack_from(data, _BODY_AT)
        (length,) = _TEXT.unpack_from(data, _TEXT_AT)
        if magic != _MAGIC or not math.isfinite(updated_at):
            return None
        text_at = _TEXT_AT + _TEXT.size
        text = data[text_at : text_at + min(length, _MAX_EXCEPTION)].decode(errors="ignore")
        return RankState(
            rank=rank,
            phase=_PHASES[phase],
            step=step,
            total_steps=total,
            loss=None if math.isnan(loss) else loss,
            samples_per_second=None if math.isnan(rate) else rate,
            snapshot_step=snapshot_step,
            exception=text,
            ending=_ENDINGS[ending],
            updated_at=updated_at,
            activity=ACTIVITIES[activity],
            pid=pid,
            marks=marks,
            marked_at=marked_at,
            seconds=StepSeconds(*_SPENT.unpack_from(data, _SPENT_AT)),
        )
    except (error, IndexError):
        return None


def read_report(directory: Path, name: str) -> Any:
    """Return what has been reported under one of the names above, None before."""
    try:
        found = json.loads((directory / name).read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and len(str(found)) < 4 * BLOCK else None


def profile_path(directory: Path, rank: int) -> Path:
    """Return where a rank says how its profile went: JSON, ``path`` or ``error``."""
    return directory / f"rank-{rank}.profile"


def order(directory: Path, rank: int, steps: int) -> bool:
    """Order a profile of a rank's next steps; False: its loop does not look, or is at one."""
    try:
        with path_of(directory, rank).open("r+b", buffering=0) as file:
            file.seek(_ORDER_AT)
            if file.read() != _ORDER.pack(1):
                return False
            file.seek(_ORDER_AT)
            file.write(_ORDER.pack(steps + 1))
    except OSError:
        return False
    return True


def read_state(directory: Path, rank: int) -> RankState | None:
    """Return the last record of a rank, None before the first."""
    try:
        return decode(path_of(directory, rank).read_bytes()[:BLOCK], rank)
    except OSError:
        return None
