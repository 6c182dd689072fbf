"""Find out where in a run samples come from, where its epochs end, and when to kill it. Pure.

cause.py asks for the samples of a resumed run, audit for the step of the kill.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ddpjob_tools.prove.record import Gang, Story

#: A step opens the next epoch when so large a part of its samples came before: noise never does.
_SEEN: Final = 0.25
#: A checkpoint is no smaller than this part of the weights, which may lie in several files.
_SHARE: Final = 1 / 8
#: What is written after more of the steps than this is a log, unless there is nothing else.
_OFTEN: Final = 0.6
_RUN: Final = 3  # steps in a row that are compared to find a place


@dataclass(frozen=True, slots=True)
class Line:
    """All ranks' data of one step: ``key`` in order, ``samples`` as far as they can be had."""

    key: tuple[tuple[str, ...], ...]
    samples: frozenset[str]


def lines(gang: Gang) -> list[Line]:
    """Join the ranks' stories, step by step."""
    together = zip(*(story.steps for story in gang), strict=False)
    return [
        Line(
            tuple(step.inputs for step in steps),
            frozenset(one for step in steps for one in step.samples),
        )
        for steps in together
    ]


def epoch_length(run: Sequence[Line]) -> int | None:
    """Return the steps of the first epoch: then samples come for the second time."""
    seen: set[str] = set()
    for index, line in enumerate(run):
        if line.samples and len(line.samples & seen) >= _SEEN * len(line.samples):
            return index
        seen |= line.samples
    return None


def place(reference: Sequence[Line], new: Sequence[Line], at: int) -> dict[str, Any]:
    """Find ``new``, a resumed run's data from step index ``at`` on, in the run it should repeat.

    ``place``: begins, repeated, skipped, earlier, later, shuffled or unknown. ``step``: of that
    run, from 1, in epoch ``from``; 0: found nowhere. ``count``, ``again``, ``missing``: of steps,
    or of samples where they are shuffled.
    """
    epoch = epoch_length(reference)
    begin = at // epoch * epoch if epoch else 0
    end = begin + epoch if epoch else len(reference)
    facts = dict.fromkeys(("step", "again", "missing", "count", "from"), 0)
    facts["epoch"] = at // epoch + 1 if epoch else 0
    found = [i for i, line in enumerate(reference) if line.key == new[0].key and any(line.key)]
    if not found:
        return {**facts, **_by_samples(reference, new, at, begin, end)}
    index = max(found, key=lambda one: (_alike(reference, new, one), begin <= one < end,
                                        -abs(one - at), one))  # fmt: skip
    facts |= {"step": index + 1, "from": index // epoch + 1 if epoch else 0}
    if not begin <= index < end:
        return {**facts, "place": "earlier" if index < at else "later"}
    facts["count"] = abs(index - at)
    if index == begin and at > begin and epoch:
        return {**facts, "place": "begins"}
    return {**facts, "place": "repeated" if index < at else "skipped"}


def _alike(reference: Sequence[Line], new: Sequence[Line], index: int) -> int:
    both = zip(reference[index : index + _RUN], new, strict=False)
    return sum(one.key == other.key for one, other in both)


def _by_samples(
    reference: Sequence[Line], new: Sequence[Line], at: int, begin: int, end: int
) -> dict[str, Any]:
    def of(some: Sequence[Line]) -> set[str]:
        return {sample for line in some for sample in line.samples}

    rest, planned = of(new[: end - at]), of(reference[at:end])
    if not rest or 2 * len(rest & of(reference)) < len(rest):
        return {"place": "unknown", "count": len(rest)}
    again, missing = len(rest & of(reference[begin:at])), len(planned - rest)
    return {"place": "shuffled", "again": again, "missing": missing, "count": len(rest)}


def saved_after(story: Story) -> list[int]:
    """Return the steps after which files were written that can be checkpoints."""
    groups: dict[str, set[int]] = {}
    for index, step in enumerate(story.steps):
        for path, size in step.files.items():
            if size and size >= _SHARE * story.bytes:
                groups.setdefault(re.sub(r"\d+", "N", path), set()).add(index)
    rare = [found for found in groups.values() if len(found) <= _OFTEN * len(story.steps)]
    return sorted(set[int]().union(*(rare or groups.values())) - {0})


def kill_after(total: int, saved: Collection[int], epoch: int | None) -> int:
    """Choose the step after which to kill: past a checkpoint within an epoch after the first."""
    usable = sorted(one for one in saved if one <= total - 2)
    if not usable:
        return max(1, total // 2)
    length = epoch or total

    def badness(step: int) -> tuple[bool, bool, bool, bool, int]:
        boundary = step % length == 0
        return step <= length, boundary, step == usable[0], total - step < length, step

    best = min(usable, key=badness)
    following = min((one for one in usable if one > best), default=total)
    return min(total - 1, best + max(1, (following - best) // 2))


def named(names: Collection[str], most: int = 4) -> str:
    """List some names for a reader."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
