"""When kopf's watch is taken for dead."""

from __future__ import annotations

import pytest

from ddpjob_operator.core.objects import observe
from ddpjob_operator.shell.watch.kopf_thread import JobWatcher
from support.world import job_object


@pytest.fixture
def watcher(monkeypatch: pytest.MonkeyPatch) -> JobWatcher:
    monkeypatch.setattr("ddpjob_operator.shell.watch.kopf_thread.time.monotonic", lambda: 45.0)
    return JobWatcher(None, ("a", "b"), lambda *_: None)  # type: ignore[arg-type]


def event(namespace: str) -> observe.Job:
    body = job_object()
    body["metadata"]["namespace"] = namespace
    return observe.job(body)


def test_a_watch_that_tells_nothing_between_two_finds_is_dead_whoever_else_is_told_of(
    watcher: JobWatcher,
) -> None:
    """However many lists in between find nothing: users of a do not change a job in each."""
    watcher.missed("a", 30.0)
    watcher.missed("b", 30.1)
    watcher._on_event("MODIFIED", event("b"))
    assert not watcher._stop.is_set()
    watcher.missed("a", 90.0)
    assert watcher._stop.is_set()
    watcher._stop.clear()
    watcher.missed("b", 90.1)
    assert not watcher._stop.is_set(), "the new one has its time"


@pytest.mark.parametrize("where", ["a", None])
def test_a_word_between_two_finds_is_a_sign_of_life(watcher: JobWatcher, where: str | None) -> None:
    watcher.missed(where, 30.0)
    watcher._on_event("MODIFIED", event("a"))
    watcher.missed(where, 60.0)
    assert not watcher._stop.is_set()
