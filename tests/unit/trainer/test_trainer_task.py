"""The task runner's command line: every option reaches start() or prepare() under its name."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields

import pytest

import ddpjob_trainer as ddp
from ddpjob_trainer.cli import _parser
from ddpjob_trainer.options import ModelOptions, Options, Reporting, SnapshotOptions
from ddpjob_trainer.task.command import PREPARE, START, parse_worker, split, worker_arguments
from ddpjob_trainer.task.runner import train

#: What a file of functions gives, or a command line cannot.
_OBJECTS = {"self", "model", "optimizer", "scheduler", "before_update"}
_NOT_OPTIONS = {*_OBJECTS, "collate", "grad_scaler", "comm_hook_options", "events", "epochs"}


@pytest.mark.parametrize(
    ("function", "declared", "offered"),
    [
        (ddp.start, (Options, SnapshotOptions, Reporting), START),
        (ddp.Run.prepare, (ModelOptions,), PREPARE),
    ],
)
def test_every_option_is_declared_once(function, declared, offered):  # type: ignore[no-untyped-def]
    """In options.py; what start() and prepare() show in their signatures says the same."""
    options = {option.name: option for kind in declared for option in fields(kind)}
    parameters = inspect.signature(function).parameters
    assert parameters.keys() - _OBJECTS == options.keys()
    assert parameters.keys() - _NOT_OPTIONS == {option.name for option in offered}
    for name, option in options.items():
        shown = parameters[name]
        if option.default is MISSING:
            assert shown.default is inspect.Parameter.empty, name
        elif shown.default is not None:  # None: the environment decides
            assert shown.default == option.default, name
        paths_and_names = "Path" in option.type or "Several" in option.type
        if not paths_and_names and name not in ("level", "threads"):
            assert shown.annotation == option.type, name


def test_the_help_tells_types_and_defaults(capsys):  # type: ignore[no-untyped-def]
    with pytest.raises(SystemExit):
        parse_worker(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--seed N of weights, data order, dropout (default: 0)" in text
    assert "--tail {drop,pad,join} an epoch's incomplete last batch (default: drop)" in text
    assert "--clip-grad-norm X bound of the norm" in text
    assert "--static-graph DDP's option --find" in text


def test_a_process_gets_what_the_launcher_was_given():  # type: ignore[no-untyped-def]
    words = ["task", "--nproc", "3", "--total-steps", "9", "t.py", "--global-batch", "6", "--ema",
             "0.9", "--static-graph", "--comm-hook", "bf16", "--", "--width", "-1"]  # fmt: skip
    ours, rest = split(words)
    given = _parser().parse_args(ours)
    assert given.nproc == 3
    options = parse_worker(worker_arguments(given, rest))
    assert (options.total_steps, options.global_batch, options.ema) == (9, 6, 0.9)
    assert (options.static_graph, options.comm_hook) == (True, "bf16")
    assert options.sync_batchnorm is None
    assert (str(options.task), options.arguments) == ("t.py", ["--width", "-1"])
    assert options.level is None  # start()'s default, not one of ours


def test_an_evaluation_that_cannot_be_is_refused_before_training(monkeypatch):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(ddp, "start", lambda **_: None)
    words = ["task.py", "--total-steps=1", "--global-batch=1", "--eval-batch=0"]
    with pytest.raises(ddp.ConfigError, match="eval_batch=0 must be at least 1"):
        train(None, parse_worker(words))
