"""Run a script undisturbed, kill it, start it again, judge. command.py calls audit().

A second undisturbed run is made only where the judgement hangs on what the script itself repeats.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ddpjob_contract import NEWEST
from ddpjob_tools.audit import runs
from ddpjob_tools.audit.runs import AuditError, End, Script
from ddpjob_tools.prove import cause, samples, steps
from ddpjob_tools.prove.cause import Verdict
from ddpjob_tools.prove.folder import Source
from ddpjob_tools.prove.steps import Gang
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.imports import parsed
from ddpjob_trainer.launcher.watch import checkpoints

#: Findings that chance could make, too: only a second undisturbed run can tell.
_BY_CHANCE = ("rng", "rounding", "unseen", "length")
_FEWEST = 3
_BEYOND = re.compile(r"(\.\./)+[\w.-][\w./-]*")
#: What reading a file says that is not whole.
_TORN = re.compile(
    r"EOFError|UnpicklingError|BadZipFile|PytorchStreamReader|JSONDecodeError|Ran out of input"
    r"|unexpected end of|truncated|Error while deserializing|IncompleteMetadata"
)

Show = Callable[[str, int], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """What to audit and how. ``directory``: for records, logs and the copy; must be empty."""

    script: Script
    source: Source
    directory: Path
    resume_arguments: tuple[str, ...] = ()
    resume_when: str = ""  # glob of the checkpoint that they name
    kill_after: int | None = None
    stop_after: int | None = None


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


class _Audit:
    """The runs of one audit, each in the same folder, which is made afresh."""

    def __init__(self, settings: Settings, show: Show) -> None:
        self._settings = settings
        self._show = show
        self._root = settings.directory / "work"
        self.work = settings.source.place(self._root)

    def fill(self) -> None:
        self._settings.source.fill(self._root)

    def run(
        self, name: str, title: str, stop_at: int | None = None, more: Sequence[str] = (),
        enough: Callable[[int], bool] = lambda steps: False,
    ) -> tuple[Gang, End]:  # fmt: skip
        out = self._settings.directory / name
        end = runs.run(
            self._settings.script, self.work, out, more=more, stop_at=stop_at, enough=enough,
            show=lambda steps: self._show(title, steps),
        )  # fmt: skip
        return steps.read(out), end


def audit(settings: Settings, show: Show) -> Result:
    """Do the runs and judge. Raises AuditError, ConfigError; leaves no process behind."""
    audit = _Audit(settings, show)
    calm, total = _undisturbed(audit, settings, "undisturbed", "1/3 undisturbed")
    named = _named(settings, audit.work)
    joined = samples.lines(calm)
    epoch = samples.epoch_length(joined)
    saved = samples.saved_after(calm[0])
    kill = settings.kill_after or samples.kill_after(total, saved, epoch)
    if kill >= total:
        raise ConfigError(f"--kill-after {kill}: the run has {total} steps; choose fewer")
    audit.fill()
    killed, end = audit.run("killed", f"2/3 to be killed after step {kill}", stop_at=kill)
    _check_alive(settings, end, min((len(story.steps) for story in killed), default=0))
    _check_killed(calm, killed, end, kill)
    words = _resume_words(settings, audit.work, killed, named)
    recorded, end = _started_again(audit, settings, calm, killed, words)
    verdict = cause.judge(recorded)
    if _hangs_on_chance(verdict):
        again, _ = _undisturbed(audit, settings, "again", "undisturbed once more, to compare")
        verdict = cause.judge(replace(recorded, again=again))
    failed = end.code or end.silent
    tail = end.tail() if failed else ""
    when = settings.resume_when
    return Result(verdict, calm, tuple(saved), epoch, tail, settings.resume_arguments, when)


def _undisturbed(audit: _Audit, settings: Settings, name: str, title: str) -> tuple[Gang, int]:
    audit.fill()
    gang, end = audit.run(name, title, stop_at=settings.stop_after)
    total = min((len(story.steps) for story in gang), default=0)
    _check_alive(settings, end, total)
    if end.code:
        raise AuditError(
            f"the script fails by itself, with exit code {end.code} after step {total}; see that it"
            f" runs to its end (or give --stop-after STEP){_beyond(settings)}. The end of its"
            f" output:\n{end.tail()}"
        )
    if total < _FEWEST:
        few = f"only {total} steps" if total else "no step"
        raise AuditError(
            f"{few} of an optimizer of torch: {_FEWEST} are needed. Perhaps it found"
            " training complete, from a checkpoint in this folder (--leave-out NAME) or at an"
            " absolute path; or it starts its processes itself: give the script, and --nproc N,"
            f" instead. The end of its output:\n{end.tail()}"
        )
    if len(gang) > 1 and all(story.world == 1 for story in gang):
        raise AuditError(
            "each process trained by itself: none joined a process group"
            " (torch.distributed.init_process_group), so all do the same work; leave --nproc out"
        )
    return gang, total


def _beyond(settings: Settings) -> str:
    """Name the paths in script and arguments that lead out of the folder; "" for none."""
    tree = parsed(settings.script.here / settings.script.program)
    nodes = ast.walk(tree) if tree else ()
    paths = [node.value for node in nodes if isinstance(node, ast.Constant)]
    paths += [word.rpartition("=")[2] for word in settings.script.arguments]
    beyond = {path for path in paths if isinstance(path, str) and _BEYOND.fullmatch(path)}
    if not (missed := sorted(beyond - {*settings.source.linked})):
        return ""
    return (
        f". {missed[0]} is outside of the folder, of which each run gets a copy: --link"
        f" {missed[0]}, once it is there, links it beside the copy"
    )


def _check_alive(settings: Settings, end: End, steps: int) -> None:
    if end.silent:
        where = f"after step {steps}" if steps else "without a first step"
        raise AuditError(
            f"nothing happened for {settings.script.patience:g} s, {where}: --patience SECONDS"
            f" allows more. The end of its output:\n{end.tail()}"
        )


def _check_killed(calm: Gang, killed: Gang, end: End, kill: int) -> None:
    """Refuse a second run that did not begin as the first, or did not get to the kill."""
    steps = min((len(story.steps) for story in killed), default=0)
    first = killed[0].steps[0].weights if steps else ""
    later = [i for i, step in enumerate(calm[0].steps) if step.after == first]
    if (first and first != calm[0].steps[0].weights and later) or (not steps and not end.code):
        after = f"with the weights of step {later[-1] + 1}" if later else "at the end"
        raise AuditError(
            f"the second run began {after} of the first: the script keeps its checkpoints outside"
            " of its working directory, of which each run here gets a fresh copy. Give it a"
            " relative path for them, such as --output_dir checkpoints, and try again"
        )
    if end.code is not None:
        raise AuditError(
            f"the second run ended by itself (exit code {end.code}) after step {steps}, before it"
            f" could be killed after step {kill}: the first took {len(calm[0].steps)} steps. Seed"
            f" what decides its end, or try --kill-after. The end of its output:\n{end.tail()}"
        )


def _named(settings: Settings, work: Path) -> list[str]:
    """Return what --resume-args name that is there now, after a whole run."""
    values = (word.partition("=")[2] or word for word in settings.resume_arguments)
    return [value for value in values if (work / value).exists()]


def _resume_words(
    settings: Settings, work: Path, killed: Gang, named: Sequence[str]
) -> tuple[str, ...]:
    """Return the arguments of the start after the kill. Raises ConfigError."""
    there = checkpoints.matches(settings.resume_when, work) if settings.resume_when else []
    *_, found = there[0] if there else ("",)
    missing = [one for one in named if not (work / one).exists()]
    if missing or (settings.resume_when and not found):
        what = (
            f"--resume-args: {missing[0]}" if missing else f"--resume-when {settings.resume_when}"
        )
        files = {path for step in killed[0].steps for path in step.files}
        kept = sorted(path for path in files if (work / path).exists())
        raise ConfigError(
            f"{what}: not there after the kill at step {len(killed[0].steps)}; the script has"
            f" written {samples.named(kept[::-1]) or 'nothing'}. Take --kill-after STEP, later, or"
            f" {NEWEST} in --resume-args and --resume-when GLOB, the checkpoints of which it stands"
            " for the newest"
        )
    return tuple(word.replace(NEWEST, found) for word in settings.resume_arguments)


def _started_again(
    audit: _Audit, settings: Settings, calm: Gang, killed: Gang, words: Sequence[str]
) -> tuple[cause.Runs, End]:
    """Start the killed run again, in its folder, until it ends or is as far as the first."""
    out = settings.directory / "resumed"
    place: list[int] = []

    def enough(made: int) -> bool:
        if settings.stop_after is None or not made:
            return False
        if not place:
            place.append(cause.resumed_after(calm, killed, steps.read(out)))
        return place[0] + made >= settings.stop_after

    title = f"3/3 killed after step {len(killed[0].steps)}, started again"
    resumed, end = audit.run(out.name, title, None, words, enough)
    kept = bool(samples.saved_after(killed[0]))
    whole = settings.stop_after is None
    torn = bool(end.code and _TORN.search(end.tail()))
    return cause.Runs(calm, killed, resumed, (), kept, end.code or 0, whole, end.silent, torn), end


def _hangs_on_chance(verdict: Verdict) -> bool:
    """Return whether another undisturbed run decides; how many steps it makes it always does."""
    return any(
        one.kind == "length"
        or (not verdict.loose and (one.kind in _BY_CHANCE or one.facts.get("place") == "unknown"))
        for one in verdict.findings
    )
