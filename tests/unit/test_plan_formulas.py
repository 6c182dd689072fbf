"""The planner's closed formulas against Daly's, and the simulation against both."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from kubectl_ddp.planning import formulas
from kubectl_ddp.planning.parts import DETECTION, KINDS, Parts
from kubectl_ddp.planning.simulate import simulate

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
NOTHING = dict.fromkeys(DETECTION, 0.0)
#: As Daly has it: one machine, one kind of failure, one restart time, snapshots that only stall.
BARE = Parts(
    pods=1, node_mtbf=HOUR, shares={"gpu": 1.0}, detection=NOTHING, teardown=0.0, start=0.0,
    start_per_pod=0.0, warmup=0.0, warmup_spare=0.0, step=1.0, stall=0.0, write=0.0,
)  # fmt: skip
#: Mean time between failures, restart, stall, seconds between snapshots.
CASES = [
    (24 * HOUR, 10 * MINUTE, 30.0, 38 * MINUTE),
    (6 * HOUR, 10 * MINUTE, 30.0, 20 * MINUTE),
    (3.1 * HOUR, 3 * MINUTE, 3.0, 4 * MINUTE),
    (108 * MINUTE, 10 * MINUTE, 30.0, 10 * MINUTE),
    (30 * MINUTE, 10 * MINUTE, 30.0, 5 * MINUTE),
    (17.7 * MINUTE, 10 * MINUTE, 30.0, 4 * MINUTE),
    (17.7 * MINUTE, 30.0, 3.0, 80.0),
    (10 * MINUTE, 5 * MINUTE, 60.0, 10 * MINUTE),
    (5 * MINUTE, 10 * MINUTE, 10.0, 3 * MINUTE),
]


def bare(mtbf: float, restart: float, stall: float, interval: float) -> Parts:
    every = round(interval / BARE.step)
    return replace(BARE, node_mtbf=mtbf, start=restart, stall=stall, every_steps=every)


@pytest.mark.parametrize(("mtbf", "restart", "stall", "interval"), CASES)
def test_formula_and_simulation_agree_with_daly(
    mtbf: float, restart: float, stall: float, interval: float
) -> None:
    exact = formulas.daly_goodput(interval, stall, restart, mtbf)
    parts = bare(mtbf, restart, stall, interval)
    assert formulas.goodput(parts) == pytest.approx(exact, rel=1e-9)
    simulated = simulate(parts, seconds=1000 * mtbf).goodput
    assert simulated == pytest.approx(exact, rel=0.02, abs=0.003)


def test_dalys_own_optima_come_out() -> None:
    """Of his figures 3 to 5: a dump of 5 minutes, failures every 24 h, 6 h and 15 minutes."""
    for mtbf, expected in ((24 * HOUR, 117.0), (6 * HOUR, 57.0), (15 * MINUTE, 9.1)):
        assert formulas.daly(5 * MINUTE, mtbf) / MINUTE == pytest.approx(expected, abs=0.5)


def test_published_figures_come_out() -> None:
    """Meta's rate of RSC-1 at 16,384 and 100,000 GPUs, a restart of 10 minutes, a stall of 30 s."""
    for gpus, expected in ((16_384, 0.827), (100_000, 0.444)):
        mtbf = 29.5e3 * HOUR / gpus
        interval = math.sqrt(2 * 30.0 * mtbf)
        assert formulas.daly_goodput(interval, 30.0, 600.0, mtbf) == pytest.approx(
            expected, abs=0.003
        )


@pytest.mark.parametrize(("mtbf", "restart", "stall", "interval"), CASES)
def test_the_best_interval_is_dalys(
    mtbf: float, restart: float, stall: float, interval: float
) -> None:
    parts = replace(bare(mtbf, restart, stall, interval), step=0.1)
    best = formulas.best_every_steps(parts) * parts.step
    daly = formulas.daly(stall, mtbf)
    assert best == pytest.approx(daly, rel=0.02)
    assert formulas.young(stall, mtbf) == pytest.approx(daly, rel=0.6)
    worth = [
        simulate(replace(parts, every_steps=round(times * best / parts.step)), seconds=300 * mtbf)
        for times in (1 / 3, 1, 3)
    ]
    assert max(one.goodput for one in worth) == worth[1].goodput, (
        "the simulation has its best there, too"
    )
    around = [
        formulas.goodput(replace(parts, every_steps=round(best / parts.step) + more))
        for more in (-1, 0, 1)
    ]
    assert max(around) == around[1]


#: What the bare gang does not have: each alone is told apart, and all of them together.
MORE = {
    "background write": {"write": 90.0, "stall": 1.0, "every_steps": 300},
    "write longer than the interval": {"write": 250.0, "stall": 2.0, "every_steps": 100},
    "long steps": {"step": 130.0, "every_steps": 2},
    "data wait": {"data": 0.25},
    "kinds": {"shares": dict.fromkeys(KINDS, 1.0), "detection": DETECTION, "warmup": 20.0},
    "hand-over": {"shares": {"node": 1.0}, "announced": 0.5, "write": 9.0, "stall": 3.0},
    "standby": {"shares": {"node": 1.0}, "standby": 40, "warmup": 30.0, "warmup_spare": 5.0},
    "all pods": {"alone": False, "in_place": False, "start_per_pod": 0.2, "pods": 300},
    "capacity": {"wait": 100.0, "pods": 3, "shares": {"pod": 1.0}},
}


@pytest.mark.parametrize("change", MORE.values(), ids=MORE.keys())
def test_the_simulation_agrees_with_the_formula(change: dict[str, Any]) -> None:
    pods = change.get("pods", 200)
    parts = replace(BARE, pods=pods, node_mtbf=HOUR * pods, start=20.0, stall=1.0, every_steps=200)
    parts = replace(parts, **change)
    exact = formulas.goodput(parts)
    assert 0.1 < exact < 0.99
    assert simulate(parts, seconds=1000 * HOUR).goodput == pytest.approx(exact, rel=0.01)


def test_enough_standbys_are_those_that_are_lost_meanwhile() -> None:
    parts = replace(BARE, pods=10, node_mtbf=100 * DAY, shares={"pod": 1.0}, start=60.0)
    assert formulas.enough_standbys(parts) == 1
    busy = replace(parts, node_mtbf=10 * 20.0)  # a loss every 20 s, a pod takes 60
    assert formulas.enough_standbys(busy) == 7  # P(Poisson(3) <= 6) = 0.97, <= 5: 0.92
    assert formulas.enough_standbys(replace(busy, node_mtbf=1.0)) == 10, "no more than pods"
    # A hundred at a time and a little more: both ways to reckon say the same.
    for gap, least in ((0.605, 117), (0.595, 118)):
        many = replace(parts, pods=1000, node_mtbf=1000 * gap)
        assert formulas.enough_standbys(many) == pytest.approx(least, abs=1)
