"""Open what run.steps() was given: the loop's way from a dataset to this rank's batches.

A map-style dataset is read position by position, here or by workers (fetch.py). A
DataLoader over one is taken apart and read in the same way, so that its order and random numbers
are those of the run. Everything else that can be iterated is a stream (stream.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, default_collate

from ddpjob_trainer.arguments import Arguments
from ddpjob_trainer.data import fetch
from ddpjob_trainer.data.fetch import Batches, BatchSettings, Fingerprint, Work, Workers
from ddpjob_trainer.data.generators import can_be_seeded, kept
from ddpjob_trainer.data.order import (
    DataOrder,
    Epochs,
    Indices,
    Plan,
    Sequential,
    Shuffled,
    Weighted,
    digest,
)
from ddpjob_trainer.data.stream import Stream
from ddpjob_trainer.data.user_samplers import Sampled, is_indexed_loader, options_of
from ddpjob_trainer.errors import ConfigError

_COMPARED = 3  # samples of the first step, which every rank makes


@dataclass(frozen=True, slots=True)
class InputOptions(Arguments):
    """Hold the options of run.steps(); None: the default."""

    workers: int | None = field(default=None, metadata={"most": 1024})
    prefetch: int | None = field(default=None, metadata={"least": 1})
    pin_memory: bool | None = None
    shuffle: bool | None = None
    sampler: Any = None
    weights: Any = None
    batched: bool | None = None
    generators: Any = None


def open_input(source: Any, options: InputOptions, settings: BatchSettings) -> Input:
    """Open a dataset or a stream. Raises ConfigError for one that cannot be read as asked for."""
    _check(options)
    if is_indexed_loader(source):
        return _taken_apart(source, options, settings)
    indexed = hasattr(source, "__getitem__") and hasattr(source, "__len__")
    if indexed and not isinstance(source, IterableDataset):
        pinned = settings.accelerator.queues and options.pin_memory is not False
        workers = {
            "num_workers": options.workers or 0, "prefetch_factor": options.prefetch or 2,
            "pin_memory": pinned,
        }  # fmt: skip
        return Indexed(source, options, settings, workers)
    if not hasattr(source, "__iter__"):
        fetch.check(source)
    _check_stream(source, options, settings)
    return Stream(source, settings, batched=options.batched, named=options.generators or ())


def _check(options: InputOptions) -> None:
    chosen = [n for n in ("shuffle", "sampler", "weights") if getattr(options, n) is not None]
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(chosen)} each decide the order: give one of them")
    named = () if options.generators is None else options.generators
    if not isinstance(named, list | tuple) or not all(map(can_be_seeded, named)):
        raise ConfigError(
            "generators must be a list of generators of torch, numpy or random, or of objects with"
            " reseed(seed)"
        )


def _taken_apart(
    loader: DataLoader[Any], options: InputOptions, settings: BatchSettings
) -> Indexed:
    for name in ("workers", "prefetch", "pin_memory", "shuffle", "sampler", "weights"):
        if getattr(options, name) is not None:
            raise ConfigError(
                f"{name} is the {type(loader).__name__}'s own: set it there, or give run.steps()"
                " the dataset itself"
            )
    settings.check_batch_size(loader.batch_size)
    workers = {
        "num_workers": loader.num_workers, "prefetch_factor": loader.prefetch_factor or 2,
        "pin_memory": bool(loader.pin_memory) and settings.accelerator.queues,
        "worker_init_fn": loader.worker_init_fn, "timeout": loader.timeout,
        "multiprocessing_context": loader.multiprocessing_context,
    }  # fmt: skip
    collate: Any = loader.collate_fn
    if collate is not default_collate:
        settings = replace(settings, collate=collate)
    return Indexed(
        loader.dataset, replace(options, **options_of(loader.sampler)), settings, workers
    )


def _epochs(source: Any, options: InputOptions, seed: int) -> Epochs:
    length = len(source)
    if options.weights is not None:
        weighted = Weighted(seed, options.weights)
        if weighted.length != length:
            raise ConfigError(
                f"there are {weighted.length} weights for {length} samples: give one for each"
            )
        return weighted
    if options.sampler is not None:
        return Sampled(seed, options.sampler, length, options.generators or ())
    return Sequential(length) if options.shuffle is False else Shuffled(seed, length)


class Indexed:
    """Read a map-style dataset: every batch is a function of its positions in the run.

    Calls come in this order: ``own`` of each rank to compare(), start(), begin(), ``compared`` of
    each rank to compare_samples(), next() for each batch of a step, close().
    """

    stream = None

    def __init__(
        self, source: Any, options: InputOptions, settings: BatchSettings, workers: dict[str, Any]
    ) -> None:
        self._source = Batches(source, settings.collate, settings.seed, options.generators or ())
        if options.batched:
            raise ConfigError("batched=True is for streams: a map-style dataset yields samples")
        self.order = DataOrder(
            _epochs(source, options, settings.seed), settings.global_batch, settings.tail
        )
        self.draws = self._source.draws  # making a batch may move this process' generators
        subset = None if self._source.subset is None else digest(self._source.subset)
        self.own = self.fingerprint = {"length": len(source), "subset": subset}
        self.compared: list[list[float]] = []  # numbers of the samples that all ranks make
        self._compared_work: Work | None = None
        self._ranks = settings.ranks
        self._pinned = settings.accelerator.pinned
        self._options = workers
        self._workers: Workers | None = None

    def compare(self, every: Sequence[Fingerprint]) -> None:
        """Learn ``own`` of each rank. Raises ConfigError where that is another dataset."""
        for rank, theirs in enumerate(every):
            if what := fetch.dataset_difference(every[0], theirs):
                raise fetch.dataset_refusal(rank, what)

    def start(self) -> None:
        """Start the workers, which need not wait for the snapshot."""
        if self._options["num_workers"]:
            self._workers = Workers(self._source, **self._options)

    def begin(self, steps: range, plan: Plan, *, fresh: bool = False) -> None:
        """Order the batches of these steps, and the samples that ranks compare.

        A worker makes them where there are any: a file that the dataset opens at its first sample
        is not to be shared by a fork. ``fresh``: no snapshot was made with this data.
        """
        work: Iterator[Work] = (self._work(p) for step in steps for p in plan(step))
        if steps and self._ranks > 1:
            first = self._work(self.order.batch(steps.start)[:_COMPARED])
            self._compared_work = replace(first, compared=True)
            work = itertools.chain([self._compared_work], work)
        if self._workers is not None:
            self._workers.begin(work)
            if self._compared_work is not None:
                self.compared = self._workers.next()[1]
        elif self._compared_work is not None:
            with kept():
                self.compared = self._source.make(self._compared_work)

    def compare_samples(self, every: Sequence[Sequence[Sequence[float]]]) -> str:
        """Return a warning where ``compared`` of a rank is not rank 0's.

        Raises ConfigError for samples that no code of the script's has made.
        """
        if (found := fetch.first_unequal(every)) is None:
            return ""
        rank, place = found
        assert self._compared_work is not None, "begin() comes first"
        sample = f"sample {self._compared_work.samples[place]}"
        if self._source.is_quiet:
            raise fetch.dataset_refusal(rank, sample)
        return (
            f"warning: {sample} of {type(self._source.dataset).__name__} is not the same on ranks 0"
            f" and {rank}. If each rank was given a part of the data, some samples are trained on"
            " twice and others never: give every rank the whole dataset, run.steps() shares it"
            " out. If the sample draws from a generator that nobody seeds, no resume repeats it:"
            " name it in run.steps(dataset, generators=[...])"
        )

    def _work(self, positions: Indices) -> Work:
        return Work(self.order.samples(positions), positions)

    def next(self, step: int, number: int, positions: Indices) -> Any:
        """Return this rank's batch ``number`` of a step, on the CPU. Raises ConfigError."""
        begun = self.own["length"]
        if not step % self.order.steps_per_epoch and (now := len(self._source.dataset)) != begun:
            raise ConfigError(
                f"the dataset had {begun} samples at the start of run.steps() and has {now} in"
                f" epoch {self.epoch(step)}: steps are counted by epochs of one length. Keep its"
                " length, and choose samples by sampler=, a function of the epoch"
            )
        if self._workers is None:
            batch = self._source.make(self._work(positions))
            if self._options["pin_memory"]:
                batch = fetch.map_tensors(batch, self._pinned)
            return batch
        while True:
            first, batch = self._workers.next()
            if first == positions[0]:  # else one that the loop's body did not ask for
                return batch

    def epoch(self, step: int) -> int:
        """Return in which epoch a step lies, from 0."""
        return step // self.order.steps_per_epoch

    def close(self) -> None:
        """End the worker processes."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None


def _check_stream(source: Any, options: InputOptions, settings: BatchSettings) -> None:
    name = type(source).__name__
    for option in ("shuffle", "sampler", "weights"):
        if getattr(options, option) is not None:
            raise ConfigError(f"{option} is for map-style datasets: {name} has its own order")
    for option in ("workers", "prefetch", "pin_memory"):
        if getattr(options, option):
            raise ConfigError(
                f"{option} is for map-style datasets: {name} is read by this process. For worker"
                " processes give a DataLoader over it, with num_workers, best one that has"
                " state_dict() (torchdata's StatefulDataLoader)"
            )
    if settings.level == "elastic":
        raise ConfigError(
            f"level='elastic' cannot share out {name}, which each process reads for itself: use a"
            " map-style dataset, or level='resume'"
        )
    if settings.tail != "drop":
        raise ConfigError(
            f"tail={settings.tail!r} needs to know where an epoch of {name} ends: use tail='drop',"
            " or a map-style dataset"
        )


Input = Indexed | Stream
