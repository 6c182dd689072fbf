"""Find where a run differs from another first, and in what. Pure.

Comparison is of the steps of any script, for cause.py; differences() is of two runs of chaos.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final, TypeVar

from ddpjob_tools.prove.record import Gang, RankStory, Step

#: Compared in each step, in the order in which one causes the next.
COMPARED: Final = (
    "weights", "buffers", "state", "hyper", "inputs", "outputs", "gradients", "after",
)  # fmt: skip
#: Set before a step by what was loaded; the others follow from these and from random numbers.
CAUSES: Final = ("weights", "buffers", "state", "hyper", "inputs")
_CLOSE: Final = 1e-3  # relative: sums in another order, never other samples


class Comparison:
    """A run beside its reference, which had made ``start`` steps before the other's first one.

    ``since``: thing -> the first step, from 1, at which it differs; ``ranks``: and on which ranks.
    The things in ``only``, or all, are compared up to step ``until``.
    """

    def __init__(
        self, reference: Gang, other: Gang, start: int = 0, *, until: int | None = None,
        only: Collection[str] | None = None,
    ) -> None:  # fmt: skip
        self.reference, self.other, self.start = reference, other, start
        self.since: dict[str, int] = {}
        self.ranks: dict[str, tuple[int, ...]] = {}
        for what in (*COMPARED, "rng"):
            end = until if only is None or what in only else None
            found = dict(self._differing(what, end))
            if found:
                self.since[what] = min(found.values())
                self.ranks[what] = tuple(n for n, at in found.items() if at == self.since[what])

    def _differing(self, what: str, end: int | None) -> Iterator[tuple[int, int]]:
        for one, other in zip(self.reference, self.other, strict=False):
            if what == "buffers" and one.rank:
                continue  # DDP gives rank 0's to the others before they are used
            pairs = zip(one.steps[self.start : end], other.steps, strict=False)
            for step, (mine, its) in enumerate(pairs, self.start + 1):
                if _differs(what, mine, its, opening=step == self.start + 1 > 1):
                    yield one.rank, step
                    break

    @property
    def first(self) -> int:
        """Return the first step with any difference that has an effect, 0 for none."""
        return min((self.since[what] for what in COMPARED if what in self.since), default=0)

    def at(self, step: int) -> Iterator[tuple[int, Step, Step]]:
        """Yield each rank with the reference's step, and the other's."""
        for one, other in zip(self.reference, self.other, strict=False):
            yield one.rank, one.steps[step - 1], other.steps[step - 1 - self.start]

    def only_rounding(self) -> bool:
        """Return whether the first difference is one of gradients or results, nearly equal."""
        first = self.first
        return first not in (0, *(self.since.get(what) for what in CAUSES)) and all(
            _close(mine.norm, its.norm) and _close(mine.loss, its.loss)
            for _, mine, its in self.at(first)
        )

    def drawn(self, step: int, ranks: Collection[int]) -> bool:
        """Return whether random numbers differed that the step, or its data, did draw."""
        following = {one.rank: one.steps[step : step + 1] for one in self.reference}
        return any(
            mine.rng != its.rng and all(later.rng != mine.rng for later in following[rank])
            for rank, mine, its in self.at(step)
            if rank in ranks
        )


def _differs(what: str, one: Step, other: Step, *, opening: bool) -> bool:
    mine, its = getattr(one, what), getattr(other, what)
    if what == "buffers":  # an evaluation may have called another module, too
        return any(mine[name] != its[name] for name in mine.keys() & its.keys())
    if what in ("inputs", "outputs") and opening and its:
        # Between the checkpoint and the kill it may have evaluated, which is not done again.
        same_end = mine[-len(its) :] == its
        return not (same_end if one.gradients == other.gradients else mine == its)
    return bool(mine != its)


def _close(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=_CLOSE, abs_tol=1e-12)


# --- Two runs of chaos --------------------------------------------------------------------

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


def differences(undisturbed: Sequence[RankStory], disturbed: Sequence[RankStory]) -> list[str]:
    """List the differences, shortened; empty when all is equal."""
    found: list[str] = []
    for rank, (one, other) in enumerate(zip(undisturbed, disturbed, strict=True)):
        if odd := _odd(one.losses, other.losses):
            found.append(f"rank {rank}: {len(odd)} losses differ, the first after step {odd[0]}")
        if values := _odd(one.reported, other.reported):  # such as evaluations
            step, what = values[0]
            text = f"{len(values)} values of {what} differ, the first after step {step}"
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


def _odd(one: Mapping[Key, object], other: Mapping[Key, object]) -> list[Key]:
    return sorted(k for k in one.keys() | other.keys() if one.get(k) != other.get(k))


def sha256(stories: Sequence[RankStory], undisturbed: Sequence[RankStory]) -> str:
    """Hash all that is compared with the undisturbed run's."""
    content = [
        [sorted((step, sorted(values)) for step, values in story.losses.items())]
        + [sorted((*key, *sorted(values)) for key, values in story.reported.items())]
        + [sorted(_parts(rank, end, wanted.hashes[0]).items()) for end in story.hashes[-1:]]
        for rank, (story, wanted) in enumerate(zip(stories, undisturbed, strict=True))
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def weights(stories: Sequence[RankStory]) -> str:
    """Return rank 0's last run.weights_sha256(), "none" without one."""
    ends = stories[0].hashes
    return ends[-1].get("weights", "none") if ends else "none"
