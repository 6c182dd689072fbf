"""Keep Kueue's Workloads of the jobs as slim records, and whether they can be read at all.

The informer and the answers to our own writes fill it, the reconciler hands them to plan(). A
record only gives way to a newer one, and one that we deleted stays away.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from ddpjob_operator.core.objects.observe import Job
from ddpjob_operator.core.objects.workload import Workload, name_of, workload
from ddpjob_operator.shell.cache.pods import number

_TOMBSTONES = 1000


class WorkloadCache:
    """Workloads by namespace and name."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], Workload] = {}
        self._deleted: OrderedDict[str, None] = OrderedDict()
        self._served: dict[str | None, bool] = {}  # by the informer's namespace, None: all

    def of(self, job: Job) -> tuple[Workload, ...] | None:
        """Return what has the name of that job's Workload; None: they cannot be read."""
        where = job.namespace if job.namespace in self._served else None
        if not self._served.get(where):
            return None
        found = self._known.get((job.namespace, name_of(job)))
        return () if found is None else (found,)

    def put(self, obj: Mapping[str, Any]) -> Workload:
        """Take a Workload object, unless a newer one is known."""
        new = workload(obj)
        old = self._known.get((new.namespace, new.name))
        older = old is not None and (number(new.version) or 0) < (number(old.version) or 0)
        if not older and new.uid not in self._deleted:
            self._known[new.namespace, new.name] = new
        return new

    def remove(self, where: tuple[str, str], uid: str, *, for_good: bool = False) -> None:
        """Forget a Workload; ``for_good``: a watch that is behind does not bring it back."""
        if where in self._known and self._known[where].uid == uid:
            del self._known[where]
        if for_good:
            self._deleted[uid] = None
            if len(self._deleted) > _TOMBSTONES:
                self._deleted.popitem(last=False)

    def replace_all(self, where: str | None, listed: Iterable[str], version: str) -> None:
        """Take a full list of these uids, read at ``version``."""
        kept, at = set(listed), number(version) or 0
        for one in list(self._known.values()):
            younger = (number(one.version) or 0) > at
            if where in (None, one.namespace) and one.uid not in kept and not younger:
                self.remove((one.namespace, one.name), one.uid)
        self._served[where] = True

    def forget(self, where: str | None) -> None:
        """Stop trusting what cannot be read any more."""
        self._served[where] = False
