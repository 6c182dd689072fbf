"""Judge a resume: find the run that it belongs to, the first step that differs, its cause. Pure.

audit calls judge() with the stories of an undisturbed run, of a killed one up to the kill, and of
the process that was started again; report.py prints the verdict.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from ddpjob_tools.prove import samples
from ddpjob_tools.prove.compare import CAUSES, COMPARED, Comparison
from ddpjob_tools.prove.record import Gang, Step, steps_made

RIGHT: Final = "right"
ROUNDING: Final = "rounding"
WRONG: Final = "wrong"
UNKNOWN: Final = "unknown"


@dataclass(frozen=True, slots=True)
class Runs:
    """All that was recorded. ``again``: a second undisturbed run, empty when none was made."""

    undisturbed: Gang
    killed: Gang
    resumed: Gang
    again: Gang = ()
    kept: bool = True  # files that can be checkpoints were there at the kill
    code: int = 0  # with which the resumed run ended
    whole: bool = True  # neither the undisturbed nor the resumed run was cut off
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
    not_repeated: tuple[Finding, ...] = ()  # what the script does not repeat even undisturbed
    total: int = 0
    unclear: bool = False  # several steps fit ``resumed_after``: weights did not change
    final: bool | None = None  # whether the last weights are equal; None: not to be compared


def judge(runs: Runs) -> Verdict:
    """Judge what was recorded."""
    runs = _even(runs)
    killed_after, total = steps_made(runs.killed), steps_made(runs.undisturbed)
    not_repeated = _not_repeated(runs)
    wrong = Verdict(WRONG, (), killed_after, None, not_repeated=not_repeated, total=total)
    if not steps_made(runs.resumed):
        return replace(wrong, findings=(_failed(runs, "no-step"),))
    reference = _reference(runs)
    start, findings = _start(reference, runs)
    if start is None:
        return replace(wrong, findings=findings)
    varying = {one.facts["what"] for one in not_repeated}
    found = Comparison(reference, runs.resumed, start, until=killed_after, only=varying)
    after = _causes(found)
    if start:
        others = [*_other_optimizers(found, killed_after)]
        known = {(one.kind, one.step) for one in others}
        after = others + [one for one in after if (one.kind, one.step) not in known]
    else:  # what follows from it are the same steps once more, or other ones
        after = [one for one in after if one.kind not in ("rounding", "rng", "unseen")]
    ended = start + steps_made(runs.resumed)
    label, findings = _label(runs, (*findings, *after, *_end(runs, ended, total)), not_repeated)
    return replace(
        wrong, label=label, findings=findings, resumed_after=start,
        compared=min(ended, killed_after if varying else total) - start,
        since={what: found.since.get(what) for what in (*COMPARED, "rng")},
        unclear=len(_fitting(reference[0].steps, runs)) > 1,
        final=_final(found, ended, total) if "after" not in varying else None,
    )  # fmt: skip


def resumed_after(undisturbed: Gang, killed: Gang, resumed: Gang) -> int:
    """Return after which step a process that has begun to step went on, 0 if that is unclear."""
    runs = _even(Runs(undisturbed, killed, resumed))
    return (_start(_reference(runs), runs)[0] or 0) if steps_made(resumed) else 0


def _even(runs: Runs) -> Runs:
    """Leave out steps that not all ranks have written, and generators that nobody seeds."""
    pairs = zip(runs.undisturbed, runs.killed, strict=False)
    begun = [(one.steps[0].rng, other.steps[0].rng) for one, other in pairs
             if one.steps and other.steps]  # fmt: skip
    unseeded = {name for one, other in begun for name in one if one[name] != other.get(name)}

    def seeded(step: Step) -> Step:
        return replace(step, rng={k: v for k, v in step.rng.items() if k not in unseeded})

    def cut(gang: Gang) -> Gang:
        least = steps_made(gang)
        return tuple(replace(one, steps=[*map(seeded, one.steps[:least])]) for one in gang)

    return replace(
        runs, undisturbed=cut(runs.undisturbed), killed=cut(runs.killed), resumed=cut(runs.resumed),
        again=cut(runs.again),
    )  # fmt: skip


def _not_repeated(runs: Runs) -> tuple[Finding, ...]:
    """Compare runs that nothing disturbed, the killed one up to its kill among them."""
    found: dict[str, Finding] = {}
    for other in (runs.killed, runs.again):
        pair = Comparison(runs.undisturbed, other)
        kind = "rounding" if pair.only_rounding() else "chance"
        for what, step in pair.since.items():
            if what not in found and what != "rng":  # random numbers without effect are no loss
                facts = {"what": what, "root": step == pair.first}
                found[what] = Finding(kind, step, pair.ranks[what], facts)
    return tuple(found.values())


def _label(
    runs: Runs, findings: Sequence[Finding], not_repeated: Sequence[Finding]
) -> tuple[str, tuple[Finding, ...]]:
    """Return the label, and the findings without those that chance explains beside a sure one."""
    by_chance = any(one.kind != "rounding" for one in not_repeated)
    # Whatever else they do not repeat, undisturbed runs may make equally many steps.
    counts = bool(runs.again) and steps_made(runs.again) == steps_made(runs.undisturbed)
    excused = {"unseen", "rng", *(() if counts else ("length",))} if by_chance else set[str]()

    def chance(one: Finding) -> bool:
        return one.kind in excused or (by_chance and one.facts.get("place") == "unknown")

    sure = tuple(one for one in findings if not chance(one))
    if any(one.kind != "rounding" for one in sure):
        return WRONG, sure
    if by_chance:
        return UNKNOWN, tuple(findings)
    return ROUNDING if findings or not_repeated else RIGHT, tuple(findings)


def _failed(runs: Runs, otherwise: str, step: int = 0) -> Finding:
    kind = "hang" if runs.silent else "crash" if runs.code else otherwise
    return Finding(kind, step, facts={"code": runs.code, "torn": runs.torn})


def _end(runs: Runs, ended: int, total: int) -> Iterator[Finding]:
    if runs.code or runs.silent:
        yield _failed(runs, "", ended + 1)
    elif runs.whole and ended != total and len(runs.resumed) == len(runs.undisturbed):
        yield Finding("length", ended, facts={"total": total, "ended": ended})


def _final(found: Comparison, ended: int, total: int) -> bool | None:
    if ended < total:
        return None
    return all(mine.after == its.after for _, mine, its in found.at(total))


# --- Where the new process went on --------------------------------------------------------


def _reference(runs: Runs) -> Gang:
    """Return what the resumed run should repeat: the killed run, then the undisturbed one."""
    return tuple(
        replace(undisturbed, steps=[*killed.steps, *undisturbed.steps[len(killed.steps) :]])
        for killed, undisturbed in zip(runs.killed, runs.undisturbed, strict=False)
    )


def _start(reference: Gang, runs: Runs) -> tuple[int | None, tuple[Finding, ...]]:
    """Find the index of the first step of the new process, by its weights before it."""
    steps, first = reference[0].steps, runs.resumed[0].steps[0]
    nothing = (Finding("nothing-loaded" if runs.kept else "nothing-kept", 1),)
    if fitting := _fitting(steps, runs):
        # Weights that do not change fit several: a checkpoint is what it went on from.
        saved = [i for i in fitting if i in (0, *samples.saved_after(runs.killed[0]))]
        start = max(saved or fitting, key=lambda i: (steps[i].inputs == first.inputs, i))
        return start, () if start else nothing
    possible = _possible(steps, runs)
    not_repeated = runs.undisturbed[0].steps[0].weights != runs.killed[0].steps[0].weights
    if not_repeated and first.empty and not any(_shared(steps[i], first) for i in possible):
        return None, nothing
    start = max(possible, key=lambda i: (_shared(steps[i], first), *_likeness(steps[i], first)))
    lost = (
        [_state(steps[start], first, start + 1)] if first.empty and not steps[start].empty else []
    )
    return None, (_partly(steps[start], first, start + 1, reference[0].names), *lost)


def _possible(steps: Sequence[Step], runs: Runs) -> list[int]:
    first = runs.resumed[0].steps[0]
    there = range(min(steps_made(runs.killed) + 1, len(steps)))
    return [i for i in there if steps[i].optimizer == first.optimizer]


def _fitting(steps: Sequence[Step], runs: Runs) -> list[int]:
    """Return the indices of the steps that the new process's first is most like."""
    first = runs.resumed[0].steps[0]
    equal = [i for i in _possible(steps, runs) if steps[i].weights == first.weights]
    best = max((_likeness(steps[i], first)[:-1] for i in equal), default=())
    return [i for i in equal if _likeness(steps[i], first)[:-1] == best]


def _likeness(one: Step, other: Step) -> tuple[bool, ...]:
    return (
        one.state == other.state, one.hyper == other.hyper, one.buffers == other.buffers,
        one.inputs == other.inputs,
    )  # fmt: skip


def _shared(one: Step, other: Step) -> int:
    return sum(a == b for a, b in zip(one.parts, other.parts, strict=False))


def _partly(mine: Step, its: Step, step: int, names: Sequence[str] = ()) -> Finding:
    """Name the weights that are not those after the step before."""
    equal = [a == b for a, b in zip(mine.parts, its.parts, strict=False)]
    other = [names[i] if i < len(names) else f"weight {i}" for i, same in enumerate(equal)
             if not same]  # fmt: skip
    return Finding("weights", step, facts={"after": step - 1, "other": other, "count": len(equal)})


def _state(mine: Step, its: Step, step: int, ranks: tuple[int, ...] = ()) -> Finding:
    return Finding("state", step, ranks, {"empty": its.empty and not mine.empty})


# --- The first step that differs ----------------------------------------------------------


def _other_optimizers(found: Comparison, until: int) -> Iterator[Finding]:
    """Find what was not loaded for optimizers that step after the first one, as of a GAN."""
    before, new = found.reference[0].steps[:until], found.other[0].steps
    seen = {new[0].optimizer}
    for step, its in enumerate(new[: until - found.start], found.start + 1):
        mine = before[step - 1]
        if its.optimizer in seen or mine.optimizer != its.optimizer:
            continue
        seen.add(its.optimizer)
        earlier = [one for one in before[: step - 1] if one.optimizer == its.optimizer]
        if not earlier or earlier[-1].after != mine.weights:
            continue  # its weights change by more than its own steps
        if mine.weights != its.weights:
            yield _partly(mine, its, step)
        if mine.state != its.state:
            yield _state(mine, its, step)


def _causes(found: Comparison) -> list[Finding]:
    """Name all causes at the first step that differs, and wrong data or settings later."""
    first = found.first
    if not first:
        return []
    causes = [_cause(what, found) for what in CAUSES if found.since.get(what) == first]
    causes = causes or [_unexplained(found)]
    # These do not follow from weights, as a rule.
    later = [
        _cause(what, found) for what in ("hyper", "inputs") if found.since.get(what, 0) > first
    ]
    return causes + [one for one in later if one.facts.get("place") != "unknown"]


def _cause(what: str, found: Comparison) -> Finding:
    step, ranks = found.since[what], found.ranks[what]
    _, mine, its = next(found.at(step))
    if what == "state":
        return _state(mine, its, step, ranks)
    if what == "hyper":
        changed = [
            (name, group[name], other.get(name))
            for group, other in zip(mine.hyper, its.hyper, strict=False)
            for name in group
            if group[name] != other.get(name)
        ]
        return Finding(what, step, ranks, {"changed": changed[:3]})
    if what == "inputs":
        return Finding(what, step, ranks, _samples(found, step))
    return Finding("between" if what == "weights" else what, step, ranks)


def _samples(found: Comparison, step: int) -> dict[str, Any]:
    """Say where the samples come from, and whether random numbers brought them."""
    reference, new = samples.lines(found.reference), samples.lines(found.other)
    facts = samples.place(reference, new[step - 1 - found.start :], step - 1)
    _, mine, its = next(found.at(step))
    # Random numbers that are those of the step from which the samples come: seeded once more.
    then = found.reference[0].steps[facts["step"] - 1].rng if facts["step"] else {}
    again = any(its.rng[name] == then.get(name) != mine.rng.get(name) for name in its.rng)
    return {**facts, "rng": 0 < found.since.get("rng", 0) <= step, "seed": again}


def _unexplained(found: Comparison) -> Finding:
    """Name the cause where all that was loaded is equal, but not what follows from it."""
    step = found.first
    what = next(one for one in COMPARED if found.since.get(one) == step)
    ranks = found.ranks[what]
    facts = {"world": found.reference[0].world}
    drawn = found.drawn(step, ranks)
    # Gradients alone may differ by rounding although other random numbers were drawn.
    if found.only_rounding() and not (drawn and what == "outputs"):
        return Finding("rounding", step, ranks, facts)
    if drawn:
        return Finding("rng", step, ranks, facts)
    return Finding("unseen", step, ranks, {"what": what})
