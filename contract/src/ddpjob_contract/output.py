"""Check spec.output: how a program prints its step, its loss and further numbers. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

MAX_PATTERN: Final = 256  # characters
MAX_METRICS: Final = 16
METRIC: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_./@-]{0,39}")


def patterns(output: Mapping[str, Any]) -> dict[str, str]:
    """Return the expressions by field; what is not of its type counts as absent."""
    named, found = (
        output.get("metrics"),
        {of: output.get(of) for of in ("step", "totalSteps", "loss")},
    )
    found |= {f"metrics.{of}": named[of] for of in named} if isinstance(named, Mapping) else {}
    return {of: one for of, one in found.items() if isinstance(one, str) and one}


def flaw(output: Mapping[str, Any]) -> str:
    """Say which field is wrong, and why; "" if none is."""
    found = patterns(output)
    names = [of.removeprefix("metrics.") for of in found if of.startswith("metrics.")]
    if len(names) > MAX_METRICS or not all(map(METRIC.fullmatch, names)):
        return f"metrics: at most {MAX_METRICS}, each name of 40 letters, digits and _./@-, no more"
    for field, pattern in found.items():
        try:
            groups = re.compile(pattern if len(pattern) <= MAX_PATTERN else "").groups
        except (re.error, OverflowError, RecursionError) as error:
            return f"{field}: {pattern!r} is no regular expression: {error}"
        if groups != 1:
            return f"{field}: {MAX_PATTERN} characters at most, the number alone in parentheses"
    return ""
