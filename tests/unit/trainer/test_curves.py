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


def test_a_program_with_many_numbers_has_some_drawn():
    curves = Curves()
    curves.add(1, {f"n{number}": 1.0 for number in range(99)})
    assert len(curves.read()) == 9
    curves.add(2, {"loss": 1.0})
    assert "loss" not in curves.read()
