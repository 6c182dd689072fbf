"""Share a run's files of tests among its workers, and what takes long to make among all of them.

pytest-xdist asks `ByFile` for each worker's next file. Workers are more than cores, since most
tests wait: for kubelets, deadlines, torch's timeouts. `Shared` holds clusters, and results that are
the same for all.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from devcluster.cachedir import locked
from support import durations

#: Tests here stop nodes, operators and the API server: one worker, on a cluster of their own.
DISRUPTIVE: Final = "tests/cluster/disruptive"
#: Files of a level that run at a time as long as there are others: gangs of torch processes.
AT_ONCE: Final[Mapping[str, int]] = {"cluster": 2, "trainer": 2}
_PER_CORE: Final = 2  # workers
_GIB_OF_A_WORKER: Final = 5.0  # a gang of torch processes, and its share of the clusters


def workers() -> int:
    """Return how many workers `-n auto` means: bounded by cores and by memory."""
    cores = len(os.sched_getaffinity(0))
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    gib = pages * size / 2**30
    return max(1, min(_PER_CORE * cores, int(gib // _GIB_OF_A_WORKER)))


def scope_of(nodeid: str) -> str:
    """Return the tests that one worker runs together: a file, or all disruptive ones."""
    return DISRUPTIVE if disruptive(nodeid) else durations.file_of(nodeid)


def disruptive(nodeid: str) -> bool:
    """Return whether a test needs a cluster of its own kind."""
    return nodeid.startswith(f"{DISRUPTIVE}/")


def longest_first(items: list[pytest.Item], seconds: Mapping[str, float]) -> None:
    """Order files by the seconds of their tests, and leave the tests of a file in their order."""
    scopes: dict[str, float] = defaultdict(float)
    for item in items:
        scopes[scope_of(item.nodeid)] += seconds.get(item.nodeid, 0.0)
    rank = {scope: n for n, scope in enumerate(sorted(scopes, key=lambda one: -scopes[one]))}
    items.sort(key=lambda item: rank[scope_of(item.nodeid)])


def next_scope(waiting: Iterable[str], running: Iterable[str]) -> str:
    """Return the first of ``waiting`` whose level is not busy; the first of all if each is."""
    busy = Counter(map(_level, running))
    candidates = list(waiting)
    for scope in candidates:
        level = _level(scope)
        if level not in AT_ONCE or busy[level] < AT_ONCE[level]:
            return scope
    return candidates[0]


def _level(scope: str) -> str:
    return scope.split("/")[1]


class ByFile(LoadScopeScheduling):
    """Gives each worker a file at a time, in the order of the collection: see `longest_first`."""

    def __init__(self, config: pytest.Config, log: Producer) -> None:
        config.option.loadscopereorder = False  # it would be by the number of tests
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)

    def remove_node(self, node: WorkerController) -> str | None:
        """Take back what a dead worker has not done: a file without a test would hold up a run."""
        scopes = self.assigned_work[node]
        for scope in [one for one, tests in scopes.items() if all(tests.values())]:
            del scopes[scope]
        return super().remove_node(node)

    def _reschedule(self, node: WorkerController) -> None:
        # A worker needs to know of one test more; with two a long file would wait behind another.
        if not self.workqueue or self._pending_of(self.assigned_work[node]) <= 1:
            super()._reschedule(node)

    def _assign_work_unit(self, node: WorkerController) -> None:
        running = [
            scope
            for other, scopes in self.assigned_work.items() if other is not node
            for scope, tests in scopes.items() if not all(tests.values())
        ]  # fmt: skip
        chosen = next_scope(self.workqueue, running)
        self.workqueue.move_to_end(chosen, last=False)
        super()._assign_work_unit(node)


@dataclass(frozen=True, slots=True)
class Shared:
    """What all workers of a run have in common, in a folder of their parent's."""

    folder: Path

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what ``make`` gave whoever asked first; JSON. Others wait until it is there."""
        kept = self.folder / f"{name}.json"
        with locked(self.folder / f"{name}.lock", print):
            if not kept.exists():
                text = json.dumps(make())
                kept.with_suffix(".new").write_text(text)
                kept.with_suffix(".new").rename(kept)
            return json.loads(kept.read_text())

    def at_end(self, cluster: str) -> None:
        """Let the parent take a cluster down when all workers have ended."""
        (self.folder / f"{cluster}.cluster").touch()

    def clusters(self) -> list[str]:
        """Return the names that `at_end` was told."""
        return sorted(path.stem for path in self.folder.glob("*.cluster"))
