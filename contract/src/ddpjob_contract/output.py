"""Check spec.output: how a program prints its step, its loss and further numbers. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import islice
from typing import Any, Final

_MOST: Final = 256  # characters
_METRICS: Final = 16
_FIELD: Final = re.compile(r"step|totalSteps|loss|metrics\.[A-Za-z_][A-Za-z0-9_./@-]{0,39}")


def patterns(output: Mapping[str, Any]) -> dict[str, str]:
    """Return the expressions by field; what is not of its type counts as absent.

    What is too long or too many is cut, one beyond what flaw() takes.
    """
    named, found = output.get("metrics"), {n: output.get(n) for n in ("step", "totalSteps", "loss")}
    if isinstance(named, Mapping):
        found |= {f"metrics.{n[:50]}": named[n] for n in islice(named, _METRICS + 1)}
    return {field: one[: _MOST + 1] for field, one in found.items() if one and isinstance(one, str)}


def bounded(output: Mapping[str, Any]) -> dict[str, Any]:
    """Return what counts of it, as it was written."""
    kept: dict[str, Any] = {"forms": "Never"} if output.get("forms") == "Never" else {}
    for field, one in patterns(output).items():
        of, _, name = field.partition(".")
        if name:
            kept.setdefault(of, {})[name] = one
        else:
            kept[of] = one
    return kept


def flaw(output: Mapping[str, Any]) -> str:
    """Say which field is wrong, and why; "" if none is."""
    found = patterns(output)
    names = found.keys() - {"step", "totalSteps", "loss"}
    for field, pattern in found.items():
        if len(names) > _METRICS or not _FIELD.fullmatch(field):
            return "metrics: at most 16, each name of at most 40 letters, digits and _./@-"
        try:
            groups = re.compile(pattern if len(pattern) <= _MOST else "").groups
        except (re.error, OverflowError, RecursionError) as error:
            return f"{field}: {pattern!r} is no regular expression: {error}"
        if groups != 1:
            return f"{field}: {_MOST} characters at most, the number alone in parentheses"
    return ""
