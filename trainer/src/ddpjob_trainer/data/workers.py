"""Make batches ahead of time in worker processes, on top of torch's DataLoader.

They are told what to make, batch by batch, so they decide nothing: with any number of them a run
has the same bits. Forked before the snapshot is loaded, they start beside the load, and share
none of the optimizer's memory. They die with the process that started them.
"""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from ddpjob_trainer.data.fetch import Batches, Work

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)  # loaded here: nothing may be loaded after a fork


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Ask for ``count`` processes, each ``prefetch`` batches ahead; other names are torch's."""

    count: int = 0
    prefetch: int = 2
    pin_memory: bool = False
    worker_init_fn: Callable[[int], None] | None = None
    multiprocessing_context: Any = None
    timeout: float = 0


def dying_with_parent(
    init: Callable[[int], None] | None, context: Any = None
) -> Callable[[int], None]:
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


def _begin_worker(parent: int | None, init: Callable[[int], None] | None, number: int) -> None:
    if parent is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the call above
            os._exit(1)
    if init is not None:
        init(number)


class _Ahead:
    """Stand for a dataset of batches, indexed by the work to do; None is no work."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches
        self._known = False

    def __getitem__(self, work: Work | None) -> Any:
        if not self._known:
            self._known = True
            # What get_worker_info() shows to the user's code is the user's dataset.
            object.__setattr__(get_worker_info(), "dataset", self.batches.dataset)
        return None if work is None else (int(work.positions[0]), self.batches.make(work))


class _Schedule:
    """Stand for a sampler that yields work, once it is known which."""

    def __init__(self, idle: int) -> None:
        self.idle = idle
        self.work: Iterator[Work] = iter(())

    def __iter__(self) -> Iterator[Work | None]:
        for _ in range(self.idle):
            yield None
        yield from self.work


def _same(batch: Any) -> Any:
    return batch


class Workers:
    """Run worker processes: they start at once, begin() says what they shall make."""

    def __init__(self, batches: Batches, options: WorkerOptions) -> None:
        self._schedule = _Schedule(options.count * options.prefetch)
        with warnings.catch_warnings():
            # torch counts cores for one process; ranks share them.
            warnings.filterwarnings("ignore", message=".*worker processes in total.*")
            loader: DataLoader[Any] = DataLoader(
                _Ahead(batches),  # type: ignore[arg-type]
                batch_size=None,
                sampler=self._schedule,
                num_workers=options.count,
                prefetch_factor=options.prefetch,
                collate_fn=_same,
                pin_memory=options.pin_memory,
                timeout=options.timeout,
                worker_init_fn=dying_with_parent(
                    options.worker_init_fn, options.multiprocessing_context
                ),
                multiprocessing_context=options.multiprocessing_context,
                generator=torch.Generator(),  # else it would draw from ours
            )
            self._batches: Iterator[Any] | None = iter(loader)

    def begin(self, work: Iterator[Work]) -> None:
        """Order this work, to be done in its order."""
        self._schedule.work = work
        for _ in range(self._schedule.idle):  # torch asks for work as it hands batches out
            self.next()

    def next(self) -> Any:
        """Return the next batch, and the first of its positions.

        Raises what the dataset raised, RuntimeError for a dead worker.
        """
        assert self._batches is not None, "close() was called"
        return next(self._batches)

    def close(self) -> None:
        """End the processes."""
        self._batches = None  # torch ends them when nobody holds the iterator
