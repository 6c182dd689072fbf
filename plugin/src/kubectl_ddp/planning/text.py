"""Write a Plan as tables with bars, as a row of a sweep, and as JSON: commands/plan.py prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kubectl_ddp.planning import formulas
from kubectl_ddp.planning.compare import Plan
from kubectl_ddp.planning.cycle import Cycle
from kubectl_ddp.planning.parts import STATES
from kubectl_ddp.planning.simulate import MOST_FAILURES, Outcome
from kubectl_ddp.text import NONE, duration, table

#: Options in a sweep, by their key.
SWEPT = ("all pods", "standby", "faster", "hand-over", "all")
_BAR = 40
_PLANNED = "no failure"
_NOTHING = 0.01  # goodput below which nothing is trained to speak of


def tables(plan: Plan) -> list[str]:
    """Write what a gang's time comes to, by state and by cause, and what each option gains."""
    outcome = plan.outcome
    by_state = dict.fromkeys(STATES, 0.0)
    by_cause: dict[str, float] = {}
    for (state, kind), share in outcome.book.items():
        by_state[state] += share
        if kind or state not in ("productive", "idle"):
            by_cause[kind or _PLANNED] = by_cause.get(kind or _PLANNED, 0.0) + share
    spent = {state: share for state, share in by_state.items() if share or state == "productive"}
    del spent["productive"]
    return [
        *_head(plan),
        "",
        *_bars("NOT PRODUCTIVE", spent),
        "",
        *_bars("CAUSE", dict(sorted(by_cause.items(), key=lambda one: -one[1]))),
        "",
        *_options(plan),
        *notes(plan),
    ]


def _head(plan: Plan) -> list[str]:
    parts, outcome = plan.parts, plan.outcome
    mtbf = 1 / parts.rate
    classic = [
        f"{name} {max(1, round(seconds / parts.step)):,}"
        for name, seconds in (
            ("Daly's formula", formulas.daly(parts.stall, mtbf)),
            ("Young's", formulas.young(parts.stall, mtbf)),
        )
    ]
    every = f"every {parts.every_steps:,} steps, {short(parts.every_steps * parts.step)}"
    pods = f"{parts.pods:,} x {parts.gpus_per_pod} GPUs"
    more = f", {parts.standby:,} standby" if parts.standby else ""
    share = f"{percent(outcome.low)} to {percent(outcome.high)} in 8 of 10 runs"
    again, new = outcome.repeated_per_day, outcome.steps_per_day
    runs = f"{outcome.runs} runs of {short(outcome.seconds)}"
    lines = [
        ("Gang", f"{pods}{more}; a failure every {short(mtbf)}"),
        ("Snapshots", f"{every}; best {plan.best_every_steps:,}, {', '.join(classic)}"),
        ("Goodput", f"{percent(outcome.goodput)}; {share} ({runs})"),
        ("Long run", f"{percent(formulas.goodput(parts))} by the closed formula"),
        ("A useful day", useful_day(outcome.goodput)),
        ("A day", f"{new:,.0f} new steps, {again:,.0f} repeated"),
    ]
    return [f"{title + ':':<14}{words}" for title, words in lines]


def _bars(title: str, shares: Mapping[str, float]) -> list[str]:
    most = max(shares.values(), default=0.0) or 1.0
    rows = [
        [name, percent(share), "#" * round(_BAR * share / most)] for name, share in shares.items()
    ]
    return table([title, "SHARE", ""], rows)


def _options(plan: Plan) -> list[str]:
    rows = [["as given", *_range(plan.outcome.goodput, plan.outcome), "", "", ""]]
    most = max((abs(one.gain) for one in plan.options), default=0.0) or 1.0
    for one in plan.options:
        bar = ("+" if one.gain > 0 else "-") * round(_BAR / 2 * abs(one.gain) / most)
        hours = f"{round(one.gpu_hours_per_day):+,}"
        rows.append(
            [one.name, *_range(one.outcome.goodput, one.outcome), points(one.gain), hours, bar]
        )
    return table(["OPTION", "GOODPUT", "8 OF 10 RUNS", "POINTS", "GPU-HOURS/DAY", ""], rows)


def _range(goodput: float, outcome: Outcome) -> list[str]:
    return [percent(goodput), f"{percent(outcome.low)} to {percent(outcome.high)}"]


def sweep(plans: Sequence[Plan]) -> list[str]:
    """Write a row for each size: its goodput, and the points that options gain."""
    head = ["GPUS", "A FAILURE EVERY", "SNAPSHOT EVERY", "GOODPUT", "8 OF 10 RUNS", "USEFUL DAY"]
    rows = []
    for plan in plans:
        parts, gains = plan.parts, {one.key: points(one.gain) for one in plan.options}
        rows.append(
            [
                f"{parts.pods * parts.gpus_per_pod:,}",
                short(1 / parts.rate),
                f"{parts.every_steps:,} steps, {short(parts.every_steps * parts.step)}",
                *_range(plan.outcome.goodput, plan.outcome),
                useful_day(plan.outcome.goodput),
                *(gains.get(key, NONE) for key in SWEPT),
            ]
        )
    return table([*head, *(key.upper() for key in SWEPT)], rows)


def notes(plan: Plan) -> list[str]:
    """Say what a reader of the numbers has to know of these numbers."""
    parts, outcome, mtbf = plan.parts, plan.outcome, 1 / plan.parts.rate
    found = []
    if outcome.goodput < _NOTHING:
        found.append(
            f"Nothing worth the name is trained: a failure comes every {short(mtbf)}, and a start"
            f" takes {short(parts.all_start() + parts.warmup)}. Fewer GPUs, or better ones."
        )
    if parts.step > mtbf:
        found.append(f"A step takes longer than the {short(mtbf)} between two failures.")
    elif parts.every_steps * parts.step > mtbf:
        found.append("Snapshots are rarer than failures: see --every-steps.")
    cycle = Cycle(parts)
    if cycle.later > cycle.first:
        found.append(
            f"A snapshot is due while another is written ({short(parts.write)}): one in"
            f" {cycle.later // cycle.first} is made, every {cycle.later:,} steps."
        )
    if parts.standby >= parts.pods:
        found.append("There are as many standbys as pods, or more: they idle, and that counts.")
    if outcome.seconds * parts.rate > MOST_FAILURES * 0.999:
        found.append(f"Runs were cut to {short(outcome.seconds)}: {MOST_FAILURES:,} failures.")
    return ["", *found] if found else []


def facts(plan: Plan) -> dict[str, Any]:
    """Return the plan for programs; docs/reference/plugin.md has each field."""
    parts = plan.parts
    return {
        "gpus": parts.pods * parts.gpus_per_pod,
        "parts": asdict(parts),
        "mtbfSeconds": 1 / parts.rate,
        "bestEverySteps": plan.best_every_steps,
        "closedFormula": formulas.goodput(parts),
        **_outcome(plan.outcome),
        "options": [
            {"option": one.key, "name": one.name, "points": 100 * one.gain}
            | {"gpuHoursPerDay": one.gpu_hours_per_day, **_outcome(one.outcome)}
            for one in plan.options
        ],
    }


def _outcome(outcome: Outcome) -> dict[str, Any]:
    shares: dict[str, dict[str, float]] = {}
    for (state, kind), share in outcome.book.items():
        shares.setdefault(state, {})[kind or "none"] = share
    return {
        "goodput": outcome.goodput,
        "low": outcome.low,
        "high": outcome.high,
        "shares": shares,
        "stepsPerDay": outcome.steps_per_day,
        "repeatedStepsPerDay": outcome.repeated_per_day,
        "runs": outcome.runs,
        "runSeconds": outcome.seconds,
    }


def percent(share: float) -> str:
    """Write 0.98765 as 98.77 %."""
    return f"{100 * share:.2f} %"


def points(gain: float) -> str:
    """Write 0.0123 as +1.23, and what rounds to nothing without a sign."""
    return f"{100 * gain:+.2f}" if abs(gain) >= 0.00005 else "0.00"


def short(seconds: float) -> str:
    """Write seconds as 0.5s, 45s, 20m, 3d."""
    return f"{seconds:.3g}s" if seconds < 10 else duration(seconds)


def useful_day(goodput: float) -> str:
    """Write the hours that 24 productive ones take."""
    return NONE if goodput < _NOTHING else f"{24 / goodput:.1f} h"
