"""Snapshots as the training loop makes them: states that change, loops that end by an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpjob_trainer as ddp
from ddpjob_trainer.snapshot import loading, manifest, sealed
from ddpjob_trainer.snapshot.format import unflatten

DATA = TensorDataset(torch.randn(60, 4, generator=torch.Generator().manual_seed(1)))


def begin(directory: Path, **start: Any) -> tuple[ddp.Run, nn.Module]:
    run = ddp.start(
        **{"total_steps": 6, "global_batch": 6, "snapshot_dir": directory, "snapshot_every": 2}
        | start
    )
    model = nn.Linear(4, 2)
    return run, run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))[0]


def train(run: ddp.Run, wrapped: nn.Module, each: Callable[[int], None] = lambda _: None) -> None:
    """``each`` is called with the finished steps at the start of a step."""
    for step in run.steps(DATA):
        each(step.index)
        for (x,) in step.batches:
            step.backward(wrapped(x).pow(2).sum())
        step.commit()


def stored(directory: Path) -> dict[int, Any]:
    found = {}
    for path in sorted(directory.glob("*/step-*.json")):
        content = manifest.read(path)
        found[content.step] = unflatten(loading.load(path.parent, content))
    return found


def test_an_error_that_leaves_the_loop_is_watched_to_its_end(gang, tmp_path):  # type: ignore[no-untyped-def]
    """The generator is closed on the way out, as when training is done."""

    def program(rank: int) -> None:
        run, wrapped = begin(tmp_path)
        ending = run._process.ending
        ending._hook = lambda *_: print(f"phase {ending._state.state.phase}")

        def fails(step: int) -> None:
            assert step < 3

        train(run, wrapped, fails)

    assert gang.run(program, world=1) == {0: 1}, gang.log(0)
    assert "phase step" in gang.log(0)


class Notes:
    """A registered state that cannot be stored for a while."""

    def __init__(self) -> None:
        self.value: Any = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@pytest.mark.parametrize("odd", [0, 1])
def test_a_state_that_cannot_be_stored_is_a_failed_snapshot(gang, tmp_path, odd):  # type: ignore[no-untyped-def]
    def program(rank: int) -> None:
        run, wrapped = begin(tmp_path / "snapshots", snapshot_keep=9)
        notes = Notes()
        run.register("notes", notes)

        def each(step: int) -> None:
            bad = rank == odd and step == 3
            notes.value = {1} if bad else step

        train(run, wrapped, each)
        run.finish()

    assert gang.run(program) == {0: 0, 1: 0, 2: 0}, gang.log(0)
    assert list(stored(tmp_path / "snapshots")) == [2, 6]
    assert "snapshot after step 4 failed: " in gang.log(0)
    why = "cannot store registered/notes/value: a set"
    assert [why in gang.log(rank) for rank in range(3)] == [rank == odd for rank in range(3)]


def test_a_state_too_large_to_be_read_again_is_refused_at_the_start(gang, tmp_path):  # type: ignore[no-untyped-def]
    def program(rank: int) -> None:
        sealed.MAX_BYTES = 20_000
        run, wrapped = begin(tmp_path)
        notes = Notes()
        notes.value = "x" * 30_000
        run.register("notes", notes)
        train(run, wrapped)

    assert gang.run(program, world=1) == {0: 64}, gang.log(0)
    assert "no snapshot can be made: names and numbers take 30" in gang.log(0)
