"""One process of the task runner: the functions of a task file in a loop on the public API."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import Field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import ddpjob_trainer as ddp
from ddpjob_trainer.options import RunnerOptions
from ddpjob_trainer.task.command import OWN, PREPARE, START

_REQUIRED = ("build_model", "build_dataset", "loss")
_NAME = "ddpjob_task"  # in sys.modules: the file's own name might be that of a library


def load(path: Path, arguments: Sequence[str]) -> ModuleType:
    """Run a task file as `python task.py` would, with these arguments. Raises ConfigError."""
    spec = importlib.util.spec_from_file_location(_NAME, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ddp.ConfigError(f"{path}: no such task file (a Python file, *.py)")
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    task = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = task
    spec.loader.exec_module(task)
    missing = [name for name in _REQUIRED if not callable(getattr(task, name, None))]
    if missing:
        raise ddp.ConfigError(f"{path} must define {'(), '.join(missing)}()")
    if hasattr(task, "evaluate") != hasattr(task, "build_eval_dataset"):
        raise ddp.ConfigError(
            f"{path} must define both evaluate() and build_eval_dataset(), or none"
        )
    return task


def train(task: Any, options: argparse.Namespace) -> None:
    """Train to the last step; rank 0 prints the evaluation and the weights' hash."""
    run = ddp.start(collate=getattr(task, "collate", None), **_given(options, START))
    own = RunnerOptions.among(RunnerOptions.defaults() | _given(options, OWN))
    model = task.build_model()
    optimizer = _optimizer(task, model, own.lr)
    scheduler = None
    if hasattr(task, "build_scheduler"):
        scheduler = task.build_scheduler(optimizer, options.total_steps)
    hook = getattr(task, "before_update", None)
    wrapped, _ = run.prepare(
        model, optimizer, scheduler=scheduler, before_update=hook, **_given(options, PREPARE)
    )
    eval_set = task.build_eval_dataset() if hasattr(task, "evaluate") else None
    for step in run.steps(task.build_dataset(), workers=own.workers):
        for batch in step.batches:
            step.backward(task.loss(wrapped, batch))
        step.commit()
        done = step.index + 1
        if own.eval_every and done % own.eval_every == 0 and done < options.total_steps:
            _evaluate(run, task, eval_set, own, ema=options.ema is not None)
    _evaluate(run, task, eval_set, own, ema=options.ema is not None)
    if run.is_main:
        print(f"weights_sha256={run.weights_sha256()}", flush=True)
    run.finish()


def _given(options: argparse.Namespace, offered: Sequence[Field[Any]]) -> dict[str, Any]:
    values = {option.name: getattr(options, option.name) for option in offered}
    return {name: value for name, value in values.items() if value is not None}


def _optimizer(task: Any, model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
    if hasattr(task, "build_optimizer"):
        optimizer: torch.optim.Optimizer = task.build_optimizer(model)
        return optimizer
    return torch.optim.AdamW(model.parameters(), lr=lr)


def _evaluate(run: ddp.Run, task: Any, dataset: Any, own: RunnerOptions, *, ema: bool) -> None:
    if dataset is None:
        return
    total = run.evaluate(
        dataset,
        task.evaluate,
        batch_size=own.eval_batch,
        ema=ema,
        workers=own.workers or 0,
    )
    if run.is_main:
        print(f"step={run.finished_steps} evaluation={total / len(dataset):.4f}", flush=True)
