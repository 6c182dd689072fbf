"""The nodes of the cluster as slim records, and since when each has been silent.

How long a node has not been ready is measured by this process's own clock from the moment when
it saw the change. Of a change that it did not see, since it happened before the process began,
the cluster's clock tells; so a restart of the operator does not begin the count anew, and two
clocks that disagree matter at no other time. Unknown altogether where nodes may not be read.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ddpjob_operator.core.nodes import Node, Nodes, Record, record

_REMEMBERED = 1000  # nodes that are gone

Slim = tuple[Record, int | None]  # with its resourceVersion


@dataclass(slots=True)
class _Seen:
    """``record`` None: there is no such node. Times are of the monotonic clock."""

    record: Record | None
    version: int | None
    down_since: float | None
    read_at: float | None = None


class NodeCache:
    """``clock`` is monotonic, ``now`` the time of day in UTC."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._clock, self._now = clock, now
        self._nodes: dict[str, _Seen] = {}
        self._workers: set[str] = set()  # that are ready
        self._up_since = -math.inf  # all were silent before
        self._known = False

    def of(self, names: Iterable[str]) -> Nodes | None:
        """These nodes for the planner; None as long as nodes cannot be read."""
        if not self._known:
            return None
        return Nodes(any_ready=bool(self._workers), known={name: self._one(name) for name in names})

    def put(self, slim: Slim, *, quorum: bool = False) -> bool:
        """Take a node; True if that is news to the planner. A quorum read is always the newest."""
        found, version = slim
        old = self._nodes.get(found.name)
        if not quorum and old and old.record and _older(version, old.version):
            return False
        read_at = self._clock() if quorum else old.read_at if old else None
        since = None if found.ready else self._silent_since(found, old)
        self._keep(found.name, _Seen(found, version, since, read_at))
        return old is None or _shown(old.record) != _shown(found)

    def remove(self, name: str, *, quorum: bool = False) -> bool:
        """The node is gone; True if that is news."""
        old, now = self._nodes.get(name), self._clock()
        since = old.down_since if old and old.record is None else now
        read_at = now if quorum else old.read_at if old else None
        self._keep(name, _Seen(None, None, since, read_at))
        gone = [name for name, seen in self._nodes.items() if seen.record is None]
        for forgotten in gone[:-_REMEMBERED]:
            del self._nodes[forgotten]
        return old is None or old.record is not None

    def replace_all(self, items: Iterable[Slim]) -> list[str]:
        """A full list, from a quorum. The names of the nodes with news."""
        listed = {slim[0].name: slim for slim in items}
        gone = [n for n, seen in self._nodes.items() if seen.record and n not in listed]
        changed = [name for name in gone if self.remove(name)]
        changed += [name for name, slim in listed.items() if self.put(slim, quorum=True)]
        self._known = True
        return changed

    def forget(self) -> None:
        """Nodes may not be read any more: what was known grows old."""
        self._nodes.clear()
        self._workers.clear()
        self._known = False

    def _one(self, name: str) -> Node:
        # A pod may be told of before its new node is: since when it is missing counts from now.
        seen = self._nodes.setdefault(name, _Seen(None, None, self._clock()))
        now, found = self._clock(), seen.record
        return Node(
            name=name,
            exists=found is not None,
            ready=found is not None and found.ready,
            out_of_service=found is not None and found.out_of_service,
            down_seconds=0.0 if seen.down_since is None else now - self._alone_since(seen),
            read_seconds=None if seen.read_at is None else now - seen.read_at,
        )

    def _alone_since(self, seen: _Seen) -> float:
        """When all were silent at once, the first that is back has only been faster."""
        since = seen.down_since or 0.0
        return max(since, self._up_since) if seen.record else since

    def _keep(self, name: str, seen: _Seen) -> None:
        none = self._known and not self._workers
        self._nodes[name] = seen
        found = seen.record
        works = found is not None and found.ready and not found.control_plane
        (self._workers.add if works else self._workers.discard)(name)
        if none and works:
            self._up_since = self._clock()

    def _silent_since(self, found: Record, old: _Seen | None) -> float:
        clock = self._clock()
        if old and old.record:
            return clock if old.down_since is None else old.down_since
        past = (self._now() - found.since).total_seconds() if found.since else 0.0
        return clock - max(0.0, past)


def slim(obj: Mapping[str, Any]) -> Slim:
    """A Node object -> what is kept of it."""
    version = obj["metadata"].get("resourceVersion", "")
    return record(obj), int(version) if version.isdecimal() else None


def _shown(found: Record | None) -> tuple[bool, bool, bool] | None:
    return None if found is None else (found.ready, found.out_of_service, found.control_plane)


def _older(version: int | None, known: int | None) -> bool:
    return version is not None and known is not None and version < known
