"""Keep the store's Workloads current where Kueue is there, and look for it where it is not.

app.py runs one per namespace if the setting asks for it. Jobs with a queue's label wait for it, no
other job does.
"""

from __future__ import annotations

from collections.abc import Iterable

from ddpjob_contract import crd
from ddpjob_operator.core.objects.workload import Workload
from ddpjob_operator.shell.api import errors
from ddpjob_operator.shell.api.client import WORKLOADS, Listing, Object
from ddpjob_operator.shell.cache.store import Key
from ddpjob_operator.shell.watch.informer import Informer


class WorkloadInformer(Informer):
    """Informer of the jobs' Workloads; without the API, or the right, none are known."""

    resource = WORKLOADS
    selector = crd.LABEL_JOB_UID

    def _keep(self, obj: Object) -> Workload:
        return self._store.workloads.put(obj)

    def _replace(self, listing: Listing) -> Iterable[Key]:
        uids = [one.uid for one in listing.items]
        self._store.workloads.replace_all(self._namespace, uids, listing.resource_version)
        return self._store.keys_in(self._namespace)

    def _apply(self, kind: str, obj: Object) -> Iterable[Key]:
        found = self._store.workloads.put(obj)
        if kind == "DELETED":
            self._store.workloads.remove((found.namespace, found.name), found.uid)
        return self._store.keys_of(found.namespace, found.owner_uid)

    def _refused(self, error: errors.ApiError) -> None:
        super()._refused(error)
        if isinstance(error, errors.NotFound | errors.Forbidden):
            self._store.workloads.forget(self._namespace)
