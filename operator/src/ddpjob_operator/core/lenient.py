"""Reads values out of raw JSON that somebody else wrote: the wrong type counts as absent.

Everything that comes from the API server passes here once; the rest of the core sees types.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def mapping(value: object) -> Mapping[str, Any]:
    """The object, or an empty one."""
    return value if isinstance(value, Mapping) else {}


def sequence(value: object) -> list[Any]:
    """The array, or an empty one."""
    return value if isinstance(value, list) else []


def opt_integer(value: object) -> int | None:
    """The integer, or None. JSON's true is no integer, though Python's True is one."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def integer(value: object, default: int = 0) -> int:
    """The integer, or the default."""
    found = opt_integer(value)
    return default if found is None else found


def opt_number(value: object) -> float | None:
    """The number, or None."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    return None


def text(value: object) -> str:
    """The string, or an empty one."""
    return value if isinstance(value, str) else ""
