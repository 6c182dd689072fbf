"""Evaluate: every sample once, shared among the ranks, and training is as it was before."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ddpjob_trainer.arguments import Arguments, function
from ddpjob_trainer.comm.world import World
from ddpjob_trainer.data import fetch, generators
from ddpjob_trainer.data.fetch import Workers
from ddpjob_trainer.data.order import Indices
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.state import stateful

#: Of a model and a batch: one number, or several by name.
Metric = Callable[[torch.nn.Module, Any], torch.Tensor | float]
Metrics = Callable[[torch.nn.Module, Any], Mapping[str, torch.Tensor | float]]
REDUCTIONS = ("sum", "mean")
_SOLE = ""  # the name of a metric that is one number


@contextlib.contextmanager
def evaluating(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the module in eval mode, without gradients; put modes and generators back.

    Gradients, too: a metric may take others, which the next update must not find.
    """
    modes = [(part, part.training) for part in module.modules()]  # some may be frozen
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    module.eval()
    try:
        with torch.no_grad(), generators.kept():
            yield module
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for part, training in modes:
            part.training = training


def share_buffers(
    module: torch.nn.Module, world: World, others: Iterable[torch.Tensor] = ()
) -> None:
    """Give every rank rank 0's buffers: each rank's BatchNorm has seen other samples.

    ``others``: those that are not persistent, and on which all ranks agree.
    """
    for buffer in (*(buffer for _, buffer in stateful.persistent_buffers(module)), *others):
        # .data: a graph that waits for its backward checks the version of what it has saved.
        world.broadcast_tensor(buffer.data)


#: Of metrics over batches: sums by name, and how many samples there were.
Sums = tuple[dict[str, float], int]


def _numbers(found: Any) -> dict[str, float]:
    """Return a batch's metrics by name. Raises ConfigError for what is no number."""
    numbers = {}
    for name, value in (found if isinstance(found, Mapping) else {_SOLE: found}).items():
        try:
            numbers[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"evaluate(): the metric {name or type(value).__name__!r} must be a number or a"
                f" tensor of one element ({error})"
            ) from error
    return numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationOptions(Arguments):
    """Of run.evaluate()."""

    batch_size: int = field(metadata={"least": 1})
    collate: fetch.Collate | None
    reduce: str = field(metadata={"choices": REDUCTIONS})
    ema: bool
    workers: int = field(metadata={"most": 1024})


def check(given: Mapping[str, Any]) -> EvaluationOptions:
    """Return what run.evaluate() was given. Raises ConfigError before a rank waits for another."""
    fetch.check(given["dataset"])
    if not len(given["dataset"]):
        raise ConfigError("evaluate(): the dataset is empty")
    function("metric", given["metric"])
    return EvaluationOptions.among(given)


def share_of_metric(
    module: torch.nn.Module,
    source: fetch.Batches,
    metric: Metric | Metrics,
    world: World,
    given: EvaluationOptions,
    alive: Callable[[], None],
) -> Sums:
    """Add the metric up over this rank's batches. ``alive`` is called for each.

    Whichever process makes a batch: random numbers drawn for it, and those drawn afterwards, depend
    on it only.
    """
    batch_size, mean = given.batch_size, given.reduce == "mean"
    sums: dict[str, float] = {}
    size = len(source.dataset)
    starts = range(world.rank * batch_size, size, world.size * batch_size)
    spans = [np.arange(start, min(start + batch_size, size)) for start in starts]
    for span, made in zip(
        spans, _made(source, spans, given.workers, pinned=world.accelerator.queues), strict=True
    ):
        alive()
        if source.draws:
            source.seed_after(span)
        batch = fetch.to_device(made, world.accelerator)
        for name, number in _numbers(metric(module, batch)).items():
            sums[name] = sums.get(name, 0.0) + number * (len(span) if mean else 1)
    return sums, sum(map(len, spans))


def _made(
    source: fetch.Batches, spans: Sequence[Indices], workers: int, *, pinned: bool
) -> Iterator[Any]:
    """Yield batches, made here or by processes that live as long as this."""
    work = (fetch.Work(span, span) for span in spans)
    if not workers or not spans:
        yield from map(source.make, work)
        return
    pool = Workers(source, num_workers=workers, pin_memory=pinned)
    try:
        pool.begin(work)
        for _ in spans:
            yield pool.next()[1]
    finally:
        pool.close()


def total(sums: Sums, world: World, *, mean: bool) -> float | dict[str, float]:
    """Add up over all ranks, in their order; a rank may have had no batch. Collective."""
    mine = json.dumps(sums).encode()
    gathered = [json.loads(blob) for blob in world.gather_bytes("run.evaluate()", mine)]
    samples = sum(count for _, count in gathered)
    found: dict[str, float] = {}
    for values, _ in gathered:
        for name, value in values.items():
            found[name] = found.get(name, 0.0) + value
    if mean:
        found = {name: value / samples for name, value in found.items()}
    if _SOLE not in found:
        return found
    if len(found) > 1:
        raise ConfigError("evaluate(): the metric gave one number for some batches, and a dict")
    return found[_SOLE]
