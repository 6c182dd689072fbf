"""Build the answer to GET /state: the ranks' reports, and earlier rounds' outcomes.

The supervisor keeps a Summary of all rounds, the seconds of the launcher's life by what its gang
did, and the progress of a program that declares a path. A thread that serves HTTP asks.
"""

from __future__ import annotations

import hmac
import math
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, cast
from urllib.parse import parse_qs

from ddpjob_contract import Proof, Resumed, Round, Spent, State, Straggler
from ddpjob_trainer.launcher.launch_config import LaunchConfig
from ddpjob_trainer.launcher.worker_group import WorkerGroup
from ddpjob_trainer.liveness import heartbeat
from ddpjob_trainer.liveness.heartbeat import RankState, read_report

# --- Seconds: the launcher's share of the ledger --------------------------------------------------
# The supervisor says which stretch begins; rank 0's record says how its steps were spent. /state
# and the termination report carry the sums, and the operator multiplies them by the gang's pods.

#: What a launcher does: workers run, those of a round end, it waits for the hub, or has ended.
Stretch = Literal["round", "recovering", "held", "idle"]
_DIGITS: Final = 3


class _Ledger(NamedTuple):
    """The sums before the present stretch. Replaced whole: threads that serve HTTP read them."""

    sums: Mapping[str, float]
    stretch: Stretch
    since: float
    start: str  # where the time of a round goes before its first step has ended


class Account:
    """Sums in seconds of the monotonic clock.

    ``reached``: the last step that was finished, here or before. ``reports_steps``: rank 0 is
    expected to keep a record; without one nobody knows what a program does.
    """

    def __init__(self, now: float, reached: int = 0, *, reports_steps: bool = True) -> None:
        self._began = now
        self._ledger = _Ledger({}, "held", now, "warmup")
        self._reports_steps = reports_steps
        self.reached = reached

    def begin(
        self, stretch: Stretch, now: float, state: RankState | None, rest: str | None = None
    ) -> None:
        """Close the present stretch and begin another. ``state``: rank 0's, of a round.

        ``rest``: where the step goes that was under way, else to ``recovering``.
        """
        ledger = self._ledger
        if stretch == ledger.stretch:
            return
        if ledger.stretch == "round" and state is not None and state.phase != "startup":
            self.reached = max(self.reached, state.step)
        sums = _plus(ledger.sums, self._present(now, state, rest or "recovering"))
        start = "recovering" if ledger.stretch == "round" else ledger.start
        self._ledger = _Ledger(sums, stretch, now, start)

    def read(self, now: float, state: RankState | None) -> Spent:
        """Return the sums up to now; a step under way is in none of them."""
        found = _plus(self._ledger.sums, self._present(now, state, None))
        rounded = {name: round(seconds, _DIGITS) for name, seconds in found.items()}
        return cast("Spent", {"up": round(now - self._began, _DIGITS), **rounded})

    def _present(self, now: float, state: RankState | None, rest: str | None) -> dict[str, float]:
        """Return the sums of the present stretch. ``rest`` None: its step goes on."""
        ledger = self._ledger
        if ledger.stretch != "round":
            return {ledger.stretch: now - ledger.since}
        if state is None:
            return {ledger.start if self._reports_steps else "unknown": now - ledger.since}
        spent = state.seconds
        if not spent.last:
            return {ledger.start: now - ledger.since}
        found = {
            ledger.start: spent.last - spent.trained - ledger.since,
            "repeated": spent.repeated,
            "data": spent.data,
            "snapshot": spent.snapshot,
            "productive": spent.trained - spent.repeated - spent.data - spent.snapshot,
        }
        rest = "idle" if state.phase == "done" else rest
        return found if rest is None else _plus(found, {rest: now - spent.last})


def _plus(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    """Add sums up; leave out what is nothing."""
    names = first.keys() | second.keys()
    both = {name: first.get(name, 0.0) + second.get(name, 0.0) for name in names}
    return {name: seconds for name, seconds in both.items() if seconds > 0}


# --- Progress by the newest mtime at a declared path ----------------------------------------------
# The supervisor looks before rounds and at the end. A thread reads, since a file server that does
# not answer must not stop the launcher. Times are compared with earlier ones only, since the file
# server's clock is unknown.

_LEVELS: Final = 3
#: The most entries of one look, the newest directories first; a file server has other clients.
MOST_ENTRIES: Final = 10_000
_EVERY_SECONDS: Final = 5.0
#: The largest share of time spent on looks.
_SHARE: Final = 0.02
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
NEVER: Final = -1


class ProgressPath:
    """``newest``: the latest mtime read, in ns since the epoch; NEVER: none yet.

    It only grows. ``path`` None: nothing is declared, and no thread runs.
    """

    def __init__(self, path: Path | None, every: float = _EVERY_SECONDS) -> None:
        self.newest = NEVER
        self._path, self._every = path, every
        self._wanted, self._read = threading.Event(), threading.Condition()
        self._begun = self._done = 0  # looks
        if path is not None:
            threading.Thread(target=self._run, name="progress", daemon=True).start()

    def poll(self, seconds: float) -> None:
        """Read the path now; wait for the result, at most so long."""
        if self._path is None:
            return
        with self._read:
            wanted = self._begun + 1  # a look that has begun may have passed the newest file
            self._wanted.set()
            self._read.wait_for(lambda: self._done >= wanted, seconds)

    def _run(self) -> None:
        assert self._path is not None
        while True:
            with self._read:
                self._wanted.clear()
                self._begun += 1
            since = time.monotonic()
            self.newest = max(self.newest, newest_mtime(self._path))
            with self._read:
                self._done = self._begun
                self._read.notify_all()
            self._wanted.wait(max(self._every, (time.monotonic() - since) / _SHARE))


def newest_mtime(path: Path) -> int:
    """Return the newest mtime, in ns, of a file or below a directory.

    ``*`` in the last part matches any characters. Below the path, links count themselves and are
    not followed. A missing or unreadable entry counts as NEVER.
    """
    budget = iter(range(MOST_ENTRIES))
    newest, directories = NEVER, []
    for found in _declared(path, budget):
        try:
            about = Path(found).stat()
        except OSError:
            continue
        if stat.S_ISDIR(about.st_mode):
            directories.append((about.st_mtime_ns, found))
        elif stat.S_ISREG(about.st_mode):
            newest = max(newest, _sane(about.st_mtime_ns))
    for _ in range(_LEVELS):
        below: list[tuple[int, str]] = []
        for _, directory in sorted(directories, reverse=True):
            for entry, about in _entries(directory, budget):
                if stat.S_ISDIR(about.st_mode):
                    below.append((about.st_mtime_ns, entry.path))
                elif stat.S_ISREG(about.st_mode) or stat.S_ISLNK(about.st_mode):
                    newest = max(newest, _sane(about.st_mtime_ns))
        directories = below
    return newest


def as_text(mtime: int) -> str:
    """Format a time in RFC 3339, UTC, with microseconds."""
    moment = _EPOCH + timedelta(microseconds=mtime // 1000)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _sane(mtime: int) -> int:
    """Drop a time that the operator cannot write down."""
    return mtime if mtime < 2**63 else NEVER


def _declared(path: Path, budget: Iterator[int]) -> list[str]:
    if "*" not in path.name:
        return [str(path)]
    matches: Callable[[str], object] = re.compile(
        ".*".join(map(re.escape, path.name.split("*"))), re.DOTALL
    ).fullmatch
    return [entry.path for entry, _ in _entries(str(path.parent), budget) if matches(entry.name)]


def _entries(
    directory: str, budget: Iterator[int]
) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
    """Yield the readable entries of a directory, with their lstat."""
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if next(budget, None) is None:
                    return
                try:
                    yield entry, entry.stat(follow_symlinks=False)
                except OSError:
                    continue
    except OSError:
        return


# --- The state ------------------------------------------------------------------------------------

_VERSION: Final = 1
_MOST_VALUES: Final = 8  # more are in /metrics
#: For the progress path: a file server that does not answer must not delay the launcher.
_POLL_SECONDS: Final = 0.2


def numbers(report: dict[str, Any] | None) -> dict[str, float]:
    """Return what of a report is a finite number: a program may write the file itself."""
    found = (report or {}).items()
    return {n: v for n, v in found if isinstance(v, int | float) and math.isfinite(v)}


@dataclass(frozen=True, slots=True)
class Results:
    """Results of earlier rounds, for /state and the report while the next starts up."""

    step: int = -1
    snapshot_step: int = -1
    total_steps: int = 0
    modified: int = NEVER  # newest mtime at the progress path, ns since the epoch
    records: tuple[Round, ...] = ()
    resumed: Resumed | None = None
    proof: Proof | None = None
    spent: Spent | None = None  # of the launcher of replica 0
    straggler: Straggler | None = None  # of this round
    printed: dict[str, float] | None = None  # what rank 0 has printed in this round
    connected: bool | None = None  # with another pod of the gang; None: unknown
    values: dict[str, float] | None = None  # numbers of the program's own, by name
    snapshot_every: float | None = None  # steps, where the trainer chooses

    def after(self, workers: WorkerGroup) -> Results:
        """Add the records of a round's workers."""
        state = workers.state(0)
        every = numbers(read_report(workers.state_dir, heartbeat.SNAPSHOTS)).get("every")
        step, total = self.step, self.total_steps
        if state is not None and state.phase != "startup":
            step, total = state.step, state.total_steps
        return replace(
            self,
            step=step,
            total_steps=total,
            snapshot_step=max(self.snapshot_step, workers.snapshot_step()),
            snapshot_every=every or self.snapshot_every,
            resumed=read_report(workers.state_dir, heartbeat.RESUMED) or self.resumed,
            straggler=read_report(workers.state_dir, heartbeat.STRAGGLER),
            proof=_newest(read_report(workers.state_dir, heartbeat.PROOF), self.proof),
            values=numbers(read_report(workers.state_dir, heartbeat.VALUES)) or self.values,
        )

    def facts(self, state: RankState | None) -> dict[str, Any]:
        """Return what /state and the report say alike; None: unknown."""
        loss, step = (state.loss, state.snapshot_step) if state else (None, -1)
        step = max(step, self.snapshot_step)
        return {
            "loss": loss if loss is not None and math.isfinite(loss) else None,
            "snapshotStep": step if step >= 0 else None,
            "fileModifiedAt": as_text(self.modified) if self.modified != NEVER else None,
            "resumed": self.resumed,
            "spent": self.spent,
            "connected": self.connected,
            # What the library reports counts; without it this is shown, and decides nothing.
            "printed": self.printed if state is None else None,
            "metrics": dict([*(self.values or {}).items()][:_MOST_VALUES]) or None,
        }


class Summary:
    """What all rounds of a launcher came to. ``results``: of those before the present one.

    ``account`` is shown by the launcher with the hub, which asks for the ``progress``.
    """

    def __init__(self, config: LaunchConfig, now: float) -> None:
        self.results = Results()
        self.account = Account(now, config.env.reached, reports_steps=config.uses_our_library)
        self.progress = ProgressPath(config.env.progress_path if config.replica == 0 else None)
        self._leads = config.replica == 0

    def add(self, workers: WorkerGroup) -> int:
        """Add a round that has ended; return the newest snapshot's step."""
        self.results = self.results.after(workers)
        self.progress.poll(_POLL_SECONDS)  # the hub decides on it
        return self.results.snapshot_step

    def read(self, workers: WorkerGroup) -> Results:
        """Return all results, with those of workers that run; from another thread, too."""
        spent = self.account.read(time.monotonic(), workers.state(0)) if self._leads else None
        found = self.results.after(workers)
        return replace(found, modified=self.progress.newest, spent=spent)

    def close(self, workers: WorkerGroup, *, signalled: bool) -> Results:
        """Close the account, whose last stretch went to saving where a signal has ended it."""
        self.progress.poll(_POLL_SECONDS)
        now, rest = time.monotonic(), "snapshot" if signalled else None
        self.account.begin("idle", now, workers.state(0), rest=rest)
        spent = self.account.read(now, None) if self._leads else None
        return replace(self.results, modified=self.progress.newest, spent=spent)


def _newest(proof: Proof | None, before: Proof | None) -> Proof | None:
    """Choose the verdict on the restarts: one that was not checked takes nothing back."""
    return before if not proof or (before and "unchecked" in proof) else proof


def state_body(
    state: RankState | None,
    *,
    uid: str = "",
    attempt: int,
    round_: int,
    gang: Mapping[str, Any] = {},
    results: Results | None = None,
    stacks: str = "",
    pace: float | None = None,
    silent: float | None = None,
) -> State:
    """Return the JSON object of GET /state for one rank's record.

    ``uid``: of the job, if it is one's. ``attempt``: the hub's number. ``gang``: the hub's facts.
    ``results``: of earlier rounds, shown while this one starts up. ``stacks``: of the last hang.
    ``pace``: steps per second. ``silent``: seconds since any rank of the gang printed a line.
    """
    results = results or Results()
    step, total = results.step, results.total_steps  # unknown before the resume
    if state is not None and state.phase != "startup":
        step, total = state.step, state.total_steps
    found: dict[str, Any] = {
        "version": _VERSION,
        "uid": uid,
        "attempt": attempt,
        "round": round_,
        **{name: fact or None for name, fact in gang.items()},
        "phase": state.phase if state else "startup",
        "step": step if step >= 0 else None,
        "totalSteps": total or None,
        "stacks": stacks or None,
        "proof": results.proof,
        "silentSeconds": None if silent is None else int(silent),
        "straggler": results.straggler or None,
        "snapshotEvery": results.snapshot_every,
        "rounds": list(results.records) or None,
        **results.facts(state),
    }
    if state is not None:
        moment = datetime.fromtimestamp(state.updated_at, UTC).replace(microsecond=0)
        found |= {
            "stepsPerSecond": pace,
            "samplesPerSecond": state.samples_per_second,
            "updatedAt": moment.isoformat().replace("+00:00", "Z"),
        }
    return cast("State", known(found))


def known(found: Mapping[str, Any]) -> dict[str, Any]:
    """Drop what is None."""
    return {name: value for name, value in found.items() if value is not None}


def answer(state: State, query: str, *, local: bool) -> State | None:
    """Return the answer to GET /state?``query``, None: it asks for another job.

    ``local``: a client on this machine asks, who may know all where there is no job.

    A client that names the job's uid may read the job, and gets all. Others are strangers: the uid
    would admit them to the hub, and stacks and exceptions expose the program.
    """
    uid = state.get("uid", "")
    named = parse_qs(query).get("uid", [""])[0]
    if hmac.compare_digest(named.encode(), uid.encode()) if uid else local:
        return state
    if uid and named:
        return None
    shown = state.copy()
    for private in ("uid", "stacks", "rounds", "resumed", "proof"):
        shown.pop(private, None)  # type: ignore[misc]
    return shown
