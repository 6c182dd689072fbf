"""Snapshots read from Python, and as DCP checkpoints, there and back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed import checkpoint

import ddpjob_trainer as ddp
from ddpjob_trainer import cli
from ddpjob_trainer.snapshot.find import SnapshotToolError
from ddpjob_trainer.snapshot.training_state import TrainingState
from support.snapshots import open_snapshots


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
    """Steps 1 and 2, of seeds 1 and 2."""
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
    with pytest.raises(KeyError):
        found.state("absent")
    with pytest.raises(KeyError):
        found.model["absent"]


def test_only_what_is_asked_for_is_read(root, monkeypatch):  # type: ignore[no-untyped-def]
    found = ddp.read_snapshot(root)
    fetched: list[str] = []
    fetch = found._source._fetch

    def seen(file, spans, buffer):  # type: ignore[no-untyped-def]
        fetched.extend(span.chunk.tensor for span in spans)
        fetch(file, spans, buffer)

    monkeypatch.setattr(found._source, "_fetch", seen)
    assert found.model["2.weight"].shape == (3, 40)
    assert set(fetched) == {"model/2.weight"}


def test_where_there_is_none(root, tmp_path):  # type: ignore[no-untyped-def]
    with pytest.raises(SnapshotToolError, match="no valid snapshot of step 9; steps there: 1, 2"):
        ddp.read_snapshot(root, step=9)
    with pytest.raises(SnapshotToolError, match="is no directory"):
        ddp.read_snapshot(tmp_path / "absent")


def test_dcp_there_and_back(root, tmp_path, capsys):  # type: ignore[no-untyped-def]
    model, optimizer = trained(2)
    dcp = tmp_path / "dcp"
    assert cli.main(["snapshot", "export", str(root), str(dcp), "--format", "dcp"]) == 0
    other, theirs = trained(7)
    state = {"model": other.state_dict(), "optimizer": theirs.state_dict()}
    checkpoint.load(state, checkpoint_id=dcp, no_dist=True)
    other.load_state_dict(state["model"])
    theirs.load_state_dict(state["optimizer"])
    ours = TrainingState(model), TrainingState(other)
    for one, opt in zip(ours, (optimizer, theirs), strict=True):
        one.register("optimizer", opt)
    torch.manual_seed(0)
    assert ours[0].capture(0).flat.tree == ours[1].capture(0).flat.tree
    assert all(
        torch.equal(value, ours[1].capture(0).flat.tensors[name])
        for name, value in ours[0].capture(0).flat.tensors.items()
    )
    file = tmp_path / "weights"
    assert cli.main(["snapshot", "import", str(dcp), str(file)]) == 0
    assert all(torch.equal(t, model.state_dict()[n]) for n, t in load_file(file).items())
    assert load_file(file).keys() == model.state_dict().keys()
    whole = tmp_path / "whole"
    assert cli.main(["snapshot", "import", str(dcp), str(whole), "--format", "torch"]) == 0
    theirs.load_state_dict(torch.load(whole, weights_only=True)["optimizer"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp", "job", "weights", "whole"]


def test_a_checkpoint_of_another_program(tmp_path, capsys):  # type: ignore[no-untyped-def]
    """Its weights may be at the top, and other things beside them."""
    model, _ = trained()
    state = {**model.state_dict(), "epoch": 3}
    checkpoint.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    out = tmp_path / "weights"
    assert cli.main(["snapshot", "import", str(tmp_path / "dcp"), str(out)]) == 0
    assert load_file(out).keys() == model.state_dict().keys()
    assert "left out, as they are no tensors: epoch" in capsys.readouterr().err
    assert cli.main(["snapshot", "import", str(tmp_path / "dcp"), str(out)]) == 1
    assert "exists" in capsys.readouterr().err
    assert cli.main(["snapshot", "import", str(tmp_path), str(tmp_path / "x")]) == 1
    assert "is no DCP checkpoint" in capsys.readouterr().err
