"""Steps per second are those of the last minute."""

from ddpjob_trainer.launcher.printed import Pace
from ddpjob_trainer.liveness.heartbeat import RankState


def seen(pace: Pace, step: int, now: float) -> float | None:
    pace.poll(RankState(0, phase="step", step=step), now)
    return pace.per_second(now)


def test_the_rate_is_that_of_the_last_minute_in_bounded_state():
    pace = Pace()
    assert seen(pace, 1000, 1.0) is None, "of a run that was resumed nobody knows yet"
    rates = [seen(pace, 1000 + 10 * second, 1.0 + second) for second in range(1, 600)]
    assert set(rates) == {10.0}
    slow = [seen(pace, 6990 + second, 600.0 + second) for second in range(1, 62)]
    assert slow[-1] == 1.0, "what was faster before is forgotten"
    assert slow[30] is not None
    assert 1.0 < slow[30] < 10.0
    assert len(pace._marks) < 65


def test_the_rate_falls_in_a_stall_and_very_slow_steps_have_one():
    pace = Pace()
    for second in range(100):
        seen(pace, 10 * second, float(second))
    assert seen(pace, 990, 129.0) == 5.0
    assert (seen(pace, 990, 600.0) or 1) < 0.03
    pace = Pace()
    for now in range(0, 1000, 1):
        rate = seen(pace, now // 100, float(now))
    assert 0.005 <= (rate or 0) <= 0.01


def test_a_start_has_none():
    pace = Pace()
    pace.poll(None, 1.0)
    pace.poll(RankState(0), 2.0)
    assert seen(pace, 100, 3.0) is None
    assert seen(pace, 110, 13.0) == 1.0
