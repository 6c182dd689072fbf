"""Write replicas as short text: {0, 1, 2, 5} is "0-2,5", {1: 5, 7: 6} is "1:5,7:6".

The first is the form of batch/v1 completedIndexes, for status.succeededReplicas; the second is
for status.births. Who may write a status writes any text there: what is read of it is bounded by
the text's length in the CRD, and by the job's replicas.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

#: maxLength in the CRD: of every other one of 10,000 replicas, and of MAX_MIN_ATTEMPTS pairs.
_RANGES: Final = 32_768
_BIRTHS: Final = 4096
_DIGITS: Final = 9  # int() refuses thousands


def format_ranges(replicas: frozenset[int]) -> str:
    """Format {0, 1, 2, 5} as "0-2,5"."""
    parts: list[list[int]] = []
    for replica in sorted(replicas):
        if parts and replica == parts[-1][1] + 1:
            parts[-1][1] = replica
        else:
            parts.append([replica, replica])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def counted(number: int, word: str) -> str:
    """Write 1, "pod" as "1 pod" and 3, "pod" as "3 pods"."""
    return f"{number} {word}{'' if number == 1 else 's'}"


def every(number: int, word: str) -> str:
    """Write 1, "replica" as "the only replica" and 3, "replica" as "all 3 replicas"."""
    return f"the only {word}" if number == 1 else f"all {counted(number, word)}"


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
