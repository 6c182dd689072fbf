"""Give the verbs their options, a folder for records, progress, and an exit code for each end."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ddpjob_contract import ExitCode
from ddpjob_tools.prove.run import ProofError
from ddpjob_trainer.arguments import MOST_PROCESSES, real, whole
from ddpjob_trainer.errors import ConfigError

#: Name and metavar; type, bool for a flag, list where it may be given again, or a tuple of choices;
#: default; help.
Option = tuple[str, Any, Any, str]
REQUIRED: Final = object()
_SHOWN_SECONDS: Final = 10.0
JSON: Final[Option] = ("--json FILE", Path, None, "write the result to FILE, for programs")


def of_program(patience: float) -> tuple[Option, ...]:
    """Return the options of a verb that runs a user's program."""
    return (
        ("--patience SECONDS", float, patience,
         f"give up after nothing happened for so long (default: {patience:g})"),
        ("--keep DIR", Path, None, "keep records and logs in DIR, which must be new or empty"),
        JSON,
    )  # fmt: skip


def add(
    commands: Any, name: str, summary: str, options: Sequence[Option],
    program: tuple[str, str] | None = None, **more: Any,
) -> argparse.ArgumentParser:  # fmt: skip
    """Describe a verb to argparse. ``program``: how a program that follows is called, and is."""
    form = argparse.RawDescriptionHelpFormatter
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, formatter_class=form, **more
    )
    for words, kind, default, about in options:
        option, _, metavar = words.partition(" ")
        given: dict[str, Any] = {"help": about}
        given |= {"required": True} if default is REQUIRED else {"default": default}
        if kind is bool:
            given["action"] = "store_true"
        elif isinstance(kind, tuple):
            given["choices"] = kind
        else:
            given |= {"action": "append"} if kind is list else {"type": kind}
            given["metavar"] = metavar
        parser.add_argument(option, **given)
    if program is not None:
        what, about = program
        parser.add_argument(  # as Python has it
            "-m", "--module", action="store_true", help=f"{what} is a Python module"
        )
        parser.add_argument("program", metavar=what, help=about)
        parser.add_argument(
            "arguments", nargs=argparse.REMAINDER, metavar="...", help=f"for {what}"
        )
    return parser


def with_processes(options: argparse.Namespace) -> argparse.Namespace:
    """Return options whose number of processes can be. Raises ConfigError."""
    if options.nproc is not None:
        whole("--nproc", options.nproc, least=1, most=MOST_PROCESSES)
    return options


def check(options: argparse.Namespace) -> None:
    """Refuse what is wrong with the options of a verb that runs a program. Raises ConfigError."""
    with_processes(options)
    real("--patience", options.patience)
    keep = options.keep
    if keep is not None and keep.exists() and not (keep.is_dir() and not any(keep.iterdir())):
        raise ConfigError(f"--keep {keep} is not empty: choose a new directory")


def ended(name: str, action: Callable[[], int], *, unproved: int = 1) -> int:
    """Return what an action returns, or the exit code of the exception that ends it.

    ``unproved``: the code of a ProofError.
    """
    try:
        return action()
    except ConfigError as error:
        say(name, str(error))
        return ExitCode.BAD_CONFIG
    except OSError as error:
        say(name, f"{error.filename}: {error.strerror}" if error.filename else str(error))
        return ExitCode.BAD_CONFIG
    except ProofError as error:
        say(name, str(error))
        return unproved
    except KeyboardInterrupt:
        say(name, "interrupted")
        return 128 + signal.SIGINT


def run(
    name: str,
    options: argparse.Namespace,
    prepare: Callable[[argparse.Namespace], argparse.Namespace],
    body: Callable[[argparse.Namespace, Path], int],
    *,
    unproved: int = 1,
    evidence: Collection[int] = (),
) -> int:
    """Run a verb in a new folder; return its exit code.

    ``prepare`` raises ConfigError before there is a folder. The folder stays where --keep names it,
    or where the code is one of ``evidence``.
    """
    keep: Path | None = getattr(options, "keep", None)
    code, folder = -1, None

    def action() -> int:
        nonlocal folder
        settings = prepare(options)
        folder = (keep or Path(tempfile.mkdtemp(prefix=f"ddpjob-{name}-"))).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        return body(settings, folder)

    try:
        code = ended(name, action, unproved=unproved)
    finally:
        if folder is not None and (keep or code in evidence):
            say(name, f"records and logs are in {folder}")
        elif folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    return code


class Progress:
    """Shows what a verb does, and at which step: a line for each run, and one now and then."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._shown, self._at = ("", 0), 0.0

    def __call__(self, title: str, step: int) -> None:
        """Show a step of a run."""
        now = time.monotonic()
        if title == self._shown[0] and (step == self._shown[1] or now - self._at < _SHOWN_SECONDS):
            return
        say(self._name, f"{title}: step {step}" if step else title)
        self._shown, self._at = (title, step), now


def say(name: str, text: str) -> None:
    """Print a line beside the report."""
    print(f"{name}: {text}", file=sys.stderr, flush=True)


def write(path: Path | None, result: Mapping[str, Any]) -> None:
    """Write the result for programs, where --json asks for it."""
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n")
