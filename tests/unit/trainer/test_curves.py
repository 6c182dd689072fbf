"""Some points of each number, however long a round is."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from ddpjob_trainer.launcher.reports import evidence
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


def test_a_counter_that_begins_again_with_each_epoch_counts_on():
    curves = Curves()
    for epoch in range(30):
        for step in range(200):
            curves.add(step, {"loss": 1 / (200 * epoch + step + 1)})
    points = curves.read()["loss"]
    assert len(points) >= 50
    assert points[-1][0] == 5999
    assert all(value == float(f"{1 / (step + 1):.6g}") for step, value in points)


def test_nothing_is_looked_at_often_and_curves_alone_are_seldom_written(monkeypatch, tmp_path):
    config: Any = SimpleNamespace(
        env=SimpleNamespace(snapshot_dir=tmp_path), replica=0, replicas=1, nproc=1,
        rank=lambda local: local,
    )  # fmt: skip
    numbers = SimpleNamespace(step=0, loss=1.0, metrics={})
    reading: Any = SimpleNamespace(reader=SimpleNamespace(numbers=numbers))
    keeper = evidence.Keeper(config, print, reading)
    looked, written, lines = [], [], [["begun"]]
    workers: Any = SimpleNamespace(state=lambda rank: looked.append(now), state_dir=tmp_path)
    monkeypatch.setattr(keeper, "_body", lambda *words, **more: now)
    monkeypatch.setattr(keeper, "_put", written.append)
    keeper.begin(config, workers, lambda rank, most: lines[-1], now := 0.0)
    while now < 130:
        now += 0.25
        numbers.step += 1
        numbers.loss = 1 / numbers.step
        if now == 83:
            lines.append(["more"])
        keeper.tick("", now)
    assert len(looked) == 130
    assert written == [2, 62, 92]
