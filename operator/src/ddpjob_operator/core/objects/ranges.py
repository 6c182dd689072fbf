"""Write replicas as short text: {0, 1, 2, 5} is "0-2,5", {1: 5, 7: 6} is "1:5,7:6".

The first is the form of batch/v1 completedIndexes, for status.succeededReplicas; the second is
for status.births.
"""

from __future__ import annotations

from collections.abc import Mapping


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


def parse_ranges(text: object) -> frozenset[int]:
    """Parse format_ranges' text; the empty set if it is malformed or absurdly wide."""
    found: set[int] = set()
    if not isinstance(text, str):
        return frozenset()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()):
            return frozenset()
        low, high = int(first), int(last or first)
        if high - low > 10_000:
            return frozenset()
        found.update(range(low, high + 1))
    return frozenset(found)


def format_births(births: Mapping[int, int]) -> str:
    """Format {1: 5, 7: 6} as "1:5,7:6"."""
    return ",".join(f"{replica}:{attempt}" for replica, attempt in sorted(births.items()))


def parse_births(text: object) -> dict[int, int]:
    """Parse format_births' text; empty if it is malformed."""
    pairs = [part.partition(":") for part in text.split(",")] if isinstance(text, str) else []
    if not all(a.isdecimal() and b.isdecimal() and len(a + b) < 16 for a, _, b in pairs):
        return {}
    return {int(a): int(b) for a, _, b in pairs}
