"""Check spec.output: how a program prints its step, its loss and further numbers. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

_MOST: Final = 256  # characters
_FIELD: Final = re.compile(r"step|totalSteps|loss|metrics\.[A-Za-z_][A-Za-z0-9_./@-]{0,39}")


def patterns(output: Mapping[str, Any]) -> dict[str, str]:
    """Return the expressions by field; what is not of its type counts as absent."""
    named, found = output.get("metrics"), {n: output.get(n) for n in ("step", "totalSteps", "loss")}
    found |= {f"metrics.{n}": named[n] for n in named} if isinstance(named, Mapping) else {}
    return {field: one for field, one in found.items() if isinstance(one, str) and one}


def flaw(output: Mapping[str, Any]) -> str:
    """Say which field is wrong, and why; "" if none is."""
    found = patterns(output)
    names = found.keys() - {"step", "totalSteps", "loss"}
    for field, pattern in found.items():
        if len(names) > 16 or not _FIELD.fullmatch(field):
            return "metrics: at most 16, each name of at most 40 letters, digits and _./@-"
        try:
            groups = re.compile(pattern if len(pattern) <= _MOST else "").groups
        except (re.error, OverflowError, RecursionError) as error:
            return f"{field}: {pattern!r} is no regular expression: {error}"
        if groups != 1:
            return f"{field}: {_MOST} characters at most, the number alone in parentheses"
    return ""
