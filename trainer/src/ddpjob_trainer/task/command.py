"""The command line of the task runner, for `ddpjob-trainer task` and for each process of it.

`ddpjob-trainer task` takes the launcher's options and the task's, in any order, and starts
`python -m ddpjob_trainer.task` with the task's. Never imports torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field
from pathlib import Path
from typing import Any

from ddpjob_trainer.options import (
    ModelOptions,
    Options,
    Reporting,
    RunnerOptions,
    SnapshotOptions,
)

MODULE = "ddpjob_trainer.task"

_DESCRIPTION = """\
Train what a file describes, without a loop of your own. TASK.py defines

  build_model()                              required: a torch.nn.Module
  build_dataset()                            required: a map-style dataset
  loss(model, batch)                         required: the mean loss of a batch
  build_optimizer(model)                     default: AdamW with --lr
  build_scheduler(optimizer, total_steps)    default: none
  before_update(named_parameters)            see prepare(before_update=...)
  collate(samples)                           default: torch's default_collate
  build_eval_dataset(), evaluate(model, batch)   both or none; evaluate returns a sum over the
                                             batch, printed as the mean over the dataset

Everything after -- is left to TASK.py in sys.argv.
"""

_EPILOG = """\
examples:
  ddpjob-trainer task --nproc 3 task.py --total-steps 2000 --global-batch 96
  ddpjob-trainer task task.py --total-steps 2000 --global-batch 96     in a DDPJob
  ddpjob-trainer task task.py --total-steps 9 --global-batch 6 -- --width 64
  torchrun --nproc-per-node 3 -m ddpjob_trainer.task task.py --total-steps 9 --global-batch 6
"""

#: Arguments of start() and of prepare() that are options here, under the same names.
START = [*Options.offered(), *SnapshotOptions.offered(), *Reporting.offered()]
PREPARE = list(ModelOptions.offered())
OWN = list(RunnerOptions.offered())
_ARGPARSE = ("help", "choices", "metavar", "required")
_TYPES = {"int": int, "float": float}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _described(option: Field[Any]) -> dict[str, Any]:
    """An option as argparse wants it. One that is not given is None: start() has the defaults."""
    about = {name: value for name, value in option.metadata.items() if name in _ARGPARSE}
    kind = str(option.type).partition(" ")[0]
    if option.default is MISSING:
        about["required"] = True
    elif option.default is not None and not isinstance(option.default, bool | tuple):
        about["help"] += f" (default: {option.default})"
    if kind == "bool" and "metavar" not in about:
        return about | {"action": "store_true", "default": None}
    return about | ({"type": _TYPES[kind]} if kind in _TYPES else {})


def _add_options(parser: argparse.ArgumentParser) -> None:
    groups: dict[str, dict[str, dict[str, Any]]] = {
        "training": {option.name: _described(option) for option in START},
        "model": {option.name: _described(option) for option in PREPARE},
        "runner": {option.name: _described(option) for option in OWN},
    }
    for title, options in groups.items():
        group = parser.add_argument_group(title)
        for name, about in options.items():
            # argparse's own metavar would be the name again.
            value = {"metavar": "N" if about["type"] is int else "X"} if "type" in about else {}
            group.add_argument(_flag(name), **value | about)
    parser.add_argument("task", type=Path, metavar="TASK.py", help="a Python file, see above")


def add(commands: Any, add_launcher: Callable[[argparse.ArgumentParser], None]) -> None:
    """Describe `ddpjob-trainer task` to argparse."""
    parser = commands.add_parser(
        "task",
        help="train what a file describes, without a loop of your own",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_launcher(parser)
    _add_options(parser)


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return what comes before the first -- and what comes after it."""
    if "--" not in arguments:
        return list(arguments), []
    at = list(arguments).index("--")
    return list(arguments[:at]), list(arguments[at + 1 :])


def parse_worker(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line of one process; ``arguments`` holds what the task file gets."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_options(parser)
    ours, rest = split(arguments)
    options = parser.parse_args(ours)
    options.arguments = rest
    return options


def worker_arguments(options: argparse.Namespace, rest: Sequence[str]) -> list[str]:
    """Return the command line that gives one process the same options."""
    words = [str(options.task)]
    for name in [option.name for option in (*START, *PREPARE, *OWN)]:
        value = getattr(options, name)
        if value is True:
            words.append(_flag(name))
        elif value is not None:
            words.append(f"{_flag(name)}={value}")
    return [*words, "--", *rest] if rest else words
