"""Pure pieces of the trainer: environment, data order, verdict, report, random numbers."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

import ddpjob_contract as contract
from ddpjob_trainer.data import generators
from ddpjob_trainer.data.generators import kept
from ddpjob_trainer.data.order import key64
from ddpjob_trainer.environment import read_launcher, read_worker
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.launcher.hub import root_cause
from ddpjob_trainer.launcher.hub.root_cause import Exit
from ddpjob_trainer.launcher.reports import termination
from ddpjob_trainer.launcher.reports.state import Results, state_body
from ddpjob_trainer.liveness.heartbeat import RankState, RankStateWriter, read_state


def test_the_operators_environment():
    env = read_worker({})
    assert (env.rank, env.world_size, env.master, env.snapshot.directory) == (0, 1, None, None)
    env = read_worker(
        {
            "RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "j-0.j.n.svc", "MASTER_PORT": "29500", "DDPJOB_UID": "abc",
            "DDPJOB_ATTEMPT": "4", "DDPJOB_ROUND": "1", "DDPJOB_SNAPSHOT_DIR": "/s/j",
            "DDPJOB_SNAPSHOT_EVERY_STEPS": "20", "DDPJOB_SNAPSHOT_KEEP": "1",
            "DDPJOB_SNAPSHOT_RESUME": "Never",
        }
    )  # fmt: skip
    assert (env.rank, env.world_size, env.master) == (2, 3, ("j-0.j.n.svc", 29500))
    assert env.identity.key == "abc/4/1"
    assert env.identity.unique
    restarted = read_worker({"DDPJOB_UID": "abc", "TORCHELASTIC_RESTART_COUNT": "3"})
    assert restarted.identity.key == "abc/1/3"  # torchrun --max-restarts inside a DDPJob
    assert str(env.snapshot.directory) == "/s/j"
    assert (env.snapshot.every_steps, env.snapshot.keep, env.snapshot.resume) == (20, 2, False)
    for said in ({}, {"DDPJOB_SNAPSHOT_EVERY_STEPS": "Auto"}):
        assert read_worker(said).snapshot.every_steps is None


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"RANK": "1"}, "RANK and WORLD_SIZE must both be set"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x' is not a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 must be below WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "WORLD_SIZE=2 needs MASTER_ADDR"),
        (
            {"DDPJOB_REPLICA": "0", "PET_NNODES": "1", "PET_NPROC_PER_NODE": "2"},
            "start the script with `ddpjob-trainer run script.py`",
        ),
        ({"DDPJOB_SNAPSHOT_DIR": "s3://x/y"}, "must be a directory"),
        ({"DDPJOB_SNAPSHOT_RESUME": "auto"}, "must be Auto or Never"),
        ({"DDPJOB_SNAPSHOT_EVERY_STEPS": "0"}, "DDPJOB_SNAPSHOT_EVERY_STEPS=0 is too small"),
        ({"DDPJOB_SNAPSHOT_EVERY_STEPS": "often"}, "STEPS='often' is not a whole number"),
        ({"DDPJOB_HANG_STEP_SECONDS": "-1"}, "must be a positive number of seconds"),
    ],
)
def test_contradictions_name_the_variable(env, words):
    with pytest.raises(ConfigError) as error:
        read_worker(env)
    assert words in str(error.value)


def test_a_launcher_in_a_gang_needs_the_gangs_variables():
    gang = {"DDPJOB_REPLICA": "1", "PET_NNODES": "3", "MASTER_ADDR": "a", "PET_NPROC_PER_NODE": "2"}
    env = read_launcher(gang)
    assert env.final_exit_codes == frozenset()
    codes = "DDPJOB_IN_PLACE_FINAL_EXIT_CODES"
    assert read_launcher({**gang, codes: "3,42"}).final_exit_codes == {3, 42}
    assert (env.replica, env.replicas, env.nproc, env.master) == (1, 3, 2, ("a", 29500))
    with pytest.raises(ConfigError, match="PET_NPROC_PER_NODE='auto'"):
        read_launcher({**gang, "PET_NPROC_PER_NODE": "auto"})


def failed(rank: int, status: int, at: float = 0.0) -> Exit:
    return Exit(rank, rank, status, at)


def test_the_first_failure():
    for exits, rank in (
        ([failed(0, 1, 2.0), failed(1, 1, 1.0)], 1),  # the earlier
        ([failed(0, 75, 1.0), failed(1, 1, 2.0)], 1),  # the cause, though later
        ([failed(0, 1, 1.0), failed(1, -9, 1.0)], 1),  # seen at once: the signal
        ([failed(0, 0, 0.5), failed(1, 75, 1.0)], 1),  # only collateral
        ([failed(0, 75, 1.0), failed(1, 75, 1.0)], 0),
    ):
        found = root_cause.first_failure(exits)
        assert found.rank == rank, exits
    exits = [failed(1, 75, 10.0)]  # collateral is waited on for a moment
    assert root_cause.cause_or_wait(exits, running=2, now=10.5) == 12.0
    assert root_cause.cause_or_wait(exits, running=2, now=12.0) == exits[0]
    assert root_cause.cause_or_wait(exits, running=0, now=10.5) == exits[0]
    assert root_cause.cause_or_wait([failed(0, 0)], running=2, now=10.5) is None


KNOWN = Results(snapshot_step=2)


def test_the_last_time_of_the_progress_path_is_in_report_and_state():
    known = replace(KNOWN, modified=1_500_000_000_123_456_789)
    made = termination.make_report(None, None, [], round_=0, terminated=False, results=known)
    assert made["fileModifiedAt"] == "2017-07-14T02:40:00.123456Z"
    body = state_body(None, uid="u", attempt=1, round_=0, results=known)
    assert body["uid"] == "u"
    assert body["fileModifiedAt"] == "2017-07-14T02:40:00.123456Z"
    assert not {"whole", "serving", "snapshotEvery"} & body.keys()
    chosen = replace(KNOWN, snapshot_every=120)
    assert state_body(None, attempt=1, round_=0, results=chosen)["snapshotEvery"] == 120
    body = state_body(
        None, attempt=1, round_=0, results=KNOWN, gang={"whole": True, "serving": "2:3"}
    )
    assert (body["whole"], body["serving"]) == (True, "2:3")
    assert (body["uid"], "fileModifiedAt" in body) == ("", False)


@pytest.mark.parametrize("char", ["y", "\u4e2d", "\U0001f600", "\x01", "\x9b", "\ud800", '"'])
def test_a_report_of_any_letters_keeps_exception_last_lines_and_a_round(char):
    round_: contract.Round = {
        "round": 123456, "at": "2026-01-01T00:00:00Z", "replica": 1234, "rank": 12345, "code": 143,
        "signal": 15, "kind": "exception", "exception": char * 400, "step": 2**40,
        "snapshotStep": 2**40,
    }  # fmt: skip
    known = Results(2**40, 2**40, 2**40, 1_500_000_000_123_456_789, (round_,) * 10)
    state = RankState(0, step=2**40, loss=-1 / 3e100)
    failure = replace(failed(12345, 1), exception=char * 5000)
    lines = [char * 300] * 19 + ["newest"]
    made = termination.make_report(
        failure, state, lines, round_=123456, terminated=False, results=known
    )
    data = termination.encode(made)
    assert len(data) <= 2048
    assert data.decode().isprintable()
    found = json.loads(data)
    head, _, tail = found["exception"].partition(" ... ")
    assert found["log"].pop() == "newest"  # the oldest go first
    assert set(head) == set(tail) == set("".join(found["log"])) == {char}
    assert set(found["rounds"][-1]["exception"].replace(" ... ", "")) == {char}
    assert len(found["log"]) >= 4
    if char == "y":
        assert (len(found["exception"]), len(found["log"][0])) == (300, 200)


def test_a_report_leaves_out_a_nan_loss_and_makes_no_file_unless_asked(tmp_path):
    state = RankState(0, step=3, loss=float("nan"))
    made = termination.make_report(None, state, [], round_=0, terminated=False, results=KNOWN)
    assert made == {"version": 1, "kind": "success", "round": 0, "step": 3, "snapshotStep": 2}
    path = tmp_path / "log"
    assert termination.write(made, path, create=False) == ""
    assert not path.exists()
    assert termination.write(made, path, create=True) == ""
    assert json.loads(path.read_bytes())["kind"] == "success"
    assert "not a regular file" in termination.write(made, tmp_path, create=False)


def test_a_ranks_record_survives_and_a_long_exception_fits(tmp_path):
    writer = RankStateWriter(tmp_path, 3)
    writer.update(step=7, loss=0.25, phase="step")
    for character in ("\u20ac", "\U0001f600", "\x01", '"', "\udc80"):
        writer.failed(ValueError(character * 3000))
        found = read_state(tmp_path, 3)
        assert found is not None, character
        assert (found.step, found.loss, found.phase) == (7, 0.25, "step")
        assert found.exception.startswith("ValueError: ")
        assert len(found.exception) >= 50
    assert read_state(tmp_path, 4) is None


def test_random_numbers_depend_on_seed_step_and_shard_only():
    def draw(*seed: int) -> tuple[float, float, float]:
        if seed:
            generators.reseed(*seed)
        return float(torch.rand(())), float(np.random.rand()), random.random()

    first = draw(1, 2, 3)
    assert draw(1, 2, 3) == first
    for other in ((2, 2, 3), (1, 3, 3), (1, 2, 4)):
        assert all(a != b for a, b in zip(draw(*other), first, strict=True))
    generators.reseed(1, 2, 3)
    with kept():
        draw()
    assert draw() == first
    blob = generators.capture()
    after = draw()
    generators.restore(blob)
    assert draw() == after


def test_random_numbers_do_not_begin_to_use_a_gpu(monkeypatch):
    """Nor pay for it; start(device='cpu') is the cure that is told where one is broken."""
    torch.manual_seed(key64("torch", 5, 3, 1))
    wanted = torch.rand(4)
    monkeypatch.delattr(torch.cuda, "manual_seed_all")
    generators.reseed(5, 3, 1)
    assert torch.equal(torch.rand(4), wanted), "torch's own stream"

    def broken() -> None:
        raise RuntimeError("No CUDA GPUs are available")

    before = {**generators.capture(), "cuda": ""}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # NVML counts
    monkeypatch.setattr(torch.cuda, "_lazy_init", broken)
    assert "cuda" not in generators.capture()
    generators.restore(before)  # of a process that had one
