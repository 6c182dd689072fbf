"""What can only be read forwards: an IterableDataset, or a DataLoader of the user's.

Each rank reads its own. A snapshot holds how far training has come in it, not how far it was read
ahead: its state_dict(), or else how often to read, which a resume then does again.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from ddpjob_trainer.accelerator import in_order
from ddpjob_trainer.data import own_generators
from ddpjob_trainer.data.alike import Alike, draw_alike
from ddpjob_trainer.data.fetch import Collate, map_tensors
from ddpjob_trainer.data.order import Indices, key64, words
from ddpjob_trainer.data.reseeded import reseed_workers
from ddpjob_trainer.data.seeding import kept, seed_generators
from ddpjob_trainer.data.workers import dying_with_parent
from ddpjob_trainer.errors import ConfigError

Say = Callable[[str], None]


class Endless:
    """The order of a stream, which nobody knows: places are only counted."""

    length = 1 << 62
    name = "stream"

    def samples(self, epoch: int, places: Indices) -> Indices:
        """Return the places themselves."""
        return places


def yields_batches(source: Any) -> bool:
    """Whether a stream's items are batches, not samples. Raises ConfigError for one unknown."""
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


def keeps_state(source: object) -> bool:
    """Whether it has torch's protocol for a position that can be saved."""
    return all(callable(getattr(source, n, None)) for n in ("state_dict", "load_state_dict"))


class Stream:
    """One rank's stream, epoch after epoch. Has a state_dict() of its own, for the snapshot.

    ``batch``: samples per batch, None when the stream yields batches. Of those, ones that hold
    fewer than ``rows`` samples, as at the end of a DataLoader's worker, are dropped. ``say`` is
    told of reading again; ``alive`` is called while that goes on.
    """

    def __init__(
        self,
        source: Any,
        *,
        batch: int | None,
        rows: int | None,
        collate: Collate | None,
        seed: int,
        rank: int,
        say: Say,
        alive: Callable[[], None],
    ) -> None:
        self.epoch = 0
        self.total = 0  # batches that training has taken in the whole run
        self._source = source
        self._batch = batch
        self._rows = rows
        self._collate = collate or default_collate
        self._collates_own = own_generators.found_in(collate) if batch is not None else []
        self._own = own_generators.found_in(source)
        #: Where its own generators stand when the run begins.
        self.own = [own_generators.mark(generator) for generator in self._own]
        self._shared: list[Any] = []  # of those, the ones that all ranks have alike
        self._key_of_all = key64("stream", seed)
        self._key = key64("stream", seed, rank)
        self._say = say
        self._alive = alive
        self._taken = 0  # of this epoch
        self._iterator: Iterator[Any] | None = None
        self.first = b""  # tells the first batch that this process has read from another
        self._alike: Alike | None = None
        self._keeper = _keeper(source)
        if isinstance(source, DataLoader):
            _check_loader(source, stateful=self._keeper is not None)
            if self._keeper is source:
                reseed_workers(source)
            if self._keeper is None:
                self._alike = draw_alike(source, lambda: key64(self._key_of_all, self.epoch))
            source.worker_init_fn = dying_with_parent(
                source.worker_init_fn, source.multiprocessing_context
            )

    def compare(self, every: Sequence[Sequence[str]]) -> None:
        """Learn ``own`` of each rank. Generators that were seeded alike stay so.

        All ranks may shuffle a list of files with them, and then read each its part.
        """
        places = (
            zip(self._own, *every, strict=True) if {*map(len, every)} == {len(self._own)} else ()
        )
        self._shared = [generator for generator, *marks in places if len({*marks}) == 1]

    # --- Training ------------------------------------------------------------------------

    def next(self) -> Any:
        """Return the next batch, from the next epoch if this one is at its end."""
        fresh = False
        while True:
            if self._iterator is None:
                self._iterator = self._open()
                fresh = not self._taken
            self._seed(self.total)
            batch = self._read(self._iterator)
            if batch is not None:
                self.first = self.first or self._drawn() or _hash(batch[0])
                self.total += 1
                self._taken += 1
                return batch[0]
            if fresh:
                raise ConfigError(
                    f"{type(self._source).__name__} has no whole batch for this process in epoch"
                    f" {self.epoch}: it yields nothing, or too few samples, or can be read only"
                    " once (a generator)"
                )
            self._iterator = None
            self.epoch += 1
            self._taken = 0

    def _drawn(self) -> bytes:
        """The samples, where they are known: each rank may have changed them in its own way."""
        return self._alike.first if self._alike is not None else b""

    def _seed(self, number: int) -> None:
        """What is drawn for a batch depends on its number."""
        key = int(words(self._key, np.array([number]))[0])
        seed_generators(key)
        own_generators.seed(self._collates_own, key)

    def _read(self, iterator: Iterator[Any]) -> tuple[Any] | None:
        """A batch, or None at the end; an incomplete last batch is dropped."""
        if self._batch is None:
            return next(((item,) for item in iterator if _is_whole(item, self._rows)), None)
        samples = list(itertools.islice(iterator, self._batch))
        return (self._collate(samples),) if len(samples) == self._batch else None

    def _open(self) -> Iterator[Any]:
        source = self._source
        key, key_of_all = key64(self._key, self.epoch), key64(self._key_of_all, self.epoch)
        shared = {id(generator) for generator in self._shared}
        if self._keeper is None:  # else they are a part of its state, which may have come back
            found = own_generators.found_in(source)
            own_generators.seed([one for one in found if id(one) not in shared], key)
            own_generators.seed(self._shared, key_of_all)
        for holder in _generator_holders(source):
            alike = holder is not source and id(holder.generator) in shared
            holder.generator.manual_seed(key_of_all if alike else key)
        seed_generators(key)  # workers' seeds are drawn from torch's
        if callable(set_epoch := getattr(source, "set_epoch", None)):
            set_epoch(self.epoch)
        return iter(source)

    # --- Snapshots -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where training is in it. Asking an unread one would start its workers: None."""
        read = self._keeper is not None and self.total
        state = self._keeper.state_dict() if read else None
        return {"epoch": self.epoch, "taken": self._taken, "total": self.total, "state": state}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Go back there, by the stream's own state or by reading again."""
        self.epoch, self._taken, self.total = state["epoch"], state["taken"], state["total"]
        self._iterator = None
        if not self.total:
            return
        if (state["state"] is None) != (self._keeper is None):
            raise ConfigError(
                f"{type(self._source).__name__} has"
                f" {'no' if self._keeper is None else 'a'} state_dict(), but the stream that made"
                " the snapshot had it otherwise: use the same, or start anew with"
                " snapshot.resume: Never"
            )
        if self._keeper is not None:
            if callable(set_epoch := getattr(self._source, "set_epoch", None)):
                set_epoch(self.epoch)
            self._keeper.load_state_dict(state["state"])
        else:
            with kept():
                self._read_again()

    def _read_again(self) -> None:
        name, count, begun = type(self._source).__name__, self._taken, time.monotonic()
        if not count:
            return
        self._say(
            f"{name} has no state_dict() and load_state_dict(): {count} batches of epoch"
            f" {self.epoch} are read again to come to where the snapshot was made"
        )
        self._iterator = self._open()
        for number in range(self.total - count, self.total):
            self._alive()
            self._seed(number)
            if self._read(self._iterator) is None:
                raise ConfigError(f"{name} has become shorter than when the snapshot was made")
        self._say(f"reading {count} batches again took {time.monotonic() - begun:.1f} s")

    def close(self) -> None:
        """Let go of the iterator, which may have worker processes."""
        self._iterator = None


def _is_whole(batch: Any, rows: int | None) -> bool:
    """Whether a tensor has this many rows, or none tells; time may come before the batch."""
    shapes: list[torch.Size] = []

    def add(tensor: torch.Tensor) -> torch.Tensor:
        shapes.append(tensor.shape)
        return tensor

    map_tensors(batch, add)
    return rows is None or not any(shapes) or any(rows in shape[:2] for shape in shapes)


def _hash(batch: Any) -> bytes:
    """Hash the tensors of a batch."""
    found = hashlib.blake2b(digest_size=8)

    def add(tensor: torch.Tensor) -> torch.Tensor:
        parts = _dense_parts(tensor)
        if parts[0] is not tensor:
            found.update(repr([tensor.layout, *(part.shape for part in parts)]).encode())
        for part in parts:
            found.update(in_order(part).cpu().view(torch.uint8).numpy().tobytes())
        return tensor

    map_tensors(batch, add)
    return found.digest()


def _dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """What it consists of: itself, or where its elements are and what they are."""
    if tensor.is_nested:
        return list(tensor.unbind())
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return [tensor.indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor.to_dense()]


def _keeper(source: Any) -> Any:
    """What keeps the position: the source, or what a DataLoader without workers reads."""
    if keeps_state(source):
        return source
    if isinstance(source, DataLoader) and not source.num_workers and keeps_state(source.dataset):
        return source.dataset
    return None


def _generator_holders(source: Any) -> Iterator[Any]:
    """A DataLoader and its samplers, where they have a generator of their own."""
    if isinstance(source, DataLoader):
        batches = source.batch_sampler
        for holder in (source, source.sampler, batches, getattr(batches, "sampler", None)):
            if isinstance(getattr(holder, "generator", None), torch.Generator):
                yield holder


def _check_loader(loader: DataLoader[Any], *, stateful: bool) -> None:
    if loader.persistent_workers and not stateful:
        raise ConfigError(
            "a DataLoader with persistent_workers=True goes on drawing random numbers from epoch"
            " to epoch, so that no resume can repeat them: use persistent_workers=False"
        )
