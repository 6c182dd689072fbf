"""Lay out a job's life as one HTML page that needs nothing else: no network, no script.

commands/why.py fills a Story and writes the page. It is XML, too, so a test reads it back whole.
Whatever a program or a volume says passes drawing.text(); the policy in the head would stop even
what slipped through.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from kubectl_ddp import drawing
from kubectl_ddp.drawing import Failed, Line, Round, text

Rows = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Story:
    """What the page shows; ``missing`` says what it cannot, and why, by part of the page."""

    title: str
    figures: Rows
    facts: Rows
    rounds: Sequence[Round]
    failures: Sequence[Failed]
    lines: Sequence[Line]
    source: str  # of the lines
    shares: Sequence[tuple[str, float, str, str]]  # state, part of all, pod-time, in words
    events: Sequence[tuple[str, str, str]]
    made: datetime
    missing: dict[str, str] = field(default_factory=dict)


def write(story: Story) -> str:
    """Return the page."""
    parts = [
        _section("Timeline", _timeline(story), story.missing.get("Timeline", "")),
        _section("Loss and own numbers", _curves(story), story.missing.get("Curves", "")),
        _section("Where the pod-hours went", _shares(story), story.missing.get("Ledger", "")),
        _section("Failures", map(_failure, story.failures), story.missing.get("Failures", "")),
        _section("Events", _events(story), story.missing.get("Events", "")),
    ]
    figures = "".join(
        f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in story.figures
    )
    head = f'<h1>{text(story.title)}</h1><dl class="figures">{figures}</dl>{_pairs(story.facts)}'
    foot = f"Made by kubectl ddp why on {story.made:%Y-%m-%d %H:%M:%S} UTC. All times are UTC."
    return (
        '<!DOCTYPE html>\n<html lang="en" xmlns="http://www.w3.org/1999/xhtml"><head>'
        f'<meta charset="utf-8"/><meta http-equiv="Content-Security-Policy" content="{_POLICY}"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        '<meta name="color-scheme" content="light dark"/>'
        f"<title>{text(story.title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><header>{head}</header>\n<main>{''.join(parts)}</main>\n"
        f"<footer>{foot}</footer></body></html>\n"
    )


def _section(title: str, content: Iterable[str], missing: str) -> str:
    why = f'<p class="missing">{text(missing)}</p>' if missing else ""
    return f"<section><h2>{text(title)}</h2>{''.join(content)}{why}</section>\n"


def _pairs(rows: Rows) -> str:
    found = "".join(f"<dt>{text(name)}</dt><dd>{text(value)}</dd>" for name, value in rows)
    return f"<dl>{found}</dl>" if found else ""


def _table(
    head: Sequence[str], rows: Iterable[Sequence[object]], title: str = "", *, boxed: bool = False
) -> str:
    """Write a table; with a title it is opened by a click. ``boxed``: each row's colour first."""
    names = "".join(f'<th scope="col">{text(name)}</th>' for name in head)
    box = '<svg width="12" height="12"><rect class="{}" width="12" height="12"/></svg> ' * boxed
    body = "".join(
        "<tr><td>" + box.format(text(row[0])) + "</td><td>".join(map(text, row)) + "</td></tr>"
        for row in rows
    )
    found = f'<div class="wide"><table><tr>{names}</tr>{body}</table></div>'
    return f"<details><summary>{text(title)}</summary>{found}</details>" if title else found


_BOX = '<svg width="22" height="22" viewBox="-11 -11 22 22">'
_LEGEND = (
    ("restart", "failure, charged to maxRestarts"),
    ("disruption", "disruption, charged to maxDisruptions"),
    ("nothing", "charged to nothing: restarted in place, or the end"),
)


def _timeline(story: Story) -> Iterator[str]:
    yield from drawing.timeline(story.rounds, story.failures)
    if story.rounds or story.failures:
        keys = [
            f"<li>{_BOX}{drawing.shape(kind)}</svg>{text(words)}</li>"
            for kind, words in _LEGEND
            if any(one.charged == kind for one in story.failures)
        ]
        if story.rounds:
            bar = f'{_BOX}<rect class="round" x="-11" y="-7" width="22" height="14" rx="3"/></svg>'
            keys.insert(0, f"<li>{bar}a round of processes</li>")
        yield f'<ul class="legend">{"".join(keys)}</ul>'
    if story.rounds:
        rows = (
            (one.attempt, one.round, time(one.began), time(one.at), one.step, one.end)
            for one in story.rounds
        )
        head = ("Attempt", "Round", "From", "To", "Steps", "End")
        yield _table(head, rows, "The rounds as a table")


def _curves(story: Story) -> Iterator[str]:
    names = dict.fromkeys(name for one in story.lines for name in one.curves)
    every = [step for one in story.lines for line in one.curves.values() for step, _ in line]
    for name in sorted(names, key=lambda name: name != "loss"):
        yield f"<h3>{text(name)}</h3>"
        height = 220 if name == "loss" else 140
        yield drawing.curve(name, story.lines, (min(every), max(every)), height)
    if names:
        yield f"<p>{text(story.source)} A dashed line: training began again there.</p>"
        rows = []
        for one in story.lines:
            for name, points in one.curves.items():
                steps, values = zip(*points, strict=True)
                shown = f"{steps[0]:,.0f} to {steps[-1]:,.0f}"
                numbers = (values[0], values[-1], min(values), max(values))
                rows.append((one.label, name, shown, *(f"{value:.6g}" for value in numbers)))
        head = ("Start", "Number", "Steps", "First", "Last", "Least", "Greatest")
        yield _table(head, rows, "The curves as a table")


def time(moment: datetime) -> str:
    """Write a time of a table."""
    return f"{moment:%m-%d %H:%M:%S}"


def _shares(story: Story) -> Iterator[str]:
    if story.shares:
        yield drawing.shares([one[:2] for one in story.shares], "Shares of the pods' time")
        rows = [
            (state, spent, f"{share:.1%}", words) for state, share, spent, words in story.shares
        ]
        yield _table(("Where", "Pod-time", "Share", "What it is"), rows, boxed=True)


def _failure(one: Failed) -> str:
    log = f"<p>Last lines{text(one.as_of)}:</p><pre>{text(chr(10).join(one.log))}</pre>"
    return (
        f'<article id="failure-{one.number}"><h3>{_BOX}{drawing.mark(one)}</svg> {text(one.when)}'
        "</h3>"
        f"{_pairs(one.rows)}{log if one.log else ''}</article>"
    )


def _events(story: Story) -> Iterator[str]:
    if story.events:
        yield _table(("Last", "Reason", "Message"), story.events, f"{len(story.events)} Events")


_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
:root{--back:#fff;--card:#f6f7f9;--ink:#1c2127;--quiet:#5c6670;--rule:#dde1e6;--accent:#2166ac;
  --soft:#9dc0e2;--bad:#b2332b;--warn:#9a6700;--calm:#5b5fa8}
@media (prefers-color-scheme:dark){:root{--back:#14171b;--card:#1d2126;--ink:#e4e8ec;
  --quiet:#98a2ad;--rule:#343a41;--accent:#7db4ea;--soft:#33567a;--bad:#e5766c;--warn:#d9a53a;
  --calm:#a3a6e6}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:60rem;padding:1.5rem 1rem 3rem;background:var(--back);
  color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;
  font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
h1{font-size:1.6rem;line-height:1.25;margin:0 0 1rem}
h2{font-size:1.2rem;margin:2.5rem 0 .75rem;padding-bottom:.25rem;
  border-bottom:1px solid var(--rule)}
h3{font-size:1rem;margin:1.25rem 0 .5rem}
p,footer,.legend,table,details{font-size:.875rem;color:var(--quiet)}
dl{display:grid;grid-template-columns:minmax(5rem,max-content) 1fr;gap:.25rem 1rem;margin:.5rem 0}
dt{color:var(--quiet)}dd{margin:0}
.figures{grid-template-columns:repeat(auto-fit,minmax(7.5rem,1fr));gap:.75rem;margin:0 0 1rem}
.figures div,article{background:var(--card);border:1px solid var(--rule);border-radius:8px;
  padding:.6rem .9rem}
.figures dt{font-size:.8rem}.figures dd{font-size:1.15rem;font-weight:600;line-height:1.3}
article{margin:0 0 1rem}article:target{border-color:var(--accent)}
article h3{margin:0 0 .5rem}h3 svg{vertical-align:-5px}article dl{font-size:.925rem}
pre{margin:.25rem 0;padding:.6rem .8rem;background:var(--back);border:1px solid var(--rule);
  border-radius:6px;font-size:.8rem;line-height:1.45;white-space:pre-wrap}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;overflow-wrap:normal}
th,td{text-align:left;vertical-align:top;padding:.3rem .8rem .3rem 0;
  border-bottom:1px solid var(--rule)}
th{font-weight:600}td{color:var(--ink)}td:first-child,th{white-space:nowrap}
summary{cursor:pointer;padding:.4rem 0}.lane{margin:.5rem 0 0}
.legend{display:flex;flex-wrap:wrap;gap:.25rem 1.25rem;list-style:none;padding:0;margin:.75rem 0}
.legend svg{vertical-align:-6px;margin-right:.35rem}
.missing{border-left:3px solid var(--warn);padding-left:.75rem;margin:.75rem 0}
footer{margin-top:3rem}
svg{display:inline-block;overflow:visible}section>svg{display:block}
svg text{font-size:12px;fill:var(--ink)}
svg .quiet{fill:var(--quiet);paint-order:stroke;stroke:var(--back);stroke-width:3px}
svg .number{fill:var(--back);font-weight:700;font-size:11px;text-anchor:middle}
.grid{stroke:var(--rule)}.begins{stroke:var(--quiet);stroke-dasharray:4 3}
.round{fill:var(--soft);stroke:var(--back)}.round.now{fill:var(--accent)}
.line{fill:none;stroke:var(--accent);stroke-width:2;vector-effect:non-scaling-stroke}
.dot{fill:var(--accent)}.mark{stroke:var(--back);stroke-width:1.5}
.mark.restart{fill:var(--bad)}.mark.disruption{fill:var(--warn)}.mark.nothing{fill:var(--calm)}
.productive{fill:#2f7fc1}.repeated{fill:#e08a3c}.data{fill:#8b6fc0}.snapshot{fill:#2ba8a0}
.warmup{fill:#d9b63c}.recovering{fill:#c6463d}.held{fill:#cf6fa3}.starting{fill:#98764f}
.waiting{fill:#7b8794}.idle{fill:#a9b2bb}.unknown{fill:#c9ced4}
a:focus-visible,summary:focus-visible{outline:2px solid var(--accent);outline-offset:2px}
@media print{@page{margin:14mm}:root{--back:#fff;--card:#fff;--ink:#000;--quiet:#444;--rule:#bbb;
  --accent:#2166ac;--soft:#9dc0e2;--bad:#b2332b;--warn:#9a6700;--calm:#5b5fa8}
  body{font-size:10pt;max-width:none;padding:0}article,section>svg,tr{break-inside:avoid}
  h2,h3{break-after:avoid}*{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
"""
