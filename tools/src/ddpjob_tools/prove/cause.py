"""Judge a resume: align it with the run it belongs to, find the first step that differs. Pure.

experiment.py calls judge() with the stories of an undisturbed run, of a killed one up to the kill,
and of the process that was started again; report.py prints the verdict.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from ddpjob_tools.prove import samples
from ddpjob_tools.prove.record import Gang, Step, Story

#: Compared in each step, in the order in which one causes the next.
COMPARED: Final = (
    "weights", "buffers", "state", "hyper", "inputs", "outputs", "gradients", "after",
)  # fmt: skip
#: Set before a step by what was loaded; the others follow from these and from random numbers.
_CAUSES: Final = ("weights", "buffers", "state", "hyper", "inputs")
_CLOSE: Final = 1e-3  # relative: sums in another order, never other samples

RIGHT: Final = "right"
ROUNDING: Final = "rounding"
WRONG: Final = "wrong"
UNKNOWN: Final = "unknown"


@dataclass(frozen=True, slots=True)
class Runs:
    """All that was recorded. ``again``: a second undisturbed run, empty when none was made."""

    calm: Gang
    killed: Gang
    resumed: Gang
    again: Gang = ()
    kept: bool = True  # files that can be checkpoints were there at the kill
    code: int = 0  # with which the resumed run ended
    whole: bool = True  # neither the calm nor the resumed run was cut off
    silent: bool = False  # the resumed run made no further step, and did not end
    torn: bool = False  # it failed at a file that was not whole


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that differs from step ``step`` (from 1) on, on some ranks."""

    kind: str
    step: int = 0
    ranks: tuple[int, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome. ``since``: for each compared thing the first step that differs, None: equal.

    ``resumed_after``: the step whose weights the new process had, None where they are of no step.
    """

    label: str
    findings: tuple[Finding, ...]
    killed_after: int
    resumed_after: int | None
    compared: int = 0
    since: dict[str, int | None] = field(default_factory=dict)
    loose: tuple[Finding, ...] = ()  # what the script does not repeat even undisturbed
    total: int = 0
    ended_after: int = 0
    unclear: bool = False  # several steps fit ``resumed_after``: weights did not change
    final: bool | None = None  # whether the last weights are equal; None: not to be compared


@dataclass(frozen=True, slots=True)
class _Comparison:
    """First differing index of each thing, and the ranks where; -1: none."""

    first: dict[str, int]
    ranks: dict[str, tuple[int, ...]]


def judge(runs: Runs) -> Verdict:
    """Judge what was recorded."""
    runs = _even(runs)
    killed_after = min((len(story.steps) for story in runs.killed), default=0)
    total = min((len(story.steps) for story in runs.calm), default=0)
    loose = _loose(runs, killed_after)
    if not runs.resumed or not runs.resumed[0].steps:
        kind = "hang" if runs.silent else "crash" if runs.code else "no-step"
        finding = Finding(kind, facts={"code": runs.code, "torn": runs.torn})
        return Verdict(WRONG, (finding,), killed_after, None, loose=loose, total=total)
    reference = _reference(runs, killed_after)
    start, findings = _start(reference, runs, killed_after)
    if start is None:
        return Verdict(WRONG, findings, killed_after, None, loose=loose, total=total)
    unsteady = {one.facts["what"] for one in loose}
    comparison = _compare(reference, runs.resumed, start, killed_after, unsteady)
    after = _causes(comparison, reference, runs, start)
    if start:
        after = _other_optimizers(reference[0], runs.resumed[0], start, killed_after) + after
    if start == 0:  # what follows from it are the same steps once more, or other ones
        after = [one for one in after if one.kind not in ("rounding", "rng", "unseen")]
    ended = start + min(len(story.steps) for story in runs.resumed)
    findings += (*after, *_end(runs, ended, total))
    return Verdict(
        *_label(runs, findings, loose), killed_after, start,
        compared=min(ended, total if not unsteady else killed_after) - start,
        since={what: start + i + 1 if i >= 0 else None for what, i in comparison.first.items()},
        loose=loose, total=total, ended_after=ended, final=_final(runs, ended, total, unsteady),
        unclear=len(_fitting(reference[0].steps, runs, killed_after)) > 1,
    )  # fmt: skip


def _even(runs: Runs) -> Runs:
    """Leave out steps that not all ranks have written, and generators that nobody seeds."""
    pairs = zip(runs.calm, runs.killed, strict=False)
    begun = [(calm.steps[0].rng, killed.steps[0].rng) for calm, killed in pairs
             if calm.steps and killed.steps]  # fmt: skip
    unseeded = {name for one, other in begun for name in one if one[name] != other.get(name)}

    def seeded(step: Step) -> Step:
        return replace(step, rng={k: v for k, v in step.rng.items() if k not in unseeded})

    def cut(gang: Gang) -> Gang:
        least = min((len(story.steps) for story in gang), default=0)
        return tuple(replace(one, steps=tuple(map(seeded, one.steps[:least]))) for one in gang)

    return replace(
        runs, calm=cut(runs.calm), killed=cut(runs.killed), resumed=cut(runs.resumed),
        again=cut(runs.again),
    )  # fmt: skip


def _label(
    runs: Runs, findings: Sequence[Finding], loose: Sequence[Finding]
) -> tuple[str, tuple[Finding, ...]]:
    """Return the label, and the findings without those that chance explains beside a sure one."""
    by_chance = any(one.kind != "rounding" for one in loose)
    # Whatever else they do not repeat, undisturbed runs may make equally many steps.
    counts = bool(runs.again) and len(runs.again[0].steps) == len(runs.calm[0].steps)
    excused = {"unseen", "rng", *(() if counts else ("length",))} if by_chance else set[str]()

    def chance(one: Finding) -> bool:
        return one.kind in excused or (by_chance and one.facts.get("place") == "unknown")

    sure = tuple(one for one in findings if not chance(one))
    if any(one.kind != "rounding" for one in sure):
        return WRONG, sure
    if by_chance:
        return UNKNOWN, tuple(findings)
    return ROUNDING if findings or loose else RIGHT, tuple(findings)


def _final(runs: Runs, ended: int, total: int, unsteady: set[str]) -> bool | None:
    if ended < total or "after" in unsteady:
        return None
    return all(
        calm.steps[total - 1].after == resumed.steps[total - 1 - (ended - len(resumed.steps))].after
        for calm, resumed in zip(runs.calm, runs.resumed, strict=False)
    )


def _end(runs: Runs, ended: int, total: int) -> Iterator[Finding]:
    if runs.code or runs.silent:
        facts = {"code": runs.code, "torn": runs.torn}
        yield Finding("hang" if runs.silent else "crash", ended + 1, facts=facts)
    elif runs.whole and ended != total and len(runs.resumed) == len(runs.calm):
        yield Finding("length", ended, facts={"total": total, "ended": ended})


# --- What the script repeats by itself ----------------------------------------------------


def _loose(runs: Runs, killed_after: int) -> tuple[Finding, ...]:
    """Compare runs that nothing disturbed, the killed one up to its kill among them."""
    found: dict[str, Finding] = {}
    for other, most in ((runs.killed, killed_after), (runs.again, None)):
        comparison = _compare(runs.calm, other, 0, most or 0, set(), most)
        first = min((comparison.first[what] for what in COMPARED if comparison.first[what] >= 0),
                    default=-1)  # fmt: skip
        for what, index in comparison.first.items():
            if index < 0 or what in found or what == "rng":
                continue  # random numbers that have no effect are nobody's loss
            kind = "chance"
            if _only_rounding(comparison, runs.calm, other, 0, first):
                kind = "rounding"
            ranks = comparison.ranks[what]
            found[what] = Finding(kind, index + 1, ranks, {"what": what, "root": index == first})
    return tuple(found.values())


# --- Where the new process went on --------------------------------------------------------


def _reference(runs: Runs, killed_after: int) -> Gang:
    """Return what the resumed run should repeat: the killed run, then the calm one."""
    return tuple(
        Story(calm.rank, calm.world, calm.names,
              steps=(*killed.steps[:killed_after], *calm.steps[killed_after:]))
        for killed, calm in zip(runs.killed, runs.calm, strict=False)
    )  # fmt: skip


def _start(
    reference: Gang, runs: Runs, killed_after: int
) -> tuple[int | None, tuple[Finding, ...]]:
    """Find the index of the first step of the new process, by its weights before it."""
    steps, first = reference[0].steps, runs.resumed[0].steps[0]
    if fitting := _fitting(steps, runs, killed_after):
        # Weights that do not change fit several: a checkpoint is what it went on from.
        saved = [i for i in fitting if i in (0, *samples.saved_after(runs.killed[0]))]
        start = max(saved or fitting, key=lambda i: (steps[i].inputs == first.inputs, i))
        return start, (_nothing(runs),) if start == 0 else ()
    possible = _possible(steps, first, killed_after)
    by_chance = runs.calm[0].steps[0].weights != runs.killed[0].steps[0].weights
    if by_chance and first.empty and not any(_shared(steps[i], first) for i in possible):
        return None, (_nothing(runs),)
    start = max(possible, key=lambda i: (_shared(steps[i], first), *_likeness(steps[i], first)))
    return None, (_partly(steps, first, start, reference[0].names), *_lost(steps, first, start))


def _possible(steps: Sequence[Step], first: Step, killed_after: int) -> list[int]:
    return [i for i in range(min(killed_after + 1, len(steps)))
            if steps[i].optimizer == first.optimizer]  # fmt: skip


def _fitting(steps: Sequence[Step], runs: Runs, killed_after: int) -> list[int]:
    """Return the indices of the steps that the new process's first is most like."""
    first = runs.resumed[0].steps[0]
    equal = [i for i in _possible(steps, first, killed_after) if steps[i].weights == first.weights]
    best = max((_likeness(steps[i], first)[:-1] for i in equal), default=())
    return [i for i in equal if _likeness(steps[i], first)[:-1] == best]


def resumed_after(calm: Gang, killed: Gang, resumed: Gang) -> int:
    """Return after which step a process that has begun to step went on, 0 if that is unclear."""
    runs = _even(Runs(calm, killed, resumed))
    if not runs.resumed or not runs.resumed[0].steps:
        return 0
    killed_after = len(runs.killed[0].steps)
    return _start(_reference(runs, killed_after), runs, killed_after)[0] or 0


def _nothing(runs: Runs) -> Finding:
    return Finding("nothing-loaded" if runs.kept else "nothing-kept", 1)


def _likeness(one: Step, other: Step) -> tuple[bool, ...]:
    return (
        one.state == other.state, one.hyper == other.hyper, one.buffers == other.buffers,
        one.inputs == other.inputs,
    )  # fmt: skip


def _shared(one: Step, other: Step) -> int:
    return sum(a == b for a, b in zip(one.parts, other.parts, strict=False))


def _partly(steps: Sequence[Step], first: Step, start: int, names: Sequence[str]) -> Finding:
    one = steps[start]
    pairs = list(zip(one.parts, first.parts, strict=False))
    other = [names[i] if i < len(names) else f"weight {i}" for i, (a, b) in enumerate(pairs)
             if a != b]  # fmt: skip
    facts = {"after": start, "other": other, "count": len(pairs)}
    return Finding("weights", start + 1, facts=facts)


def _lost(steps: Sequence[Step], first: Step, start: int) -> Iterator[Finding]:
    if first.empty and not steps[start].empty:
        yield Finding("state", start + 1, facts={"empty": True})


# --- The first step that differs ----------------------------------------------------------


def _differs(what: str, one: Step, other: Step, *, opening: bool) -> bool:
    mine, its = getattr(one, what), getattr(other, what)
    if what == "buffers":  # an evaluation may have called another module, too
        return any(mine[name] != its[name] for name in mine.keys() & its.keys())
    if what in ("inputs", "outputs") and opening and its:
        # Between the checkpoint and the kill it may have evaluated, which is not done again.
        same_end = mine[-len(its) :] == its
        return not (same_end if one.gradients == other.gradients else mine == its)
    return bool(mine != its)


def _compare(
    reference: Gang, resumed: Gang, start: int, sure: int, unsteady: set[str],
    most: int | None = None,
) -> _Comparison:  # fmt: skip
    """Compare step by step; ``unsteady`` things only below ``sure``, in one and the same run."""
    first = dict.fromkeys((*COMPARED, "rng"), -1)
    ranks: dict[str, tuple[int, ...]] = {}
    for what in first:
        found: dict[int, int] = {}
        for one, other in zip(reference, resumed, strict=False):
            if what == "buffers" and one.rank:
                continue  # DDP gives rank 0's to the others before they are used
            end = sure if what in unsteady else most
            pairs = zip(one.steps[start:end], other.steps, strict=False)
            for index, (mine, its) in enumerate(pairs):
                if _differs(what, mine, its, opening=index == 0 and start > 0):
                    found[one.rank] = index
                    break
        if found:
            first[what] = min(found.values())
            ranks[what] = tuple(rank for rank, at in found.items() if at == first[what])
    return _Comparison(first, ranks)


def _other_optimizers(reference: Story, resumed: Story, start: int, sure: int) -> list[Finding]:
    """Find what was not loaded for optimizers that step after the first one, as of a GAN."""
    found: list[Finding] = []
    seen = {resumed.steps[0].optimizer}
    pairs = zip(reference.steps[start:sure], resumed.steps, strict=False)
    for index, (mine, its) in enumerate(pairs, start):
        if its.optimizer in seen or mine.optimizer != its.optimizer:
            continue
        seen.add(its.optimizer)
        earlier = [one for one in reference.steps[:index] if one.optimizer == its.optimizer]
        if not earlier or earlier[-1].after != mine.weights:
            continue  # its weights change by more than its own steps
        if mine.weights != its.weights:
            found.append(_partly(reference.steps, its, index, ()))
        if mine.state != its.state:
            facts = {"empty": its.empty and not mine.empty}
            found.append(Finding("state", index + 1, facts=facts))
    return found


def _causes(comparison: _Comparison, reference: Gang, runs: Runs, start: int) -> list[Finding]:
    first = min((comparison.first[what] for what in COMPARED if comparison.first[what] >= 0),
                default=-1)  # fmt: skip
    if first < 0:
        return []
    found = [_finding(what, comparison, reference, runs, start) for what in _CAUSES
             if comparison.first[what] == first]  # fmt: skip
    if not found:
        found = [_unexplained(comparison, reference, runs.resumed, start, first)]
    for what in ("hyper", "inputs"):  # they do not follow from weights, as a rule
        if comparison.first[what] > first:
            later = _finding(what, comparison, reference, runs, start)
            found += [later] if later.facts.get("place", "") != "unknown" else []
    return found


def _finding(
    what: str, comparison: _Comparison, reference: Gang, runs: Runs, start: int
) -> Finding:
    index = comparison.first[what]
    what = "between" if what == "weights" else what
    facts: dict[str, Any] = {}
    mine, its = reference[0].steps[start + index], runs.resumed[0].steps[index]
    if what == "state":
        facts = {"empty": its.empty and not mine.empty}
    elif what == "hyper":
        changed = [
            (name, group[name], other.get(name))
            for group, other in zip(mine.hyper, its.hyper, strict=False)
            for name in group
            if group[name] != other.get(name)
        ]
        facts = {"changed": changed[:3]}
    elif what == "inputs":
        facts = _samples(comparison, runs, reference, start, index)
    ranks = comparison.ranks["weights" if what == "between" else what]
    return Finding(what, start + index + 1, ranks, facts)


def _samples(
    comparison: _Comparison, runs: Runs, reference: Gang, start: int, index: int
) -> dict[str, Any]:
    calm, new = samples.lines(reference), samples.lines(runs.resumed)
    epoch = samples.epoch_length(calm)
    at = start + index
    found = samples.place(calm, new[index:], at, epoch)
    return {
        "place": found.kind, "step": found.step, "again": found.again, "missing": found.missing,
        "count": found.count, "epoch": at // epoch + 1 if epoch else 0,
        "from": (found.step - 1) // epoch + 1 if epoch and found.step else 0,
        "rng": 0 <= comparison.first["rng"] <= index,
        "seed": found.step > 0 and _begun_again(runs, reference, start, index, found.step - 1),
    }  # fmt: skip


def _begun_again(runs: Runs, reference: Gang, start: int, index: int, place: int) -> bool:
    """Return whether random numbers are those of the step from which the samples come."""
    its, then, now = (
        one.rng for one in (runs.resumed[0].steps[index], runs.calm[0].steps[place],
                            reference[0].steps[start + index])
    )  # fmt: skip
    return any(its[name] == then.get(name) != now.get(name) for name in its)


def _unexplained(
    comparison: _Comparison, reference: Gang, resumed: Gang, start: int, index: int
) -> Finding:
    """Name the cause where all that was loaded is equal, but not what follows from it."""
    what = next(one for one in COMPARED if comparison.first[one] == index)
    ranks = comparison.ranks[what]
    facts = {"world": reference[0].world}
    if what == "outputs" and _drawn(reference, resumed, start, index, ranks):
        return Finding("rng", start + index + 1, ranks, facts)
    if _only_rounding(comparison, reference, resumed, start, index):
        return Finding("rounding", start + index + 1, ranks, facts)
    if _drawn(reference, resumed, start, index, ranks):
        return Finding("rng", start + index + 1, ranks, facts)
    return Finding("unseen", start + index + 1, ranks, {"what": what})


def _drawn(reference: Gang, resumed: Gang, start: int, index: int, ranks: Sequence[int]) -> bool:
    """Return whether random numbers differed that the step, or its data, did draw."""
    for one, other in zip(reference, resumed, strict=False):
        if one.rank in ranks:
            mine, its = one.steps[start + index], other.steps[index]
            following = one.steps[start + index + 1 : start + index + 2]
            drew = not following or following[0].rng != mine.rng
            if mine.rng != its.rng and drew:
                return True
    return False


def _only_rounding(
    comparison: _Comparison, reference: Gang, resumed: Gang, start: int, index: int
) -> bool:
    """Return whether the first difference is one of gradients or results that are nearly equal."""
    if index < 0 or any(comparison.first[what] == index for what in _CAUSES):
        return False
    return all(
        _close(one.steps[start + index].norm, other.steps[index].norm)
        and _close(one.steps[start + index].loss, other.steps[index].loss)
        for one, other in zip(reference, resumed, strict=False)
    )


def _close(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=_CLOSE, abs_tol=1e-12)
