"""Workloads: the newest wins, what is gone stays gone, unread is not none; the API of PodGroups."""

import asyncio
from typing import Any

import pytest

from ddpjob_operator.core.objects import observe, workload
from ddpjob_operator.shell.api import Forbidden
from ddpjob_operator.shell.scheduling import GangApi
from ddpjob_operator.shell.store import WorkloadCache
from support.world import job_object

JOB = observe.job(job_object())


def obj(version: int, uid: str = "wl", namespace: str = "ns") -> dict[str, Any]:
    owner = {"uid": job_object()["metadata"]["uid"], "controller": True}
    name = workload.name_of(JOB)
    meta = {"namespace": namespace, "name": name, "uid": uid, "resourceVersion": str(version)}
    return {"metadata": {**meta, "ownerReferences": [owner]}, "spec": {"queueName": str(version)}}


@pytest.fixture
def cache() -> WorkloadCache:
    made = WorkloadCache()
    made.replace_all(None, [], "1")
    return made


def queues(cache: WorkloadCache) -> list[str]:
    return [one.queue for one in cache.of(JOB) or ()]


def test_before_a_list_and_after_a_refusal_nothing_is_known():
    cache = WorkloadCache()
    assert cache.of(JOB) is None
    cache.replace_all(None, [], "1")
    assert cache.of(JOB) == ()
    cache.forget(None)
    assert cache.of(JOB) is None


def test_each_namespace_is_known_by_its_own_list():
    cache = WorkloadCache()
    cache.replace_all("other", [], "1")
    assert cache.of(JOB) is None
    cache.replace_all("ns", [], "1")
    assert cache.of(JOB) == ()


def test_an_older_version_never_replaces_a_newer_one(cache):
    cache.put(obj(5))
    cache.put(obj(4))
    assert queues(cache) == ["5"]
    cache.put(obj(6))
    assert queues(cache) == ["6"]


def test_a_list_drops_what_it_lacks_but_nothing_younger(cache):
    cache.put(obj(5, "old"))
    cache.put(obj(9, "young"))
    cache.replace_all(None, [], "7")
    assert queues(cache) == ["9"]


def test_what_we_deleted_no_late_event_brings_back(cache):
    cache.put(obj(5))
    cache.remove(("ns", workload.name_of(JOB)), "wl", for_good=True)
    cache.put(obj(6))
    assert queues(cache) == []
    cache.put(obj(7, "next"))
    assert queues(cache) == ["7"]


def test_another_namespaces_workload_is_nobodys(cache):
    cache.put(obj(5, namespace="elsewhere"))
    assert queues(cache) == []


def test_one_that_lost_its_owner_is_no_second_one_as_it_was(cache):
    """Else an eviction would never be seen."""
    cache.put(obj(5))
    orphan = obj(6)
    orphan["metadata"]["ownerReferences"] = []
    cache.put(orphan)
    assert [one.owner_uid for one in cache.of(JOB) or ()] in ([], [""])


class Closed:
    """An API server whose discovery only some may read (no binding of system:discovery)."""

    async def discover(self, path: str) -> Any:
        raise Forbidden(403, "Forbidden", f"cannot get path {path}")


async def test_discovery_that_is_forbidden_is_an_answer():
    """The operator does no job's work before it has one."""
    found = GangApi(Closed(), lambda: None)  # type: ignore[arg-type]
    task = asyncio.create_task(found.run())
    await asyncio.wait_for(found.answered.wait(), 1)
    task.cancel()
    assert found.version == ""
