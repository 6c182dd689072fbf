"""Print a verdict for a stranger: what was done, the verdict, what differs, the cure. Pure text.

command.py prints the lines, and writes as_json() where it is asked for.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

from ddpjob_tools.prove import cures
from ddpjob_tools.prove.cause import COMPARED, RIGHT, ROUNDING, UNKNOWN, WRONG, Finding, Verdict
from ddpjob_tools.prove.record import Gang
from ddpjob_trainer.arguments import shown_words

#: What is compared, as a user calls it.
_TITLES: Final = {
    "weights": "weights before the step",
    "buffers": "buffers, frozen weights",
    "state": "optimizer's state",
    "hyper": "optimizer's settings (lr)",
    "inputs": "samples",
    "outputs": "results, loss",
    "gradients": "gradients",
    "after": "weights after the step",
    "rng": "random numbers",
}


@dataclass(frozen=True, slots=True)
class Result:
    """The verdict and what it rests on. ``tail``: the last output of a run that failed."""

    verdict: Verdict
    calm: Gang
    saved: tuple[int, ...]
    epoch: int | None
    tail: str = ""
    resume_arguments: tuple[str, ...] = ()
    resume_when: str = ""


def lines(result: Result, script: str) -> Iterator[str]:
    """Yield the report, line by line."""
    verdict, head = result.verdict, result.calm[0]
    versions = ", ".join(f"{name} {version}".strip() for name, version in head.frameworks.items())
    processes = f"{len(result.calm)} process" + ("es" if len(result.calm) > 1 else "")
    yield f"{script}: {versions or cures.OWN}, {processes}"
    yield ""
    yield from _story(result)
    yield ""
    yield f"{_HEADLINES[verdict.label]}{_headline(verdict)}"
    framework = cures.framework(head.frameworks)
    for finding in verdict.findings:
        yield ""
        yield f"  {_where(finding, result)}{cures.said(finding)}"
        if found := cures.cure(finding, framework):
            yield f"    cure: {found}"
    if verdict.label == WRONG and framework != "ddpjob_trainer":
        yield ""
        yield f"  {cures.LIBRARY}"
    if result.resume_arguments and verdict.label in (RIGHT, ROUNDING):
        yield ""
        yield f"  {_with(result)}"
    for text in _ranks(result.calm):
        yield ""
        yield f"  {text}"
    if text := cures.chance(verdict):
        yield ""
        yield f"  not repeated: {text}"
    if verdict.since:
        yield ""
        yield from _table(verdict)
    if result.tail:
        yield ""
        yield "  the end of its output when it was started again:"
        yield result.tail


def _with(result: Result) -> str:
    """Say what the verdict hangs on, and how a cluster does the same."""
    words = f"--resume-args {shlex.quote(shown_words(result.resume_arguments))}"
    if result.resume_when:
        words += f" --resume-when {shlex.quote(result.resume_when)}"
    return (
        f"This holds with {words}: give them to ddpjob-trainer run and init too (spec.restart of a"
        " DDPJob), or a restart begins at step 1"
    )


def _ranks(calm: Gang) -> Iterator[str]:
    """Say what a run of several processes shows that do not train one model."""
    if len({story.steps[0].after for story in calm if story.steps}) > 1:
        yield (
            "the ranks' weights differ after step 1: without DistributedDataParallel each trains by"
            " itself (of a model that is sharded they differ rightly)"
        )
    if all(step.after == step.weights for story in calm for step in story.steps):
        yield "the weights never change: equal ones prove nothing here"


def _story(result: Result) -> Iterator[str]:
    verdict, epoch = result.verdict, result.epoch
    an_epoch = f", {epoch} in an epoch" if epoch else ""
    saved = _numbers(result.saved)
    kept = f"files written after {saved}" if saved else "no file that can be a checkpoint"
    yield f"  undisturbed    {verdict.total} steps{an_epoch}; {kept}"
    if result.calm[0].steps and not result.calm[0].steps[0].empty:
        yield "                 it began from a checkpoint in this folder (--leave-out NAME)"
    yield f"  killed         after step {verdict.killed_after}{_epoch(verdict.killed_after, epoch)}"
    after = verdict.resumed_after
    if given := result.resume_arguments:
        yield f"  with           {shown_words(given)}, at each start but the first"
    if after is not None and verdict.unclear:
        yield "  started again  after which step cannot be told: several have the same weights"
    elif after is not None:
        lost = verdict.killed_after - after
        again = f", {lost} step{'s' * (lost != 1)} done again" if lost else ", no step lost"
        where = f"after step {after}{again}" if after else "at the beginning: all steps done again"
        yield f"  started again  {where}"
    else:
        yield "  started again  with the state of no step that it had made"


def _numbers(steps: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, steps[:3]))
    return (
        f"step {shown}, ... {steps[-1]}"
        if len(steps) > 4
        else f"step {', '.join(map(str, steps))}"
        if steps
        else ""
    )


def _epoch(step: int, epoch: int | None) -> str:
    return f", in epoch {(step - 1) // epoch + 1}" if epoch else ""


_HEADLINES: Final = {
    RIGHT: "RIGHT: ",
    ROUNDING: "RIGHT, but for rounding: ",
    WRONG: "WRONG: ",
    UNKNOWN: "NOT TO BE JUDGED: ",
}


def _headline(verdict: Verdict) -> str:
    if verdict.label == RIGHT:
        final = ", and ends in the same weights" if verdict.final else ""
        after = f"each of the {verdict.compared} steps after the restart"
        return f"{after} is as undisturbed, bit for bit{final}"
    if verdict.label == ROUNDING:
        return "all that was loaded, and every sample after it, is as undisturbed; sums are not"
    if verdict.label == UNKNOWN:
        return (
            "nothing wrong was found up to the kill, but even undisturbed the script does not"
            " repeat itself"
        )
    first = verdict.findings[0]
    if first.kind.startswith("nothing"):
        same = all(step is None for step in verdict.since.values())
        more = (
            ", and ends in the same weights"
            if same
            else ", and other ones"
            if verdict.since
            else ""
        )
        return f"a kill loses all that was trained. Started again, it does all steps again{more}"
    if first.step:
        return (
            f"a killed run does not end as an undisturbed one. It differs from step {first.step} on"
        )
    return "a killed run does not end as an undisturbed one"


def _where(finding: Finding, result: Result) -> str:
    if not finding.step:
        return ""
    everywhere = len(finding.ranks) in (0, len(result.calm))
    ranks = "" if everywhere else f", rank {', '.join(map(str, finding.ranks))}"
    return f"step {finding.step}{ranks}: "


def _table(verdict: Verdict) -> Iterator[str]:
    last = (verdict.resumed_after or 0) + verdict.compared
    yield f"  compared, steps {(verdict.resumed_after or 0) + 1} to {last}:"
    loose = {one.facts["what"] for one in verdict.loose}
    for what in (*COMPARED, "rng"):
        step = verdict.since[what]
        text = "equal" if step is None else f"differ from step {step} on"
        if what == "rng" and step is not None and verdict.label in (RIGHT, ROUNDING):
            text += ", without effect"
        if what in loose:
            text += " (not repeated by the script itself, so compared up to the kill)"
        yield f"    {_TITLES[what]:<27}{text}"
    if verdict.final is not None:
        yield f"    {'weights at the end':<27}{'equal' if verdict.final else 'differ'}"


def as_json(result: Result) -> dict[str, Any]:
    """Return the result for machines."""
    head, verdict = result.calm[0], result.verdict
    framework = cures.framework(head.frameworks)
    return {
        "verdict": verdict.label,
        "framework": framework,
        "versions": {"torch": head.torch, **head.frameworks},
        "processes": len(result.calm),
        "total_steps": verdict.total,
        "epoch_steps": result.epoch,
        "saved_after": list(result.saved),
        "killed_after": verdict.killed_after,
        "resumed_after": verdict.resumed_after,
        "final_weights_equal": verdict.final,
        "resume_args": list(result.resume_arguments),
        "resume_when": result.resume_when,
        "notes": list(_ranks(result.calm)),
        "first_difference": verdict.since,
        "findings": [
            {**asdict(one), "said": cures.said(one), "cure": cures.cure(one, framework)}
            for one in verdict.findings
        ],
        "not_repeated": [asdict(one) for one in verdict.loose],
    }
