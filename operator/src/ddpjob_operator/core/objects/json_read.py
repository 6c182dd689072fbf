"""Read values out of a stranger's raw JSON: the wrong type counts as absent.

observe.py, spec.py and status.py pass everything from the API server through here once; the rest of
the core sees types. Replicas are short text there: {0, 1, 2, 5} is "0-2,5" (the form of batch/v1
completedIndexes, for status.succeededReplicas), {1: 5, 7: 6} is "1:5,7:6" (for status.births).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from sys import intern
from typing import Any, Final

_LABEL: Final = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_NAME: Final = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_NAME_MAX: Final = 253
_TIME_MAX: Final = 64
INT32: Final = 2**31
_LONG: Final = 100  # entries; no field of a status has as many
_INT64: Final = 2**63
#: maxLength in the CRD: of every other one of 10,000 replicas, and of MAX_MIN_ATTEMPTS pairs.
_RANGES: Final = 32_768
_BIRTHS: Final = 4096
_DIGITS: Final = 9  # int() refuses thousands


def mapping(value: object) -> Mapping[str, Any]:
    """Return the object, or an empty one."""
    return value if isinstance(value, Mapping) else {}


def shared_names(value: Any, levels: int = 8) -> Any:
    """Return the JSON with each field's name once in memory, whichever object has it.

    A decoder makes new strings for each text: a third of a fleet's memory. What is deeper than
    ``levels``, or long, is hostile, and stays as it is.
    """
    if isinstance(value, Mapping | list) and levels and len(value) < _LONG:
        if isinstance(value, list):
            return [shared_names(one, levels - 1) for one in value]
        return {intern(name): shared_names(one, levels - 1) for name, one in value.items()}
    return value


def sequence(value: object) -> list[Any]:
    """Return the array, or an empty one."""
    return value if isinstance(value, list) else []


def opt_integer(value: object, limit: int = _INT64) -> int | None:
    """Return the integer from -limit to below it, or None; true is none, unlike Python's True."""
    number = isinstance(value, int) and not isinstance(value, bool)
    return value if isinstance(value, int) and number and -limit <= value < limit else None


def integer(value: object, default: int = 0) -> int:
    """Return the integer, or the default."""
    found = opt_integer(value)
    return default if found is None else found


def counter(value: object, limit: int = INT32 - 1) -> int:
    """Return a count from 0 to below the limit: one more fits an int32."""
    return min(max(0, integer(value)), limit - 1)


def opt_count(value: object, limit: int = _INT64) -> int | None:
    """Return the integer from 0 to below the limit, which the CRD sets, or None."""
    found = opt_integer(value, limit)
    return found if found is not None and found >= 0 else None


def opt_number(value: object) -> float | None:
    """Return the finite number, or None."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def text(value: object, limit: int | None = None) -> str:
    """Return the string, cut to ``limit``, or an empty one."""
    return value[:limit] if isinstance(value, str) else ""


def names(value: object) -> tuple[str, ...]:
    """Return the valid names of objects (DNS subdomains) in an array, each once."""
    found = (name for name in sequence(value) if isinstance(name, str) and len(name) <= _NAME_MAX)
    return tuple(dict.fromkeys(name for name in found if _NAME.fullmatch(name)))


def format_time(at: datetime) -> str:
    """Format RFC 3339 in UTC with microseconds (MicroTime), as the API server prints it."""
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def parse_time(value: object) -> datetime | None:
    """Parse an RFC 3339 time, or return None."""
    if not isinstance(value, str) or len(value) > _TIME_MAX:
        return None
    try:
        at = datetime.fromisoformat(value)
    except ValueError:
        return None
    # A later year would overflow with a deadline or a time zone; an earlier one has three digits in
    # UTC, and strftime does not pad it to the four that the CRD's date-time asks for.
    if not 1000 < at.year <= 9000:
        return None
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def format_ranges(replicas: frozenset[int]) -> str:
    """Format {0, 1, 2, 5} as "0-2,5"."""
    parts: list[list[int]] = []
    for replica in sorted(replicas):
        if parts and replica == parts[-1][1] + 1:
            parts[-1][1] = replica
        else:
            parts.append([replica, replica])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def parse_ranges(text: object, replicas: int) -> frozenset[int]:
    """Parse format_ranges' text; empty if it is malformed, or has more than so many."""
    found: set[int] = set()
    if not isinstance(text, str) or len(text) > _RANGES:
        return frozenset()
    least = 0  # ranges rise, so none is unfolded twice
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        low, high = _number(first), _number(last or first)
        if low is None or high is None or not least <= low <= high < replicas:
            return frozenset()
        found.update(range(low, high + 1))
        least = high + 1
    return frozenset(found)


def format_pairs(births: Mapping[int, int]) -> str:
    """Format {1: 5, 7: 6} as "1:5,7:6"."""
    return ",".join(f"{replica}:{attempt}" for replica, attempt in sorted(births.items()))


def parse_pairs(text: object) -> dict[int, int]:
    """Parse format_pairs' text; empty if it is malformed, or too long for MAX_MIN_ATTEMPTS."""
    if not isinstance(text, str) or len(text) > _BIRTHS:
        return {}
    parts = (part.partition(":") for part in text.split(","))
    pairs = [(_number(a), _number(b)) for a, _, b in parts]
    found = {a: b for a, b in pairs if a is not None and b is not None}
    return found if all(None not in pair for pair in pairs) else {}


def _number(text: str) -> int | None:
    return int(text) if len(text) <= _DIGITS and text.isdecimal() else None
