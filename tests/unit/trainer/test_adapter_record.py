"""What the adapters for other trainers write into this rank's record."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddpjob_trainer.adapters import record
from ddpjob_trainer.environment import STATE_DIR
from ddpjob_trainer.launcher.reports.state import state_body
from ddpjob_trainer.liveness.heartbeat import RankState, read_state


@pytest.fixture
def rank(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    found: int = getattr(request, "param", 0)
    told = {STATE_DIR: str(tmp_path), "RANK": str(found), "WORLD_SIZE": "3"}
    for name, value in {**told, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(record, "RECORD", record.Record())
    return found


def begin(**options: int) -> record.Record:
    record.RECORD.begin(**options)
    return record.RECORD


def seen(directory: Path, rank: int = 0) -> RankState:
    found = read_state(directory, rank)
    assert found is not None
    return found


def test_a_run_from_its_resume_to_its_end(tmp_path: Path, rank: int):
    mine = begin(step=10, total_steps=30)
    first = seen(tmp_path)
    assert (first.phase, first.step, first.total_steps, first.pid) == (
        "startup", 10, 30, os.getpid())  # fmt: skip
    record.forward_begins()
    assert seen(tmp_path).activity == "forward"
    record.forward_ends()
    assert seen(tmp_path).activity == "backward"
    mine.stepped(11, 0.5)
    state = seen(tmp_path)
    assert (state.phase, state.step, state.loss, state.activity) == ("step", 11, 0.5, "data")
    assert state.marks > first.marks
    mine.saving()
    mine.told(0.25)  # between a checkpoint's begin and its end
    assert (seen(tmp_path).phase, seen(tmp_path).snapshot_step) == ("snapshot", -1)
    mine.saved(11)
    state = seen(tmp_path)
    assert (state.phase, state.snapshot_step, state.loss) == ("step", 11, 0.25)
    mine.failed(ValueError("no"))
    assert seen(tmp_path).exception == "ValueError: no"
    mine.ended()
    assert seen(tmp_path).phase == "done"


def test_a_checkpoint_before_the_first_step_leaves_the_time_of_a_start(tmp_path: Path, rank: int):
    mine = begin()
    mine.saving()
    mine.saved(0)
    assert seen(tmp_path).phase == "startup"


@pytest.mark.parametrize("rank", [1], indirect=True)
def test_only_rank_0_says_that_a_checkpoint_is_written(tmp_path: Path, rank: int):
    mine = begin()
    mine.saving()
    mine.saved(5)
    assert seen(tmp_path, 1).snapshot_step == -1


def test_a_loss_is_read_now_and_then_and_whatever_it_is_it_stops_nothing(tmp_path: Path, rank: int):
    reads = 0

    class Loss:
        def __float__(self) -> float:
            nonlocal reads
            reads += 1
            raise RuntimeError("of several elements")

    mine = begin()
    for step in range(100):
        mine.stepped(step + 1, Loss())
    assert 1 <= reads < 100
    mine.told("much")  # type: ignore[arg-type]
    state = seen(tmp_path)
    assert (state.step, state.loss) == (100, None)


def test_a_data_loaders_worker_is_no_rank(tmp_path: Path, rank: int):
    mine = begin()
    before = seen(tmp_path)
    pid = os.fork()
    if not pid:
        mine.at("evaluation")
        record.forward_begins()
        os._exit(0)
    os.waitpid(pid, 0)
    assert seen(tmp_path) == before


def test_a_total_that_nobody_knows_is_not_told(tmp_path: Path, rank: int):
    begin().stepped(7)
    body = state_body(seen(tmp_path), attempt=1, round_=0)
    assert (body["step"], "totalSteps" in body) == (7, False)


def test_calls_before_training_begins_do_nothing(tmp_path: Path, rank: int):
    """Such as those of Lightning's sanity check."""
    record.forward_begins()
    record.forward_ends()
    record.RECORD.stepped(1, 0.5)
    record.RECORD.saving()
    record.RECORD.saved(1)
    record.RECORD.failed(ValueError())
    record.RECORD.ended()
    assert list(tmp_path.iterdir()) == []
