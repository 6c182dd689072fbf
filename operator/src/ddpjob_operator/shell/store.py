"""Store the operator's knowledge: jobs, their pods, and the API's refusals.

Three sources write here: the watches, full lists, and the answers to our own calls; the reconciler
reads snapshots. The sources overtake one another, so a record only gives way to a newer one
(resourceVersion), and an older watch event does not bring back what a quorum list or a deletion has
removed. Everything runs on one event loop; no method awaits.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from ddpjob_contract import crd
from ddpjob_operator.core.actions import ApiFeedback
from ddpjob_operator.core.objects import observe
from ddpjob_operator.core.objects.nodes import Nodes
from ddpjob_operator.core.objects.observe import Job
from ddpjob_operator.core.objects.workload import Workload, name_of, workload
from ddpjob_operator.shell.api import version_number
from ddpjob_operator.shell.nodes import NodeCache

log = logging.getLogger(__name__)

Key = tuple[str, str]  # namespace, name
Owner = tuple[str, str]  # namespace of the pod, uid of the job: no pod of another namespace is its
Object = Mapping[str, Any]

_TOMBSTONES = 20_000
_ATTEMPTS = 4
_DELETED_WORKLOADS = 1000


@dataclass(frozen=True, slots=True)
class SlimPod:
    """The kept part of a pod, and its resourceVersion."""

    pod: observe.Pod
    version: int | None
    readable: bool = True


def slim_pod(obj: Object) -> SlimPod:
    """Keep the needed part of a Pod object; a malformed one must hide no other."""
    meta, readable = obj["metadata"], True
    try:
        pod = observe.pod(obj)
    except Exception:
        log.exception("a pod that cannot be read is ignored")
        named = {field: meta[field] for field in ("namespace", "name", "uid")}
        pod, readable = observe.pod({"metadata": named}), False
    return SlimPod(pod, version_number(meta.get("resourceVersion")), readable)


@dataclass(frozen=True, slots=True)
class JobState:
    """One job with all that is known about it, for one planning round."""

    job: observe.Job
    pods: tuple[observe.Pod, ...]
    feedback: ApiFeedback
    nodes: Nodes | None = None


@dataclass(slots=True)
class _Gang:
    """The pods that name one job as their owner.

    ``floor``: watch events up to this version are history; ``floors``: those of one seat's pods.
    ``seen``: by attempt, the replicas that had a pod; only of the newest few attempts.
    """

    pods: dict[str, SlimPod] = field(default_factory=dict)  # by uid
    floor: int = 0
    floors: dict[int | None, int] = field(default_factory=dict)
    seen: dict[int, set[int]] = field(default_factory=dict)

    def note(self, pod: observe.Pod) -> None:
        """Note that this pod has existed."""
        if pod.attempt is not None and pod.replica is not None:
            self.seen.setdefault(pod.attempt, set()).add(pod.replica)
            if len(self.seen) > _ATTEMPTS:
                del self.seen[min(self.seen)]  # members may be of older attempts


class WorkloadCache:
    """Kueue's Workloads by namespace and name; one that we deleted stays away."""

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
        if (old is None or _newer(old.version, new.version)) and new.uid not in self._deleted:
            self._known[new.namespace, new.name] = new
        return new

    def remove(self, where: tuple[str, str], uid: str, *, for_good: bool = False) -> None:
        """Forget a Workload; ``for_good``: a watch that is behind does not bring it back."""
        if where in self._known and self._known[where].uid == uid:
            del self._known[where]
        if for_good:
            self._deleted[uid] = None
            if len(self._deleted) > _DELETED_WORKLOADS:
                self._deleted.popitem(last=False)

    def replace_all(self, where: str | None, listed: Iterable[str], version: str) -> None:
        """Take a full list of these uids, read at ``version``."""
        kept = set(listed)
        for one in list(self._known.values()):
            gone = one.uid not in kept and _newer(one.version, version)
            if gone and where in (None, one.namespace):
                self.remove((one.namespace, one.name), one.uid)
        self._served[where] = True

    def forget(self, where: str | None) -> None:
        """Stop trusting what cannot be read any more."""
        self._served[where] = False


class RewoundError(Exception):
    """A quorum list is older than versions that the API server reported: etcd was restored.

    Every known version, deletion and confirmation is then void, so only a fresh start helps.
    """


class Store:
    """Jobs by key and uid, pods by owner, feedback by job uid; ``now()`` is the operator's UTC."""

    def __init__(
        self,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        nodes: NodeCache | None = None,
    ) -> None:
        self._now = now
        self._jobs: dict[Key, observe.Job] = {}
        self._keys: dict[str, Key] = {}  # by job uid
        self._gangs: dict[Owner, _Gang] = {}
        self._owners: dict[str, Owner] = {}  # by pod uid
        self._outcomes: dict[str, ApiFeedback] = {}
        self.nodes = nodes or NodeCache()
        self.workloads = WorkloadCache()
        #: Uids of pods that are gone, and in which version; 0: unknown.
        self._buried: OrderedDict[str, int] = OrderedDict()
        self._newest: dict[str, int] = {}  # the newest version seen, by plural

    def newest(self, plural: str) -> int:
        """Return the newest version that the API server reported; ask before a list."""
        return self._newest.get(plural, 0)

    def check_list(self, plural: str, version: str, newest_before: int) -> None:
        """Raise RewoundError if a quorum list is older than what was known when it began."""
        read = version_number(version)
        if read is not None and read < newest_before:
            known = f"{plural} were read at version {read} after {newest_before}"
            raise RewoundError(f"{known}: etcd was restored from a backup")
        self._saw(plural, read)

    def _saw(self, plural: str, version: int | None) -> None:
        self._newest[plural] = max(version or 0, self._newest.get(plural, 0))

    def put_job(self, offered: Object | observe.Job) -> bool:
        """Take a job from a watch or a list; return False without news."""
        if isinstance(offered, observe.Job):
            job = offered
        else:
            meta = offered["metadata"]
            job = observe.job(offered, self._jobs.get((meta["namespace"], meta["name"])))
        self._saw(crd.PLURAL, version_number(job.resource_version))
        known = self._jobs.get(job.key)
        if known is not None and not _newer(known.resource_version, job.resource_version):
            return False
        if known is not None and known.uid != job.uid:
            self.forget_job(known.key, known.uid)
        self._jobs[job.key] = job
        self._keys[job.uid] = job.key
        return True

    def job_versions(self) -> dict[str, str]:
        """Return the versions of all jobs, by uid; ask before a list."""
        return {job.uid: job.resource_version for job in self._jobs.values()}

    def put_read_job(self, offered: Object, versions_before: Mapping[str, str]) -> bool:
        """Take a job that a quorum has read; raise RewoundError if it became older.

        It is older after a restore that raises the revision of etcd, as the manual has it.
        """
        uid, version = offered["metadata"]["uid"], offered["metadata"]["resourceVersion"]
        read, before = version_number(version), version_number(versions_before.get(uid, ""))
        if read is not None and before is not None and read < before:
            known = f"a DDPJob was read at version {read} after {before}"
            raise RewoundError(f"{known}: etcd was restored from a backup")
        return self.put_job(offered)

    def put_own_write(self, obj: Object) -> None:
        """Take the answer to our own write; a job that vanished meanwhile stays vanished."""
        if obj["metadata"]["uid"] in self._keys:
            self.put_job(obj)

    def forget_job(self, key: Key, uid: str) -> bool:
        """Forget the job with that uid, with all that the API's answers showed of it."""
        if self._keys.get(uid) != key:
            return False
        del self._keys[uid]
        self._jobs.pop(key, None)
        self._outcomes.pop(uid, None)
        if not self._gangs.get((key[0], uid), _Gang()).pods:
            self._gangs.pop((key[0], uid), None)
        return True

    def drop_vanished_jobs(
        self, namespace: str | None, listed_uids: Iterable[str], version: str
    ) -> list[Key]:
        """Forget the jobs that a full list does not show, unless they are younger."""
        listed = set(listed_uids)
        gone = [
            job
            for job in self._jobs.values()
            if namespace in (None, job.namespace)
            and job.uid not in listed
            and _newer(job.resource_version, version)
        ]
        for job in gone:
            self.forget_job(job.key, job.uid)
        return [job.key for job in gone]

    def keys_in(self, namespace: str | None) -> list[Key]:
        """Return the keys of a namespace's jobs, or of all (None)."""
        return [key for key in self._jobs if namespace in (None, key[0])]

    def jobs(self) -> Iterator[observe.Job]:
        """Iterate over all jobs; the store must not change meanwhile."""
        return iter(self._jobs.values())

    def snapshot(self, key: Key) -> JobState | None:
        """Return all that is known about one job, or None if there is none."""
        job = self._jobs.get(key)
        if job is None:
            return None
        pods = self.pods_of(job.uid)
        nodes = self.nodes.of({pod.node for pod in pods if pod.node})
        return JobState(job, pods, self.feedback(job.uid), nodes)

    def feedback(self, uid: str) -> ApiFeedback:
        """Return what the API's answers showed about that job."""
        return self._outcomes.get(uid, ApiFeedback())

    def record(self, uid: str, **changes: Any) -> None:
        """Replace fields of the feedback, unless the job is gone."""
        self.set_feedback(uid, replace(self.feedback(uid), **changes))

    def set_feedback(self, uid: str, feedback: ApiFeedback) -> None:
        """Remember the feedback, unless the job is gone."""
        if uid in self._keys:
            self._outcomes[uid] = feedback

    def forget_times(self) -> None:
        """Forget all feedback after the clock was set; ends count as seen now."""
        self._outcomes.clear()
        for gang in self._gangs.values():
            for uid, kept in gang.pods.items():
                if kept.pod.end_seen_at:
                    gang.pods[uid] = replace(kept, pod=replace(kept.pod, end_seen_at=self._now()))

    def doubt_all(self) -> None:
        """Void all confirmations, since another operator may have led meanwhile."""
        for uid, known in self._outcomes.items():
            self._outcomes[uid] = replace(known, confirmed=None, begun=0)

    def put_pod(self, offered: Object | SlimPod, *, from_watch: bool = True) -> set[Key]:
        """Take a pod; return the keys of its jobs, two if it changed its owner."""
        found = offered if isinstance(offered, SlimPod) else slim_pod(offered)
        pod, version = found.pod, found.version
        self._saw("pods", version)
        if pod.uid in self._buried or not found.readable:
            return set()
        owner = (pod.namespace, pod.owner_uid) if pod.owner_uid else None
        former = self._owners.get(pod.uid)
        concerned = {one for one in (owner, former) if one is not None}
        if any(self._outdated(one, pod, version, from_watch) for one in concerned):
            return set()
        if former not in (None, owner):
            self._disown(pod.uid)
        if owner is not None:
            gang = self._gangs.setdefault(owner, _Gang())
            if pod.trainer.state == "terminated":
                known = gang.pods.get(pod.uid)
                pod = replace(pod, end_seen_at=(known and known.pod.end_seen_at) or self._now())
            gang.pods[pod.uid] = SlimPod(pod, version)
            gang.note(pod)
            self._owners[pod.uid] = owner
        return self.keys_of(concerned)

    def remove_pod(self, uid: str, version: int | None = None) -> Key | None:
        """Forget the pod with that uid for good; return the key of its job."""
        self._buried[uid] = version or 0
        self._buried.move_to_end(uid)
        if len(self._buried) > _TOMBSTONES:
            self._buried.popitem(last=False)
        owner = self._disown(uid)
        return next(iter(self.keys_of([owner] if owner else [])), None)

    def replace_pods(
        self,
        job_uid: str,
        items: Iterable[SlimPod],
        version: str,
        seats: frozenset[int] = frozenset(),
    ) -> None:
        """Replace a job's cached pods by a quorum list, read at ``version``.

        ``seats``: it is of their pods alone; empty: of all.
        """
        if job_uid not in self._keys:
            return  # deleted meanwhile
        gang = self._gangs.setdefault((self._keys[job_uid][0], job_uid), _Gang())
        at, kept = version_number(version) or 0, {item.pod.uid for item in items}
        if seats:
            kept |= {uid for uid, known in gang.pods.items() if known.pod.replica not in seats}
        self._retain(gang, kept, version)
        for item in items:
            if self._buried.get(item.pod.uid, 0) > at:
                continue  # it was deleted while the list came
            self._buried.pop(item.pod.uid, None)
            self.put_pod(item, from_watch=False)
        if seats:
            gang.floors |= dict.fromkeys(seats, at)
        else:
            gang.floor = max(gang.floor, at)

    def drop_vanished_pods(
        self, namespace: str | None, listed_uids: Iterable[str], version: str
    ) -> set[Key]:
        """Forget the pods that a full list does not show; return their jobs' keys."""
        listed = set(listed_uids)
        there = [(o, gang) for o, gang in self._gangs.items() if namespace in (None, o[0])]
        return self.keys_of(owner for owner, gang in there if self._retain(gang, listed, version))

    def pods_of(self, job_uid: str) -> tuple[observe.Pod, ...]:
        """Return the pods whose controller is that job, by name."""
        pods = [known.pod for known in self._gang(job_uid).pods.values()]
        return tuple(sorted(pods, key=lambda pod: (pod.name, pod.uid)))

    def keys_on(self, nodes: Container[str]) -> set[Key]:
        """Return the jobs that have a pod on one of these nodes."""
        return self.keys_of(
            owner
            for owner, gang in self._gangs.items()
            if any(known.pod.node in nodes for known in gang.pods.values())
        )

    def seen(self, job_uid: str, attempt: object) -> frozenset[int]:
        """Return replicas of that attempt whose pods this process has seen, gone or not."""
        seen = self._gang(job_uid).seen
        return frozenset(seen.get(attempt, ()) if isinstance(attempt, int) else ())

    def pod_count(self) -> int:
        """Count the cached pods."""
        return len(self._owners)

    def keys_of(self, owners: Iterable[Owner]) -> set[Key]:
        """Return the keys of those of these jobs that are known."""
        keys = {(one, self._keys.get(one[1])) for one in owners}
        return {key for one, key in keys if key and key[0] == one[0]}

    def _gang(self, job_uid: str) -> _Gang:
        namespace, _ = self._keys.get(job_uid, ("", ""))
        return self._gangs.get((namespace, job_uid), _Gang())

    def _outdated(
        self, owner: Owner, pod: observe.Pod, version: int | None, from_watch: bool
    ) -> bool:
        """Return True if that job's pods include a version of the pod as new or newer."""
        gang = self._gangs.get(owner)
        if gang is None or version is None:
            return False
        known = gang.pods.get(pod.uid)
        seen = known.version if known and known.version is not None else -1
        floor = max(gang.floor, gang.floors.get(pod.replica, 0))
        return version <= max(seen, floor if from_watch else -1)

    def _disown(self, uid: str) -> Owner | None:
        owner = self._owners.pop(uid, None)
        if owner is not None:
            gang = self._gangs[owner]
            del gang.pods[uid]
            if not gang.pods and not self.keys_of([owner]):
                del self._gangs[owner]
        return owner

    def _retain(self, gang: _Gang, listed: set[str], version: str) -> bool:
        """Remove pods absent from a list read at ``version``; return True if there were any.

        A pod that we created after the list was read is not missing from it.
        """
        at = version_number(version)
        gone = [
            uid
            for uid, known in gang.pods.items()
            if uid not in listed and (at is None or known.version is None or known.version <= at)
        ]
        for uid in gone:
            self.remove_pod(uid, at)
        return bool(gone)


def _newer(known: str, offered: str) -> bool:
    """Return True if ``offered`` replaces ``known``, also when they cannot be compared."""
    a, b = version_number(known), version_number(offered)
    return True if a is None or b is None else b > a
