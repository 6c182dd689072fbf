"""`python -m ddpjob_trainer.task task.py ...`: one training process; also what torchrun starts."""

from __future__ import annotations

import sys

from ddpjob_trainer.contract import ExitCode
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.task.command import parse_worker
from ddpjob_trainer.task.runner import load, train

if __name__ == "__main__":
    options = parse_worker(sys.argv[1:])
    try:
        task = load(options.task, options.arguments)
    except ConfigError as error:
        print(f"ddpjob: {error}", file=sys.stderr)
        sys.exit(ExitCode.BAD_CONFIG)
    train(task, options)
