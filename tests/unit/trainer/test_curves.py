"""Some points of each number, however long a round is."""

from itertools import pairwise

from ddpjob_trainer.launcher.reports.curves import Curves


def test_a_long_round_keeps_some_points_spread_over_all_its_steps():
    curves = Curves()
    for step in range(10_001):
        curves.add(step, {"loss": 1 / (step + 1), "same": 3.0, "odd": float("nan")})
    found = curves.read()
    steps = [step for step, _ in found["loss"]]
    assert 50 <= len(steps) <= 101
    assert (steps[0], steps[-1]) == (0, 10_000)
    gaps = [after - before for before, after in pairwise(steps[:-1])]
    assert max(gaps) <= 4 * min(gaps)
    assert found["same"] == [[0, 3.0]]
    assert "odd" not in found
    curves.add(10_001, {"loss": 1.0})
    assert found != curves.read(), "what is written and compared does not change meanwhile"


def test_a_counter_that_begins_again_with_each_epoch_counts_on():
    curves = Curves()
    for epoch in range(30):
        for step in range(200):
            curves.add(step, {"loss": 1 / (200 * epoch + step + 1)})
    points = curves.read()["loss"]
    assert len(points) >= 50
    assert points[-1][0] == 5999
    assert all(value == float(f"{1 / (step + 1):.6g}") for step, value in points)
