"""Reckon mean goodput and the best snapshot interval in closed form: compare.py and text.py ask.

Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps" (2006), and
the same sum for snapshots that are written in the background. tests/unit/test_plan_formulas.py
holds story and simulation against them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from kubectl_ddp.planning.cycle import Cycle
from kubectl_ddp.planning.parts import Parts

_TRIES = 60  # of an interval, on each pass
_MOST_STEPS = 10**9
_MANY = 100  # from here on Poisson's distribution is as good as Gauss's


def young(stall: float, mtbf: float) -> float:
    """Return Young's optimum: seconds of training between snapshots."""
    return math.sqrt(2 * stall * mtbf)


def daly(stall: float, mtbf: float) -> float:
    """Return Daly's optimum of higher order: seconds of training between snapshots."""
    if stall >= 2 * mtbf:
        return mtbf
    half = stall / (2 * mtbf)
    return math.sqrt(2 * stall * mtbf) * (1 + math.sqrt(half) / 3 + half / 9) - stall


def daly_goodput(interval: float, stall: float, restart: float, mtbf: float) -> float:
    """Return useful time over all time; failures may hit restarts and snapshots."""
    seconds = mtbf * math.exp(restart / mtbf) * math.expm1((interval + stall) / mtbf)
    return interval / seconds


def goodput(parts: Parts) -> float:
    """Return the productive share of pod-seconds in the long run.

    A cycle from failure to failure takes 1 / rate and keeps the steps of each snapshot that is
    durable before it ends. A standby is taken to be there whenever it is needed.
    """
    rate, cycle = parts.rate, Cycle(parts)
    durable = _series(rate, cycle, cycle.write)
    cases = parts.cases()
    announced = sum(share for case, share in cases if case.announced)
    if announced:
        saved = math.exp(-rate * (parts.stall + parts.write)) * _all_steps(rate, cycle)
        durable = (1 - announced) * durable + announced * saved
    back = 0.0
    for case, share in cases:
        recovery = parts.recovery(case, standby=parts.standby > 0)
        saving = parts.stall + parts.write if case.announced else 0.0
        back += share * math.exp(-rate * (recovery.seconds + saving))
    useful = rate * durable * back * (parts.step - parts.data)
    return useful * parts.pods / (parts.pods + parts.standby)


def _series(rate: float, cycle: Cycle, more: float) -> float:
    """Sum over all snapshots: their steps, times the chance to live until ``more`` after them."""
    first = cycle.first * math.exp(-rate * (cycle.first_seconds + more))
    gone = -math.expm1(-rate * cycle.later_seconds)
    second = cycle.first_seconds + cycle.later_seconds
    return first + cycle.later * math.exp(-rate * (second + more)) / gone


def _all_steps(rate: float, cycle: Cycle) -> float:
    """Sum over all steps the chance to live until they are done."""
    gone = -math.expm1(-rate * cycle.step)

    def steps(count: int) -> float:
        return math.exp(-rate * cycle.step) * -math.expm1(-rate * cycle.step * count) / gone

    again = -math.expm1(-rate * cycle.later_seconds)
    return steps(cycle.first) + math.exp(-rate * cycle.first_seconds) * steps(cycle.later) / again


def best_every_steps(parts: Parts) -> int:
    """Search the interval with the most goodput."""
    most = min(_MOST_STEPS, max(1, int(20 / (parts.rate * parts.step))))
    return _best(lambda steps: goodput(replace(parts, every_steps=steps)), most)


def _best(worth: Callable[[int], float], most: int) -> int:
    """Search 1 to ``most`` on a grid that narrows: finer and finer around the best so far."""
    low, high = 1, most
    while True:
        ratio = (high / low) ** (1 / _TRIES)
        tries = sorted({low, high, *(min(high, round(low * ratio**n)) for n in range(_TRIES))})
        best = max(tries, key=worth)
        at = tries.index(best)
        low, high = tries[max(0, at - 1)], tries[min(len(tries) - 1, at + 1)]
        if high - low <= 2:
            return max(range(low, high + 1), key=worth)


def enough_standbys(parts: Parts) -> int:
    """Return how many find a standby parked in 95 of 100 losses: 1 at least, all pods at most."""
    lost = sum(share for case, share in parts.cases() if parts.replaced_alone(case))
    waiting = parts.rate * lost * (parts.teardown + parts.wait + parts.start)  # at any moment
    if waiting > _MANY:
        return min(parts.pods, math.ceil(waiting + 1.645 * math.sqrt(waiting)) + 1)
    chance = reached = math.exp(-waiting)
    count = 1
    while reached < 0.95 and count < parts.pods:
        chance *= waiting / count
        reached += chance
        count += 1
    return count
