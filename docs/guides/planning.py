"""Writes what planning.md shows: outputs of `kubectl ddp plan`, and the data of its pictures.

`make manifests` after a change of the planner. Between `<!-- plan OPTIONS -->` and `<!-- end -->`
stands what the command prints; docs/pictures/planning.json is drawn by studies/pictures.py.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kubectl_ddp import cli
from kubectl_ddp.planning import formulas
from kubectl_ddp.planning.parts import DAY, DETECTION, Parts
from kubectl_ddp.planning.simulate import simulate

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/guides/planning.md"
DATA = ROOT / "docs/pictures/planning.json"
BLOCK = re.compile(r"(<!-- plan (.*?) -->\n).*?(<!-- end -->\n)", re.DOTALL)

SIZES = (8, 64, 512, 4096, 32768, 100_000)
LINE = [round(64 * (100_000 / 64) ** (n / 24)) // 8 * 8 for n in range(25)]  # GPUs
GPUS = 16_384  # whose snapshots the other picture is about
#: NCCL's watchdog; Kubernetes' node-monitor-grace-period and the toleration it adds by itself.
USUAL = {**DETECTION, "hang": 600.0, "node": 50.0 + 300.0, "hub": 50.0 + 300.0}
#: docs/internals/benchmarks.md, 1.49 GB of state: stall, and seconds more until it is durable.
WAYS = {"torch.save by rank 0": (3.791, 4.28 - 3.791), "ddpjob": (0.031, 1.07)}


def output(options: str) -> str:
    """Return the command and what it prints, as a fenced block."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert cli.run(["plan", *shlex.split(options)]) == 0, options
    return f"```\n$ kubectl ddp plan {options}\n{said.getvalue()}```\n"


def written(page: str) -> str:
    """Return the page with the outputs of now."""
    return BLOCK.sub(lambda m: m[1] + output(m[2]) + m[3], page)


def gang(gpus: int, **change: Any) -> Parts:
    """Return one of the command's defaults, with snapshots as often as is best."""
    parts = replace(Parts(), pods=gpus // 8, **change)
    return replace(parts, every_steps=formulas.best_every_steps(parts))


GANGS: dict[str, Callable[[int], Parts]] = {
    "all pods restart; a hang ends after 10 min, a lost node after 350 s": lambda gpus: gang(
        gpus, in_place=False, alone=False, detection=USUAL
    ),
    "all pods restart": lambda gpus: gang(gpus, in_place=False, alone=False),
    "restart in place, lost pod alone": gang,
    "the same, a standby, all noticed in 20 s": lambda gpus: gang(
        gpus, standby=1, detection={kind: min(20.0, took) for kind, took in DETECTION.items()}
    ),
}


def data() -> str:
    """Return planning.json: lines by the closed formula, dots by simulation with their range."""
    sizes = {
        name: {
            "line": [[gpus, _digits(formulas.goodput(made(gpus)))] for gpus in LINE],
            "dots": [_dot(gpus, made(gpus)) for gpus in SIZES if gpus >= LINE[0]],
        }
        for name, made in GANGS.items()
    }
    mtbf = Parts().node_mtbf / (GPUS // 8)
    ways = {}
    for name, (stall, write) in WAYS.items():
        parts = replace(Parts(), pods=GPUS // 8, step=0.1, stall=stall, write=write)
        ways[name] = {
            "line": [
                [seconds, _digits(formulas.goodput(replace(parts, every_steps=seconds * 10)))]
                for seconds in (round(5 * 720 ** (n / 30)) for n in range(31))
            ],
            "dots": [
                _dot(seconds, replace(parts, every_steps=seconds * 10))
                for seconds in (5, 30, 180, 900, 3600)
            ],
            "daly": _digits(formulas.daly(stall, mtbf)),
        }
    return json.dumps({"gpus": GPUS, "sizes": sizes, "intervals": ways}, indent=1) + "\n"


def _dot(x: int, parts: Parts) -> list[float]:
    found = simulate(parts, seconds=10 * DAY)
    return [x, *map(_digits, (found.goodput, found.low, found.high))]


def _digits(number: float) -> float:
    return float(f"{number:.5g}")


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
    DATA.write_text(data())
