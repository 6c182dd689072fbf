"""Read what can only be read forwards: an IterableDataset, or a DataLoader of the user's.

The loop asks each rank's stream for its next batch. A snapshot holds how far training has come in
it, not how far it was read ahead: its state_dict(), or else how often to read, which a resume then
does again.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from ddpjob_trainer.data import fetch, generators
from ddpjob_trainer.data.fetch import BatchSettings, dying_with_parent, map_tensors
from ddpjob_trainer.data.generators import kept, seed_generators
from ddpjob_trainer.data.order import DataOrder, Indices, Plan, Sequential, key64, words
from ddpjob_trainer.data.user_samplers import SeededSampler, seed_sampler
from ddpjob_trainer.errors import ConfigError


class Endless(Sequential):
    """Count the places of a stream, whose order nobody knows."""

    name: ClassVar[str] = "stream"


def _yields_batches(source: Any) -> bool:
    """Tell whether a stream's items are batches, not samples. Raises ConfigError if unknown."""
    if isinstance(source, DataLoader):
        return True
    if isinstance(source, IterableDataset) or type(source).__module__.startswith("datasets."):
        return False
    if hasattr(source, "batch_size"):
        return source.batch_size is not None
    raise ConfigError(
        f"run.steps() cannot tell what {type(source).__name__} yields: say batched=True if batches,"
        " batched=False if samples"
    )


class Stream:
    """Read one rank's stream, epoch after epoch. See Indexed for the calls, and their order.

    ``batched``: it yields batches; None: to be found out. Of these, ones that hold fewer samples
    than the source's batch_size, as at the end of a DataLoader's worker, are dropped. ``named``:
    generators to seed beside those that are found.
    """

    draws = True
    fingerprint = None

    def __init__(
        self,
        source: Any,
        settings: BatchSettings,
        *,
        batched: bool | None = None,
        named: Sequence[Any] = (),
    ) -> None:
        self._unsure = batched is None  # until the first item is seen
        batched = _yields_batches(source) if batched is None else batched
        rows = getattr(source, "batch_size", None)
        if batched and isinstance(rows, int):
            settings.check_batch_size(rows)
        self.order = DataOrder(Endless(1 << 62), settings.global_batch)
        self.stream = self
        self.total = 0  # batches that training has taken in the whole run
        self.first = b""  # tells the first batch that this process has read from another
        self._epoch = 0
        self._taken = 0  # of this epoch
        self._source = source
        self._settings = settings
        self._parts = settings.parts // settings.ranks  # batches of this rank in a step
        self._batched = batched
        self._rows = rows if isinstance(rows, int) else None
        self._collate = settings.collate or default_collate
        self._collates_own = [] if batched else generators.found_in(settings.collate)
        self._named = named
        self._own = generators.found_in(source, named)
        #: Where its own generators stand when the run begins.
        self.own = [generators.mark(generator) for generator in self._own]
        self._shared: list[Any] = []  # of those, the ones that all ranks have alike
        self._key_of_all = key64("stream", settings.seed)
        self._key = key64("stream", settings.seed, settings.rank)
        self._iterator: Iterator[Any] | None = None
        self._keeper = _keeper(source)
        self._sampler: SeededSampler | None = None
        if isinstance(source, DataLoader):
            if source.persistent_workers and self._keeper is None:
                raise ConfigError(
                    "a DataLoader with persistent_workers=True goes on drawing random numbers from"
                    " epoch to epoch, which no resume can repeat: use persistent_workers=False"
                )
            if self._keeper is None:
                self._sampler = seed_sampler(source, self._key_of_all)
            source.worker_init_fn = dying_with_parent(
                source.worker_init_fn, source.multiprocessing_context
            )

    def compare(self, every: Sequence[Sequence[str]]) -> None:
        """Learn ``own`` of each rank. Generators that were seeded alike stay so.

        All ranks may shuffle a list of files with them, and then read each its part.
        """
        places = zip(self._own, *every, strict=False)
        self._shared = [generator for generator, *marks in places if len({*marks}) == 1]

    # --- Training ------------------------------------------------------------------------

    def start(self) -> None:
        """Do nothing: a stream's workers start where the snapshot says."""

    def begin(self, steps: range, plan: Plan, *, fresh: bool = False) -> None:
        """Check that the snapshot has brought the stream here."""
        step = steps.start
        if fresh:
            self.total = step * self._parts
        if self.total != step * self._parts:
            raise ConfigError(
                f"after {step} steps the stream of this process should have given"
                f" {step * self._parts} batches, the snapshot knows of {self.total}: use as many"
                " processes and micro_batches as then, or start over with snapshot.resume: Never"
            )

    def next(self, step: int, number: int, positions: Indices) -> Any:
        """Return the stream's next batch."""
        wanted = step * self._parts + number
        while True:
            batch = self.read()
            if self.total > wanted:  # else one that the loop's body did not ask for
                return batch

    def epoch(self, step: int) -> int:
        """Return how often the stream has come to its end."""
        return self._epoch

    def read(self) -> Any:
        """Return the next batch, from the next epoch if this one is at its end."""
        fresh = False
        while True:
            if self._iterator is None:
                self._iterator = self._open()
                fresh = not self._taken
            self._seed(self.total)
            batch = self._read(self._iterator)
            if batch is not None:
                self.first = self.first or self._fingerprint(batch[0])
                self.total += 1
                self._taken += 1
                return batch[0]
            if fresh:
                raise ConfigError(
                    f"{type(self._source).__name__} has no whole batch for this process in epoch"
                    f" {self._epoch}: it yields nothing, or too few samples, or can be read only"
                    " once (a generator)"
                )
            self._iterator = None
            self._epoch += 1
            self._taken = 0

    def _fingerprint(self, batch: Any) -> bytes:
        """Return bytes that tell this rank's first batch from another rank's."""
        if self._sampler is not None:  # its draw: each rank may change samples
            return self._sampler.first
        return str(fetch.sample_numbers(batch) or self._key).encode()

    def _seed(self, number: int) -> None:
        """Let what is drawn for a batch depend on its number."""
        key = int(words(self._key, np.array([number]))[0])
        seed_generators(key)
        generators.seed(self._collates_own, key)

    def _read(self, iterator: Iterator[Any]) -> tuple[Any] | None:
        """Return a batch, or None at the end; an incomplete last batch is dropped."""
        if self._batched:
            return next(((item,) for item in iterator if _is_whole(item, self._rows)), None)
        size = self._settings.batch_size
        samples = list(itertools.islice(iterator, size))
        if self._unsure and samples and self._settings.collate is None:
            self._check_sample(samples[0])
        self._unsure = False
        return (self._collate(samples),) if len(samples) == size else None

    def _check_sample(self, item: Any) -> None:
        """Raise ConfigError for an item that may be a batch: all its tensors have as many rows."""
        found = [*_shapes(item)]
        shapes = [shape for shape in found if shape]
        rows = {shape[0] for shape in shapes}
        dimensions = {len(shape) for shape in shapes}
        alone = len(shapes) < 2 and shapes != found  # the number beside it is its label
        if alone or len(rows) != 1 or (count := rows.pop()) < 2:
            return
        as_asked = count == self._settings.batch_size and (len(shapes) > 1 or dimensions != {1})
        # As inputs and labels have; texts with their targets have one each, images three.
        if as_asked or len(dimensions) > 1 or (dimensions == {2} and len(shapes) > 1):
            raise ConfigError(
                f"run.steps() cannot tell whether {type(self._source).__name__} yields samples or"
                f" batches: all tensors of its first item begin with {count} rows. Say batched=True"
                " if an item is a batch, batched=False if it is one sample"
            )

    def _open(self) -> Iterator[Any]:
        source = self._source
        key, key_of_all = key64(self._key, self._epoch), key64(self._key_of_all, self._epoch)
        shared = {id(generator) for generator in self._shared}
        if self._keeper is None:  # else they are a part of its state, which may have come back
            found = generators.found_in(source, self._named)
            generators.seed([one for one in found if id(one) not in shared], key)
            generators.seed(self._shared, key_of_all)
        for holder in _parts(source) if isinstance(source, DataLoader) else ():
            if isinstance(generator := getattr(holder, "generator", None), torch.Generator):
                alike = holder is not source and id(generator) in shared
                generator.manual_seed(key_of_all if alike else key)
        if self._sampler is not None:
            self._sampler.epoch = self._epoch
        seed_generators(key)  # workers' seeds are drawn from torch's
        for holder in _parts(source):
            if callable(set_epoch := getattr(holder, "set_epoch", None)):
                set_epoch(self._epoch)
        return iter(source)

    def close(self) -> None:
        """Let go of the iterator, which may have worker processes."""
        self._iterator = None

    # --- Snapshots -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return where training is in it. Asking an unread one would start its workers: None."""
        read = self._keeper is not None and self.total
        state = self._keeper.state_dict() if read else None
        return {"epoch": self._epoch, "taken": self._taken, "total": self.total, "state": state}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Go back there, by the stream's own state or by reading again."""
        self._epoch, self._taken, self.total = state["epoch"], state["taken"], state["total"]
        self._iterator = None
        if not self.total:
            return
        if (state["state"] is None) != (self._keeper is None):
            raise ConfigError(
                f"{type(self._source).__name__} has"
                f" {'no' if self._keeper is None else 'a'} state_dict(), other than that of the"
                " snapshot: use the same, or start over with snapshot.resume: Never"
            )
        if self._keeper is not None:
            if callable(set_epoch := getattr(self._source, "set_epoch", None)):
                set_epoch(self._epoch)
            self._keeper.load_state_dict(state["state"])
        elif self._taken:
            with kept():
                self._read_again()

    def _read_again(self) -> None:
        name, count, begun = type(self._source).__name__, self._taken, time.monotonic()
        self._settings.say(
            f"{name} has no state_dict() and load_state_dict(): {count} batches of epoch"
            f" {self._epoch} are read again to come to where the snapshot was made"
        )
        self._iterator = self._open()
        for number in range(self.total - count, self.total):
            self._settings.alive()
            self._seed(number)
            if self._read(self._iterator) is None:
                raise ConfigError(f"{name} has become shorter than when the snapshot was made")
        self._settings.say(f"reading {count} batches again took {time.monotonic() - begun:.1f} s")


def _is_whole(batch: Any, rows: int | None) -> bool:
    """Tell whether a tensor has this many rows, or none has any. Time may come first."""
    shapes: list[torch.Size] = []

    def add(tensor: torch.Tensor) -> torch.Tensor:
        shapes.append(tensor.shape)
        return tensor

    map_tensors(batch, add)
    return rows is None or not any(shapes) or any(rows in shape[:2] for shape in shapes)


def _keeper(source: Any) -> Any:
    """Return what keeps the position: the source, or what a DataLoader without workers reads."""
    here = isinstance(source, DataLoader) and not source.num_workers
    for one in (source, source.dataset) if here else (source,):
        if all(callable(getattr(one, name, None)) for name in ("state_dict", "load_state_dict")):
            return one
    return None


def _parts(source: Any) -> list[Any]:
    """Return the source, and a DataLoader's samplers."""
    if not isinstance(source, DataLoader):
        return [source]
    batches = source.batch_sampler
    found = (source, source.sampler, batches, getattr(batches, "sampler", None))
    return [*{id(part): part for part in found if part is not None}.values()]


def _shapes(item: Any) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of an item's tensors, arrays and numbers."""
    if isinstance(item, torch.Tensor | np.ndarray):
        yield tuple(item.shape)
    elif isinstance(item, bool | int | float | np.number):
        yield ()
    elif isinstance(item, Mapping | list | tuple):
        for part in item.values() if isinstance(item, Mapping) else item:
            yield from _shapes(part)
