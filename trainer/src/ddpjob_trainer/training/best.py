"""run.keep_best(): the weights with the best value so far, in a file of their own.

What is best is kept in each snapshot, so after a resume the same values are better than the same
others; the file itself is written again then, with the same content.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddpjob_trainer.errors import ConfigError

MODES = ("min", "max")


@dataclass(frozen=True, slots=True)
class Best:
    """``mode``: whether the least or the greatest value is the best."""

    value: float
    step: int
    mode: str


def is_better(value: float, mode: str, before: Best | None) -> bool:
    """Whether a value beats what was best before; what is not finite never does.

    Raises ConfigError.
    """
    if mode not in MODES:
        raise ConfigError(f"keep_best(mode={mode!r}) must be one of {', '.join(MODES)}")
    if before is not None and before.mode != mode:
        raise ConfigError(
            f"keep_best(mode={mode!r}): for this file it was {before.mode!r} before; give another"
            " file, or the same mode"
        )
    if not math.isfinite(value):
        return False
    if before is None:
        return True
    return value < before.value if mode == "min" else value > before.value


def packed(best: Mapping[str, Best]) -> dict[str, list[Any]]:
    """By file, for a snapshot's JSON."""
    return {path: [one.value, one.step, one.mode] for path, one in best.items()}


def unpacked(stored: Any) -> dict[str, Best]:
    """What packed() was given; nothing, if it is of another form."""
    try:
        return {
            str(path): Best(float(value), int(step), str(mode))
            for path, (value, step, mode) in stored.items()
        }
    except (AttributeError, TypeError, ValueError):
        return {}
