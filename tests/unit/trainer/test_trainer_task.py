"""The task runner's command line: every option reaches start() or prepare() under its name."""

from __future__ import annotations

import inspect

import ddpjob_trainer as ddp
from ddpjob_trainer.cli import _parser
from ddpjob_trainer.task.command import PREPARE, START, parse_worker, split, worker_arguments

#: What a file of functions gives, or a command line cannot.
_NOT_OPTIONS = {"collate", "self", "model", "optimizer", "scheduler", "grad_scaler",
                "comm_hook_options", "events", "before_update"}  # fmt: skip


def test_the_options_are_the_arguments_of_start_and_prepare():  # type: ignore[no-untyped-def]
    for function, options in ((ddp.start, START), (ddp.Run.prepare, PREPARE)):
        names = set(inspect.signature(function).parameters) - _NOT_OPTIONS
        assert names == options.keys(), function.__name__


def test_a_process_gets_what_the_launcher_was_given():  # type: ignore[no-untyped-def]
    words = ["task", "--nproc", "3", "--total-steps", "9", "t.py", "--global-batch", "6", "--ema",
             "0.9", "--static-graph", "--comm-hook", "bf16", "--", "--width", "-1"]  # fmt: skip
    ours, rest = split(words)
    given = _parser().parse_args(ours)
    assert given.nproc == 3
    options = parse_worker(worker_arguments(given, rest))
    assert (options.total_steps, options.global_batch, options.ema) == (9, 6, 0.9)
    assert (options.static_graph, options.sync_batchnorm, options.comm_hook) == (
        True,
        False,
        "bf16",
    )
    assert (str(options.task), options.arguments) == ("t.py", ["--width", "-1"])
    assert options.level is None  # start()'s default, not one of ours
