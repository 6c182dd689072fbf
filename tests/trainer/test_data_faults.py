"""Data that a resume, or another rank, would have otherwise: each kind of fault is told.

Three ranks, several buckets; the kill comes in the midst of the fourth epoch. A DataLoader that the
loop's body reads for itself is in test_replay.py.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import ddpjob_trainer as ddp
from ddpjob_trainer.environment import REPLAY_DIR
from ddpjob_trainer.gradients import determinism
from support.snapshots import await_snapshot

SAMPLES, GLOBAL_BATCH = 100, 24  # 4 steps in an epoch
STEPS, EVERY = 18, 6
KILLED, SNAPSHOT = 14, 12  # at the step of this index; durable before
LAST_OF_EPOCH = 3
X = torch.randn(SAMPLES, 12, generator=torch.Generator().manual_seed(1))


class Rows(Dataset[Any]):
    """A class of the script's own. The loop's body is told of each step by after()."""

    generators: Sequence[Any] = ()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return X[index], index % 5

    def after(self, step: ddp.Step) -> None:
        """Learn from a step that is committed."""


class Mosaic(Rows):
    """Mixes into each sample the ones before."""

    def __init__(self) -> None:
        self.buffer = deque[torch.Tensor](maxlen=4)

    def __getitem__(self, index: int) -> Any:
        self.buffer.append(X[index])
        return torch.stack([*self.buffer]).mean(0), index % 5


class Curriculum(Rows):
    """Grows harder from epoch to epoch, by an attribute that the loop sets."""

    level = 0

    def __getitem__(self, index: int) -> Any:
        return X[index] * (1 + self.level), index % 5

    def after(self, step: ddp.Step) -> None:
        self.level += step.index % (LAST_OF_EPOCH + 1) == LAST_OF_EPOCH


class Mining(Rows):
    """Gives the samples of the worst steps in place of others."""

    def __init__(self) -> None:
        self.hard: list[int] = []

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(self.hard[index % len(self.hard)] if self.hard else index)

    def after(self, step: ddp.Step) -> None:
        self.hard = [*self.hard, int(1000 * step.loss) % SAMPLES][-9:]


class Hidden(Rows):
    """Draws from a generator in a list that is as long as one of samples."""

    def __init__(self) -> None:
        self.table = [torch.Generator() for _ in range(SAMPLES + 1)]

    def __getitem__(self, index: int) -> Any:
        return X[index] + torch.rand(1, generator=self.table[0]), index % 5


class Named(Hidden):
    """The cure."""

    @property
    def generators(self) -> Sequence[Any]:  # type: ignore[override]
        return self.table[:1]


class OfItsRank(Rows):
    """Gives each rank its part, as a plain script may have it: as many samples on each."""

    def __getitem__(self, index: int) -> Any:
        own = (index * 3 + int(os.environ["RANK"])) % SAMPLES
        return X[own], own % 5


@dataclass
class Training:
    directory: Path
    make: Callable[[], Rows]
    workers: int = 0
    die: bool = False

    def __call__(self, rank: int) -> None:
        run = ddp.start(
            total_steps=STEPS, global_batch=GLOBAL_BATCH, seed=4,
            snapshot_dir=self.directory / "s", snapshot_every=EVERY,
        )  # fmt: skip
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 5))
        optimizer = torch.optim.AdamW(net.parameters(), 0.01)
        model, _ = run.prepare(net, optimizer, bucket_cap_mb=0.005)
        data = self.make()
        for step in run.steps(data, generators=data.generators, workers=self.workers):
            for x, y in step.batches:
                step.backward(cross_entropy(model(x), y))
            assert len(determinism.buckets(model)) > 1
            if self.die and rank == 1 and step.index == KILLED:
                await_snapshot(max((self.directory / "s").glob("0*")), SNAPSHOT)
                os.kill(os.getpid(), signal.SIGKILL)
            step.commit()
            data.after(step)
        run.finish()


@pytest.fixture
def restarted(gang, tmp_path):  # type: ignore[no-untyped-def]
    """Return what rank 0 of a run after a kill says."""

    def run(make: Callable[[], Rows]) -> str:
        env = {REPLAY_DIR: str(tmp_path / "replay")}
        codes = gang.run(Training(tmp_path, make, die=True), env=env)
        assert codes[1] == -signal.SIGKILL, gang.last_words()
        gang.log_path(0).unlink()
        assert gang.run(Training(tmp_path, make), env=env) == dict.fromkeys(range(3), 0), gang.log(
            0
        )
        return str(gang.log(0))

    return run


@pytest.mark.tier("all")
@pytest.mark.fault("T14")
@pytest.mark.parametrize("make", [Mosaic, Curriculum, Mining, Hidden])
def test_the_check_of_the_restart_names_the_batch(restarted, make):  # type: ignore[no-untyped-def]
    told = restarted(make)
    for words in (
        f"resuming after step {SNAPSHOT}",
        f"restart not proven: step {SNAPSHOT + 1}, done again after the restart, differs on rank",
        "in its batch",
        "Compute it from the sample's index or the epoch",
        "run.steps(dataset, generators=[...])",
    ):
        assert words in told


@pytest.mark.tier("all")
@pytest.mark.fault("T14")
def test_a_generator_that_is_named_is_proven(restarted):  # type: ignore[no-untyped-def]
    assert f"restart proven: steps {SNAPSHOT + 1} to " in restarted(Named)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.tier("all"))])
def test_a_dataset_that_is_another_on_each_rank_is_told(gang, tmp_path, workers):  # type: ignore[no-untyped-def]
    training = Training(tmp_path, OfItsRank, workers)
    assert gang.run(training) == dict.fromkeys(range(3), 0), gang.last_words()
    told = gang.log(0)
    assert told.count("warning: sample ") == 1
    assert "of OfItsRank is not the same on ranks 0 and 1" in told
    assert "give every rank the whole dataset" in told
