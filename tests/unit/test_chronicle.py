"""The record of a cluster's watches: what only some of them have told yet is not judged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support import chronicle as module
from support.chronicle import Chronicle
from support.invariants import JOBS, NODES, PODS, SERVICES


class Store:
    """What lists show."""

    def __init__(self, _: Path) -> None:
        self.version = 10
        self.objects: dict[str, list[dict[str, Any]]] = {
            plural: [] for plural in (JOBS, PODS, SERVICES, NODES)
        }
        self.objects[SERVICES] = [{"metadata": {**meta("job", 2), **OWNED}}]
        self.after = {JOBS: lambda: None}  # done once those were listed

    def get(self, path: str) -> dict[str, Any]:
        plural = path.rpartition("/")[2]
        version = {"resourceVersion": str(self.version)}
        found = {"metadata": version, "items": [*self.objects[plural]]}
        self.after.pop(plural, lambda: None)()
        return found


OWNED = {"ownerReferences": [{"uid": "uid-job", "controller": True}]}


def meta(name: str, version: int) -> dict[str, Any]:
    return {"name": name, "uid": f"uid-{name}", "resourceVersion": str(version), "generation": 1}


def job(version: int, phase: str, attempt: int) -> dict[str, Any]:
    status = {"phase": phase, "attempt": attempt}
    return {"metadata": meta("job", version), "spec": {"replicas": 1}, "status": status}


def pod(version: int, attempt: int) -> dict[str, Any]:
    labels = {
        "ddpjob.dev/attempt": str(attempt),
        "ddpjob.dev/replica": "0",
        "ddpjob.dev/job-uid": "uid-job",
    }
    told = {"DDPJOB_REPLICA": "0", "DDPJOB_ATTEMPT": str(attempt), "PET_NODE_RANK": "0"}
    env = [{"name": name, "value": value} for name, value in told.items()]
    spec = {"containers": [{"name": "trainer", "image": "i", "env": env}]}
    return {"metadata": {**meta("job-0", version), **OWNED, "labels": labels}, "spec": spec}


@pytest.fixture
def store() -> Store:
    return Store(Path())


@pytest.fixture
def chronicle(store: Store, monkeypatch: pytest.MonkeyPatch) -> Chronicle:
    """One that reads lists when told to; a test tells what its watches tell."""
    monkeypatch.setattr(module, "Rest", lambda _: store)
    monkeypatch.setattr(module, "_QUIET", -1.0)  # nothing comes by itself
    return Chronicle(Path(), "here")


def listed(chronicle: Chronicle, *plurals: str) -> None:
    for plural in plurals or (JOBS, PODS, SERVICES, NODES):
        chronicle._list(chronicle._streams[plural])


def tell(chronicle: Chronicle, plural: str, kind: str, obj: dict[str, Any]) -> None:
    chronicle._take(chronicle._streams[plural], kind, obj)


def test_a_pod_that_no_intent_asks_for_is_found(store: Store, chronicle: Chronicle) -> None:
    store.objects[JOBS] = [job(9, "Running", 1)]
    listed(chronicle)
    store.version, store.objects[PODS] = 13, [pod(13, 2)]
    tell(chronicle, PODS, "ADDED", pod(13, 2))
    (wrong,) = chronicle.violations()
    assert wrong.startswith("i4_intent_first: job-0 of attempt 2 is created")


def test_a_pod_that_is_told_before_its_intent_is_judged_after_it(
    store: Store, chronicle: Chronicle
) -> None:
    store.objects[JOBS] = [job(9, "Restarting", 2)]
    listed(chronicle)

    def go_on() -> None:
        """The watch of jobs is late with the first of the two."""
        store.version = 14
        store.objects[JOBS], store.objects[PODS] = [job(12, "Starting", 2)], [pod(13, 2)]
        tell(chronicle, PODS, "ADDED", pod(13, 2))

    store.after[JOBS] = go_on
    assert chronicle.violations() == []
    assert chronicle.state.pods == {}
    tell(chronicle, JOBS, "MODIFIED", job(12, "Starting", 2))
    assert chronicle.violations() == []
    assert chronicle.orphans() == []
    assert [*chronicle.state.pods["uid-job"]] == ["uid-job-0"]


def test_what_was_asked_for_before_all_streams_had_begun_anew_is_nobodys(
    store: Store, chronicle: Chronicle
) -> None:
    store.objects[JOBS] = [job(9, "Running", 1)]
    listed(chronicle)
    chronicle.begin_anew()
    listed(chronicle, PODS, SERVICES, NODES)
    store.version = 20
    store.objects[JOBS], store.objects[PODS] = [job(15, "Running", 2)], [pod(13, 2)]
    tell(chronicle, PODS, "ADDED", pod(13, 2))  # it was Starting, which no list shows any more
    listed(chronicle, JOBS)
    assert chronicle.violations() == []
    assert [*chronicle.state.pods["uid-job"]] == ["uid-job-0"]


def test_an_event_that_was_on_its_way_when_history_began_anew_is_forgotten(
    store: Store, chronicle: Chronicle
) -> None:
    listed(chronicle)
    chronicle.begin_anew()
    tell(chronicle, PODS, "ADDED", pod(90, 2))
    store.version, store.objects[JOBS] = 100, [job(99, "Running", 3)]
    listed(chronicle)
    assert chronicle.violations() == []
    assert chronicle.state.pods == {}


def test_a_stream_whose_list_failed_has_told_nothing(store: Store, chronicle: Chronicle) -> None:
    listed(chronicle)
    chronicle.begin_anew()

    def fail() -> None:
        raise OSError("refused")

    store.after[JOBS] = fail
    with pytest.raises(OSError, match="refused"):
        listed(chronicle, JOBS)
    stream = chronicle._streams[JOBS]
    assert chronicle._has_told(JOBS, stream) is None
    assert stream.era != chronicle.gaps, "so it is listed again"


def test_a_pod_that_came_and_went_unseen_is_nobodys(store: Store, chronicle: Chronicle) -> None:
    """No list shows it, so its watch seems to have told all."""
    store.objects[JOBS] = [job(9, "Running", 1)]
    listed(chronicle)
    store.version, store.objects[JOBS] = 20, [job(19, "Running", 2)]
    tell(chronicle, JOBS, "MODIFIED", job(15, "Starting", 2))
    tell(chronicle, JOBS, "MODIFIED", job(19, "Running", 2))
    assert chronicle.violations() == []
    tell(chronicle, PODS, "ADDED", pod(16, 2))  # late
    tell(chronicle, PODS, "DELETED", pod(17, 2))
    assert chronicle.violations() == []
