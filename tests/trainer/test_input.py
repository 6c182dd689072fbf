"""Input pipelines in real ranks: kills, worker processes, streams. More than one bucket."""

import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import ddpjob_trainer as ddp
from ddpjob_trainer.gradients import determinism
from support.rounds import alive
from support.stand import ALL_0, Stand

SAMPLES = 77


class Noise:
    """A transform that draws from a generator of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + float(self.rng.normal())


class Augmented(Dataset[dict[str, Any]]):
    """Rows as Hugging Face's datasets give them, with noise from every generator there is."""

    def __init__(self, pids: Path | None = None) -> None:
        self.pids = pids
        self.transforms = [Noise()]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.pids is not None:
            (self.pids / f"worker-{os.getpid()}").touch()
        x = torch.arange(48.0) * index / 500 + torch.randn(48)
        x[: len(x) // 2] *= random.random() + float(np.random.rand())
        return {"x": self.transforms[0](x), "label": index % 10}


class Streaming(IterableDataset[dict[str, Any]]):
    """Every world-th row; with torch's protocol of a state."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, self.at = rank, world, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self.at < SAMPLES:
            self.at += 1
            if (self.at - 1) % self.world == self.rank:
                yield Augmented()[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


@dataclass(kw_only=True)
class Training(Stand, every=3, total_steps=9, global_batch=24):
    data: Callable[[ddp.Run, Path], Any]
    steps: dict[str, Any] = field(default_factory=dict)

    def train(self, run: ddp.Run) -> int:
        torch.manual_seed(3)
        net = nn.Sequential(
            nn.Linear(48, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 128), nn.ReLU(),
            nn.Linear(128, 10),
        )  # fmt: skip
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        model, _ = run.prepare(net, optimizer, bucket_cap_mb=0.02)
        for step in run.steps(self.data(run, self.directory), **self.steps):
            for batch in step.batches:
                loss = nn.functional.cross_entropy(model(batch["x"]), batch["label"])
                step.backward(loss * (1 + torch.rand(()) + random.random()))
            if run.options.level == "resume":
                assert len(determinism.buckets(model)) > 1
            self.may_die(run, step.index)
            step.commit()
        return step.epoch


def augmented(run: ddp.Run, directory: Path) -> Any:
    return Augmented(directory)


def loader(run: ddp.Run, directory: Path) -> Any:
    return DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=1)


def streaming(run: ddp.Run, directory: Path) -> Any:
    return Streaming(run.rank, run.world_size)


class Same(IterableDataset[dict[str, Any]]):
    """Knows of no ranks."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter([{"x": torch.full((48,), float(i)), "label": i % 10} for i in range(SAMPLES)])


def killed_and_resumed(gang: Any, first: Training, then: Training) -> list[str]:
    first.die = (1, 4)
    assert gang.run(first)[1] == -signal.SIGKILL
    assert gang.run(then) == ALL_0, gang.log(0)
    assert "resuming after step 3" in gang.log(0)
    return then.results()


def processes_of(directory: Path) -> list[int]:
    return [int(path.name.split("-")[1]) for path in directory.glob("worker-*")]


def test_workers_change_no_bit_and_die_with_their_rank(gang, tmp_path, wait_until):
    micro = {"micro_batches": 2}
    plain = Training(tmp_path / "plain", micro, data=augmented)
    assert gang.run(plain) == ALL_0, gang.log(0)
    assert len(processes_of(plain.directory)) == 3  # the ranks themselves
    for counts in ((4, 2), (0, 4)):
        directory = tmp_path / f"{counts}"
        first, then = (
            Training(directory, micro, data=augmented, steps={"workers": count, "prefetch": 3})
            for count in counts
        )
        assert killed_and_resumed(gang, first, then) == plain.results()
        workers = processes_of(directory)
        assert len(workers) == sum(3 * (count or 1) for count in counts)
        wait_until(lambda found=workers: not any(map(alive, found)), "all workers are gone")
    first, then = (Training(tmp_path / "loader", micro, data=loader) for _ in range(2))
    assert killed_and_resumed(gang, first, then) == plain.results()


def test_at_level_elastic_neither_workers_nor_the_world_size_change_a_bit(gang, tmp_path):
    elastic = {"level": "elastic", "shards": 4}
    three = Training(tmp_path / "three", elastic, data=augmented, steps={"workers": 1})
    assert gang.run(three) == ALL_0, gang.log(0)
    two = Training(tmp_path / "two", elastic, data=augmented)
    assert gang.run(two, world=2) == {0: 0, 1: 0}, gang.log(0)
    assert set(three.results()) == set(two.results(2))


def test_a_stream_with_state_goes_on_where_training_was(gang, tmp_path):
    whole = Training(tmp_path / "whole", data=streaming)
    assert gang.run(whole) == ALL_0, gang.log(0)
    directory = tmp_path / "killed"
    first, then, other = (Training(directory, data=streaming) for _ in range(3))
    assert killed_and_resumed(gang, first, then) == whole.results()
    assert set(gang.run(other, world=2).values()) == {64}
    assert "made with world_size=3, now it is 2: each has its own stream" in gang.log(0)
    shuffled = Training(directory, data=augmented)
    assert set(gang.run(shuffled).values()) == {64}
    assert "made with order=stream, now it is shuffled" in gang.log(0)
    assert "must read its own share" not in gang.log(0)
    assert gang.run(Training(tmp_path / "shared", data=lambda run, directory: Same())) == ALL_0
    assert "all 3 processes read the same batch from their streams" in gang.log(0)


class Broken(Augmented):
    def __getitem__(self, index: int) -> dict[str, Any]:
        raise KeyError("no such image")


class Deadly(Augmented):
    def __getitem__(self, index: int) -> dict[str, Any]:
        if torch.utils.data.get_worker_info().id == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("kind", "workers", "said"),
    [
        (Broken, 0, ("KeyError", "no such image", "in __getitem__")),
        (Broken, 1, ("KeyError", "no such image", "in __getitem__")),
        (Deadly, 2, ("is killed by signal: Killed",)),
    ],
)
def test_an_error_of_the_dataset_or_a_dead_worker_is_told(gang, tmp_path, kind, workers, said):
    program = Training(tmp_path / "b", data=lambda *_: kind(), steps={"workers": workers})
    assert gang.run(program, world=1) == {0: 1}
    assert [words for words in said if words not in gang.log(0)] == []
