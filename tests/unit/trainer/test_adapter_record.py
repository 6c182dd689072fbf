"""What the adapters for other trainers write into this rank's record."""

import os
from pathlib import Path

import pytest

from ddpjob_trainer.adapters import record
from ddpjob_trainer.environment import STATE_DIR
from ddpjob_trainer.launcher.reports.state import state_body
from ddpjob_trainer.liveness.heartbeat import RankState, read_state


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> record.Record:
    told = {STATE_DIR: str(tmp_path), "RANK": "0", "WORLD_SIZE": "3"}
    for name, value in {**told, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(record, "RECORD", record.Record())
    return record.RECORD


def seen(directory: Path, rank: int = 0) -> RankState:
    found = read_state(directory, rank)
    assert found is not None
    return found


def test_a_run_from_its_resume_to_its_end(tmp_path, mine):
    record.forward_begins()  # such as those of Lightning's sanity check
    record.forward_ends()
    for early in (lambda: mine.stepped(1, 0.5), mine.saving, lambda: mine.saved(1), mine.ended):
        early()
    mine.failed(ValueError())
    assert list(tmp_path.iterdir()) == [], "calls before training begins do nothing"
    mine.begin(step=10, total_steps=30)
    first = seen(tmp_path)
    assert (first.phase, first.step, first.total_steps, first.pid) == (
        "startup", 10, 30, os.getpid())  # fmt: skip
    mine.saving()
    mine.saved(10)
    assert seen(tmp_path).phase == "startup", "a checkpoint leaves the time of a start"
    record.forward_begins()
    assert seen(tmp_path).activity == "forward"
    record.forward_ends()
    assert seen(tmp_path).activity == "backward"
    record.marks("evaluation")("a trainer", 7, batch=None)
    assert seen(tmp_path).activity == "evaluation"
    mine.stepped(11, 0.5)
    state = seen(tmp_path)
    assert (state.phase, state.step, state.loss, state.activity) == ("step", 11, 0.5, "data")
    assert state.marks > first.marks
    mine.saving()
    mine.add_loss(0.25)  # between a checkpoint's begin and its end
    assert (seen(tmp_path).phase, seen(tmp_path).snapshot_step) == ("snapshot", 10)
    mine.saved(11)
    state = seen(tmp_path)
    assert (state.phase, state.snapshot_step, state.loss) == ("step", 11, 0.25)
    mine.failed(ValueError("no"))
    assert seen(tmp_path).exception == "ValueError: no"
    mine.ended()
    assert seen(tmp_path).phase == "done"


def test_a_loss_is_read_now_and_then_and_whatever_it_is_it_stops_nothing(tmp_path, mine):
    reads = 0

    class Loss:
        def __float__(self) -> float:
            nonlocal reads
            reads += 1
            raise RuntimeError("of several elements")

    mine.begin()
    for step in range(100):
        mine.stepped(step + 1, Loss())
    assert 1 <= reads < 100
    mine.add_loss("much")  # type: ignore[arg-type]
    state = seen(tmp_path)
    assert (state.step, state.loss) == (100, None)
    assert "totalSteps" not in state_body(state, attempt=1, round_=0), "nobody knows it"


def test_a_data_loaders_worker_is_no_rank_and_rank_1_names_no_checkpoint(
    tmp_path, mine, monkeypatch
):
    mine.begin()
    before = seen(tmp_path)
    pid = os.fork()
    if not pid:
        mine.at("evaluation")
        record.forward_begins()
        os._exit(0)
    os.waitpid(pid, 0)
    assert seen(tmp_path) == before
    monkeypatch.setenv("RANK", "1")
    other = record.Record()
    other.begin()
    other.saving()
    other.saved(5)
    assert seen(tmp_path, 1).snapshot_step == -1


def test_a_second_run_of_a_process_keeps_the_seconds_of_the_first(tmp_path, mine):
    """As k-fold's: the launcher reads the newest record only, and its sums must not fall."""
    mine.begin(total_steps=30)
    for step in range(1, 4):
        mine.stepped(step)
    first = seen(tmp_path).seconds
    assert first.trained > 0
    mine.begin(total_steps=30)
    assert seen(tmp_path).seconds == first
    mine.stepped(1)
    assert seen(tmp_path).seconds.trained > first.trained
