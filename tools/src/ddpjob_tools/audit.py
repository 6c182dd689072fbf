"""Run any script undisturbed, kill it, start it again, and judge: `ddpjob audit`.

A second undisturbed run is made only where the judgement hangs on what the script itself repeats.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddpjob_contract import NEWEST
from ddpjob_tools import verb
from ddpjob_tools.prove import cause, report, samples
from ddpjob_tools.prove.folder import Source
from ddpjob_tools.prove.record import Gang, Steps, steps_made
from ddpjob_tools.prove.report import Result
from ddpjob_tools.prove.run import LOOK_SECONDS, ProofError, Run, environment, launcher
from ddpjob_trainer.arguments import check_notebook, check_resume, resume_words, whole
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.launcher import workdir

_DESCRIPTION = """\
Does training resume correctly after a kill? Run any script undisturbed, then kill it and start it
again, and name the first step that differs, and what does: samples repeated or left out, random
numbers, optimizer, scheduler, nothing loaded at all; with the cure in the framework's own words.

The script needs no change, no cluster and not this library: Lightning, accelerate, transformers'
Trainer or a loop of one's own. It must save checkpoints below its working directory, of which each
run gets a fresh copy; the directory itself stays as it is.
"""

_EPILOG = """\
examples:
  ddpjob audit -- train.py --lr 0.1
  ddpjob audit --nproc 3 -- train.py              as torchrun --nproc-per-node 3 train.py
  ddpjob audit --resume-args "--resume {newest}" --resume-when "out/*.pt" -- train.py
  ddpjob audit --stop-after 500 -- -m package.train    a long run: its first 500 steps
  ddpjob audit --link data --leave-out runs -- train.py

exit code: 0 it resumes correctly, 1 it does not, 3 no verdict (it fails by itself, makes no step,
does not repeat itself), 64 not possible as asked
"""
_NOT_JUDGED = 3
_CODES = {cause.RIGHT: 0, cause.ROUNDING: 0, cause.WRONG: 1, cause.UNKNOWN: _NOT_JUDGED}
_PROBE = "ddpjob_tools.prove.probe"
_STARTERS = ("torchrun", "accelerate", "lightning", "deepspeed")
#: A rank that does not reach the step of the kill soon after another waits for that one.
_TOGETHER_SECONDS = 10.0
_FEWEST = 3
#: Findings that chance could make, too: only a second undisturbed run can tell.
_PERHAPS_CHANCE = ("rng", "rounding", "unseen", "length")
#: What reading a file says that is not whole.
_TORN = re.compile(
    r"EOFError|UnpicklingError|BadZipFile|PytorchStreamReader|JSONDecodeError|Ran out of input"
    r"|unexpected end of|truncated|Error while deserializing|IncompleteMetadata"
)

_OPTIONS: tuple[verb.Option, ...] = (
    ("--nproc N", int, None,
     "processes, started as torchrun does (default: one, as `python` does)"),
    ("--resume-args WORDS", str, "",
     "more arguments when it is started again, as '--resume last.pt' (default: none)"),
    ("--resume-when GLOB", str, "",
     "checkpoints, as 'out/*.pt': {newest} in --resume-args is the newest"),
    ("--seed N", int, None,
     "seed torch, random and numpy at each start, if the script does not"),
    ("--kill-after STEP", int, None, "default: within an epoch after the first, past a checkpoint"),
    ("--stop-after STEP", int, None, "end each run there (default: at its end)"),
    ("--link NAME", list, [],
     "a file or folder that is only read, such as data or ../data: linked into the copies"),
    ("--leave-out NAME", list, [],
     "a file or folder that no run should see, such as earlier checkpoints"),
    *verb.of_program(300.0),
)  # fmt: skip


def add(commands: Any) -> None:
    """Describe the command to argparse."""
    verb.add(
        commands, "audit",
        "test whether a script resumes correctly after a kill, and name what is wrong",
        _OPTIONS, ("SCRIPT", "a Python script"), description=_DESCRIPTION, epilog=_EPILOG,
        allow_abbrev=False,  # the script's --resume is not our --resume-args
    )  # fmt: skip


def main(options: argparse.Namespace) -> int:
    """Run the command; return its exit code."""

    def body(options: argparse.Namespace, folder: Path) -> int:
        result = Audit(options, folder).result()
        print(f"\n{report.text(result, shlex.quote(options.program))}", flush=True)
        verb.write(options.json, report.as_json(result))
        return _CODES[result.verdict.label]

    return verb.run("audit", options, _checked, body, unproved=_NOT_JUDGED)


def _checked(options: argparse.Namespace) -> argparse.Namespace:
    words = [options.program, *options.arguments]
    if not options.module and Path(words[0]).name.startswith("python") and len(words) > 1:
        words = words[1:]  # python train.py
    if not options.module and words[0] == "-m" and len(words) > 1:
        options.module, words = True, words[1:]
    options.program, *options.arguments = words
    verb.check(options)
    for name in ("kill_after", "stop_after"):
        if getattr(options, name) is not None:
            whole(f"--{name.replace('_', '-')}", getattr(options, name), least=1)
    if options.kill_after and options.stop_after and options.kill_after >= options.stop_after:
        raise ConfigError("--kill-after must be less than --stop-after: nothing would follow it")
    options.resume_words = resume_words(options.resume_args)
    check_resume(options.resume_words, options.resume_when)
    if options.seed is not None:
        whole("--seed", options.seed, most=2**32 - 1)  # numpy's bound
    options.source = Source(Path.cwd(), tuple(options.leave_out), tuple(options.link))
    options.source.check()
    if not options.module:
        _check_script(Path(options.program))
    return options


def _check_script(path: Path) -> None:
    check_notebook(path)
    if path.name in _STARTERS:
        raise ConfigError(
            f"{path} starts processes that audit does not see: give the script itself, and"
            " --nproc N, as in: ddpjob audit --nproc 2 -- train.py"
        )
    if not path.is_file():
        raise ConfigError(f"{path}: no such script")


@dataclass(frozen=True, slots=True)
class End:
    """How a run ended: ``code`` None when it was cut off; ``silent``: as nothing happened."""

    gang: Gang
    code: int | None
    silent: bool
    tail: str

    @property
    def steps(self) -> int:
        """Return the steps that all ranks have made."""
        return steps_made(self.gang)


class Audit:
    """The runs of one audit, each in the same folder, which is made afresh."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._script = options
        self._source: Source = options.source
        self._folder = folder
        self._copies = folder / "work"
        self._work = self._source.place(self._copies)
        self._show = verb.Progress("audit")

    def result(self) -> Result:
        """Do the runs and judge. Raises ProofError, ConfigError; leaves no process behind."""
        try:
            return self._result()
        finally:
            shutil.rmtree(self._copies, ignore_errors=True)

    def _result(self) -> Result:
        undisturbed = self._undisturbed("undisturbed", "1/3 undisturbed")
        total, named = steps_made(undisturbed), self._named()
        epoch = samples.epoch_length(samples.lines(undisturbed))
        saved = samples.saved_after(undisturbed[0])
        kill = self._script.kill_after or samples.kill_after(total, saved, epoch)
        if kill >= total:
            raise ConfigError(f"--kill-after {kill}: the run has {total} steps; choose fewer")
        killed = self._killed(undisturbed, kill)
        words = self._resume_words(killed, named)
        recorded, tail = self._started_again(undisturbed, killed, words)
        verdict = cause.judge(recorded)
        if _hangs_on_chance(verdict):
            again = self._undisturbed("again", "undisturbed once more, to compare")
            verdict = cause.judge(replace(recorded, again=again))
        given = self._script.resume_words, self._script.resume_when
        return Result(verdict, undisturbed, tuple(saved), epoch, tail, *given)

    # --- The runs ------------------------------------------------------------------------

    def _undisturbed(self, name: str, title: str) -> Gang:
        self._source.fill(self._copies)
        end = self._run(name, title, stop_at=self._script.stop_after)
        if end.code:
            raise ProofError(
                f"the script fails on its own, with exit code {end.code} after step {end.steps};"
                " make it run to its end (or give --stop-after STEP; --link PATH for what it"
                f" reads outside of this folder, as ../data). The end of its output:\n{end.tail}"
            )
        if end.steps < _FEWEST:
            few = f"only {end.steps} steps" if end.steps else "no step"
            raise ProofError(
                f"{few} of an optimizer of torch: {_FEWEST} are needed. Perhaps it found"
                " training complete, from a checkpoint in this folder (--leave-out NAME) or at an"
                " absolute path; or it starts its processes itself: give the script, and --nproc N,"
                f" instead. The end of its output:\n{end.tail}"
            )
        if len(end.gang) > 1 and all(story.world == 1 for story in end.gang):
            raise ProofError(
                "each process trained by itself: none joined a process group"
                " (torch.distributed.init_process_group), so all do the same work; leave --nproc"
                " out"
            )
        return end.gang

    def _killed(self, undisturbed: Gang, kill: int) -> Gang:
        """Run up to the kill. Refuse a run that did not begin as the first, or ended before."""
        self._source.fill(self._copies)
        end = self._run("killed", f"2/3 to be killed after step {kill}", stop_at=kill)
        first = end.gang[0].steps[0].weights if end.steps else ""
        steps = undisturbed[0].steps
        later = [i for i, step in enumerate(steps) if step.after == first]
        if (first and first != steps[0].weights and later) or not (end.steps or end.code):
            after = f"with the weights of step {later[-1] + 1}" if later else "at the end"
            raise ProofError(
                f"the second run began {after} of the first: the script keeps its checkpoints"
                " outside of its working directory, of which each run here gets a fresh copy. Give"
                " it a relative path for them, such as --output_dir checkpoints, and try again"
            )
        if end.code is not None:
            raise ProofError(
                f"the second run exited on its own (exit code {end.code}) after step {end.steps},"
                f" before it could be killed after step {kill}: the first took"
                f" {steps_made(undisturbed)} steps. Seed what decides its end, or try"
                f" --kill-after. The end of its output:\n{end.tail}"
            )
        return end.gang

    def _started_again(
        self, undisturbed: Gang, killed: Gang, words: Sequence[str]
    ) -> tuple[cause.Runs, str]:
        """Start the killed run again, in its folder, until it ends or is as far as the first."""
        stop_after: int | None = self._script.stop_after
        place: list[int] = []

        def enough(gang: Gang) -> bool:
            if stop_after is None or not steps_made(gang):
                return False
            if not place:
                place.append(cause.resumed_after(undisturbed, killed, gang))
            return place[0] + steps_made(gang) >= stop_after

        title = f"3/3 killed after step {steps_made(killed)}, started again"
        end = self._run("resumed", title, more=words, enough=enough)
        recorded = cause.Runs(
            undisturbed, killed, end.gang, kept=bool(samples.saved_after(killed[0])),
            code=end.code or 0, whole=stop_after is None, silent=end.silent,
            torn=bool(end.code and _TORN.search(end.tail)),
        )  # fmt: skip
        return recorded, end.tail if end.code or end.silent else ""

    def _run(
        self, name: str, title: str, *, stop_at: int | None = None, more: Sequence[str] = (),
        enough: Callable[[Gang], bool] = lambda gang: False,
    ) -> End:  # fmt: skip
        """Run the script until it ends, stops at a step, has done ``enough``, or does nothing."""
        out = self._folder / name
        out.mkdir()
        base = {"PYTHONUNBUFFERED": "1", **os.environ}
        snapshots = self._work / ".ddpjob-snapshots"  # of scripts with our library
        run = Run(
            self._command(out, stop_at, more), environment(base, snapshots),
            out.with_suffix(".log"), str(self._work),
        )  # fmt: skip
        steps, silent = Steps(out), False
        seen, since, first = -1, time.monotonic(), 0.0
        run.start()
        try:
            while run.running():
                gang = steps.look()
                self._show(title, steps_made(gang))
                now, counts = time.monotonic(), [len(story.steps) for story in gang]
                if sum(counts) != seen:
                    seen, since = sum(counts), now
                silent = now - since > self._script.patience
                there = sum(count >= stop_at for count in counts) if stop_at else 0
                first = first or (now if there else 0.0)
                together = there >= (self._script.nproc or len(counts))
                waited = now - first > _TOGETHER_SECONDS
                if silent or enough(gang) or (there and (together or waited)):
                    break
                time.sleep(LOOK_SECONDS)
            code = run.exit_code
        finally:
            run.end()
        end = End(steps.look(), code, silent, run.tail())
        if silent and name != "resumed":
            where = f"after step {end.steps}" if end.steps else "without a first step"
            raise ProofError(
                f"nothing happened for {self._script.patience:g} s, {where}: --patience SECONDS"
                f" allows more. The end of its output:\n{end.tail}"
            )
        return end

    def _command(self, out: Path, stop_at: int | None, more: Sequence[str]) -> list[str]:
        script, here = self._script, self._source.folder
        program = script.program
        if not script.module:
            path = (here / program).resolve()
            inside = path.is_relative_to(here)
            program = str(self._work / path.relative_to(here) if inside else path)
        order = {
            "out": str(out), "watch": str(self._work), "stop_at": stop_at,
            "module": script.module, "shown": script.program, "seed": script.seed,
        }  # fmt: skip
        words = ["-m", _PROBE, json.dumps(order), program, *script.arguments, *more]
        if script.nproc is None:
            return [sys.executable, *words]
        once = ("--spares", "0", "--max-rounds-without-progress", "0")
        return launcher(script.nproc, *once, *words)

    # --- What the script is given, and what it names --------------------------------------

    def _named(self) -> list[str]:
        """Return what --resume-args name that is there now, after a whole run."""
        values = (word.partition("=")[2] or word for word in self._script.resume_words)
        return [value for value in values if (self._work / value).exists()]

    def _resume_words(self, killed: Gang, named: Sequence[str]) -> tuple[str, ...]:
        """Return the arguments of the start after the kill. Raises ConfigError."""
        when, work = self._script.resume_when, self._work
        there = workdir.matching_checkpoints(when, work) if when else []
        *_, found = there[0] if there else ("",)
        missing = [one for one in named if not (work / one).exists()]
        if missing or (when and not found):
            what = f"--resume-args: {missing[0]}" if missing else f"--resume-when {when}"
            files = {path for step in killed[0].steps for path in step.files}
            kept = sorted(path for path in files if (work / path).exists())
            raise ConfigError(
                f"{what}: not there after the kill at step {steps_made(killed)}; the script has"
                f" written {samples.named(kept[::-1]) or 'nothing'}. Take --kill-after STEP, later,"
                f" or {NEWEST} in --resume-args and --resume-when GLOB, the checkpoints of which it"
                " stands for the newest"
            )
        return tuple(word.replace(NEWEST, found) for word in self._script.resume_words)


def _hangs_on_chance(verdict: cause.Verdict) -> bool:
    """Return whether another undisturbed run decides; how many steps it makes it always does."""
    kinds = () if verdict.not_repeated else _PERHAPS_CHANCE
    return any(
        one.kind in ("length", *kinds) or (kinds and one.facts.get("place") == "unknown")
        for one in verdict.findings
    )
