"""The process as a whole, before an API server that refuses, hangs or was restored."""

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ddpjob_operator.settings import Credentials, Settings
from ddpjob_operator.shell import app as app_module
from ddpjob_operator.shell.api import (
    JOBS,
    ApiError,
    Forbidden,
    Gone,
    Listing,
    NotFound,
    Object,
    Resource,
)
from support.cluster import ROOT
from support.world import job_object
from unit.operator_shell.test_shell_api import FakeConfiguration

pytestmark = [pytest.mark.looptime]

DEPLOYMENT = ROOT / "charts/ddpjob/templates/deployment.yaml"
NOWHERE = Credentials(FakeConfiguration("http://127.0.0.1:1"), "default")
STARTING = {"phase": "Starting", "attempt": 1, "membersSince": 1}


class FakeApi:
    """One job in each namespace. ``meet`` comes before each answer; it may raise or hang."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.jobs: dict[str, dict[str, Any]] = {}
        self.written = asyncio.Event()
        self.status: dict[str, Any] = {}  # of a new job
        self.version = 7
        self.pods_at: list[str] = []  # the versions of the next lists of pods
        self.meet: Callable[[str, Resource, str | None], Awaitable[None]] = self._nothing

    async def _nothing(self, verb: str, resource: Resource, namespace: str | None) -> None:
        """Let it pass."""

    async def __aenter__(self) -> None:
        """It is no connection."""

    async def __aexit__(self, *_: object) -> None:
        """It is no connection."""

    async def discover(self, path: str) -> Object:
        return {}

    async def get(self, resource: Resource, namespace: str, name: str) -> Any:
        await self.meet("get", resource, namespace)
        if resource.plural == "leases" and self.lease:
            return dict(self.lease)
        if resource is JOBS:
            return self._job(namespace)
        raise NotFound(404, "NotFound", name)

    async def create(
        self, resource: Resource, namespace: str, body: Any, *, strict: bool = False
    ) -> Any:
        await self.meet("create", resource, namespace)
        if resource.plural == "leases":
            self.lease = body
        if resource.plural == "pods":
            raise Forbidden(403, "Forbidden", "exceeded quota")
        return body

    async def replace(
        self, resource: Resource, namespace: str, name: str, body: Any, *, sub: str = ""
    ) -> Any:
        await self.meet("replace", resource, namespace)
        if resource.plural == "leases":
            self.lease = body
            return body
        self.version += 1
        job = self._job(namespace)
        meta = {**job["metadata"], "resourceVersion": str(self.version)}
        self.jobs[namespace] = {**job, "metadata": meta, "status": body["status"]}
        self.written.set()
        return self.jobs[namespace]

    async def list_all(
        self, resource: Resource, namespace: str | None, *_: object, keep: Any, **__: object
    ) -> Listing:
        await asyncio.sleep(0.01)
        await self.meet("list", resource, namespace)
        named = self.pods_at if resource.plural == "pods" else []
        version = named.pop(0) if named else str(self.version)
        found = [self._job(namespace or "ns")] if resource is JOBS else []
        return Listing([keep(one) for one in found], version)

    async def watch(self, *_: object, **__: object) -> AsyncIterator[tuple[str, Object]]:
        await asyncio.sleep(60)
        return
        yield

    def _job(self, namespace: str) -> dict[str, Any]:
        new = job_object()
        new["metadata"] |= {"namespace": namespace, "uid": f"uid-{namespace}"}
        return self.jobs.setdefault(namespace, {**new, "status": self.status})

    @property
    def served(self) -> set[str]:
        """Namespaces in which a status was written."""
        return {where for where, job in self.jobs.items() if job["status"]}


async def endless(*_: object) -> None:
    await asyncio.Event().wait()


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    """Instead of a connection; kopf, which opens one of its own, is silent."""
    made = FakeApi()
    monkeypatch.setattr(app_module, "Api", lambda *_: made)
    watcher = SimpleNamespace(run=endless, received_at=0.0)
    monkeypatch.setattr(app_module, "JobWatcher", lambda *_: watcher)
    return made


def made(*namespaces: str) -> app_module.App:
    settings = Settings(identity="a", namespaces=namespaces, probe_host="127.0.0.1", probe_port=0)
    return app_module.App(settings, NOWHERE)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("plural", ["leases", "nodes"])
async def test_a_part_that_fails_ends_the_process_as_a_bug(api, plural, caplog):
    async def broken(verb: str, resource: Resource, _: object) -> None:
        if resource.plural == plural:
            raise RuntimeError("broken inside")

    api.meet = broken
    assert await made().run() == 1
    assert "ended: a bug" in caplog.text
    assert "broken inside" in caplog.text


async def test_a_lost_lease_ends_the_process_and_is_no_bug(api, caplog):
    running = asyncio.create_task(made().run())
    await api.written.wait()
    api.lease = {"spec": {"holderIdentity": "b", "leaseDurationSeconds": 15}}
    assert await running == 1
    assert "lost the lease" in caplog.text
    assert "bug" not in caplog.text


async def test_etcd_restored_below_a_barrier_starts_the_process_anew(api, caplog):
    """A worker's quorum read shows it before any watch or list of a whole kind does."""
    api.status, api.pods_at = STARTING, ["8", "7"]
    assert await made().run() == 1
    assert "etcd was restored from a backup; starting again" in caplog.text
    assert "bug" not in caplog.text


async def test_the_end_fits_in_the_grace_that_the_chart_gives(api):
    """Even if work, lists and the lease all hang, and some do not let themselves be cancelled."""
    found = re.search(r"terminationGracePeriodSeconds: (\d+)", DEPLOYMENT.read_text())
    assert found is not None
    let_go = False

    async def hang(verb: str, resource: Resource, _: object) -> None:
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                if let_go or resource.plural == "leases":
                    raise

    running = asyncio.create_task(made().run())
    await api.written.wait()
    api.meet = hang
    await asyncio.sleep(40)  # until the next lists are under way
    began = asyncio.get_running_loop().time()
    stop()
    try:
        assert await running == 0
        assert asyncio.get_running_loop().time() - began < int(found[1]) - 1
    finally:
        let_go = True  # the loop cancels who is left


async def test_the_lease_is_given_back_in_the_time_that_the_work_leaves(api):
    """A slow API server needs 5 s for it, though the work was done at once."""

    async def slow(verb: str, resource: Resource, _: object) -> None:
        if (verb, resource.plural) == ("replace", "leases"):
            await asyncio.sleep(4.9)

    running = asyncio.create_task(made().run())
    await api.written.wait()
    api.meet = slow
    stop()
    assert await running == 0
    assert api.lease
    assert api.lease["spec"]["holderIdentity"] == ""


@pytest.mark.parametrize(
    "error",
    [
        Forbidden(403, "Forbidden", "somebody deleted the RoleBinding"),
        ApiError(500, "InternalError", "a webhook of conversion is down"),
        ApiError(0, "", "no answer within 20 s"),
        Gone(410, "Expired", "the pages took too long"),
    ],
    ids=["forbidden", "error", "silence", "too long"],
)
@pytest.mark.parametrize("plurals", [("ddpjobs", "pods"), ("pods",)], ids="-".join)
async def test_a_namespace_that_cannot_be_read_holds_up_no_other(api, error, plurals):
    """Its administrator can take the operator's rights there."""

    async def refuse(verb: str, resource: Resource, namespace: str | None) -> None:
        if (verb, namespace) == ("list", "b") and resource.plural in plurals:
            raise error

    api.meet = refuse
    app = made("b", "a")
    running = asyncio.create_task(app.run())
    await asyncio.sleep(400)
    assert api.served == {"a"}
    assert app._unready() == []
    api.meet = api._nothing
    await asyncio.sleep(60)
    assert api.served == {"a", "b"}
    stop()
    assert await running == 0
