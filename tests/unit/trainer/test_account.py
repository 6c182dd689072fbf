"""Where a launcher's time goes: a rank's record of its steps, and the launcher's sums of it."""

import pytest

from ddpjob_trainer.launcher.reports.state import Account
from ddpjob_trainer.liveness.heartbeat import RankState, RankStateWriter, StepSeconds, read_state
from ddpjob_trainer.liveness.step_times import StepAccount


def state(**seconds: float) -> RankState:
    return RankState(0, "step", 5, seconds=StepSeconds(**seconds))


def test_the_first_step_is_of_the_start_and_repeated_ones_are_apart(tmp_path):
    steps = StepAccount(reached=12)
    steps.passed("data", 9.0)
    assert steps.stepped(11, 10.0, 110.0) == StepSeconds(last=110.0)
    steps.passed("data", 0.25)
    steps.passed("backward", 0.75)
    again = steps.stepped(12, 1.0, 111.0)
    assert again == StepSeconds(1.0, 1.0, 0.0, 0.0, 111.0), "repeated, whatever it did"
    steps.passed("data", 0.5)
    steps.passed("snapshot", 0.25)
    steps.passed("agreement", 1.25)
    new = steps.stepped(13, 2.0, 113.0)
    assert new == StepSeconds(3.0, 1.0, 0.5, 0.25, 113.0)
    assert steps.newest == (0.5, 0.5)
    writer = RankStateWriter(tmp_path, 3)
    writer.failed(ValueError("x" * 1000))
    writer.spent(new)
    found = read_state(tmp_path, 3)
    assert (found.seconds, set(found.exception[-99:])) == (new, {"x"}), (
        "neither overwrites the other"
    )


def test_a_launchers_life_is_booked_whole_but_for_the_step_under_way():
    account = Account(100.0)
    account.begin("round", 101.0, None)
    assert account.read(104.0, None) == {"up": 4.0, "held": 1.0, "warmup": 3.0}
    # The first step has ended after 7 s; 10 s of steps, of which 2 waited for data; 1 s is open.
    now = state(trained=10.0, data=2.0, last=118.0)
    sums = {"held": 1.0, "warmup": 7.0, "data": 2.0, "productive": 8.0}
    assert account.read(119.0, now) == {"up": 19.0, **sums}
    account.begin("recovering", 120.0, now)  # killed: what was under way is lost
    account.begin("recovering", 121.0, now)
    account.begin("round", 121.5, None)
    assert account.reached == 5
    assert account.read(122.5, None) == {"up": 22.5, **sums, "recovering": 4.5}
    # It starts again within 2 s and does the same steps again.
    now = state(trained=4.0, repeated=3.0, last=127.5)
    sums |= {"recovering": 5.5, "repeated": 3.0, "productive": 9.0}
    assert account.read(127.5, now) == {"up": 27.5, **sums}
    account.begin("held", 127.5, now)
    account.begin("round", 147.5, None)
    assert account.read(147.5, None) == {"up": 47.5, **sums, "held": 21.0}


@pytest.mark.parametrize(
    ("phase", "rest", "where"),
    [("done", None, "idle"), ("step", None, "recovering"), ("step", "snapshot", "snapshot")],
)
def test_the_last_seconds_of_a_run(phase, rest, where):
    account = Account(0.0)
    account.begin("round", 0.0, None)
    last = RankState(0, phase, 9, seconds=StepSeconds(trained=6.0, last=8.0))  # type: ignore[arg-type]
    account.begin("idle", 10.0, last, rest)
    assert account.read(10.0, None) == {"up": 10.0, "warmup": 2.0, "productive": 6.0, where: 2.0}


def test_nobody_knows_what_a_program_without_a_record_does():
    account = Account(0.0, reports_steps=False)
    account.begin("round", 0.0, None)
    assert account.read(50.0, None) == {"up": 50.0, "unknown": 50.0}
    account.begin("recovering", 60.0, None)
    account.begin("round", 61.0, None)
    assert account.read(70.0, None) == {"up": 70.0, "unknown": 69.0, "recovering": 1.0}
