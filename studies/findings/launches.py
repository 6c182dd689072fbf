"""Starts the studies' own programs, gang after gang."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import programs

PROGRAMS = Path(__file__).parents[1] / "programs"


def one_after_another(gangs: Sequence[tuple[int, str, Sequence[str]]]) -> list[Any]:
    """Run (ranks, program, arguments) one after the other; the JSON that each wrote to --out.

    All share one import of torch: for what does not depend on how ranks were started.
    """
    with tempfile.TemporaryDirectory() as directory:
        outs = [Path(directory) / f"{number}.json" for number in range(len(gangs))]
        words: list[str] = []
        for (ranks, name, arguments), out in zip(gangs, outs, strict=True):
            words += ["--", str(ranks), str(PROGRAMS / name), "--out", str(out), *arguments]
        programs.complete([sys.executable, str(PROGRAMS / "forked.py"), *words[1:]])
        return [json.loads(out.read_text()) for out in outs]
