"""The lease: two electors, an API that can fail, and time that is simulated."""

import asyncio
import copy
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest

from ddpjob_operator.shell.api import ApiError, Conflict, NotFound, Object, Resource
from ddpjob_operator.shell.elector import Elector
from support.patience import PATIENCE

pytestmark = [pytest.mark.looptime]


@pytest.fixture(autouse=True)
async def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The elector's clock is the simulated one."""
    clock = SimpleNamespace(monotonic=asyncio.get_running_loop().time)
    monkeypatch.setattr("ddpjob_operator.shell.elector.time", clock)


class LeaseServer:
    """One Lease with optimistic concurrency; ``fail`` may raise instead.

    ``slow`` is awaited before each answer, so after a write is stored.
    """

    def __init__(self) -> None:
        self.lease: Object | None = None
        self.version = 0
        self.fail: Callable[[str], None] = lambda verb: None
        self.slow: Callable[[str], Awaitable[object]] = lambda verb: asyncio.sleep(0)

    async def get(self, resource: Resource, namespace: str, name: str) -> Object:
        self.fail("get")
        await self.slow("get")
        if self.lease is None:
            raise NotFound(404, "NotFound", "no lease")
        return copy.deepcopy(self.lease)

    async def create(self, resource: Resource, namespace: str, body: Object) -> Object:
        self.fail("create")
        if self.lease is not None:
            raise Conflict(409, "AlreadyExists", "there is one")
        return await self._answer("create", body)

    async def replace(self, resource: Resource, namespace: str, name: str, body: Object) -> Object:
        self.fail("replace")
        if body["metadata"]["resourceVersion"] != str(self.version):
            raise Conflict(409, "Conflict", "changed")
        return await self._answer("replace", body)

    @property
    def spec(self) -> Object:
        spec: Object = self.lease["spec"]
        return spec

    @property
    def holder(self) -> str:
        return str(self.spec["holderIdentity"])

    def touch(self) -> None:
        """Write it again, as somebody else does."""
        assert self.lease is not None
        self._store(self.lease)

    async def _answer(self, verb: str, body: Object) -> Object:
        stored = self._store(body)
        await self.slow(verb)
        return stored

    def _store(self, body: Object) -> Object:
        self.version += 1
        self.lease = copy.deepcopy(body)
        self.lease["metadata"]["resourceVersion"] = str(self.version)
        return copy.deepcopy(self.lease)


class Candidate:
    """One elector."""

    def __init__(self, server: LeaseServer, name: str) -> None:
        self.changes: list[bool] = []
        self.elector = Elector(
            server,
            namespace="ns",
            name="lease",
            identity=name,
            seconds=15,
            on_change=self.changes.append,
        )
        self.task = asyncio.create_task(self.elector.run())

    def leads(self) -> bool:
        return self.elector.leads()

    async def die(self) -> None:
        """As by SIGKILL: nothing is released."""
        self.task.cancel()
        await asyncio.wait([self.task])


async def dead_leader(server: LeaseServer) -> Candidate:
    """It led for a moment, and the lease is its still."""
    found = Candidate(server, "a")
    await asyncio.sleep(5)
    await found.die()
    return found


async def test_one_of_two_leads_and_the_other_follows_when_it_dies():
    server = LeaseServer()
    first = Candidate(server, "a")
    await asyncio.sleep(1)
    server.spec["renewTime"] = "1999-01-01T00:00:00.000000Z"
    second = Candidate(server, "b")
    await asyncio.sleep(2)
    assert not second.leads(), "an old time in the lease says nothing about its age here"
    await asyncio.sleep(58)
    assert (first.leads(), second.leads()) == (True, False)
    await first.die()
    await asyncio.sleep(10)
    assert not second.leads(), "the lease has not expired"
    await asyncio.sleep(10)
    assert second.leads()
    assert server.spec["leaseTransitions"] == 2
    await second.die()


async def test_a_renewal_that_is_stored_late_does_not_keep_the_lease():
    """Its task is cancelled while the API server has the call already."""
    server = LeaseServer()
    first = await dead_leader(server)

    def late(verb: str) -> None:
        if verb == "replace":
            server.fail = lambda verb: None
            server.touch()

    server.fail = late
    release = asyncio.create_task(first.elector.release(PATIENCE))
    await asyncio.sleep(1)
    assert server.holder == ""
    await release


@pytest.mark.parametrize("verb", ["create", "replace"])
async def test_a_lease_that_is_just_being_taken_is_given_back(verb):
    """Its task is cancelled, or the answer is lost, when the API server has stored it already."""
    server = LeaseServer()
    if verb == "replace":
        before = Candidate(server, "z")
        await asyncio.sleep(1)
        await before.die()
        await before.elector.release(PATIENCE)
    server.slow = lambda done: asyncio.sleep(0 if done == "get" else 3600)
    first = Candidate(server, "a")
    await asyncio.sleep(1)
    assert (server.holder, first.leads()) == ("a", False)
    await first.die()
    server.slow = lambda done: asyncio.sleep(0)
    await first.elector.release(PATIENCE)
    assert server.holder == ""


@pytest.mark.parametrize("error", [ApiError(500, "", "down"), Conflict(409, "Conflict", "changed")])
async def test_a_release_that_cannot_be_says_why(error, caplog):
    server, loop = LeaseServer(), asyncio.get_running_loop()
    first = Candidate(server, "a")
    await asyncio.sleep(5)
    await first.die()

    def fail(verb: str) -> None:
        raise error

    server.fail = fail
    began = loop.time()
    await first.elector.release(7)
    assert loop.time() - began == 7
    assert f"cannot give the lease ns/lease back: {error}" in caplog.text


async def test_without_an_api_server_it_stops_acting_before_the_lease_expires():
    server = LeaseServer()
    first = Candidate(server, "a")
    await asyncio.sleep(6)
    assert first.leads()

    def down(verb: str) -> None:
        raise ApiError(0, "", "down")

    server.fail = down
    await asyncio.sleep(6)
    assert first.leads(), "one missed renewal is no reason to stop"
    await asyncio.sleep(6)
    assert not first.leads()
    await asyncio.sleep(5)
    assert first.task.done(), "run() returns, so that the process ends"
    assert first.changes == [True, False]


async def test_a_renewal_that_comes_late_tells_that_leadership_is_back():
    """What was looked at meanwhile was left alone, so it must be looked at again."""
    server = LeaseServer()
    first = Candidate(server, "a")
    await asyncio.sleep(1)
    paused: list[bool] = []
    loop = asyncio.get_running_loop()
    again = loop.time() + 7.5

    def away(verb: str) -> None:
        if loop.time() < again:
            raise ApiError(503, "", "away")

    async def slow(verb: str) -> None:
        if verb == "replace" and not paused:
            await asyncio.sleep(3.5)  # beyond the deadline of the renewal before
            paused.append(not first.leads())

    server.fail, server.slow = away, slow
    await asyncio.sleep(20)
    assert paused == [True]
    assert first.leads()
    assert first.changes == [True, True]
    await asyncio.sleep(20)
    assert first.changes == [True, True], "renewals in time tell nothing"
    await first.die()


async def test_what_others_write_to_the_lease_is_no_sign_of_life():
    """Whoever labels or annotates it, a backup's or GitOps' controller, does not hold it."""
    server = LeaseServer()
    await dead_leader(server)
    second = Candidate(server, "b")
    for number in range(6):
        await asyncio.sleep(3)
        assert server.lease is not None
        if server.holder == "a":
            server.lease["metadata"]["annotations"] = {"touched": str(number)}
            server.touch()
    assert second.leads()
    await second.die()
