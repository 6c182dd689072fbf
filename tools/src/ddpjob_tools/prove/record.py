"""Read what runs write while they go on: JSON lines in files that grow, one or more for each rank.

Steps has what audit's probe writes of any script, Records what the library writes for chaos
(training/replay/records.py). A line that SIGKILL has torn is left out.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any


class Lines:
    """The JSON objects of a growing file, each once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self._rest = b""

    def new(self) -> list[dict[str, Any]]:
        """Return those that have come since the last call."""
        found: list[dict[str, Any]] = []
        try:
            if self._path.stat().st_size == self._at:
                return found
            with self._path.open("rb") as file:
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return found
        self._at += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError):  # empty, or cut off by a kill
                found.append(json.loads(line))
        return found


# --- What the probe writes ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one optimizer. Hashes; ``parts``: of each of its weights, before it."""

    optimizer: int = 0
    weights: str = ""
    parts: tuple[str, ...] = ()
    state: str = ""
    empty: bool = False  # the optimizer had no state yet
    hyper: Sequence[Mapping[str, Any]] = ()
    rng: Mapping[str, str] = field(default_factory=dict)
    buffers: Mapping[str, str] = field(default_factory=dict)  # of each module that was called
    inputs: tuple[str, ...] = ()
    samples: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    loss: float | None = None
    gradients: str = ""
    norm: float | None = None
    after: str = ""  # the weights
    files: Mapping[str, int] = field(default_factory=dict)  # written before it: path -> bytes


@dataclass(frozen=True, slots=True)
class Story:
    """The steps of one process. ``bytes``: of the weights of the optimizer that stepped first."""

    rank: int = 0
    world: int = 1
    names: Sequence[str] = ()
    bytes: int = 0
    frameworks: Mapping[str, str] = field(default_factory=dict)
    torch: str = ""  # its version
    steps: Sequence[Step] = ()


Gang = tuple[Story, ...]  # by rank


def steps_made(gang: Gang) -> int:
    """Return the steps that all ranks have made."""
    return min((len(story.steps) for story in gang), default=0)


class Steps:
    """The stories of one run's ranks, as its files grow: one for each process of a rank."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lines: dict[Path, Lines] = {}
        self._stories: dict[Path, Story] = {}
        self._steps: dict[Path, list[Step]] = {}

    def look(self) -> Gang:
        """Return the ranks' stories; of several processes of a rank the one with most steps."""
        for path in sorted(self._folder.glob("rank-*.jsonl")):
            for line in self._lines.setdefault(path, Lines(path)).new():
                if path in self._stories:
                    self._steps[path].append(_of(Step, line))
                else:
                    self._steps[path] = []
                    self._stories[path] = replace(_of(Story, line), steps=self._steps[path])
        found: dict[int, Story] = {}
        for story in self._stories.values():
            if len(story.steps) > len(found.setdefault(story.rank, story).steps):
                found[story.rank] = story
        return tuple(found[rank] for rank in sorted(found))


def _of(kind: type[Any], line: Mapping[str, Any]) -> Any:
    known = {name: line[name] for name in kind.__dataclass_fields__ if name in line}
    lists = {name: tuple(value) for name, value in known.items() if isinstance(value, list)}
    return kind(**{**known, **lists})


# --- What the library writes for chaos ----------------------------------------------------

Incarnation = tuple[int, int]  # attempt, round


@dataclass(slots=True)
class RankStory:
    """All records of one rank over its incarnations."""

    incarnation: Incarnation = (0, 0)
    pid: int = 0
    step: int = 0  # finished steps, as its newest incarnation counts
    events: int = 0  # steps and ends, over all incarnations
    progress: int = 0  # the same since its newest incarnation began
    epoch: int = 0  # steps in one; 0: not known
    began: dict[Incarnation, int | None] = field(default_factory=dict)  # see Records.restarts()
    progress_at: float = 0.0  # monotonic seconds of the first of these
    last_at: float = 0.0
    ended: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    losses: dict[int, set[tuple[str, ...]]] = field(default_factory=dict)
    first_at: dict[int, float] = field(default_factory=dict)  # when it finished a step first
    again: int = 0  # steps finished once more
    hashes: list[dict[str, str]] = field(default_factory=list)
    reported: dict[tuple[int, str], set[str]] = field(default_factory=dict)  # by step and call

    def take(self, line: dict[str, Any]) -> None:
        """Take in one event."""
        event, at = line["event"], float(line["at"])
        if event == "start":
            self.incarnation = (line["attempt"], line["round"])
            self.pid = line["pid"]
            self.facts = line
            self.progress, self.ended = 0, False
            self.began[self.incarnation] = None
        elif event == "resume":
            self.step, self.epoch = line["step"], line["epoch"] or 0
        elif event == "step":
            self.step = line["step"]
            if self.began.get(self.incarnation) is None:
                self.began[self.incarnation] = self.step - 1
            self.again += self.step in self.first_at
            self.first_at.setdefault(self.step, at)
            self.losses.setdefault(self.step, set()).add(tuple(line["losses"]))
        elif event == "told":
            values = json.dumps(line["values"], sort_keys=True)
            self.reported.setdefault((line["step"], line["what"]), set()).add(values)
        elif event == "end":
            self.hashes.append(line["hashes"])
            self.ended = True
        if event in ("step", "end"):
            self.events += 1
            self.progress += 1
            self.progress_at = at if self.progress == 1 else self.progress_at
        self.last_at = at


class Records:
    """The stories of one run's ranks, over all their incarnations."""

    def __init__(self, directory: Path, ranks: int) -> None:
        self.stories = [RankStory() for _ in range(ranks)]
        self._lines = [Lines(directory / f"rank-{rank}.jsonl") for rank in range(ranks)]

    def look(self) -> None:
        """Read new records."""
        for story, lines in zip(self.stories, self._lines, strict=True):
            for line in lines.new():
                story.take(line)

    @property
    def step(self) -> int:
        """Return the finished steps of the rank that is ahead."""
        return max(story.step for story in self.stories)

    @property
    def incarnation(self) -> Incarnation:
        """Return the newest incarnation that any rank recorded."""
        return max(story.incarnation for story in self.stories)

    def restarts(self) -> list[int | None]:
        """Return the step after which each incarnation but the first began.

        0: from the beginning. None: it made no step.
        """
        found: dict[Incarnation, int | None] = {}
        for story in self.stories:
            for incarnation, step in story.began.items():
                found[incarnation] = step if step is not None else found.get(incarnation)
        return [found[incarnation] for incarnation in sorted(found)[1:]]

    @property
    def again(self) -> int:
        """Return the steps done once more, of the rank that has most."""
        return max(story.again for story in self.stories)

    def passed_at(self, step: int) -> float | None:
        """Return when all ranks had finished a step for the first time, None: not all have."""
        times = [story.first_at.get(step) for story in self.stories]
        known = [time for time in times if time is not None]
        return max(known) if len(known) == len(times) else None

    def ended(self) -> bool:
        """Return whether all ranks have left their loop, in their newest incarnations."""
        return all(story.ended for story in self.stories)

    def together(self) -> bool:
        """Return whether all ranks have made a step in the newest incarnation."""
        newest = self.incarnation
        return all(s.incarnation == newest and s.progress > 0 for s in self.stories)


def process_state(pid: int) -> tuple[int, str]:
    """Return a process's parent and state letter; (0, "") if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0, ""
    return int(fields[1]), fields[0]


def open_gate(path: Path, step: int) -> None:
    """Let the ranks finish steps up to this number; Recorder.wait() reads it."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(fd, step.to_bytes(8, "little"), 0)
    finally:
        os.close(fd)
