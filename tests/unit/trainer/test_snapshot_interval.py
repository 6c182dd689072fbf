"""everySteps: Auto. How far apart snapshots are, by what they cost, on all ranks alike."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from ddpjob_trainer.environment import SnapshotSettings
from ddpjob_trainer.snapshot.interval import Interval, steps_apart
from ddpjob_trainer.snapshot.manager import SnapshotManager


@pytest.mark.parametrize(
    ("step", "pauses", "durable", "apart"),
    [
        (0.039, (), 0.0, 26),  # before the first: soon, as nothing is known
        (0.039, (0.127,), 0.8, 326),  # an H200 with 865 MiB: 16 % of 20 steps, 1 % of these
        (0.125, (0.019,), 1.5, 40),  # GPT-2 124M: not more often than every 5 s
        (0.01, (0.0,), 0.02, 500),
        (0.5, (0.1,), 0.4, 20),
        (0.5, (0.1,), 60.0, 120),  # a slow volume: once the last one is durable
        (0.5, (20.0,), 60.0, 1200),  # a long pause: work is worth more than 1 %
        (0.5, (20.0,), 900.0, 1800),  # but never two at a time
        (30.0, (0.1,), 5.0, 3),  # between two there are steps without one
        (0.5, (9.0, 0.1, 0.2), 0.4, 40),  # one was slow, as the first may be
        (0.5, (9.0, 0.1), 0.4, 20),
    ],
)
def test_as_often_as_pauses_take_one_percent(step, pauses, durable, apart):
    assert steps_apart(step, pauses, durable) == apart


def test_what_a_snapshot_costs_is_seen_in_the_step_after_it():
    found = Interval()
    assert found.next(0) == 0
    for step, seconds in ((2, 0.5), (3, 0.5), (4, 0.75), (4, 0.75), (5, 0.5)):
        found.stepped(step, seconds, 3)
    found.durable = 0.1
    assert (found.next(3), found.every) == (53, 50)
    assert found.news().startswith("a snapshot every 50 steps (everySteps: Auto): each pauses")
    assert found.news() == "", "said once"
    found.durable = 30.0
    assert found.next(3) == 63
    assert found.news() == "", "nor again for a little"
    found.durable = 50.0
    assert found.next(3) == 103
    assert found.news()


class Gang:
    """Managers of several ranks, of which each step's sums are made here."""

    def __init__(self, directory: Path, ranks: int) -> None:
        settings = SnapshotSettings(directory, None, 2, resume=True)
        self.ranks = [
            SnapshotManager(settings, Mock(rank=rank), Mock(took=(0, 0.0))) for rank in range(ranks)
        ]
        self.saving = False
        self.writer: Any = SimpleNamespace(
            saving=lambda: self.saving, behind=lambda: "", outcomes=list,
            pool=SimpleNamespace(free=lambda: True),
        )  # fmt: skip
        for one in self.ranks:
            one._writer = self.writer

    def due(self, step: int, seconds: float) -> bool:
        """End a step that took so long on rank 0; all ranks agree on what follows."""
        self.ranks[0]._progress.took = (step - 1, seconds)
        reports: Sequence[Sequence[float]] = [one.report() for one in self.ranks]
        sums = [sum(numbers) for numbers in zip(*reports, strict=True)]
        for one in self.ranks:
            one.receive(sums)
        (due,) = {one.due(step, last=False) for one in self.ranks}
        for one in self.ranks if due else ():
            one._last = step  # as save() notes it
        return due


def test_all_ranks_save_at_the_step_that_rank_0_has_chosen(tmp_path):
    gang = Gang(tmp_path, 3)
    saved = [step for step in range(2, 150) if gang.due(step, 0.125)]
    assert saved == [8, 48, 88, 128], "after a second, then every five"
    gang.saving = True
    assert not any(gang.due(step, 0.125) for step in range(150, 180)), "never two at a time"
    gang.saving = False
    assert gang.due(180, 0.125)
