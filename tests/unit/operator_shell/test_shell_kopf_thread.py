"""When kopf's watch is taken for dead."""

from __future__ import annotations

from typing import Any

from ddpjob_operator.core.objects import observe
from ddpjob_operator.shell.watch.kopf_thread import JobWatcher
from support.world import job_object


def watcher(monkeypatch: Any) -> tuple[JobWatcher, list[bool]]:
    made, restarts = JobWatcher(None, ("a", "b"), lambda *_: None), list[bool]()  # type: ignore[arg-type]
    monkeypatch.setattr(made, "restart", lambda: restarts.append(True))
    monkeypatch.setattr("ddpjob_operator.shell.watch.kopf_thread.time.monotonic", lambda: 45.0)
    return made, restarts


def event(namespace: str) -> observe.Job:
    body = job_object()
    body["metadata"]["namespace"] = namespace
    return observe.job(body)


def test_a_watch_that_tells_nothing_between_two_finds_is_dead_whoever_else_is_told_of(
    monkeypatch: Any,
) -> None:
    """However many lists in between find nothing: users of a do not change a job in each."""
    made, restarts = watcher(monkeypatch)
    made.missed("a", 30.0)
    made.missed("b", 30.1)
    made._on_event("MODIFIED", event("b"))
    assert not restarts
    made.missed("a", 90.0)
    assert restarts
    made.missed("b", 90.1)
    assert len(restarts) == 1, "the new one has its time"


def test_a_word_between_two_finds_is_a_sign_of_life(monkeypatch: Any) -> None:
    for where in ("a", None):
        made, restarts = watcher(monkeypatch)
        made.missed(where, 30.0)
        made._on_event("MODIFIED", event("a"))
        made.missed(where, 60.0)
        assert not restarts
