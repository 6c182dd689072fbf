"""What run.steps() was given, and how a rank gets its batches from it.

A map-style dataset is read position by position, here or by workers. A DataLoader over one is
taken apart and read in the same way, so that its order and random numbers are those of the run.
Everything else that can be iterated is a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch.utils.data import IterableDataset

from ddpjob_trainer.accelerator import Accelerator
from ddpjob_trainer.arguments import Arguments
from ddpjob_trainer.data import dataset_fingerprint, fetch, own_generators, user_samplers
from ddpjob_trainer.data.dataset_fingerprint import Likeness
from ddpjob_trainer.data.fetch import Batches, Collate, Work
from ddpjob_trainer.data.order import DataOrder, Epochs, Indices, Sequential, Shuffled, Weighted
from ddpjob_trainer.data.stream import Endless, Say, Stream, yields_batches
from ddpjob_trainer.data.workers import WorkerOptions, Workers
from ddpjob_trainer.errors import ConfigError

#: Positions of each of this rank's batches of a step; a pure function.
Plan = Callable[[int], Sequence[Indices]]


@dataclass(frozen=True, slots=True)
class InputOptions(Arguments):
    """Of run.steps(); None: the default."""

    workers: int | None = field(default=None, metadata={"most": 1024})
    prefetch: int | None = field(default=None, metadata={"least": 1})
    pin_memory: bool | None = None
    shuffle: bool | None = None
    sampler: Any = None
    weights: Any = None
    batched: bool | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where the batches go: what of the run decides about them."""

    seed: int
    rank: int
    ranks: int
    global_batch: int
    parts: int  # batches of a step, over all ranks
    level: str
    tail: str
    collate: Collate | None
    accelerator: Accelerator
    say: Say
    alive: Callable[[], None]


class Input(Protocol):
    """One rank's batches. Calls come in this order; next() for each batch of a step."""

    order: DataOrder
    draws: bool  # making a batch may move this process' generators
    likeness: Likeness | None  # what must be equal on all ranks

    @property
    def stream(self) -> Stream | None:
        """What has a state to be kept."""
        ...

    @property
    def own(self) -> Any:
        """What the other ranks are to know of this one's, in what JSON holds."""
        ...

    def compare(self, every: Sequence[Any]) -> None:
        """Learn ``own`` of each rank. Raises ConfigError where that is another dataset."""
        ...

    def start(self) -> None:
        """Begin with what need not wait for the snapshot."""
        ...

    def begin(self, steps: range, plan: Plan, *, fresh: bool = False) -> None:
        """These steps are left to do; ``fresh``: the snapshot, if any, was made with other data.

        Raises ConfigError when the input cannot go on there.
        """
        ...

    def next(self, step: int, number: int, positions: Indices) -> Any:
        """Return batch ``number`` of this rank's in a step, on the CPU."""
        ...

    def epoch(self, step: int) -> int:
        """In which epoch a step begins, from 0."""
        ...

    def close(self) -> None:
        """End the worker processes."""
        ...


def open_input(source: Any, options: InputOptions, place: Place) -> Input:
    """Raises ConfigError for what cannot be read, or not in the way that was asked for."""
    _check(options)
    if user_samplers.is_indexed_loader(source):
        _refuse_for_loader(source, options)
        source, options, workers, collate = user_samplers.take_apart(source, options, place)
        return Indexed(source, options, replace(place, collate=collate), workers)
    indexed = hasattr(source, "__getitem__") and hasattr(source, "__len__")
    if indexed and not isinstance(source, IterableDataset):
        return Indexed(source, options, place, _workers(options, place))
    if not hasattr(source, "__iter__"):
        fetch.check(source)
    return Streamed(source, options, place)


def _check(options: InputOptions) -> None:
    chosen = [n for n in ("shuffle", "sampler", "weights") if getattr(options, n) is not None]
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(chosen)} each decide the order: give one of them")


def _workers(options: InputOptions, place: Place) -> WorkerOptions:
    pinned = place.accelerator.queues and options.pin_memory is not False
    return WorkerOptions(options.workers or 0, options.prefetch or 2, pin_memory=pinned)


def _refuse_for_loader(source: Any, options: InputOptions) -> None:
    for name in ("workers", "prefetch", "pin_memory", "shuffle", "sampler", "weights"):
        if getattr(options, name) is not None:
            raise ConfigError(
                f"{name} is the {type(source).__name__}'s own: set it there, or give run.steps()"
                " the dataset itself"
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
        return user_samplers.Sampled(seed, options.sampler, length)
    return Sequential(length) if options.shuffle is False else Shuffled(seed, length)


class Indexed:
    """A map-style dataset: every batch is a function of its positions in the run."""

    stream = None

    def __init__(
        self, source: Any, options: InputOptions, place: Place, workers: WorkerOptions
    ) -> None:
        fetch.check(source)
        if options.batched:
            raise ConfigError("batched=True is for streams: a map-style dataset yields samples")
        epochs = _epochs(source, options, place.seed)
        self.order = DataOrder(epochs, place.global_batch, place.tail)
        self._source = Batches(source, place.collate, place.seed)
        self.draws = self._source.draws
        if self.draws:
            own_generators.warn_of_more(source, place.say)
        self.likeness: Likeness | None = dataset_fingerprint.of(self._source)
        self.own = self.likeness
        self._pinned = place.accelerator.pinned
        self._options = workers
        self._workers: Workers | None = None
        self._length, self._epoch = len(source), 0

    def compare(self, every: Sequence[Likeness | None]) -> None:
        """See Input."""
        dataset_fingerprint.check(every)

    def start(self) -> None:
        """Start the workers."""
        if self._options.count:
            self._workers = Workers(self._source, self._options)

    def begin(self, steps: range, plan: Plan, *, fresh: bool = False) -> None:
        """Have the batches of these steps made."""
        if self._workers is not None:
            self._workers.begin(self._work(part) for step in steps for part in plan(step))

    def _work(self, positions: Indices) -> Work:
        return Work(self.order.samples(positions), positions)

    def next(self, step: int, number: int, positions: Indices) -> Any:
        """Return the batch of these positions. Raises ConfigError for another dataset."""
        if (epoch := self.epoch(step)) != self._epoch:
            self._epoch = epoch
            self._check_length()
        if self._workers is None:
            batch = self._source.make(self._work(positions))
            if self._options.pin_memory:
                batch = fetch.map_tensors(batch, self._pinned)
            return batch
        while True:
            first, batch = self._workers.next()
            if first == positions[0]:  # else one that the loop's body did not ask for
                return batch

    def _check_length(self) -> None:
        now = len(self._source.dataset)
        if now != self._length:
            raise ConfigError(
                f"the dataset had {self._length} samples at the start of run.steps() and has {now}"
                f" in epoch {self._epoch}: steps are counted by epochs of one length. Keep its"
                " length and choose samples by sampler=, a function of the epoch; or finish the"
                " run and start one that goes on with start(allow_changes='data')"
            )

    def epoch(self, step: int) -> int:
        """In which epoch a step lies."""
        return step // self.order.steps_per_epoch

    def close(self) -> None:
        """End the workers."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None


class Streamed:
    """A stream of each rank's own."""

    draws = True
    likeness: Likeness | None = None

    def __init__(self, source: Any, options: InputOptions, place: Place) -> None:
        _check_stream(source, options, place)
        batched = yields_batches(source) if options.batched is None else options.batched
        size = place.global_batch // place.parts
        known = getattr(source, "batch_size", None)
        if batched and isinstance(known, int) and known != size:
            raise user_samplers.other_batch_size(known, size, place)
        self.order = DataOrder(Endless(), place.global_batch)
        self._parts = place.parts // place.ranks
        self.stream = Stream(
            source,
            batch=None if batched else size,
            rows=known if isinstance(known, int) else None,
            collate=place.collate,
            seed=place.seed,
            rank=place.rank,
            say=place.say,
            alive=place.alive,
        )
        own_generators.warn_of_more(source, place.say)
        self.own = self.stream.own

    def compare(self, every: Sequence[Sequence[str]]) -> None:
        """See Stream."""
        self.stream.compare(every)

    def start(self) -> None:
        """Nothing: a stream's workers start where the snapshot says."""

    def begin(self, steps: range, plan: Plan, *, fresh: bool = False) -> None:
        """Check that the snapshot has brought the stream here."""
        step = steps.start
        if fresh:
            self.stream.total = step * self._parts
        if self.stream.total != step * self._parts:
            raise ConfigError(
                f"after {step} steps the stream of this process should have given"
                f" {step * self._parts} batches, but the snapshot knows of {self.stream.total}: it"
                " was made with another number of processes or of micro_batches. Use the same, or"
                " start anew with snapshot.resume: Never"
            )

    def next(self, step: int, number: int, positions: Indices) -> Any:
        """Return the stream's next batch."""
        wanted = step * self._parts + number
        while True:
            batch = self.stream.next()
            if self.stream.total > wanted:  # else one that the loop's body did not ask for
                return batch

    def epoch(self, step: int) -> int:
        """How often the stream has come to its end."""
        return self.stream.epoch

    def close(self) -> None:
        """Let go of the stream."""
        self.stream.close()


def _check_stream(source: Any, options: InputOptions, place: Place) -> None:
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
    if place.level == "elastic":
        raise ConfigError(
            f"level='elastic' cannot share out {name}, which each process reads for itself: use a"
            " map-style dataset, or level='resume'"
        )
    if place.tail != "drop":
        raise ConfigError(
            f"tail={place.tail!r} needs to know where an epoch of {name} ends: use tail='drop',"
            " or a map-style dataset"
        )
