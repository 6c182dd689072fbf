"""One benchmark's frame: `--quick`, facts about the machine, a table on screen, a JSON file."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "dev/bench/results"


def options(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a short run that only shows it works")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write to FILE, not to dev/bench/results"
    )
    return parser


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """What a figure depends on. The load says whether the machine was quiet."""
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "command": " ".join(["python", *sys.orig_argv[1:]]),
    }


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which that share lies, between neighbours."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(values: Sequence[float]) -> dict[str, float]:
    """Count, median, 95th percentile, least and greatest; empty for no values."""
    if not values:
        return {}
    return {
        "n": len(values),
        "median": statistics.median(values),
        "p95": percentile(values, 0.95),
        "min": min(values),
        "max": max(values),
    }


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Median and the range around it, for a table."""
    if not values:
        return "-"
    middle = statistics.median(values)
    return f"{middle:.{digits}f} ({min(values):.{digits}f}..{max(values):.{digits}f})"


def columns(header: str | Sequence[str]) -> Sequence[str]:
    """Their names, also written as one text: "way | s"."""
    return header.split(" | ") if isinstance(header, str) else header


def table(header: str | Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    cells = [[str(cell) for cell in row] for row in (columns(header), *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in cells]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def text(facts: Mapping[str, Any]) -> str:
    """Where and when it was measured."""
    return (
        f"Measured on {facts['date']}: {facts['cores']} cores ({facts['processor']}), torch"
        f" {facts['torch']}, CPU and gloo, load before it began {facts['load_before']}."
    )


def markdown(header: str | Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    names = columns(header)
    lines: list[Sequence[object]] = [names, ("---",) * len(names), *rows]
    return "".join(f"| {' | '.join(str(cell) for cell in line)} |\n" for line in lines)


def finish(name: str, facts: dict[str, Any], result: dict[str, Any], path: Path | None) -> None:
    """Write the JSON and say where it is."""
    path = path or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"benchmark": name, "machine": facts, **result}, indent=1) + "\n")
    print(f"\n{facts['cores']} cores, {facts['processor']}, torch {facts['torch']}; {path}")
