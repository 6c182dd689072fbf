"""GET /state: whom it asks, what it accepts, and that it never fails anything."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from aiohttp import web

import ddpjob_contract as contract
from ddpjob_operator.core import render
from ddpjob_operator.core.objects import compact_spec, observe, ports, spec, status
from ddpjob_operator.shell import progress
from ddpjob_operator.shell.progress import ProgressReader
from ddpjob_operator.shell.store import Key, Store
from support import stored
from support.patience import PATIENCE

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def own_address() -> str:
    """An address of this machine that is not the loopback's, as a pod's would be."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing
        return str(probe.getsockname()[0])
    return "127.0.0.1"


ADDRESS = own_address()
needs_address = pytest.mark.skipif(
    ADDRESS.startswith("127."), reason="this machine has no address but the loopback's"
)


@contextlib.asynccontextmanager
async def reading(
    handle: Handler, leads: Callable[[], bool] = lambda: True
) -> AsyncIterator[tuple[Store, list[Key]]]:
    """A running job whose replica 0 answers with ``handle``, and a reader that reads fast."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, ADDRESS, 0).start()
    store = Store()
    changed: list[Key] = []
    store.put_job(job(runner.addresses[0][1]))
    store.put_pod(pod(replica=1, ip="192.0.2.77"))
    store.put_pod(pod(replica=0, ip=ADDRESS))
    reader = ProgressReader(store, changed.append, leads, seconds=0.05)
    task = asyncio.create_task(reader.run())
    try:
        yield store, changed
    finally:
        task.cancel()
        await runner.cleanup()


def job(port: int, name: str = "job", uid: str = "u1") -> dict[str, Any]:
    found = stored.job(1, uid, name, phase="Running", attempt=1)
    return {**found, "spec": {"metrics": {"port": port}}}


def pod(replica: int, ip: str, job: str = "job", uid: str = "u1") -> dict[str, Any]:
    container = {"name": "trainer", "state": {"running": {}}}
    status = {"phase": "Running", "podIP": ip, "containerStatuses": [container]}
    more: dict[str, Any] = {"name": f"{job}-{replica}", "owner": uid, "status": status}
    return stored.pod(f"{uid}-p{replica}", replica, **more)


async def until(check: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while True:
            if check():
                return
            await asyncio.sleep(0.01)


@needs_address
async def test_news_reach_outcomes_and_queue_once_and_only_a_leader_asks():
    asked: list[str] = []
    questions = 0

    async def state(request: web.Request) -> web.StreamResponse:
        asked.append(request.path_qs)
        return web.json_response({"step": 7, "totalSteps": 100, "loss": 0.5, "snapshotStep": 5})

    def leads() -> bool:
        nonlocal questions
        questions += 1
        return questions > 5

    async with reading(state, leads) as (store, changed):
        await until(lambda: questions == 5)
        assert asked == []
        await until(lambda: len(asked) >= 5)
        found = store.feedback("u1").progress
    assert (found.step, found.total_steps, found.snapshot_step) == (7, 100, 5)
    assert set(asked) == {"/state?uid=u1"}, "to strangers a launcher tells no rounds"
    assert changed == [("ns", "job")], "the same answer again is no news"


@needs_address
async def test_the_same_answer_of_a_new_attempt_is_news_once():
    """Else it counts as the attempt's before for ever."""
    asked: list[str] = []

    async def state(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        return web.json_response({"connected": False})

    async with reading(state) as (store, changed):
        await until(lambda: len(asked) >= 3)
        (known,), began = store.jobs(), datetime.now(UTC).replace(microsecond=0)
        older = replace(store.feedback("u1").progress, updated_at=began - timedelta(seconds=1))
        times = {"runningAt": began.isoformat().replace("+00:00", "Z")}
        later = stored.job(2, phase="Running", attempt=1, timings=times)
        store.put_job({**later, "spec": known.spec})
        store.record("u1", progress=older)
        await until(lambda: store.feedback("u1").progress.updated_at >= began)
        answers = len(asked)
        await until(lambda: len(asked) >= answers + 3)
    assert changed == [("ns", "job")] * 2


@needs_address
async def test_whom_the_hub_calls_away_is_told_again_until_it_is_back():
    away: list[Any] = [1, 7, -1, "0", None]
    asked: list[str] = []

    async def state(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        return web.json_response({"step": 7, "away": away})

    async with reading(state) as (store, changed):
        await until(lambda: len(changed) >= 3)
        (pod_1,) = [one.uid for one in store.pods_of("u1") if one.replica == 1]
        assert store.feedback("u1").away == {pod_1}, "of the members, by uid"
        away.clear()
        await until(lambda: not store.feedback("u1").away)
        told, answers = len(changed), len(asked)
        await until(lambda: len(asked) >= answers + 3)
        assert len(changed) == told


DRAWN = ports.of(
    compact_spec.template({"spec": {"hostNetwork": True}}), ports.MASTER, ports.METRICS, "u1", 1, 0
).metrics


@pytest.mark.parametrize("port", [ports.MASTER, DRAWN], ids=["default", "taken"])
@pytest.mark.parametrize("host_network", [False, True])
async def test_it_asks_where_the_pod_was_told_to_answer(host_network, port):
    template = {"spec": {"hostNetwork": host_network, "containers": [{"name": "trainer"}]}}
    obj = {**job(9400), "spec": {"replicas": 1, "template": template, "port": port}}
    store = Store()
    store.put_job(obj)
    store.put_pod(pod(replica=0, ip="192.0.2.7"))
    seen = observe.job(obj)
    (trainer,) = render.pod(seen, spec.parse(seen.spec), 1, 0)["spec"]["containers"]
    env = {variable["name"]: variable.get("value", "") for variable in trainer["env"]}
    reader, known = (
        ProgressReader(store, lambda _: None, lambda: True),
        status.from_dict(seen.status),
    )
    address = reader._address(seen, known)
    assert address == ("192.0.2.7", int(env[contract.METRICS_PORT]))
    assert host_network == (env[contract.METRICS_PORT] != "9400")


def test_after_a_replacement_it_asks_the_hub():
    store = Store()
    store.put_job(stored.job(1, phase="Running", attempt=5, membersSince=2, births="0:4,1:5"))
    store.put_pod(stored.pod("old", 0, 2, status=pod(0, "192.0.2.6")["status"]))
    reader = ProgressReader(store, lambda _: None, lambda: True)
    (seen,) = store.jobs()
    known = status.from_dict(seen.status)
    assert reader._address(seen, known) is None
    store.put_pod(stored.pod("new", 0, 4, status=pod(0, "192.0.2.7")["status"]))
    assert reader._address(seen, known) == ("192.0.2.7", 9400)


OTHERS = [{"attempt": 0}, {"attempt": 2}, {"attempt": "1"}, {"attempt": None},
          {"attempt": 1, "uid": "u2"}]  # fmt: skip
GOOD = json.dumps({"step": 1})


@needs_address
async def test_what_a_stranger_may_answer_is_ignored():
    """Or the launcher of another attempt or gang, whose address it is by now."""
    answers = [
        *({"text": json.dumps({**other, "round": 5, "step": 7})} for other in OTHERS),
        {"text": GOOD + " " * 2 * contract.STATE_MAX_BYTES},
        {"text": "[" * 50_000},
        {"text": "step 1"},
        {"text": f"[{GOOD}]"},
        {"text": GOOD, "status": 500},
        {"status": 302, "headers": {"Location": "/other"}},
    ]
    asked: list[str] = []

    async def state(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        return web.Response(**answers[len(asked) % len(answers)])

    async with reading(state) as (store, changed):
        await until(lambda: len(asked) > len(answers))
        assert (store.feedback("u1").progress, store.feedback("u1").rounds) == (None, None)
    assert changed == []
    assert set(asked) == {"/state"}


@needs_address
async def test_jobs_that_never_answer_do_not_silence_the_others():
    """More of them than are asked side by side, and all before the one that answers."""
    steps = holes = 0

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal holes
        holes += 1
        await reader.read()  # until the other side gives up
        writer.close()

    async def state(request: web.Request) -> web.StreamResponse:
        nonlocal steps
        steps += 1
        return web.json_response({"step": steps})

    hole = await asyncio.start_server(silent, ADDRESS, 0)
    port = hole.sockets[0].getsockname()[1]
    async with reading(state) as (store, _):
        first = next(store.jobs())
        store.forget_job(first.key, first.uid)
        for number in range(40):
            name, uid = f"silent-{number}", f"s{number}"
            store.put_job(job(port, name, uid))
            store.put_pod(pod(0, ADDRESS, name, uid))
        store.put_job(job(first.spec["metrics"]["port"]))
        await until(lambda: steps >= 40 or holes >= 450)
    hole.close()
    assert steps >= 40, "for each answer some 17 of the others had their 2 seconds"


@needs_address
@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\n", b"a: b\r\n"),
        (b"HTTP/1.1 200 OK\r\n\r\n", b" "),
    ],
    ids=["before", "head", "body"],
)
async def test_of_an_answer_without_end_little_is_looked_at(begin, more):
    sent = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(begin)
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                writer.write(more * (100_000 // len(more)))
                await writer.drain()
                sent += 100_000
        writer.close()

    async with await asyncio.start_server(flood, ADDRESS, 0) as server:
        with pytest.raises(ValueError, match="bytes that begin with"):
            await progress._fetch(ADDRESS, server.sockets[0].getsockname()[1], "u2")
    assert sent < 20_000_000, "what the sockets hold"


@pytest.mark.parametrize("ip", [
    "", "example", "10.1.2", "127.0.0.1", "127.9.9.9", "0.0.0.0", "169.254.169.254", "224.0.0.1",
    "255.255.255.255", "::", "::1", "ff02::1", "fe80::1", "::ffff:127.0.0.1", "::ffff:7f00:1",
    "::ffff:0.0.0.0", "::ffff:10.1.2.3", "0.0.0.1", "::ffff:0:0.0.0.1",
    "::ffff:169.254.169.254", "::ffff:224.0.0.1", "::127.0.0.1",
    "::ffff:0:127.0.0.1", "64:ff9b::169.254.169.254", "64:ff9b:1::a9fe:a9fe", "2002:7f00:1::",
    "2002:a9fe:a9fe::1", "2001:0:7f00:1::", "fe80::1%eth0", "fd00::7%1", "fd00::7%\r\nX: y",
])  # fmt: skip
def test_addresses_that_no_pod_has_are_not_asked(ip):
    store = Store()
    store.put_job(job(9400))
    store.put_pod(pod(replica=0, ip=ip))
    (seen,) = store.jobs()
    reader, known = ProgressReader(store, print, bool), status.from_dict(seen.status)
    assert reader._address(seen, known) is None


@pytest.mark.parametrize("ip", [
    "10.1.2.3", "192.168.0.9", "100.64.0.1", "240.1.2.3", "8.8.8.8", "fd00::7", "2001:db8::7",
    "2600:1f14::1",
])  # fmt: skip
def test_addresses_that_pods_have_are_asked(ip):
    assert progress._is_of_a_pod(ip)
