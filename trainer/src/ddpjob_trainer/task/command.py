"""The command line of the task runner, for `ddpjob-trainer task` and for each process of it.

`ddpjob-trainer task` takes the launcher's options and the task's, in any order, and starts
`python -m ddpjob_trainer.task` with the task's. Never imports torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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
START: dict[str, dict[str, Any]] = {
    "total_steps": {"type": int, "required": True, "help": "optimizer steps of the whole run"},
    "global_batch": {"type": int, "required": True, "help": "samples per step, all processes"},
    "seed": {"type": int, "help": "of weights, data order, dropout (default: 0)"},
    "level": {"choices": ("off", "resume", "elastic"), "help": "bits kept over restarts"},
    "shards": {"type": int, "help": "parts of the global batch at level elastic (default: 8)"},
    "micro_batches": {"type": int, "help": "gradients accumulated per step (default: 1)"},
    "tail": {"choices": ("drop", "pad", "join"), "help": "an epoch's incomplete last batch"},
    "precision": {"choices": ("fp32", "bf16", "fp16"), "help": "of the forward (default: fp32)"},
    "nan_policy": {
        "choices": ("stop", "skip", "ignore"),
        "help": "at a loss or gradient that is not finite (default: stop)",
    },
    "check_every": {"type": int, "help": "steps between comparisons of the ranks (default: 100)"},
    "threads": {"type": int, "help": "torch's threads per process"},
    "log_every": {"type": int, "help": "steps between two lines of progress"},
    "snapshot_dir": {"metavar": "DIR", "help": "default: what the DDPJob says, else none"},
    "snapshot_every": {"type": int, "help": "steps between two snapshots (default: 50)"},
    "snapshot_keep": {"type": int, "help": "snapshots to keep (default: 3)"},
    "resume": {"metavar": "FILE", "help": "weights to begin with, if there is no snapshot yet"},
    "allow_changes": {"metavar": "NAMES", "help": "of global_batch,data,ema: may be changed"},
    "snapshot_upload": {"metavar": "URL", "help": "copy finished ones there, as s3://bucket/job"},
    "tensorboard_dir": {"metavar": "DIR", "help": "write there for TensorBoard"},
    "sinks": {"metavar": "NAMES", "help": "curves go to tensorboard,wandb,mlflow (default: none)"},
    "snapshot_staging": {
        "choices": ["auto", "inline", "thread"],
        "help": "copy the state between steps or beside them (default: auto)",
    },
}
PREPARE: dict[str, dict[str, Any]] = {
    "clip_grad_norm": {"type": float, "help": "bound of the norm of all gradients"},
    "ema": {"type": float, "metavar": "DECAY", "help": "moving average of the weights, as 0.999"},
    "compile": {"metavar": "BACKEND", "help": "torch.compile; inductor is PyTorch's default"},
    "sync_batchnorm": {"action": "store_true", "help": "BatchNorm over all processes (CUDA)"},
    "bucket_cap_mb": {"type": float, "help": "size of DDP's gradient buckets"},
    "gradient_as_bucket_view": {"action": "store_true", "help": "DDP's option"},
    "static_graph": {"action": "store_true", "help": "DDP's option"},
    "find_unused_parameters": {"action": "store_true", "help": "DDP's option"},
    "comm_hook": {"choices": ("bf16", "fp16"), "help": "how gradients travel"},
}
_OWN: dict[str, dict[str, Any]] = {
    "lr": {"type": float, "default": 1e-3, "help": "of the default optimizer (default: 0.001)"},
    "eval_every": {"type": int, "help": "evaluate every N steps, too (default: at the end only)"},
    "eval_batch": {"type": int, "default": 256, "help": "samples per evaluation batch (256)"},
}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _add_options(parser: argparse.ArgumentParser) -> None:
    for title, options in (("training", START), ("model", PREPARE), ("runner", _OWN)):
        group = parser.add_argument_group(title)
        for name, about in options.items():
            plain = "action" in about or "choices" in about or "metavar" in about
            more: dict[str, Any] = {}
            if not plain:
                more["metavar"] = "N" if about["type"] is int else "X"
            group.add_argument(_flag(name), **about, **more)
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
    for name, about in {**START, **PREPARE, **_OWN}.items():
        value = getattr(options, name)
        if about.get("action"):
            words += [_flag(name)] if value else []
        elif value is not None:
            words.append(f"{_flag(name)}={value}")
    return [*words, "--", *rest] if rest else words
