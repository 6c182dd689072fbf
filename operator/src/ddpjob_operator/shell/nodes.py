"""Keep the cluster's nodes as slim records, and since when each is silent.

The node informer fills the cache, the reconciler hands it to plan(). This process's own clock
measures how long a node has not been ready, from the moment when it saw that; time before its
start, or with the node ready in between, does not count. Without the right to read nodes nothing is
known.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ddpjob_operator.core.objects import nodes
from ddpjob_operator.core.objects.json_read import mapping
from ddpjob_operator.shell.api import LEASES, NODES, Api, Forbidden, NotFound, version_number

_LEASES = "kube-node-lease"  # their namespace
_REMEMBERED = 1000  # nodes that are gone

Slim = tuple[nodes.NodeRecord, int | None]  # with its resourceVersion


@dataclass(slots=True)
class _Seen:
    """One node's record and times on the monotonic clock; ``record`` None: no such node.

    ``read_at``: when a quorum read showed it in this state; None after news from a watch.
    """

    record: nodes.NodeRecord | None
    version: int | None
    down_since: float | None
    read_at: float | None = None
    guessed: bool = False  # only a pod names it so far


@dataclass(slots=True)
class _Lease:
    """When a list first showed a Lease as it is, and then another node's with news."""

    renewed: object  # by the kubelet's clock: only good to tell one renewal from another
    since: float
    behind: float = math.inf

    def seen(self, at: float) -> nodes.Lease:
        """Return how long it was unrenewed, and behind others, when a list was asked for."""
        return nodes.Lease(max(0.0, at - self.since), max(0.0, at - self.behind))


class NodeCache:
    """The known nodes; ``clock`` is monotonic, ``signals`` say that one is about to go."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, signals: nodes.Signals = nodes.NO_SIGNALS
    ) -> None:
        self._clock, self._signals = clock, signals
        self._nodes: dict[str, _Seen] = {}
        self._workers: dict[str, bool] = {}  # whether each is ready
        self._unready = 0  # of them
        self._disrupted = False
        self._calm_since = -math.inf  # they were silent together before
        self._known = self._forbidden = False
        self._leases: dict[str, _Lease] = {}
        self._leases_at = -math.inf  # when they were asked for

    def of(self, names: Iterable[str]) -> nodes.Nodes | None:
        """Return these nodes for the planner; None before they could be read."""
        if not self._known:
            return nodes.FORBIDDEN if self._forbidden else None
        return nodes.Nodes(
            workers=len(self._workers),
            unready=self._unready,
            calm_seconds=self._clock() - self._calm_since,
            known={name: self._one(name) for name in names},
            leases_seconds=self._clock() - self._leases_at,
        )

    def slim(self, obj: Mapping[str, Any]) -> Slim:
        """Keep the needed part of a Node object."""
        return nodes.record(obj, self._signals), version_number(
            obj["metadata"].get("resourceVersion")
        )

    def put(self, slim: Slim, *, quorum: bool = False) -> bool:
        """Take a node; return True if it is news. A quorum read is always the newest."""
        found, version = slim
        old = self._nodes.get(found.name)
        known = old.version if old and old.record else None
        if not quorum and version is not None and known is not None and version < known:
            return False
        read = old.read_at if old and old.record == found else None
        read_at = self._clock() if quorum else read
        since = None if found.ready else self._silent_since(found, old)
        self._keep(found.name, _Seen(found, version, since, read_at))
        return old is None or _shown(old.record) != _shown(found)

    def remove(self, name: str, *, quorum: bool = False) -> bool:
        """Note that the node is gone; return True if that is news."""
        old, now = self._nodes.get(name), self._clock()
        since, read = (old.down_since, old.read_at) if old and old.record is None else (now, None)
        read_at = now if quorum else read
        self._keep(name, _Seen(None, None, since, read_at))
        gone = [name for name, seen in self._nodes.items() if seen.record is None]
        for forgotten in gone[:-_REMEMBERED]:
            del self._nodes[forgotten]
        return old is None or old.record is not None or old.guessed

    def replace_all(self, items: Iterable[Slim]) -> list[str]:
        """Take a full list from a quorum; return the names of the nodes with news."""
        listed = {slim[0].name: slim for slim in items}
        known = {n for n, seen in self._nodes.items() if seen.record or seen.guessed}
        changed = [name for name in known if name not in listed and self.remove(name)]
        changed += [name for name, slim in listed.items() if self.put(slim, quorum=True)]
        self._known, self._forbidden = True, False
        self._restart_calm()
        return changed

    async def read_leases(self, api: Api) -> None:
        """List the nodes' Leases; without the right to that none is known. Raise ApiError."""
        asked = self._clock()
        found: dict[str, object] = {}
        with contextlib.suppress(Forbidden):
            listing = await api.list_all(LEASES, _LEASES, keep=_renewal)
            found = dict(listing.items)
        now, old = self._clock(), self._leases
        moved = [name for name in found if name in old and old[name].renewed != found[name]]
        kept = {name: old[name] for name in found if name in old and name not in moved}
        for lease in kept.values():
            lease.behind = min(lease.behind, now if moved else math.inf)
        self._leases = {name: kept.get(name) or _Lease(found[name], now) for name in found}
        self._leases_at = asked

    def forget(self) -> None:
        """Stop trusting the nodes, which may not be read any more."""
        self._nodes.clear()
        self._workers.clear()
        self._unready = 0
        self._known = self._disrupted = False
        self._forbidden = True

    def _one(self, name: str) -> nodes.Node:
        # A pod may be reported before its new node: the node counts as missing from now.
        seen = self._nodes.setdefault(name, _Seen(None, None, self._clock(), guessed=True))
        now, found = self._clock(), seen.record
        lease = self._leases.get(name)
        return nodes.Node(
            name=name,
            exists=found is not None,
            ready=found is not None and found.ready,
            out_of_service=found is not None and found.out_of_service,
            down_seconds=0.0 if seen.down_since is None else now - seen.down_since,
            read_seconds=None if seen.read_at is None else now - seen.read_at,
            guessed=seen.guessed,
            signal=found.signal if found is not None else "",
            lease=lease.seen(self._leases_at) if lease else nodes.Lease(),
            since=found.since if found is not None else None,
        )

    def _keep(self, name: str, seen: _Seen) -> None:
        self._nodes[name] = seen
        found = seen.record
        self._unready -= self._workers.pop(name, True) is False
        if found is not None and not found.control_plane:
            self._workers[name] = found.ready
            self._unready += not found.ready
        self._restart_calm()

    def _restart_calm(self) -> None:
        """Start the calm again: the first of a group to return have only been faster."""
        before, now = self._disrupted, nodes.disrupted(len(self._workers), self._unready)
        self._disrupted = self._known and now
        if before or self._disrupted:
            self._calm_since = self._clock()

    def _silent_since(self, found: nodes.NodeRecord, old: _Seen | None) -> float:
        """Go on counting only if the node itself was not ready all the time."""
        same = old is not None and old.record is not None and old.record.since == found.since
        since = old.down_since if old and same else None
        return self._clock() if since is None else since


async def read(api: Api, cache: NodeCache, names: Iterable[str]) -> None:
    """GET each of them from a quorum into the cache; raise ApiError."""
    for name in names:
        try:
            cache.put(cache.slim(await api.get(NODES, None, name)), quorum=True)
        except NotFound:
            cache.remove(name, quorum=True)


def _renewal(obj: Mapping[str, Any]) -> tuple[str, object]:
    return obj["metadata"]["name"], mapping(obj.get("spec")).get("renewTime")


def _shown(found: nodes.NodeRecord | None) -> nodes.NodeRecord | None:
    return None if found is None else replace(found, since=None)
