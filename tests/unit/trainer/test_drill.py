"""When a drill is made, and by whom it is left out."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

import pytest

from ddpjob_trainer.environment import (
    ROUND_DRILL,
    DrillSettings,
    Identity,
    read_launcher,
    read_worker,
)
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.training.replay.replay import SLOW_SECONDS, Drill

EVERY, TOTAL, EPOCH = 10, 100, 40


class Rank:
    """One rank's drill; ``said``: why there is none."""

    def __init__(
        self, mode: str = "Auto", *, took: float = 1.0, parent: int | None = None,
        attempt: int = 1, round_: int = 0, every: int = EVERY,
    ) -> None:  # fmt: skip
        begun = time.monotonic() - took
        given = DrillSettings(mode, os.getppid() if parent is None else parent, begun)
        self.said: list[str] = []
        self.replay: Any = SimpleNamespace(
            records=True, compares=False, tell_unchecked=self.said.append
        )
        self.snapshots: Any = SimpleNamespace(
            newest=-1, around=lambda step: (step // every * every, step // every * every + every)
        )
        identity = Identity("uid", attempt, round_, unique=True)
        self.drill = Drill(given, identity, self.replay, self.snapshots)

    def begin(self, done: int = 0, *, epoch: int | None = EPOCH, total: int = TOTAL) -> Rank:
        self.snapshots.newest = done or -1
        self.drill.begin(done, epoch=epoch, total=total)
        self.drill.receive(self.drill.report())
        return self

    def due(self, step: int, newest: int) -> bool:
        self.snapshots.newest = newest
        return self.drill.is_due(step)


@pytest.mark.parametrize(
    ("step", "newest", "due"),
    [
        (9, -1, False),  # nothing to resume from
        (12, -1, False),  # not known to be durable yet
        (11, 10, False),  # one step to do again is too few
        (12, 10, True),
        (19, 10, True),
        (20, 10, False),  # a snapshot is being made
        (21, 10, False),
        (22, 10, True),  # whichever of the two will be the newest
        (90, 80, False),
        (88, 80, True),
        (92, 90, False),  # near the end: no snapshot but the last follows
    ],
)
def test_the_first_comes_two_steps_after_a_durable_snapshot(step, newest, due):
    rank = Rank().begin()
    assert rank.due(step, newest) is due
    rank.replay.compares = True  # another restart
    assert not rank.due(step, newest)


@pytest.mark.parametrize(
    ("where", "done", "more", "found"),
    [
        ({}, 0, {}, [12]),
        ({"round_": 1}, 10, {}, [42]),  # the second, after the first epoch's end
        ({"round_": 2}, 40, {}, []),
        ({"round_": 1}, 10, {"epoch": 1000}, []),  # an epoch longer than the run
        ({"round_": 1}, 10, {"epoch": None}, []),  # a stream
        ({}, 0, {"epoch": 5}, [12]),  # the first is the second, too
        ({"round_": 1}, 10, {"epoch": 5}, []),
        ({"round_": 3}, 0, {}, [12]),  # killed before the first snapshot
        ({"attempt": 2}, 0, {}, [12]),
        ({"attempt": 2}, 50, {}, []),  # new pods in the midst of a job
        ({}, 50, {}, [62]),  # a job that goes on from another's snapshots
        ({}, 0, {"total": 15}, []),
        ({"every": 1}, 0, {}, []),  # no two steps lie between two snapshots
        ({"every": 2}, 0, {}, []),
        ({"every": 3}, 0, {}, [5]),
        ({"mode": "Never"}, 0, {}, []),
        ({"mode": "Always", "took": 1e6}, 0, {}, [12]),
        ({"parent": 0}, 0, {}, []),  # a shell or torchrun is between the launcher and this process
    ],
)
def test_each_run_has_a_defined_drill_or_none(where, done, more, found):
    """Steps at which one would come, if each snapshot were durable at the next step's end."""
    rank, every = Rank(**where).begin(done, **more), where.get("every", EVERY)
    due = [
        s for s in range(done + 1, TOTAL) if rank.due(s, max(done, (s - 1) // every * every) or -1)
    ]
    assert due[:1] == found
    assert rank.said == []


def test_one_slow_rank_or_one_without_a_record_leaves_it_out_on_all():
    slow = Rank(took=SLOW_SECONDS + 1).begin()
    slow.drill.receive(slow.drill.report())
    assert not slow.due(12, 10)
    (words,) = slow.said
    assert "took more than 60 s" in words
    assert "drill: Always" in words
    rank = Rank().begin()
    for sums, said in (([1.0, 0.0], 0), ([0.0, 1.0], 1)):
        rank.drill.receive(sums)
        assert not rank.due(12, 10)
        assert len(rank.said) == said
    alone = Rank()
    alone.replay.records = None
    assert not alone.begin().due(12, 10)


def test_the_launcher_says_what_it_is_told():
    assert read_launcher({}).drill == "Auto"
    assert read_launcher({"DDPJOB_DRILL": "Never"}).drill == "Never"
    with pytest.raises(ConfigError, match="DDPJOB_DRILL='on' must be one of Auto, Always, Never"):
        read_launcher({"DDPJOB_DRILL": "on"})
    assert read_worker({}).drill == DrillSettings("Never", 0, 0.0)
    assert read_worker({ROUND_DRILL: "Auto 17 2.5"}).drill == DrillSettings("Auto", 17, 2.5)
