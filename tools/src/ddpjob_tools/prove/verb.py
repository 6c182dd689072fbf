"""Give the verbs their common options, a folder for records, and an exit code for each end."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ddpjob_contract import ExitCode
from ddpjob_tools.prove.run import ProofError
from ddpjob_trainer.arguments import MOST_PROCESSES, real, whole
from ddpjob_trainer.errors import ConfigError

Settings = TypeVar("Settings")
Options = Mapping[str, Mapping[str, Any]]

JSON: Options = {
    "--json": {"type": Path, "metavar": "FILE", "help": "write the result to FILE too"}
}


def of_program(what: str, about: str, patience: float) -> Options:
    """Return the options of a verb that runs a user's program."""
    return {
        "--patience": {
            "type": float, "default": patience, "metavar": "SECONDS",
            "help": f"give up when nothing happens for so long (default: {patience:g})",
        },
        "--keep": {
            "type": Path, "metavar": "DIR",
            "help": "keep records and logs in DIR, which must be new or empty",
        },
        **JSON,
        "-m": {"dest": "module", "action": "store_true", "help": f"{what} is a Python module"},
        "program": {"metavar": what, "help": about},
        "arguments": {"nargs": argparse.REMAINDER, "metavar": "...", "help": f"for {what}"},
    }  # fmt: skip


def add(commands: Any, name: str, summary: str, *, options: Options, **more: Any) -> None:
    """Describe a verb to argparse."""
    form = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser(name, help=summary, formatter_class=form, **more)
    for option, given in options.items():
        names = (option, "--module") if option == "-m" else (option,)
        parser.add_argument(*names, **given)


def check_processes(nproc: int | None) -> None:
    """Refuse a number of processes that cannot be. Raises ConfigError."""
    if nproc is not None:
        whole("--nproc", nproc, least=1, most=MOST_PROCESSES)


def check(options: argparse.Namespace) -> None:
    """Refuse what is wrong with the options of a verb that runs a program. Raises ConfigError."""
    check_processes(options.nproc)
    real("--patience", options.patience)
    keep = options.keep
    if keep is not None and keep.exists() and not (keep.is_dir() and not any(keep.iterdir())):
        raise ConfigError(f"--keep {keep} is not empty: choose a new directory")


def run(
    name: str,
    options: argparse.Namespace,
    prepare: Callable[[argparse.Namespace], Settings],
    body: Callable[[Settings, Path], int],
    *,
    unproved: int = 1,
    evidence: Collection[int] = (),
) -> int:
    """Run a verb in a new folder; return its exit code.

    ``prepare`` raises ConfigError before there is a folder. ``unproved``: the code of a ProofError.
    The folder stays where --keep names it, or where the code is one of ``evidence``.
    """
    code: int = ExitCode.BAD_CONFIG
    keep: Path | None = getattr(options, "keep", None)
    folder = None
    try:
        settings = prepare(options)
        folder = (keep or Path(tempfile.mkdtemp(prefix=f"ddpjob-{name}-"))).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        code = body(settings, folder)
    except ConfigError as error:
        say(name, str(error))
    except ProofError as error:
        say(name, str(error))
        code = unproved
    except KeyboardInterrupt:
        say(name, "interrupted")
        code = 128 + signal.SIGINT
    finally:
        if folder is not None and (keep or code in evidence):
            say(name, f"records and logs are in {folder}")
        elif folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    return code


def say(name: str, text: str) -> None:
    """Print a line beside the report."""
    print(f"{name}: {text}", file=sys.stderr, flush=True)


def write(path: Path | None, result: Mapping[str, Any]) -> None:
    """Write the result for programs, where --json asks for it."""
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n")
