"""Compare a gang with what it could be: commands/plan.py asks, text.py shows the Plan.

`kubectl ddp account` may ask the same with the parts that a job's ledger has measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from kubectl_ddp.planning import formulas
from kubectl_ddp.planning.parts import DAY, Parts
from kubectl_ddp.planning.simulate import Outcome, simulate
from kubectl_ddp.text import duration

Change = Mapping[str, Any]  # fields of Parts
ALL: Final = ("all", "all that gain, together")


@dataclass(frozen=True, slots=True)
class Option:
    """One thing done otherwise, and what it brings."""

    key: str  # of changes()
    name: str
    change: Change
    outcome: Outcome
    gain: float  # of goodput: 0.01 is a percentage point
    gpu_hours_per_day: float  # the same, of all GPUs


@dataclass(frozen=True, slots=True)
class Plan:
    """A gang, what its time comes to, and each option."""

    parts: Parts
    outcome: Outcome
    best_every_steps: int
    options: list[Option]


@dataclass(frozen=True, slots=True)
class What:
    """The options' own numbers, and how runs are simulated."""

    faster: float = 20.0  # seconds, to notice any failure
    announced: float = 0.5  # share of lost nodes
    seconds: float = 30 * DAY  # of a run
    seed: int = 1


def plan(parts: Parts, what: What | None = None, names: frozenset[str] | None = None) -> Plan:
    """Simulate the gang and its options, or those that ``names`` has."""
    what = what or What()
    best = formulas.best_every_steps(parts)
    now = simulate(parts, seconds=what.seconds, seed=what.seed)
    found = list[Option]()
    for key, (name, change) in changes(parts, best, what).items():
        if names is None or key in names:
            found.append(_option(parts, now, what, (key, name), change))
    if names is None or ALL[0] in names:
        good = [one for one in found if one.gain > 0]
        together: dict[str, Any] = {}
        for one in sorted(good, key=lambda one: one.gain):
            together |= one.change
        if len(good) > 1:
            found.append(_option(parts, now, what, ALL, together))
    return Plan(parts, now, best, found)


def changes(parts: Parts, best: int, what: What) -> dict[str, tuple[str, Change]]:
    """List the options by a short name: the words for it, and what it changes."""
    every, found = parts.every_steps, dict[str, tuple[str, Change]]()
    if every == best:
        if every > 1:
            found["oftener"] = ("snapshots twice as often", {"every_steps": every // 2})
        found["rarer"] = ("snapshots half as often", {"every_steps": every * 2})
    else:
        found["best"] = (f"snapshots every {best:,} steps", {"every_steps": best})
    if parts.alone and parts.pods > 1:
        found["together"] = ("all pods restart when one is lost", {"alone": False})
    if parts.in_place:
        change = {"alone": False, "in_place": False}
        found["all pods"] = ("all pods restart at every failure", change)
    if not (parts.alone and parts.in_place):
        change = {"alone": True, "in_place": True}
        found["least"] = ("restart in place, replace the lost pod alone", change)
    if parts.standby:
        found["standby"] = ("no standby", {"standby": 0})
    elif parts.pods > 1 and parts.alone:
        count = formulas.enough_standbys(parts)
        found["standby"] = (f"standby: {count}", {"standby": count})
    if max(parts.detection.values()) > what.faster:
        quick = {kind: min(took, what.faster) for kind, took in parts.detection.items()}
        name = f"every failure noticed in {duration(what.faster)}"
        found["faster"] = (name, {"detection": quick})
    if parts.announced:
        found["hand-over"] = ("no hand-over", {"announced": 0.0})
    else:
        name = f"hand-over of {what.announced:.0%} of lost nodes"
        found["hand-over"] = (name, {"announced": what.announced})
    return found


def _option(
    parts: Parts, now: Outcome, what: What, named: tuple[str, str], change: Change
) -> Option:
    other = replace(parts, **change)
    outcome = simulate(other, seconds=what.seconds, seed=what.seed)
    gain = outcome.goodput - now.goodput
    return Option(*named, change, outcome, gain, gain * 24 * parts.gpus)
