"""`ddpjob-trainer snapshot` on directories that the real store has written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ddpjob_trainer import cli
from ddpjob_trainer.snapshot.ondisk import manifest
from ddpjob_trainer.snapshot.reader import read_snapshot
from ddpjob_trainer.snapshot.training_state import TrainingState
from ddpjob_trainer.state.codec import flatten
from support.snapshots import open_snapshots


def model(step: int) -> dict[str, torch.Tensor]:
    shared = torch.full((4, 2), float(step))
    return {"embed.weight": shared, "head.weight": shared, "bn.mean": torch.tensor(1.5)}


def save(root: Path, attempt: int, *steps: int) -> None:
    store, _ = open_snapshots(root, attempt)
    for step in steps:
        state: dict[str, Any] = {"model": model(step), "registered": {}, "rng": []}
        store.save(step, flatten(state), {"seed": 7})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two attempts: the second took step 20 over and went on to 30."""
    where = tmp_path / "job"
    save(where, 1, 10, 20)
    save(where, 2, 30)
    return where


def damage(root: Path, step: int) -> None:
    for path in root.glob(f"*/step-{step:012d}-*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.unlink()  # the file may be hard-linked into a newer directory
        path.write_bytes(data)


def test_what_an_attempt_commits_after_it_was_superseded_does_not_count(
    root: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    zombie = root / "00000001"
    late = replace(manifest.read(zombie / manifest.file_name(20)), step=90)
    (zombie / manifest.file_name(90)).write_bytes(late.encode())
    assert cli.main(["snapshot", "ls", str(root)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [(row[1], row[3], row[5]) for row in rows] == [
        ("1", "10", "current"), ("1", "20", "current"), ("1", "90", "superseded"),
        ("2", "20", "current"), ("2", "30", "current"),
    ]  # fmt: skip
    out = tmp_path / "out.safetensors"
    assert cli.main(["snapshot", "export", str(root), str(out)]) == 0
    assert load_file(out)["bn.mean"] == 1.5
    assert load_file(out)["head.weight"][0, 0] == 30


def test_verify_finds_a_single_flipped_bit(root: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["snapshot", "verify", str(root)]) == 0
    damage(root, 30)
    assert cli.main(["snapshot", "verify", str(root)]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if "DAMAGED" in line]
    assert lines
    assert all("step-000000000030.json: DAMAGED" in line for line in lines)


class Odd(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.calls = 0
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}


def test_export_holds_what_state_dict_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = torch.nn.Sequential(Odd())
    model[0].calls = 5
    open_snapshots(tmp_path / "root")[0].save(1, TrainingState(model).capture(0).flat, {})
    assert cli.main(["snapshot", "export", str(tmp_path / "root"), str(tmp_path / "model")]) == 0
    assert "the extra state of 0 is not in" in capsys.readouterr().err
    assert load_file(tmp_path / "model").keys() == {"0.weight", "0.bias"}
    assert read_snapshot(tmp_path / "root").extra_state() == {"0": {"calls": 5}}


def test_export_takes_the_newest_that_is_valid(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    damage(root, 30)
    out = tmp_path / "model"
    assert cli.main(["snapshot", "export", str(root), str(out)]) == 0
    loaded = load_file(out)
    assert loaded.keys() == model(0).keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model(20).items())
    assert "passed over" in capsys.readouterr().err
    again = tmp_path / "again"
    assert cli.main(["snapshot", "export", str(root), str(again)]) == 0
    assert again.read_bytes() == out.read_bytes()
    assert cli.main(["snapshot", "export", str(root), str(tmp_path / "b"), "--step", "10"]) == 0
    assert load_file(tmp_path / "b")["head.weight"][0, 0] == 10


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["ls", "{root}/absent"], "holds no snapshots"),
        (["verify", "{root}/.."], "holds no snapshots; give <spec.snapshot.path>/<job name>"),
        (["export", "{root}", "{root}/../x", "--step", "5"], "steps there: 10, 20, 30"),
        (["export", "{root}", "{root}/00000001/start.json"], "exists"),
    ],
)
def test_what_cannot_be_had_is_said_in_a_line(
    root: Path, arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
):
    words = [word.format(root=root) for word in arguments]
    assert cli.main(["snapshot", *words]) == 1
    error = capsys.readouterr().err
    assert told in error
    assert len(error.splitlines()) == 1
