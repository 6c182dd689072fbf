"""Runs a gang that trains for ever, kills a worker, and times how all ranks come back.

Three ways to come back: in place (our launcher's rounds), by a new launcher (what a new set of
pods does, without Kubernetes' own time), and by torchrun, which restarts the hand-written loop.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import ddpjob_contract as contract
from ddpjob_tools.prove.record import Incarnation, Records, open_gate
from ddpjob_tools.prove.run import Run, environment_of_job, launcher
from ddpjob_trainer.environment import RESCUE
from ddpjob_trainer.failpoints import GATE, OPEN
from harness import programs

FOR_EVER = 10_000_000
EVERY = 25  # steps between snapshots, on all sides
MAX_RESTARTS = 30
#: Events of the trace in their order, each the end of a stage.
STAGES = {
    "noticed": "failed",
    "others ended": "stopped",
    "called": "go",
    "process, imports": "start",
    "GPU context": "device",
    "joined": "joined",
    "model built": "built",
    "restored": "loaded",
    "compiled, warm-up": "backward",
    "first step": "step",
}
_LOOK_SECONDS = 0.002
_MARK_SECONDS = 1.0  # a rank marks its step a moment after it recorded it
_START_SECONDS = 600.0


@dataclass
class Recovery:
    """``seconds`` is what was waited when ``came_back`` is false."""

    seconds: float
    past: float = 0.0  # until all ranks were past what was done before the kill
    came_back: bool = True
    stages: dict[str, float] = field(default_factory=dict)
    repeated: int = 0  # steps made before the kill and once more
    warm: bool = True  # spares were there when the kill came
    lost_rounds: int = 0  # restarts that died of themselves


class Subject:
    """One way to come back, on its own training.

    ``program``: a script and its arguments, behind options of the launcher. ``rounds``: failures
    restart in place; else by a new launcher, or, by ``torchrun``, as that does.
    """

    def __init__(
        self,
        way: str,
        nproc: int,
        program: Sequence[str],
        directory: Path,
        *,
        rounds: bool = False,
        torchrun: bool = False,
    ) -> None:
        self.way = way
        self.rounds = rounds
        self._nproc = nproc
        self._directory = directory
        directory.mkdir(parents=True)
        self._trace = directory / "trace"
        open_gate(directory / GATE, OPEN)
        self.records = Records(directory, nproc)
        self._torchrun = torchrun
        self.job = self._make(program)
        self.launches = 0

    def _make(self, program: Sequence[str]) -> Run:
        base = programs.environment()
        if self._torchrun:
            file = str(self._directory / "checkpoint.pt")
            command = [
                *programs.torchrun(self._nproc, "--max-restarts", str(MAX_RESTARTS)),
                *(*program, "--checkpoint", file, "--every", str(EVERY)),
            ]
            base["BENCH_RECORD"] = str(self._directory)
            return Run(command, base, self._directory / "log")
        environment = environment_of_job(base, self._directory, "bench", EVERY, None)
        environment[RESCUE] = str(int("rescue" in self.way))
        if not self.rounds:
            environment[contract.IN_PLACE_MAX_WITHOUT_PROGRESS] = "0"
        return Run(launcher(self._nproc, *program), environment, self._directory / "log")

    def _until(self, condition: Callable[[], bool], what: str, seconds: float) -> None:
        """Raises TimeoutError."""
        deadline = time.monotonic() + seconds
        while not condition():
            self.records.look()
            if not self.job.running():
                self.job.start()
                self.launches += 1
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.way}: not in {seconds:g} s: {what}\n{self.job.tail()}")
            time.sleep(_LOOK_SECONDS)

    def start(self) -> None:
        self.job.start()
        begun = time.monotonic()
        self._until(
            lambda: (
                self.records.together()
                and min(story.progress_at for story in self.records.stories) > begun
            ),
            "a first step",
            _START_SECONDS,
        )

    def end(self) -> None:
        self.job.end()

    def settle(self, *, warm: bool) -> None:
        """Before the next kill: a newer snapshot than the last resume, and spares if wanted."""
        story = self.records.stories[0]
        self._until(lambda: story.progress > EVERY + 5, "a new snapshot", _START_SECONDS)
        if warm and self.rounds:
            self._until(self._spares, "spares", _START_SECONDS)

    def _events(self) -> list[dict]:
        with contextlib.suppress(OSError):
            lines = self._trace.read_text().splitlines()
            return [json.loads(line) for line in lines if line.endswith("}")]
        return []

    def _spares(self) -> bool:
        """Whether they were refilled since all ranks stepped."""
        events = self._events()
        stepped = max((e["t"] for e in events if e["event"] == "go"), default=0.0)
        return any(e["event"] == "spares" and e["t"] > stepped for e in events)

    def kill(self, rank: int, patience: float) -> Recovery:
        """SIGKILL one worker; wait until every rank has finished a step of a newer life.

        A gang that does not come back in time is started again.
        """
        warm = self._spares()
        before, launches, attempt = self.records.incarnation, self.launches, self.job.attempt
        made = self.records.step
        at = time.monotonic()
        os.kill(self.records.stories[rank].pid, signal.SIGKILL)
        try:
            self._until(
                lambda: self._lives(before, at) and self.records.together(), "a new step", patience
            )
        except TimeoutError:
            self.job.end()
            self.start()
            return Recovery(patience, patience, came_back=False)
        back = max(story.progress_at for story in self.records.stories)
        lost = 0
        if self.launches != launches and self._torchrun:
            lost = MAX_RESTARTS - before[1]  # all that it had left
        elif self.job.attempt == attempt:
            lost = self.records.incarnation[1] - before[1] - 1
        resumed = self.records.stories[0].began[self.records.incarnation] or 0
        stages = self._stages(at)
        self._until(lambda: self.records.passed_at(made + 1) is not None, "the next step", patience)
        past = (self.records.passed_at(made + 1) or math.inf) - at
        return Recovery(back - at, past, True, stages, made - resumed, warm, lost)

    def _lives(self, before: Incarnation, at: float) -> bool:
        """Whether it is another life: a new torchrun counts its rounds from 0 again."""
        steps = [story.progress_at for story in self.records.stories]
        return self.records.incarnation != before and min(steps) > at

    def _stages(self, at: float) -> dict[str, float]:
        """Seconds of each stage: from the end of the one before to the last rank's end of it."""
        deadline = time.monotonic() + _MARK_SECONDS
        while True:
            events = [e for e in self._events() if self._belongs(e, at)]
            marked = sum(e["event"] == "step" for e in events)
            if marked >= self._nproc or time.monotonic() > deadline:
                break
            time.sleep(_LOOK_SECONDS)
        found, since = {}, at
        for stage, event in STAGES.items():
            times = [e["t"] for e in events if e["event"] == event]
            if times:
                found[stage] = max(times) - since
                since = max(times)
        return found

    def _belongs(self, event: dict, at: float) -> bool:
        """Whether it is of this recovery: workers tell the round that they begin."""
        ours = event["rank"] < 0 or event["round"] == self.records.incarnation[1]
        return bool(ours and event["t"] > at)


def recoveries(
    way: str,
    nproc: int,
    program: Sequence[str],
    kills: int,
    patience: float,
    *,
    rounds: bool = False,
    torchrun: bool = False,
    cold: int = 0,
) -> Iterator[Recovery]:
    """Kill each rank in turn. ``cold``: so many more kills at once after the one before."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory) / "run"
        subject = Subject(way, nproc, program, place, rounds=rounds, torchrun=torchrun)
        try:
            subject.start()
            for number in range(kills):
                subject.settle(warm=True)
                found = subject.kill(number % nproc, patience)
                print(f"{way}: {number + 1}/{kills} {found.seconds:.3f} s", flush=True)
                yield found
            for number in range(cold):
                subject.settle(warm=False)
                subject.kill(number % nproc, patience)
                found = subject.kill((number + 1) % nproc, patience)
                print(f"{way}, again: {number + 1}/{cold} {found.seconds:.3f} s", flush=True)
                yield found
        finally:
            subject.end()


def stage_rows(groups: Mapping[str, Sequence[Recovery]]) -> list[list[str]]:
    """The median seconds of each stage, a column for each group."""
    rows = []
    for stage in STAGES:
        cells = []
        for found in groups.values():
            times = [one.stages[stage] for one in found if stage in one.stages]
            cells.append(f"{statistics.median(times):.3f}" if times else "-")
        rows.append([stage, *cells])
    return rows
