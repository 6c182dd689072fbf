"""Compare two runs bit for bit: each rank's losses, evaluations and state hashes. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TypeVar

from ddpjob_tools.prove.record import RankStory

Key = TypeVar("Key", int, tuple[int, str])

_SHOWN = 8
#: The only hashes of a run whose loop is left before a commit().
_UNCOMMITTED = {"parameters", "weights"}


def _parts(rank: int, hashes: dict[str, str], wanted: dict[str, str]) -> dict[str, str]:
    """Drop hashes that may differ: other ranks' buffers, which DDP overwrites before use.

    "weights" are parameters and buffers in one hash: for display.
    """
    left_out = {"weights"} if rank == 0 else {"weights", "buffers"}
    if wanted.keys() == _UNCOMMITTED:
        left_out |= hashes.keys() - _UNCOMMITTED
    return {name: value for name, value in hashes.items() if name not in left_out}


def differences(calm: Sequence[RankStory], wild: Sequence[RankStory]) -> list[str]:
    """List the differences, shortened; empty when all is equal."""
    found: list[str] = []
    for rank, (one, other) in enumerate(zip(calm, wild, strict=True)):
        if odd := _odd(one.losses, other.losses):
            found.append(f"rank {rank}: {len(odd)} losses differ, the first after step {odd[0]}")
        if told := _odd(one.told, other.told):  # such as evaluations
            step, what = told[0]
            text = f"{len(told)} values of {what} differ, the first after step {step}"
            found.append(f"rank {rank}: {text}")
        if not other.hashes:
            found.append(f"rank {rank} never finished")
        for ends in (one.hashes, other.hashes):
            found += [
                f"rank {rank}: {name} differ" + ("s" if not name.endswith("s") else "")
                for name in _differing(rank, one.hashes[0], ends)
            ]
    return found[:_SHOWN] + ([f"... and {len(found) - _SHOWN} more"] if found[_SHOWN:] else [])


def _differing(rank: int, wanted: dict[str, str], ends: Sequence[dict[str, str]]) -> list[str]:
    """Return the parts that differ at an end: a killed run may end twice."""
    mine = _parts(rank, wanted, wanted)
    theirs = [_parts(rank, end, wanted) for end in ends]
    names = sorted(set(mine).union(*theirs))
    return [name for name in names if any(end.get(name) != mine.get(name) for end in theirs)]


def _odd(calm: Mapping[Key, object], wild: Mapping[Key, object]) -> list[Key]:
    return sorted(k for k in calm.keys() | wild.keys() if calm.get(k) != wild.get(k))


def sha256(stories: Sequence[RankStory], calm: Sequence[RankStory]) -> str:
    """Hash all that is compared with the ``calm`` run's."""
    content = [
        [sorted((step, sorted(values)) for step, values in story.losses.items())]
        + [sorted((*key, *sorted(values)) for key, values in story.told.items())]
        + [sorted(_parts(rank, end, wanted.hashes[0]).items()) for end in story.hashes[-1:]]
        for rank, (story, wanted) in enumerate(zip(stories, calm, strict=True))
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def weights(stories: Sequence[RankStory]) -> str:
    """Return rank 0's last run.weights_sha256(), "none" without one."""
    ends = stories[0].hashes
    return ends[-1].get("weights", "none") if ends else "none"
