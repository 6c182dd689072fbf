"""Read the ranks' records (training/replay/recorder.py) while they run, and locate the ranks."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    hashes: list[dict[str, str]] = field(default_factory=list)
    told: dict[tuple[int, str], set[str]] = field(default_factory=dict)  # by step and call

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
            self.losses.setdefault(self.step, set()).add(tuple(line["losses"]))
        elif event == "told":
            values = json.dumps(line["values"], sort_keys=True)
            self.told.setdefault((line["step"], line["what"]), set()).add(values)
        elif event == "end":
            self.hashes.append(line["hashes"])
            self.ended = True
        if event in ("step", "end"):
            self.events += 1
            self.progress += 1
            self.progress_at = at if self.progress == 1 else self.progress_at
        self.last_at = at


class Records:
    """Follows the record files of one run."""

    def __init__(self, directory: Path, ranks: int, name: str = "rank-{}.jsonl") -> None:
        self.stories = [RankStory() for _ in range(ranks)]
        self._paths = [directory / name.format(rank) for rank in range(ranks)]
        self._offsets = [0] * ranks
        self._rests = [b""] * ranks

    def look(self) -> None:
        """Read new records."""
        for rank, path in enumerate(self._paths):
            try:
                if path.stat().st_size == self._offsets[rank]:
                    continue
            except FileNotFoundError:
                continue
            with path.open("rb") as file:
                file.seek(self._offsets[rank])
                data = file.read()
            self._offsets[rank] += len(data)
            *lines, self._rests[rank] = (self._rests[rank] + data).split(b"\n")
            for line in lines:
                self._take(rank, line)

    def _take(self, rank: int, line: bytes) -> None:
        try:
            event = json.loads(line)
        except ValueError:
            return  # empty, or cut off by a kill
        self.stories[rank].take(event)

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
