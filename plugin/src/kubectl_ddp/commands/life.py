"""Collect a job's life and write it as a page: `kubectl ddp why --html`.

why.py calls it with what it has read; here evidence, ledger and an event log become a Story. What
is not known is said on the page, with the reason.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from ddpjob_contract.evidence import Incident
from kubectl_ddp import page
from kubectl_ddp.commands import account
from kubectl_ddp.commands.events import Happening
from kubectl_ddp.drawing import Failed, Line, Points, Round
from kubectl_ddp.gang import Job, moment
from kubectl_ddp.kubectl import Failure
from kubectl_ddp.page import Story
from kubectl_ddp.text import NONE, ranges, since

_KEPT: Final = 20  # rounds, by launchers
_MOST_EVENTS: Final = 100
_MOST_POINTS: Final = 1000  # of a number in an event log
_MOST_NAMES: Final = 9
_GREATEST: Final = 1e300
_NO_CURVES: Final = (
    "before rank 0's launcher has read a number: the job's image may be older than this command,"
    " or the program prints none in a usual form (spec.output); --events FILE draws an event log"
)


def story(
    job: Job,
    failures: Sequence[Failed],
    facts: page.Rows,
    found: Sequence[Incident],
    events: Sequence[Happening],
    notes: Mapping[str, str],
    log: str | None,
) -> Story:
    """Put together what is known, and why the rest is not; raise Failure.

    ``log``: the event log whose curves are drawn instead of those that launchers kept.
    """
    now = datetime.now(UTC)
    missing: dict[str, str] = {}
    unread = notes.get("Evidence", "")
    try:
        shares = _shares(job)
    except Failure as failure:
        shares, missing["Ledger"] = [], str(failure)
    ordered = sorted(found, key=lambda one: (one["attempt"], one["round"]))
    lines = [line for line in map(_line, ordered) if line.curves]
    source = "As rank 0's launcher saw them, once a second, about a hundred points a round."
    if log:
        lines, source = logged(log), f"Of {log}; steps that were done again are drawn again."
    if not found:
        missing["Timeline"] = f"The rounds are not known {unread or 'before a pod has run'}."
    elif len(found) >= _KEPT:
        missing["Timeline"] = f"Launchers keep the newest {_KEPT} rounds; earlier ones are gone."
    if not lines:
        missing["Curves"] = f"Nothing can be drawn over steps {unread or _NO_CURVES}."
    if not failures:
        missing["Failures"] = "None is known."
    if not events:
        missing["Events"] = notes.get("Events", "None is left: the API server keeps them an hour.")
    return Story(
        title=f"{job.namespace}/{job.name}",
        figures=_figures(job, now),
        facts=facts,
        rounds=[_round(one, job, newest=one is ordered[-1], now=now) for one in ordered],
        failures=failures,
        lines=lines,
        source=source,
        shares=shares,
        events=[(page.time(one.last), one.reason, one.message) for one in events[-_MOST_EVENTS:]],
        made=now,
        missing=missing,
    )


def write(where: str, made: Story) -> int:
    """Write the page to a file, or to stdout; raise Failure."""
    text = page.write(made)
    if where in ("-", "/dev/stdout"):
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")  # as the page says, in any locale
        print(text, end="")
        return 0
    try:
        Path(where).write_text(text, encoding="utf-8")
    except OSError as error:
        raise Failure(f"{where} cannot be written: {error.strerror}") from None
    print(f"{where}: {len(made.rounds)} rounds, {len(made.failures)} failures")
    return 0


def _line(one: Incident) -> Line:
    found = one.get("curves", {}).items()
    pairs = {name: [pair for pair in points if len(pair) == 2] for name, points in found}
    label = f"attempt {one['attempt']}" + (f", round {one['round']}" if one["round"] else "")
    return Line(label, {name: points for name, points in pairs.items() if points})


def _round(one: Incident, job: Job, *, newest: bool, now: datetime) -> Round:
    began, at = moment(one["began"]) or now, moment(one["at"]) or now
    runs = newest and "running" in one and job.phase == "Running"
    ends = [(word, one.get(word)) for word in ("failed", "followed", "stopped", "succeeded")]
    words = [f"rank {ranges(who)} {word}" for word, who in ends if isinstance(who, list) and who]
    words += [f"replica {n} {how}" for n, how in one.get("lost", {}).items()]
    words += [f"{', '.join(one['silent'])} silent"] if one.get("silent") else []
    end = "runs" if runs else "; ".join(words) or "its end was not written"
    step = one.get("step", NONE)
    return Round(
        one["attempt"], one["round"], began, max(now if runs else at, began), step, end, runs
    )


def _figures(job: Job, now: datetime) -> page.Rows:
    status = job.status
    timings, progress = status.get("timings") or {}, status.get("progress") or {}
    started, ended = moment(timings.get("startedAt")), moment(timings.get("completedAt"))
    goodput, loss = status.get("goodput"), progress.get("loss")
    found = {
        "Phase": job.phase or "not seen yet",
        "Attempt": str(status["attempt"]) if status.get("attempt") else "",
        "Step": str(progress.get("stepOfTotal", "")).replace("/", " of "),
        "Loss": f"{loss:.6g}" if isinstance(loss, int | float) else "",
        "Goodput": f"{goodput:.1%}" if isinstance(goodput, int | float) else "",
        "Time": since(started, ended or now) if started else "",
    }
    return [(name, value) for name, value in found.items() if value]


def _shares(job: Job) -> list[tuple[str, float, str, str]]:
    found = account.booked(job)
    causes = ", ".join(f"{name} {account.hours(each)}" for name, each in found.causes.items())
    words = {**account.OF_STATES, "recovering": f"{account.OF_STATES['recovering']}: {causes}"}
    return [
        (state, seconds / found.total, account.hours(seconds), words[state])
        for state, seconds in found.states
    ]


# --- The event log ------------------------------------------------------------------------


def logged(path: str) -> list[Line]:
    """Read an event log: a Line for each start of training; raise Failure."""
    starts: list[dict[str, list[list[float]]]] = []
    labels: list[str] = []
    try:
        with Path(path).open(encoding="utf-8", errors="replace") as file:
            for one in _objects(file):
                if one.get("event") == "resume" or not starts:
                    starts.append({})
                    labels.append(f"after step {one.get('step', 0)}")
                _take(starts[-1], one)
    except OSError as error:
        raise Failure(f"{path} cannot be read: {error.strerror}") from None
    return [
        Line(label, {name: _thinned(points) for name, points in start.items()})
        for label, start in zip(labels, starts, strict=True)
        if start
    ]


def _thinned(points: Sequence[Sequence[float]]) -> Points:
    apart = len(points) // _MOST_POINTS + 1
    return [*points[:-1:apart], points[-1]]


def _objects(lines: Iterable[str]) -> Iterable[dict[str, Any]]:
    for line in lines:
        with suppress(ValueError, RecursionError):  # the last line may be torn
            found = json.loads(line)
            if isinstance(found, dict):
                yield found


def _take(curves: dict[str, list[list[float]]], one: Mapping[str, Any]) -> None:
    step, given = one.get("step"), one.get("values")
    named = {"loss": one.get("loss")} if one.get("event") == "step" else given
    if type(step) is not int or abs(step) > _GREATEST or not isinstance(named, dict):
        return
    for name, value in named.items():
        known = name in curves or len(curves) < _MOST_NAMES
        if known and isinstance(value, int | float) and abs(value) < _GREATEST:
            curves.setdefault(name, []).append([step, value])
