"""Read what the probes of one run have written: a story of steps for each rank.

runs.py reads while a run goes on, experiment.py when it has ended. Pure but for the reading.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


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
    names: tuple[str, ...] = ()
    bytes: int = 0
    frameworks: Mapping[str, str] = field(default_factory=dict)
    torch: str = ""  # its version
    steps: tuple[Step, ...] = ()


Gang = tuple[Story, ...]  # by rank


def read(folder: Path) -> Gang:
    """Return the ranks' stories; of several processes of a rank the one with most steps."""
    found: dict[int, Story] = {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        story = _story(path)
        if story and (story.rank not in found or len(found[story.rank].steps) < len(story.steps)):
            found[story.rank] = story
    return tuple(found[rank] for rank in sorted(found))


def _story(path: Path) -> Story | None:
    lines = _lines(path)
    if not lines:
        return None
    names = Story.__dataclass_fields__.keys() - {"steps"}
    head = {name: value for name, value in lines[0].items() if name in names}
    head["names"] = tuple(head.get("names", ()))
    return Story(**head, steps=tuple(_step(line) for line in lines[1:]))


def _step(line: Mapping[str, Any]) -> Step:
    known = {name: line[name] for name in Step.__dataclass_fields__ if name in line}
    lists = {name: tuple(value) for name, value in known.items() if isinstance(value, list)}
    return Step(**{**known, **lists})


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines: SIGKILL may have torn the last one."""
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    return [json.loads(line) for line in whole.splitlines()]
