"""Lay out the commands' output: tables, ages, text of strangers.

Nothing is coloured and nothing depends on the terminal but the width at which lines are wrapped.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from datetime import datetime

NONE = "-"
WHOLE = sys.maxsize  # lines of a message
_GAP = "   "
_WIDTH = 120  # of output that another program reads, or a person later
_LEAST_LAST = 36
_INDENT = 11
_MOST = 20_000
_MOST_OF_CELL = 200


def width() -> int:
    """Return the columns that lines may take."""
    return max(80, shutil.get_terminal_size().columns) if sys.stdout.isatty() else _WIDTH


def clean(text: str) -> str:
    """Replace in a container's text what could move a terminal's cursor; keep its lines.

    A text may have megabytes: all but the beginning is cut.
    """
    if len(text) > _MOST:
        text = text[:_MOST] + "..."
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text.expandtabs(4))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Align columns into lines."""
    return _aligned([head, *([clean(cell[:_MOST_OF_CELL]) for cell in row] for row in rows)])


def wrapped_table(
    head: Sequence[str], rows: Iterable[Sequence[str]], columns: int, most: int = 3
) -> list[str]:
    """Align columns, wrap the last at ``columns`` and cut it after ``most`` lines."""
    rows = [[clean(cell) for cell in row] for row in rows]
    sizes = [max(len(row[n]) for row in [head, *rows]) for n in range(len(head) - 1)]
    left = max(_LEAST_LAST, columns - sum(sizes) - len(_GAP) * len(sizes))
    lines: list[Sequence[str]] = [head]
    for row in rows:
        first, *more = wrapped(row[-1], left, most) or [""]
        lines.append([*row[:-1], first])
        lines += [[*[""] * len(sizes), line] for line in more]
    return _aligned(lines)


def wrapped(text: str, columns: int, most: int) -> list[str]:
    """Wrap a text at ``columns``, and end with "..." after ``most`` lines."""
    lines = [
        part
        for line in clean(text).splitlines()
        if line.strip()
        for part in textwrap.wrap(line, columns, drop_whitespace=True)
    ]
    return lines if len(lines) <= most else [*lines[:most], "..."]


def row(title: str, text: str, columns: int, most: int, margin: str = "") -> list[str]:
    """Write a title and a text beside it, wrapped."""
    parts = wrapped(text, columns - _INDENT - len(margin), most) or [NONE]
    titles = [f"{title}:", *[""] * (len(parts) - 1)]
    return [f"{margin}{one:<{_INDENT}}{part}" for one, part in zip(titles, parts, strict=True)]


def since(then: datetime | None, now: datetime) -> str:
    """Write the age of a moment, as kubectl does."""
    return NONE if then is None else duration((now - then).total_seconds())


def duration(seconds: float) -> str:
    """Write seconds in about two digits: 45s, 3m20s, 45m, 5h10m, 20h, 3d."""
    s = max(0, int(seconds))  # two clocks may disagree
    minutes, hours, days = s // 60, s // 3600, s // 86400
    if s < 120:
        return f"{s}s"
    if minutes < 10:
        return f"{minutes}m{s % 60}s" if s % 60 else f"{minutes}m"
    if hours < 3:
        return f"{minutes}m"
    if hours < 8:
        return f"{hours}h{minutes % 60}m" if minutes % 60 else f"{hours}h"
    return f"{hours}h" if days < 2 else f"{days}d"


def ranges(numbers: Iterable[int]) -> str:
    """Write 0, 1, 2, 5 as `0-2,5`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        _GAP.join(cell.ljust(size) for cell, size in zip(row, sizes, strict=True)).rstrip()
        for row in rows
    ]
