"""Who hangs: the culprit, never those that wait for it."""

import pytest

from ddpjob_trainer.liveness.hang import Deadlines, Sign, find
from ddpjob_trainer.liveness.heartbeat import RankState

LIMITS = Deadlines(startup=60, step=30, snapshot=100)


def sign(rank, phase, activity, silent, *, stopped=False):  # type: ignore[no-untyped-def]
    state = RankState(rank, phase=phase, activity=activity, step=7, marked_at=1000.0 - silent)
    return Sign(state, silent, stopped)


CASES = {
    "all move": ([("step", "data", 1), ("step", "backward", 2)], None),
    "nobody is there": ([], None),
    "exactly at the limit is not over it": ([("step", "forward", 30)], None),
    "data loading": ([("step", "backward", 30.5), ("step", "data", 30.6)], 1),
    "the forward": ([("step", "forward", 31), ("step", "backward", 31)], 0),
    "found late: both are far over": ([("step", "backward", 90), ("step", "data", 90.1)], 1),
    "two at work: the older": ([("step", "data", 31), ("step", "update", 32)], 1),
    "who waits began long before": ([("step", "backward", 40), ("step", "forward", 31)], 1),
    "who waits has longer": ([("step", "backward", 38.4), ("step", "agreement", 38.4)], None),
    "all wait: the oldest": ([("step", "backward", 38.6), ("step", "backward", 38.7)], 1),
    "one saves, they wait": ([("step", "backward", 90), ("snapshot", "snapshot", 91)], None),
    "and it does not end": ([("step", "backward", 100), ("snapshot", "snapshot", 101)], 1),
    "they wait for one that starts": ([("startup", "load", 70), ("startup", "build", 59)], None),
    "start": ([("startup", "load", 60.1), ("startup", "build", 60.2)], 1),
    "start, all meet": ([("startup", "rendezvous", 121), ("startup", "rendezvous", 121)], None),
    "for too long": ([("startup", "rendezvous", 121.1), ("startup", "rendezvous", 121.1)], 0),
    "after the loop nothing is watched": ([("done", "end", 10_000)], None),
    "one has ended its loop": ([("done", "end", 10_000), ("step", "backward", 40)], 1),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_culprit(name):
    signs, culprit = CASES[name]
    found = find([sign(rank, *rest) for rank, rest in enumerate(signs)], LIMITS)
    assert (found.rank if found else None) == culprit


def test_a_stopped_process_is_at_fault_wherever_it_stands():
    stopped = sign(1, "step", "backward", 30.5, stopped=True)
    signs = sign(0, "step", "backward", 31.0), stopped, sign(2, "step", "data", 31.0)
    found = find(signs, LIMITS)
    assert (found.rank, found.sign.stopped) == (1, True)
    assert "rank 1 is stopped (SIGSTOP)" in str(found)


def test_one_without_a_record_has_not_come_to_start():
    found = find([sign(0, "startup", "rendezvous", 50.0), Sign(RankState(1), 60.5)], LIMITS)
    assert str(found) == (
        "rank 1 hangs: it has not come to ddp.start() within 60.5 s; the limit is"
        " DDPJOB_HANG_STARTUP_SECONDS=60: raise it if the script was at work"
    )


def test_the_message_names_rank_phase_activity_time_step_and_the_limit():
    for phase, limit in (("startup", 60), ("step", 30), ("snapshot", 100)):
        assert str(find([sign(3, phase, "data", 100.54)], LIMITS)) == (
            f"rank 3 hangs: it gave no sign of life for 100.5 s in phase {phase} (data) after"
            f" step 7; the limit is DDPJOB_HANG_{phase.upper()}_SECONDS={limit}"
        )
