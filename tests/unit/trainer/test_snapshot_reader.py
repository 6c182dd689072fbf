"""Snapshots read by users: read_snapshot(), `ddpjob-trainer snapshot`, the example for DCP."""

import os
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed import checkpoint

from ddpjob_trainer import cli, read_snapshot
from ddpjob_trainer.snapshot.ondisk import manifest
from ddpjob_trainer.snapshot.reader import SnapshotToolError
from ddpjob_trainer.snapshot.training_state import TrainingState
from ddpjob_trainer.state.codec import flatten
from support.snapshots import flip, open_snapshots, save, saved

EXAMPLE = Path(__file__).parents[3] / "examples/to_dcp.py"


def tool(*words: object) -> int:
    return cli.main(["snapshot", *map(str, words)])


# --- From Python ------------------------------------------------------------------------------


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


def captured(model: nn.Module, **registered: Any) -> TrainingState:
    state = TrainingState(model)
    for name, one in registered.items():
        state.register(name, one)
    return state


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A trained model, its optimizer and a scheduler, after two steps."""
    store, _ = open_snapshots(tmp_path / "job")
    for step in (1, 2):
        model, optimizer = trained(step)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        state = captured(model, optimizer=optimizer, scheduler=scheduler)
        store.save(step, state.capture(0).flat, {"seed": step})
    return tmp_path / "job"


def test_a_snapshot_is_read_tensor_by_tensor(root, monkeypatch):
    model, optimizer = trained(2)
    found = read_snapshot(root)
    assert (found.step, found.config["seed"], found.caches) == (2, 2, {"cache"})
    state = {name: found.model[name] for name in found.model if name not in found.caches}
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert found.registered == ("optimizer", "scheduler")
    torch.optim.lr_scheduler.StepLR(optimizer, 5)  # notes the first rate in the groups
    wanted = optimizer.state_dict()
    read = found.state("optimizer")
    assert read["param_groups"] == wanted["param_groups"]
    for number, values in wanted["state"].items():
        assert all(torch.equal(read["state"][number][name], it) for name, it in values.items())
    other, theirs = trained(5)
    other.load_state_dict(state)
    theirs.load_state_dict(read)
    assert read_snapshot(root, step=1).step == 1
    counted: list[int] = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *a: (counted.append(n := preadv(*a)), n)[1])
    assert found.model["2.weight"].shape == (3, 40)
    assert "0.weight" in found.model
    assert sum(counted) == 4 * 3 * 40, "only what is asked for"
    for absent in (found.state, found.model.__getitem__):
        with pytest.raises(KeyError):
            absent("absent")


def test_the_example_makes_a_dcp_checkpoint(root, tmp_path, monkeypatch):
    model, optimizer = trained(2)
    monkeypatch.setattr(sys, "argv", ["to_dcp.py", str(root), str(tmp_path / "dcp")])
    runpy.run_path(str(EXAMPLE))
    other, theirs = trained(7)
    state = {"model": other.state_dict(), "optimizer": theirs.state_dict()}
    checkpoint.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    other.load_state_dict(state["model"])
    theirs.load_state_dict(state["optimizer"])
    ours, read = captured(model, optimizer=optimizer), captured(other, optimizer=theirs)
    assert ours.sha256(0) == read.sha256(0)


def test_a_reader_says_that_retention_was_faster(tmp_path):
    store = saved(tmp_path, 1, 2, keep=2)
    found = read_snapshot(tmp_path)
    save(store, 3, 4)
    with pytest.raises(SnapshotToolError, match=r"step 2 has changed .*snapshot\.keep"):
        _ = found.model["w"]


@pytest.mark.parametrize("command", ["verify", "ls"])
def test_what_retention_removes_meanwhile_is_not_damaged(tmp_path, monkeypatch, capsys, command):
    store, read = saved(tmp_path, 1, 2, keep=2), manifest.read

    def late(path: Path) -> manifest.Manifest:
        found = read(path)
        if command == "ls" or found.step == 1:
            monkeypatch.undo()
            save(store, 3)
        return read(path) if command == "ls" else found

    monkeypatch.setattr(manifest, "read", late)
    assert tool(command, tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    if command == "verify":
        name = f"00000001/{manifest.file_name(1)}"
        assert lines == [f"{name}: removed meanwhile", f"{name[:-6]}2.json: ok"]
    else:
        assert [line.split()[3:4] + line.split()[5:] for line in lines[1:]] == [["2", "current"]]


# --- The tool ---------------------------------------------------------------------------------


def tied(step: int) -> dict[str, torch.Tensor]:
    shared = torch.full((4, 2), float(step))
    return {"embed.weight": shared, "head.weight": shared, "bn.mean": torch.tensor(1.5)}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Two attempts: the second took step 20 over and went on to 30."""
    for attempt, steps in ((1, (10, 20)), (2, (30,))):
        store, _ = open_snapshots(tmp_path / "job", attempt)
        for step in steps:
            state: dict[str, Any] = {"model": tied(step), "registered": {}, "rng": []}
            store.save(step, flatten(state), {"seed": 7})
    return tmp_path / "job"


def damage(root: Path) -> None:
    for path in root.glob("*/step-000000000030-*.safetensors"):
        flip(path)


def exported(job: Path, out: Path, *options: object) -> dict[str, torch.Tensor]:
    assert tool("export", job, out, *options) == 0
    return load_file(out)


def test_what_a_zombie_commits_is_superseded_and_not_exported(job, tmp_path, capsys):
    zombie = job / "00000001"
    late = replace(manifest.read(zombie / manifest.file_name(20)), step=90)
    (zombie / manifest.file_name(90)).write_bytes(late.encode())
    assert tool("ls", job) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [(row[1], row[3], row[5]) for row in rows] == [
        ("1", "10", "current"), ("1", "20", "current"), ("1", "90", "superseded"),
        ("2", "20", "current"), ("2", "30", "current"),
    ]  # fmt: skip
    found = exported(job, tmp_path / "out")
    assert (found["bn.mean"], found["head.weight"][0, 0]) == (1.5, 30)


def test_a_flipped_bit_is_found_and_the_newest_valid_is_exported(job, tmp_path, capsys):
    assert tool("verify", job) == 0
    damage(job)
    assert tool("verify", job) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if "DAMAGED" in line]
    assert [line.partition(": ")[0] for line in lines] == [f"00000002/{manifest.file_name(30)}"]
    found = exported(job, tmp_path / "out")
    assert found.keys() == tied(0).keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tied(20).items())
    assert "passed over" in capsys.readouterr().err
    exported(job, tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "out").read_bytes()
    assert exported(job, tmp_path / "b", "--step", 10)["head.weight"][0, 0] == 10


class Odd(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.calls = 5
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}


def test_an_export_holds_what_state_dict_does(tmp_path, capsys):
    flat = TrainingState(nn.Sequential(Odd())).capture(0).flat
    open_snapshots(tmp_path / "root")[0].save(1, flat, {})
    assert exported(tmp_path / "root", tmp_path / "model").keys() == {"0.weight", "0.bias"}
    assert "the extra state of 0 is not in" in capsys.readouterr().err
    assert read_snapshot(tmp_path / "root").extra_state() == {"0": {"calls": 5}}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("ls {job}/absent", "holds no snapshots"),
        ("verify {job}/..", "holds no snapshots; give <spec.snapshot.path>/<job name>"),
        ("export {job} {job}/../x --step 5", "steps there: 10, 20, 30"),
        ("export {job} {job}/00000001/start.json", "exists"),
    ],
)
def test_what_cannot_be_had_is_said_in_a_line(job, capsys, arguments, words):
    assert tool(*arguments.format(job=job).split()) == 1
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1
