"""Draw a job's life as SVG, for page.py: timeline, curves, shares. Pure functions of data to text.

Places are shares of the width and letters keep their size, so one drawing fits a phone and a wall.
All that a job says passes text(); what is seen is said in words, too, in titles and tables.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from kubectl_ddp.text import clean

Points = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class Round:
    """One round of an attempt. ``end`` words how it ended."""

    attempt: int
    round: int
    began: datetime
    at: datetime
    step: object
    end: str
    runs: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """A failure: its number on the page, who was lost, and what was charged.

    ``charged``: restart, disruption or nothing. ``log``: the last lines; ``as_of``: how old.
    """

    number: int
    attempt: int
    at: datetime
    when: str
    who: str
    charged: str
    rows: Sequence[tuple[str, str]]
    log: Sequence[str]
    as_of: str


@dataclass(frozen=True, slots=True)
class Line:
    """What was seen of one start of training: pairs of step and value by the number's name."""

    label: str
    curves: Mapping[str, Points]


def text(words: object) -> str:
    """Escape a text of strangers for HTML and XML; letters that are none are replaced."""
    return html.escape(clean(str(words)))


def frame(content: str, height: int, title: str, words: str, role: str = "img") -> str:
    """Wrap a drawing with its name and description. ``role`` group: it has links."""
    about = f"<title>{text(title)}</title><desc>{text(words)}</desc>"
    label = f'role="{role}" aria-label="{text(f"{title}: {words}")}"'
    return f'<svg {label} width="100%" height="{height}">{about}{content}</svg>'


# --- The timeline -------------------------------------------------------------------------

LANES = 24  # the newest attempts that have a lane
_TALL = 24
_SHAPES = {
    "restart": "M-9 0a9 9 0 1 0 18 0a9 9 0 1 0-18 0z",
    "disruption": "M0-11L11 0L0 11L-11 0z",
    "nothing": "M-8-8h16v16h-16z",
}


def timeline(rounds: Sequence[Round], failures: Sequence[Failed]) -> Iterator[str]:
    """Draw a lane for each attempt, with its rounds and failures; nothing if none is known."""
    times = [time for one in rounds for time in (one.began, one.at)]
    times += [one.at for one in failures]
    if not times:
        return
    first, last = min(times), max(times)
    span = max((last - first).total_seconds(), 1.0)

    def place(time: datetime) -> float:
        return 2 + 96 * (time - first).total_seconds() / span  # marks at the edge are whole

    known = {one.attempt for one in rounds} | {one.attempt for one in failures}
    for attempt in sorted(known)[-LANES:]:
        own = [one for one in failures if one.attempt == attempt]
        lost = ", ".join(f"({one.number}) {one.who}" for one in reversed(own))
        words = f"attempt {attempt}{'; lost: ' * bool(own)}{lost}"
        thirds = (f"{2 + 32 * third}%" for third in range(4))
        parts = [f'<line class="grid" x1="{x}" x2="{x}" y1="0" y2="100%"/>' for x in thirds]
        for each in (each for each in rounds if each.attempt == attempt):
            left, right = place(each.began), place(each.at)
            when = f"{each.began:%H:%M:%S} to {each.at:%H:%M:%S} UTC"
            said = f"attempt {attempt}, round {each.round}: {when}, {each.end}"
            parts.append(
                f'<rect class="round{" now" * each.runs}" x="{left:.2f}%" y="5" height="14"'
                f' width="{max(right - left, 0.4):.2f}%" rx="3"><title>{text(said)}</title>'
                "</rect>"
            )
        parts += [
            f'<svg x="{place(one.at):.2f}%" y="12" overflow="visible">'
            f'<a href="#failure-{one.number}">{mark(one)}</a></svg>'
            for one in reversed(own)
        ]
        yield f'<p class="lane">{text(words)}</p>'
        yield frame("".join(parts), _TALL, f"Timeline of attempt {attempt}", words, "group")
    form = "%H:%M:%S" if span < 3600 else "%H:%M" if span < 86400 else "%m-%d %H:%M"
    ticks = zip(range(4), ("start", "middle", "middle", "end"), strict=True)
    hours = ((n, anchor, first + timedelta(seconds=span * n / 3)) for n, anchor in ticks)
    axis = (_letters(f"{at:{form}}", f"{2 + 32 * n}%", 13, anchor) for n, anchor, at in hours)
    yield frame("".join(axis), 18, "Hours, UTC", f"from {first:%F %T} to {last:%F %T}")


def mark(one: Failed) -> str:
    """Draw a failure's mark around 0, 0."""
    title = f"<title>{text(f'{one.when}: {one.who}')}</title>"
    return f'{title}{shape(one.charged)}<text class="number" y="4">{one.number}</text>'


def shape(charged: str) -> str:
    """Draw a mark without its number."""
    return f'<path class="mark {charged}" d="{_SHAPES[charged]}"/>'


def _letters(words: str, x: str, y: float, anchor: str) -> str:
    return f'<text class="quiet" text-anchor="{anchor}" x="{x}" y="{y:g}">{text(words)}</text>'


# --- Curves -------------------------------------------------------------------------------

_WIDE = 10_000  # of the box of a curve, stretched to what there is
_LEAST = 1e-300  # below it floats are no longer divided
_LABEL = 17  # percent of the width that a label takes


def curve(name: str, lines: Sequence[Line], steps: tuple[float, float], height: int) -> str:
    """Draw a number over steps, a line for each start, with a mark where it begins."""
    found = [(one.label, points) for one in lines if (points := one.curves.get(name))]
    values = [value for _, points in found for _, value in points]
    low, high = min(values), max(values)
    more = (high - low) * 0.08 or abs(high) * 0.1
    more = more if more > _LEAST else 1.0
    low, high = low - more, high + more
    bottom = height - 22
    span = max(steps[1] - steps[0], 1)

    def x(step: float) -> float:
        return 100 * (step - steps[0]) / span

    def y(value: float) -> float:
        return bottom - bottom * (value - low) / (high - low)

    parts: list[str] = []
    for tick in _ticks(low, high):
        parts.append(f'<line class="grid" x1="0" x2="100%" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(_letters(f"{tick:g}", "0", max(y(tick) - 4, 10), "start"))
    taken = -100.0
    for number, (label, points) in enumerate(found):
        begins = x(points[0][0])
        if number:
            title = f"<title>{text(f'{label}: first seen at step {points[0][0]:,.0f}')}</title>"
            place = f'x1="{begins:.2f}%" x2="{begins:.2f}%" y1="0" y2="{bottom}"'
            parts.append(f'<line class="begins" {place}>{title}</line>')
            if begins - taken > _LABEL:
                anchor = "start" if begins < 100 - _LABEL else "end"
                short = label.rpartition(", ")[2]
                parts.append(_letters(f" {short} ", f"{begins:.2f}%", 11, anchor))
                taken = begins
        parts.append(_path([(x(step), y(value)) for step, value in points], bottom))
    low_step, high_step = (f"step {step:,.0f}" for step in steps)
    parts.append(_letters(low_step, "0", height - 5, "start"))
    parts.append(_letters(high_step, "100%", height - 5, "end"))
    words = f"{len(values)} points of {len(found)} starts, the newest {values[-1]:g}"
    return frame("".join(parts), height, f"{name} over steps", words)


def _path(points: Sequence[tuple[float, float]], bottom: float) -> str:
    """Draw a line, or a point where there is one; the box is stretched, the line's width is not."""
    if len(points) == 1:
        return f'<circle class="dot" cx="{points[0][0]:.2f}%" cy="{points[0][1]:.1f}" r="3"/>'
    pairs = " ".join(f"{x * _WIDE / 100:.0f},{y:.1f}" for x, y in points)
    box = f'viewBox="0 0 {_WIDE} {bottom}" width="100%" height="{bottom}"'
    return f'<svg {box} preserveAspectRatio="none"><polyline class="line" points="{pairs}"/></svg>'


def _ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers between two."""
    rough = (high - low) / 5
    base = 10.0 ** math.floor(math.log10(rough))
    gap = next(base * each for each in (1, 2, 5, 10) if base * each >= rough)
    numbers = range(math.ceil(low / gap), math.floor(high / gap) + 1)
    return [float(f"{number * gap:.12g}") for number in numbers]


# --- Shares -------------------------------------------------------------------------------


def shares(parts: Sequence[tuple[str, float]], title: str) -> str:
    """Draw a bar of parts, which sum up to 1, each of the colour of its name's class."""
    left, drawn = 0.0, []
    for name, share in parts:
        words = f"<title>{text(f'{name}: {share:.1%}')}</title>"
        place = f'x="{100 * left:.3f}%" width="{100 * share:.3f}%"'
        drawn.append(f'<rect class="{text(name)}" {place} y="0" height="30">{words}</rect>')
        left += share
    words = ", ".join(f"{name} {share:.1%}" for name, share in parts)
    return frame("".join(drawn), 30, title, words)
