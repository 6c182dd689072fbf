"""A training of forked ranks in a directory: one may be killed, and all go on from a snapshot."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import ddpjob_trainer as ddp
from support.snapshots import await_snapshot

ALL_0 = {0: 0, 1: 0, 2: 0}


@dataclass
class Stand:
    """A test adds train(): it makes what is trained, and calls may_die() in each step."""

    directory: Path
    start: dict[str, Any] = field(default_factory=dict)
    die: tuple[int, int] | None = None  # rank, index of the step

    kept: ClassVar[Mapping[str, Any]] = {}  # of its snapshots, besides
    options: ClassVar[Mapping[str, Any]]
    every: ClassVar[int]

    def __init_subclass__(cls, *, every: int = 2, **options: Any) -> None:
        """Take what all of a class give start(), but for what ``start`` of one changes."""
        cls.every, cls.options = every, options

    def __post_init__(self) -> None:
        self.directory.mkdir(exist_ok=True)

    def __call__(self, rank: int) -> None:
        kept = {"directory": self.directory / "snapshots", "every": self.every} | self.kept
        given = {"seed": 5, "snapshots": ddp.Snapshots(**kept)} | self.options | self.start
        run = ddp.start(**given)
        more = self.train(run)
        run.finish()
        result = f"{run.weights_sha256()} {run.state_sha256()} {more}"
        (self.directory / f"result-{rank}").write_text(result)

    def train(self, run: ddp.Run) -> object:
        """Return what the ranks must end with besides weights and state."""
        raise NotImplementedError

    def may_die(self, run: ddp.Run, index: int) -> None:
        """End the rank that is to die, once the newest snapshot is durable."""
        if (run.rank, index) == self.die:
            if newest := index // self.every * self.every:
                await_snapshot(max((self.directory / "snapshots").glob("0*")), newest)
            os.kill(os.getpid(), signal.SIGKILL)

    def results(self, world: int = 3) -> list[str]:
        """Of each rank its weights, its whole state, and what train() returned."""
        return [(self.directory / f"result-{rank}").read_text() for rank in range(world)]


def resumed(
    gang: Any, training: Stand, die: tuple[int, int], after: int,
    between: Callable[[], object] = lambda: None,
) -> list[str]:  # fmt: skip
    """Kill a rank in a step, and let all go on after an earlier one; return the results."""
    training.die = die
    assert gang.run(training) == {0: 75, 1: 75, 2: 75} | {die[0]: -signal.SIGKILL}, gang.log(0)
    training.die = None
    between()
    assert gang.run(training) == ALL_0, gang.log(0)
    assert f"resuming after step {after}" in gang.log(0)
    return training.results()
