"""Make batches ahead of time in worker processes, on top of torch's DataLoader.

They are given what to make, batch by batch, so they decide nothing: with any number of them a run
has the same bits. Forked before the snapshot is loaded, they start beside the load, and share
none of the optimizer's memory. They die with the process that started them.
"""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from ddpjob_trainer.data.fetch import Batches, Work

Init = Callable[[int], None]  # a worker_init_fn
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)  # loaded here: nothing may be loaded after a fork


def dying_with_parent(init: Init | None, context: Any = None) -> Init:
    """Return a worker_init_fn that ties workers to the rank's life, then calls ``init``."""
    method = context if isinstance(context, str) else _start_method(context)
    # A fork server's children are the fork server's; torch looks for their rank now and then.
    parent = None if method == "forkserver" else os.getpid()
    return functools.partial(_begin_worker, parent, init)


def _start_method(context: Any) -> str:
    """Return how workers start, without settling it: the script may still choose."""
    if context is not None:
        return str(context.get_start_method())
    # Python's own default is fork up to 3.13 and forkserver from 3.14 on.
    chosen = multiprocessing.get_start_method(allow_none=True)
    return chosen or multiprocessing.get_all_start_methods()[0]


def _begin_worker(parent: int | None, init: Init | None, number: int) -> None:
    if parent is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the call above
            os._exit(1)
    if init is not None:
        init(number)


class _Ahead:
    """Stand for a dataset of batches, indexed by the work to do. None is no work."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __getitem__(self, work: Work | None) -> Any:
        return None if work is None else (int(work.positions[0]), self.batches.make(work))


def _same(batch: Any) -> Any:
    return batch


def _show_dataset(batches: Batches, init: Init | None, number: int) -> None:
    """Let get_worker_info() show the user's own dataset to the user's code."""
    object.__setattr__(get_worker_info(), "dataset", batches.dataset)
    if init is not None:
        init(number)


class Workers:
    """Run worker processes: they start at once, begin() says what they shall make.

    ``options``: of torch's DataLoader.
    """

    def __init__(
        self,
        batches: Batches,
        *,
        num_workers: int,
        prefetch_factor: int = 2,
        worker_init_fn: Init | None = None,
        multiprocessing_context: Any = None,
        **options: Any,
    ) -> None:
        self._idle = num_workers * prefetch_factor
        self._work: Iterator[Work] = iter(())
        init = functools.partial(_show_dataset, batches, worker_init_fn)
        loader: DataLoader[Any] = DataLoader(
            _Ahead(batches),  # type: ignore[arg-type]
            batch_size=None,
            sampler=self._asked(),
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            collate_fn=_same,
            worker_init_fn=dying_with_parent(init, multiprocessing_context),
            multiprocessing_context=multiprocessing_context,
            generator=torch.Generator(),  # else it would draw from ours
            **options,
        )
        self._batches: Iterator[Any] | None = iter(loader)

    def begin(self, work: Iterator[Work]) -> None:
        """Order this work, to be done in its order."""
        self._work = work
        for _ in range(self._idle):  # torch asks for work as it hands batches out
            self.next()

    def _asked(self) -> Iterator[Work | None]:
        """Yield what torch asks for: no work at first, then that of begin()."""
        yield from [None] * self._idle
        yield from self._work

    def next(self) -> Any:
        """Return the next batch, and the first of its positions.

        Raises what the dataset raised, RuntimeError for a dead worker.
        """
        assert self._batches is not None, "close() was called"
        return next(self._batches)

    def close(self) -> None:
        """End the processes."""
        self._batches = None  # torch ends them when nobody holds the iterator
