"""The informer's patience with a server that calls every version too old."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ddpjob_operator.core.objects.nodes import FORBIDDEN, Signals
from ddpjob_operator.shell.api import ApiError, Forbidden, Gone, Listing, Object
from ddpjob_operator.shell.informer import NodeInformer, PodInformer
from ddpjob_operator.shell.nodes import NodeCache
from ddpjob_operator.shell.store import Key, Store
from support import stored

pytestmark = [pytest.mark.looptime]

BOOKMARK: tuple[str, Object] = ("BOOKMARK", {"metadata": {"resourceVersion": "6"}})


class ForgetfulApi:
    """Its watches tell ``events`` after ``pause``, and then that the version is too old."""

    def __init__(self) -> None:
        self.lists: list[float] = []
        self.watches = 0
        self.events: list[tuple[str, Object]] = []
        self.pause = 0.0
        self.too_old = True
        self.listed = asyncio.Event()
        self.gone_lists = False

    async def list_all(self, *_: object, **__: object) -> Listing:
        self.lists.append(asyncio.get_running_loop().time())
        self.listed.set()
        await asyncio.sleep(0.001)
        if self.gone_lists:
            raise Gone(410, "Expired", "the pages took too long")
        return Listing([], "5")

    async def watch(self, *_: object, **__: object) -> AsyncIterator[tuple[str, Object]]:
        self.watches += 1
        await asyncio.sleep(self.pause)
        for event in self.events:
            yield event
        if self.too_old:
            raise Gone(410, "Expired", "too old resource version")


@pytest.fixture(autouse=True)
async def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The informer's clock is the simulated one."""
    clock = SimpleNamespace(monotonic=asyncio.get_running_loop().time)
    monkeypatch.setattr("ddpjob_operator.shell.informer.time", clock)


@contextlib.asynccontextmanager
async def informing(api: ForgetfulApi) -> AsyncIterator[PodInformer]:
    informer = PodInformer(api, Store(), None, lambda _: None)  # type: ignore[arg-type]
    task = asyncio.create_task(informer.run())
    yield informer
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.parametrize("gone_lists", [False, True], ids=["watches", "lists"])
async def test_repeated_gone_is_no_storm_of_lists(gone_lists, caplog):
    api = ForgetfulApi()
    api.gone_lists = gone_lists
    async with informing(api):
        await asyncio.sleep(0.1)
        assert len(api.lists) == 2, "the first time it lists again at once"
        await asyncio.sleep(600)
    assert 10 < len(api.lists) < 50, "it goes on, but ever more slowly"
    told = [one.message for one in caplog.records if one.levelname == "WARNING"]
    once = ["pods: 410 Expired: the pages took too long; trying again"]
    assert told == (once if gone_lists else [])


@pytest.mark.parametrize("too_old", [True, False], ids=["too old", "ends"])
async def test_a_watch_that_tells_something_and_ends_at_once_is_no_storm(too_old):
    api = ForgetfulApi()
    api.events, api.too_old, api.pause = [BOOKMARK], too_old, 0.01
    async with informing(api):
        await asyncio.sleep(600)
    assert 10 < api.watches < 300
    assert 10 < len(api.lists) < 100


class NodesApi(ForgetfulApi):
    """Lists ``answer``, then waits."""

    def __init__(self, answer: list[Object] | ApiError) -> None:
        super().__init__()
        self.answer = answer

    async def list_all(
        self, *_: object, keep: Callable[[Object], Any] = lambda obj: obj, **__: object
    ) -> Listing:
        self.lists.append(asyncio.get_running_loop().time())
        if isinstance(self.answer, ApiError):
            raise self.answer
        return Listing(list(map(keep, self.answer)), "5")

    async def watch(self, *_: object, **__: object) -> AsyncIterator[tuple[str, Object]]:
        for event in self.events:
            yield event
        await asyncio.sleep(3600)


def node(name: str, version: int, *, ready: bool = True) -> Object:
    status = {"conditions": [{"type": "Ready", "status": str(ready)}]}
    return {"metadata": {"name": name, "resourceVersion": str(version)}, "status": status}


def store_with_a_pod_on(name: str) -> Store:
    store = Store()
    store.put_job(stored.job())
    store.put_pod({**stored.pod("p"), "spec": {"nodeName": name}})
    return store


@contextlib.asynccontextmanager
async def informing_of_nodes(api: NodesApi, store: Store) -> AsyncIterator[list[Key]]:
    """The jobs that the informer names."""
    told: list[Key] = []
    informer = NodeInformer(api, store, None, told.append)  # type: ignore[arg-type]
    task = asyncio.create_task(informer.run())
    await informer.synced.wait()
    yield told
    task.cancel()


async def test_a_node_that_changes_names_the_jobs_that_are_on_it():
    api, store = NodesApi([node("a", 3), node("b", 3)]), store_with_a_pod_on("a")
    api.events = [
        ("MODIFIED", node("a", 6)),  # a heartbeat
        ("MODIFIED", node("b", 7, ready=False)),  # nobody is there
        ("MODIFIED", node("a", 8, ready=False)),
        ("DELETED", node("a", 9)),
    ]
    async with informing_of_nodes(api, store) as told:
        await asyncio.sleep(1)
    assert told == [("ns", "job")] * 3, "at the list, silent, gone"
    store.remove_pod("p")
    assert store.keys_on({"a"}) == set()


async def test_a_node_that_is_about_to_go_names_the_jobs_that_are_on_it():
    tainted = {"spec": {"taints": [{"key": "going"}]}}
    store = Store(nodes=NodeCache(signals=Signals(taints=("going",))))
    store.put_job(stored.job())
    store.put_pod({**stored.pod("p"), "spec": {"nodeName": "a"}})
    api = NodesApi([node("a", 3)])
    api.events = [("MODIFIED", {**node("a", version), **tainted}) for version in (4, 5)]
    async with informing_of_nodes(api, store) as told:
        await asyncio.sleep(1)
        found = store.nodes.of(["a"])
    assert told == [("ns", "job")] * 2, "at the list and the taint"
    assert found.known["a"].signal == "taint going"


@pytest.mark.parametrize(
    ("error", "known"),
    [
        (Forbidden(403, "Forbidden", "not you"), FORBIDDEN),
        (ApiError(503, "", "not you"), None),  # no want of rights
    ],
)
async def test_nodes_that_cannot_be_read_are_unknown_and_nobody_waits(error, known, caplog):
    api, store = NodesApi(error), store_with_a_pod_on("a")
    async with informing_of_nodes(api, store):
        assert store.nodes.of(["a"]) == known
        await asyncio.sleep(600)
        assert len(api.lists) < 40
        assert len([r for r in caplog.records if "not you" in r.message]) == 1, "told once"
        api.answer = [node("a", 3)]
        await asyncio.sleep(60)
        found = store.nodes.of(["a"])
        assert found.known["a"].ready


async def test_each_object_of_a_list_is_a_sign_of_life():
    """All of them may take longer than a loop may seem stuck."""
    api = NodesApi([node("a", 3)])
    informer = NodeInformer(api, Store(), None, lambda _: None)  # type: ignore[arg-type]

    async def list_all(*_: object, keep: Callable[[Object], Any], **__: object) -> Listing:
        informer.alive_at = -1.0
        keep(node("a", 3))
        assert informer.alive_at > -1.0
        return Listing([], "5")

    api.list_all = list_all  # type: ignore[method-assign]
    assert await informer._list() == "5"


@pytest.mark.parametrize("part", ["list", "watch"])
async def test_no_server_makes_it_wait_for_an_hour(part):
    busy = ApiError(503, "", "maintenance", retry_after=3600.0)

    class BusyApi(NodesApi):
        async def watch(self, *_: object, **__: object) -> AsyncIterator[tuple[str, Object]]:
            self.watches += 1
            raise busy
            yield BOOKMARK

    api = BusyApi(busy if part == "list" else [])
    async with informing_of_nodes(api, Store()):
        await asyncio.sleep(100)
    assert 3 <= (len(api.lists) if part == "list" else api.watches) <= 6
