"""Snapshots read from Python, and the example that makes a DCP checkpoint of one."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint

import ddpjob_trainer as ddp
from ddpjob_trainer.snapshot.training_state import TrainingState
from support.snapshots import open_snapshots

EXAMPLE = Path(__file__).parents[3] / "examples/to_dcp.py"


def trained(seed: int = 0) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Linear(40, 3, bias=False))
    model.register_buffer("cache", torch.ones(2), persistent=False)
    model.wave = nn.Parameter(torch.randn(4, dtype=torch.complex64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        (model(torch.randn(8, 6)).pow(2).sum() + model.wave.abs().sum()).backward()
        optimizer.step()
    return model, optimizer


@pytest.fixture
def root(tmp_path: Path) -> Path:
    where = tmp_path / "job"
    store, _ = open_snapshots(where)
    for step in (1, 2):
        model, optimizer = trained(step)
        state = TrainingState(model)
        state.register("optimizer", optimizer)
        state.register("scheduler", torch.optim.lr_scheduler.StepLR(optimizer, 5))
        store.save(step, state.capture(0).flat, {"seed": step})
    return where


def test_a_snapshot_is_read_tensor_by_tensor(root):  # type: ignore[no-untyped-def]
    model, optimizer = trained(2)
    found = ddp.read_snapshot(root)
    assert (found.step, found.config["seed"]) == (2, 2)
    assert found.caches == {"cache"}
    state = {name: found.model[name] for name in found.model if name not in found.caches}
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert found.registered == ("optimizer", "scheduler")
    torch.optim.lr_scheduler.StepLR(optimizer, 5)  # notes the first rate in the groups
    wanted = optimizer.state_dict()
    read = found.state("optimizer")
    assert read["param_groups"] == wanted["param_groups"]
    for number, values in wanted["state"].items():
        for name, value in values.items():
            assert torch.equal(read["state"][number][name], value)
    other, theirs = trained(5)
    other.load_state_dict(state)
    theirs.load_state_dict(read)
    assert ddp.read_snapshot(root, step=1).step == 1
    fetched: list[str] = []
    fetch = found._source._fetch

    def seen(file: Any, spans: Any, buffer: torch.Tensor) -> None:
        fetched.extend(span.chunk.tensor for span in spans)
        fetch(file, spans, buffer)

    found._source._fetch = seen
    assert found.model["2.weight"].shape == (3, 40)
    assert "0.weight" in found.model
    assert set(fetched) == {"model/2.weight"}, "only what is asked for"
    with pytest.raises(KeyError):
        found.state("absent")
    with pytest.raises(KeyError):
        found.model["absent"]


def test_the_example_makes_a_dcp_checkpoint(root, tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    model, optimizer = trained(2)
    dcp = tmp_path / "dcp"
    monkeypatch.setattr(sys, "argv", ["to_dcp.py", str(root), str(dcp)])
    runpy.run_path(str(EXAMPLE))
    other, theirs = trained(7)
    state = {"model": other.state_dict(), "optimizer": theirs.state_dict()}
    checkpoint.load(state, checkpoint_id=dcp, no_dist=True)
    other.load_state_dict(state["model"])
    theirs.load_state_dict(state["optimizer"])
    ours = TrainingState(model), TrainingState(other)
    for one, opt in zip(ours, (optimizer, theirs), strict=True):
        one.register("optimizer", opt)
    assert ours[0].sha256(0) == ours[1].sha256(0)
