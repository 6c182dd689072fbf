"""Parse and run the command `ddpjob-trainer audit`."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ddpjob_contract import ExitCode
from ddpjob_tools.audit import report
from ddpjob_tools.audit.experiment import Result, Settings, audit
from ddpjob_tools.audit.runs import AuditError, Script
from ddpjob_tools.prove import cause
from ddpjob_tools.prove.folder import Source
from ddpjob_trainer.arguments import (
    MOST_PROCESSES,
    check_notebook,
    check_resume,
    real,
    resume_words,
    whole,
)
from ddpjob_trainer.errors import ConfigError

_DESCRIPTION = """\
Does training go on rightly after a kill? Run any script undisturbed, then kill it and start it
again, and name the first step that differs, and what does: samples repeated or left out, random
numbers, optimizer, scheduler, nothing loaded at all; with the cure in the framework's own words.

The script needs no change, no cluster and not this library: Lightning, accelerate, transformers'
Trainer or a loop of one's own. It must save checkpoints below its working directory, of which each
run gets a fresh copy; the directory itself stays as it is.
"""

_EPILOG = """\
examples:
  ddpjob-trainer audit -- train.py --lr 0.1
  ddpjob-trainer audit --nproc 3 -- train.py              as torchrun --nproc-per-node 3 train.py
  ddpjob-trainer audit --resume-args "--resume {newest}" --resume-when "out/*.pt" -- train.py
  ddpjob-trainer audit --stop-after 500 -- -m package.train    a long run: its first 500 steps
  ddpjob-trainer audit --link data --leave-out runs -- train.py

exit code: 0 it goes on rightly, 1 it does not, 3 not to be judged (it fails by itself, makes no
step, does not repeat itself), 64 not possible as asked
"""
_NOT_JUDGED = 3
_SHOWN_SECONDS = 10.0  # where there is no terminal


def add(commands: Any) -> None:
    """Describe the command to argparse."""
    parser = commands.add_parser(
        "audit",
        help="find out whether any script goes on rightly after a kill, and what is wrong",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # the script's --resume is not our --resume-args
    )
    step = {"type": int, "metavar": "STEP"}
    parser.add_argument(
        "--nproc", type=int, metavar="N",
        help="processes, started as torchrun does (default: one, as `python` does)",
    )  # fmt: skip
    parser.add_argument(
        "--resume-args", default="", metavar="WORDS",
        help="more arguments when it is started again, as '--resume last.pt' (default: none)",
    )  # fmt: skip
    parser.add_argument(
        "--resume-when", default="", metavar="GLOB",
        help="checkpoints, as 'out/*.pt': {newest} in --resume-args stands for the newest",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=int, metavar="N",
        help="seed torch, random and numpy at each start, of a script that does not",
    )  # fmt: skip
    parser.add_argument(
        "--kill-after", **step, help="default: within an epoch after the first, past a checkpoint"
    )
    parser.add_argument("--stop-after", **step, help="end each run there (default: at its end)")
    parser.add_argument(
        "--patience", type=float, default=300.0, metavar="SECONDS",
        help="give up when no step is made for so long (default: 300)",
    )  # fmt: skip
    parser.add_argument(
        "--link", action="append", default=[], metavar="NAME",
        help="a file or folder that is only read, such as data or ../data: linked into the copies",
    )  # fmt: skip
    parser.add_argument(
        "--leave-out", action="append", default=[], metavar="NAME",
        help="a file or folder that no run should see, such as earlier checkpoints",
    )  # fmt: skip
    parser.add_argument(
        "--keep", type=Path, metavar="DIR",
        help="keep records and logs in DIR, which must be new or empty",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to FILE too")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a Python module")
    parser.add_argument("script", metavar="SCRIPT", help="a Python script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="for SCRIPT")


def main(options: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    code: int = ExitCode.BAD_CONFIG
    directory = None
    try:
        settings = _settings(options)
        directory = settings.directory
        code = _run(settings, options)
    except ConfigError as error:
        _say(str(error))
    except AuditError as error:
        _say(str(error))
        code = _NOT_JUDGED
    except KeyboardInterrupt:
        _say("interrupted")
        code = 128 + signal.SIGINT
    finally:
        if directory is not None:
            if options.keep is None:
                shutil.rmtree(directory, ignore_errors=True)
            else:
                shutil.rmtree(directory / "work", ignore_errors=True)
                _say(f"records and logs are in {directory}")
    return code


def _settings(options: argparse.Namespace) -> Settings:
    words = [options.script, *options.arguments]
    module = options.module
    if not module and Path(words[0]).name.startswith("python") and len(words) > 1:
        words = words[1:]  # python train.py
    if not module and words[0] == "-m" and len(words) > 1:
        module, words = True, words[1:]
    _check(options, words[0], module)
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    directory = options.keep or Path(tempfile.mkdtemp(prefix="ddpjob-audit-"))
    script = Script(
        words[0], tuple(words[1:]), module, options.nproc, Path.cwd(), os.environ,
        options.patience, options.seed,
    )  # fmt: skip
    return Settings(
        script, _source(options), directory.resolve(), resume_words(options.resume_args),
        options.resume_when, options.kill_after, options.stop_after,
    )  # fmt: skip


def _source(options: argparse.Namespace) -> Source:
    return Source(Path.cwd(), tuple(options.leave_out), tuple(options.link))


def _check(options: argparse.Namespace, script: str, module: bool) -> None:
    if options.nproc is not None:
        whole("--nproc", options.nproc, least=1, most=MOST_PROCESSES)
    for name in ("kill_after", "stop_after"):
        if getattr(options, name) is not None:
            whole(f"--{name.replace('_', '-')}", getattr(options, name), least=1)
    if options.kill_after and options.stop_after and options.kill_after >= options.stop_after:
        raise ConfigError("--kill-after must be less than --stop-after: nothing would follow it")
    real("--patience", options.patience)
    check_resume(resume_words(options.resume_args), options.resume_when)
    if options.seed is not None:
        whole("--seed", options.seed, most=2**32 - 1)  # numpy's bound
    _source(options).check()
    if not module:
        check_notebook(Path(script))
        if Path(script).name in ("torchrun", "accelerate", "lightning", "deepspeed"):
            raise ConfigError(
                f"{script} starts processes that audit does not see: give the script itself, and"
                " --nproc N, as in: ddpjob-trainer audit --nproc 2 -- train.py"
            )
        if not Path(script).is_file():
            raise ConfigError(f"{script}: no such script")
    if (
        options.keep is not None
        and options.keep.exists()
        and (not options.keep.is_dir() or any(options.keep.iterdir()))
    ):
        raise ConfigError(f"--keep {options.keep} is not empty: choose a new directory")


def _run(settings: Settings, options: argparse.Namespace) -> int:
    result = audit(settings, _Progress())
    print(flush=True)
    for line in report.lines(result, shlex.join([settings.script.program])):
        print(line, flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(report.as_json(result), indent=1) + "\n")
    return _code(result)


def _code(result: Result) -> int:
    label = result.verdict.label
    return {cause.RIGHT: 0, cause.ROUNDING: 0, cause.WRONG: 1}.get(label, _NOT_JUDGED)


class _Progress:
    """Show what runs, and at which step: one line that changes, or one now and then."""

    def __init__(self) -> None:
        self._title = ""
        self._at = 0.0
        self._step = -1
        self._live = sys.stderr.isatty()

    def __call__(self, title: str, step: int) -> None:
        """Show a step of a run."""
        now = time.monotonic()
        new = title != self._title
        if not new and (step == self._step or now - self._at < (0.2 if self._live else
                                                                 _SHOWN_SECONDS)):  # fmt: skip
            return
        if self._live:
            begin = "\n" if new and self._title else "\r"
            sys.stderr.write(f"{begin}audit: {title}: step {step}")
            sys.stderr.flush()
        else:
            _say(f"{title}: step {step}" if step else title)
        self._title, self._at, self._step = title, now, step


def _say(text: str) -> None:
    print(f"audit: {text}", file=sys.stderr, flush=True)
