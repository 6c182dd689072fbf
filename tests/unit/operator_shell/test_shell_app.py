"""The process as a whole: what ends it, what it says then, and how long the end may take."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from ddpjob_operator.core.actions import ConfirmGone, Plan
from ddpjob_operator.core.objects import observe
from ddpjob_operator.shell import reconciler
from ddpjob_operator.shell.api import errors
from ddpjob_operator.shell.api.client import JOBS, Listing, Object, Resource
from ddpjob_operator.shell.api.credentials import Credentials
from ddpjob_operator.shell.app import App
from ddpjob_operator.shell.settings import Settings
from support.world import job_object
from unit.operator_shell.test_shell_api import FakeConfiguration

DEPLOYMENT = Path(__file__).parents[3] / "charts/ddpjob/templates/deployment.yaml"


NOWHERE = Credentials(FakeConfiguration("http://127.0.0.1:1"), "default")


async def endless(*_: object) -> None:
    await asyncio.Event().wait()


class Stubborn:
    """Takes no notice of being cancelled until it is let go."""

    let_go = False

    async def run(self) -> None:
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                if self.let_go:
                    raise


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> App:
    """An operator of which no part does anything."""
    made = App(Settings(identity="a"), NOWHERE)
    lists = (*made._resyncs.values(), *made._informers.values(), made._node_informer)
    lists = (*lists, made._gang_api)
    for part in (made._watcher, made._recorder, made._progress, *lists):
        monkeypatch.setattr(part, "run", endless)
    monkeypatch.setattr(made._elector, "run", endless)
    monkeypatch.setattr(made, "_work", endless)
    return made


async def fail() -> None:
    raise RuntimeError("broken inside")


async def lose() -> None:
    pass


@pytest.mark.parametrize(
    ("part", "ends", "bug"),
    [("_elector", fail, True), ("_node_informer", fail, True), ("_elector", lose, False)],
)
async def test_a_part_that_fails_ends_the_process_and_tells_why(
    app: App, part: str, ends: Any, bug: bool, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr(getattr(app, part), "run", ends)
    assert await app._run_parts(asyncio.Event()) == 1
    assert ("bug" in caplog.text) == ("broken inside" in caplog.text) == bug


async def test_a_restored_etcd_that_a_worker_finds_is_no_bug_and_a_reason_to_start_anew(
    app: App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its barrier shows it before any watch or list of a whole kind does."""

    async def list_pods(*_: object, **__: object) -> Listing:
        return Listing([], "7")

    async def work() -> None:
        await app._queue.run(2, app._reconciler.reconcile)

    monkeypatch.setattr(app._api, "list_all", list_pods)
    monkeypatch.setattr(app._reconciler, "_leads", lambda: True)
    monkeypatch.setattr(app._reconciler._executor, "_leads", lambda: True)
    monkeypatch.setattr(app, "_work", work)
    for part in (app._resyncs[None], app._informers[None]):
        part.synced.set()
    app._store.put_job(job_object())
    app._store.check_list("pods", "8", 0)
    app._queue.add(("ns", "job"))
    monkeypatch.setattr(reconciler, "plan", lambda *_: Plan((ConfirmGone(1),)))
    assert await app._run_parts(asyncio.Event()) == 1
    assert "etcd was restored from a backup; starting anew" in caplog.text
    assert "bug" not in caplog.text


@pytest.mark.looptime
async def test_the_end_fits_in_the_grace_that_the_chart_gives(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the work, the parts and the API server all hang. Time is simulated."""
    found = re.search(r"terminationGracePeriodSeconds: (\d+)", DEPLOYMENT.read_text())
    assert found is not None
    stubborn = Stubborn()
    monkeypatch.setattr(app._resyncs[None], "run", stubborn.run)
    monkeypatch.setattr(app._queue, "drained", endless)
    monkeypatch.setattr(app._elector, "_written_at", 0.0)
    monkeypatch.setattr(app._elector, "_return_lease", endless)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    running: asyncio.Task[Any] = asyncio.create_task(app._run_parts(stop))
    await asyncio.sleep(1)
    began = loop.time()
    stop.set()
    assert await running == 0
    assert loop.time() - began < int(found[1]) - 1
    stubborn.let_go = True  # the loop cancels whoever is left


@pytest.mark.looptime
async def test_the_lease_is_given_back_in_the_time_that_the_work_leaves(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow API server needs more than it had: 2 s, though the work was done at once."""
    released = []

    async def slow() -> str:
        await asyncio.sleep(5)
        released.append(True)
        return ""

    monkeypatch.setattr(app._elector, "_written_at", 0.0)
    monkeypatch.setattr(app._elector, "_return_lease", slow)
    stop = asyncio.Event()
    stop.set()
    assert await app._run_parts(stop) == 0
    assert released


class HalfRefused:
    """An API of two namespaces, of which b is not read until it is given back."""

    def __init__(self, error: errors.ApiError) -> None:
        self.error, self.given_back = error, False
        self.planned: list[str] = []

    async def discover(self, path: str) -> Object:
        return {}

    async def list_all(
        self,
        resource: Resource,
        namespace: str | None,
        *_: object,
        keep: Callable[[Object], Any],
        **__: object,
    ) -> Listing:
        await asyncio.sleep(0.01)
        if namespace == "b" and not self.given_back:
            raise self.error
        job = job_object()
        job["metadata"] |= {"namespace": namespace, "uid": f"uid-{namespace}"}
        return Listing([keep(job)] if resource is JOBS else [], "7")

    async def watch(self, *_: object, **__: object) -> AsyncIterator[tuple[str, Object]]:
        await asyncio.sleep(60)
        return
        yield

    def plan(self, job: observe.Job, *_: object) -> Plan:
        self.planned.append(job.namespace)
        return Plan()


@pytest.mark.looptime
@pytest.mark.parametrize(
    "error",
    [
        errors.Forbidden(403, "Forbidden", "somebody deleted the RoleBinding"),
        errors.ApiError(500, "InternalError", "a webhook of conversion is down"),
        errors.ApiError(0, "", "no answer within 20 s"),
        errors.Gone(410, "Expired", "the pages took too long"),
    ],
    ids=["forbidden", "error", "silence", "too long"],
)
async def test_a_namespace_that_cannot_be_read_holds_up_no_other(
    error: errors.ApiError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever administers one can take the operator's rights there. Time is simulated."""
    settings = Settings(identity="a", namespaces=("b", "a"))
    made, api = App(settings, NOWHERE), HalfRefused(error)
    for part in (made._watcher, made._recorder, made._progress):
        monkeypatch.setattr(part, "run", endless)
    monkeypatch.setattr(made._api, "list_all", api.list_all)
    monkeypatch.setattr(made._api, "watch", api.watch)
    monkeypatch.setattr(made._api, "discover", api.discover)
    monkeypatch.setattr(made._elector, "leads", lambda: True)
    monkeypatch.setattr(made._reconciler, "_leads", lambda: True)
    monkeypatch.setattr(made._elector, "run", endless)
    monkeypatch.setattr(reconciler, "plan", api.plan)
    stop = asyncio.Event()
    running = asyncio.create_task(made._run_parts(stop))
    await asyncio.sleep(400)
    assert set(api.planned) == {"a"}
    assert made._unready() == []
    api.given_back = True
    await asyncio.sleep(60)
    assert set(api.planned) == {"a", "b"}
    stop.set()
    assert await running == 0
