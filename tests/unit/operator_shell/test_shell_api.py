"""The API client against a local HTTP server that behaves in all the ways servers do."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web

from ddpjob_operator.settings import Credentials
from ddpjob_operator.shell.api import (
    JOBS,
    PODS,
    Api,
    ApiError,
    Conflict,
    Forbidden,
    Gone,
    Invalid,
    NotFound,
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """``handle`` answers every request; requests are kept."""

    def __init__(self) -> None:
        self.handle: Handler = self._nothing
        self.seen: list[web.Request] = []
        self.url = ""

    async def _nothing(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({})

    def says(self, what: object = None, code: int = 200, **headers: str) -> None:
        """Answer so from now on: JSON, or text as it is."""

        async def handle(_: web.Request) -> web.StreamResponse:
            text = what if isinstance(what, str) else json.dumps(what)
            return web.Response(
                text=text, status=code, headers=headers, content_type="application/json"
            )

        self.handle = handle

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(request)
        return await self.handle(request)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    found = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", found.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    found.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield found
    await runner.cleanup()


class FakeConfiguration:
    ssl_ca_cert = cert_file = key_file = tls_server_name = proxy = None
    verify_ssl = True

    def __init__(self, host: str) -> None:
        self.host = host
        self.token = "bearer first\n"

    def get_api_key_with_prefix(self, name: str, alias: str) -> str:
        return self.token


@pytest.fixture
async def calls() -> Counter[tuple[str, str, int]]:
    return Counter()


@pytest.fixture
async def api(server: Server, calls: Counter[tuple[str, str, int]]) -> AsyncIterator[Api]:
    def count(verb: str, resource: str, code: int) -> None:
        calls[verb, resource, code] += 1

    async with Api(Credentials(FakeConfiguration(server.url), "default"), count) as found:
        yield found


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (400, Invalid),
        (401, Forbidden),
        (403, Forbidden),
        (404, NotFound),
        (409, Conflict),
        (410, Gone),
        (422, Invalid),
        (500, ApiError),
        (504, ApiError),
    ],
)
async def test_errors_carry_the_servers_words(api, server, calls, code, error):
    server.says({"kind": "Status", "reason": "Because", "message": "so it is"}, code)
    with pytest.raises(error) as caught:
        await api.get(PODS, "ns", "x")
    assert (caught.value.code, caught.value.reason) == (code, "Because")
    assert caught.value.message == "so it is"
    assert caught.value.maybe_done is (code >= 500)
    assert calls == {("get", "pods", code): 1}


async def test_an_error_without_an_end_is_one(api, server):
    async def refuse(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=409)
        await response.prepare(request)
        while True:
            await response.write(b"taken" * 10_000)

    server.handle = refuse
    with pytest.raises(Conflict, match="taken"):
        await api.get(PODS, "ns", "x")


async def test_no_answer_may_mean_done(api, server, calls, monkeypatch):
    async def hang(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(30)
        return web.json_response({})

    server.handle = hang
    monkeypatch.setattr("ddpjob_operator.shell.api._TIMEOUT", 0.2)
    with pytest.raises(ApiError) as caught:
        await api.replace(PODS, "ns", "x", {})
    assert caught.value.maybe_done
    assert calls == {("update", "pods", 0): 1}


async def test_a_throttled_call_is_repeated_when_the_server_says(api, server, calls):
    async def later(request: web.Request) -> web.StreamResponse:
        if len(server.seen) < 3:
            return web.json_response({}, status=429, headers={"Retry-After": "0"})
        return web.json_response({"ok": True})

    server.handle = later
    assert await api.create(PODS, "ns", {"a": 1}) == {"ok": True}
    assert calls == {("create", "pods", 429): 2, ("create", "pods", 200): 1}


async def test_a_list_is_read_in_pages(api, server):
    async def page(request: web.Request) -> web.StreamResponse:
        token = request.query.get("continue")
        meta = {"resourceVersion": "7"} | ({} if token else {"continue": "more"})
        return web.json_response({"metadata": meta, "items": [{"page": token}]})

    server.handle = page
    listing = await api.list_all(PODS, "ns", "app=x")
    assert [item["page"] for item in listing.items] == [None, "more"]
    assert listing.resource_version == "7"
    for request in server.seen:
        assert request.query["limit"] == "500"
        assert request.query["labelSelector"] == "app=x"
        assert "resourceVersion" not in request.query, "a quorum read"


async def test_only_the_servers_silence_ends_a_list_or_a_watch(api, server, monkeypatch):
    """What is long to decode, for one user has made it so, would keep the list from all others."""
    monkeypatch.setattr("ddpjob_operator.shell.api._TIMEOUT", 2.0)

    async def page(request: web.Request) -> web.StreamResponse:
        items = [{"fill": "x" * 50_000}] * 40
        return web.json_response({"metadata": {"resourceVersion": "7"}, "items": items})

    server.handle = page
    listing = await api.list_all(PODS, "ns", keep=lambda _: time.sleep(0.08))
    assert len(listing.items) == 40

    async def stall(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'{"items":[')
        await asyncio.sleep(3600)
        return response

    server.handle = stall
    monkeypatch.setattr("ddpjob_operator.shell.api._TIMEOUT", 0.2)
    with pytest.raises(ApiError, match=r"no answer within 0\.2 s"):
        await api.list_all(PODS, "ns")
    assert [event async for event in api.watch(PODS, "ns", "5", silence=0.2)] == []


async def test_an_answer_that_is_no_list_is_not_an_empty_one(api, server):
    """Every pod would count as gone, and every gang would be restarted."""
    for text in (
        "{}",
        "[]",
        '{"kind":"Status","status":"Success","metadata":{"resourceVersion":"7"}}',
        '{"items":[]}',
        '{"items":[],"metadata":{"resourceVersion":""}}',
        '{"items":{},"kind":"PodList","metadata":{"resourceVersion":"7"}}',
        '{"items":null,"metadata":{"resourceVersion":"7"}}',
    ):
        server.says(text)
        with pytest.raises(ApiError, match="no answer") as caught:
            await api.list_all(PODS, "ns")
        assert caught.value.code == 0


async def test_a_line_that_is_no_event_ends_the_watch_as_an_error(api, server):
    for line in (
        "null",
        "<html>",
        '{"type":"ADDED"}',
        '{"type":"ADDED","object":{}}',
        '{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":7}}}',
        '{"type":"ERROR","object":{"code":"x"}}',
    ):
        server.says(line + "\n")
        with pytest.raises(ApiError):
            async for _ in api.watch(PODS, "ns", "5"):
                pass


async def test_a_watch_reads_lines_of_any_length_and_ends_with_the_stream(api, server):
    meta = {"resourceVersion": "7", "note": "x" * (9 << 20)}
    long = {"type": "ADDED", "object": {"metadata": meta}}

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        data = b"\n".join([json.dumps(long).encode()] * 2 + [b"broken off"])
        for start in range(0, len(data), 1_000_001):
            await response.write(data[start : start + 1_000_001])
        return response

    server.handle = stream
    events = [event async for event in api.watch(PODS, None, "5")]
    assert events == [("ADDED", long["object"])] * 2
    assert server.seen[0].query["resourceVersion"] == "5"
    assert server.seen[0].query["allowWatchBookmarks"] == "true"
    assert server.seen[0].path == "/api/v1/pods"


async def test_an_error_event_of_a_watch_is_raised(api, server):
    event = {"type": "ERROR", "object": {"code": 410, "message": "too old"}}
    server.says(json.dumps(event) + "\n")
    with pytest.raises(Gone, match="too old"):
        async for _ in api.watch(JOBS, "ns", "5"):
            pass


async def test_a_redirect_is_not_followed(api, server):
    server.says("", 302, Location="/elsewhere")
    with pytest.raises(ApiError):
        await api.get(PODS, "ns", "x")
    assert len(server.seen) == 1


async def test_each_call_carries_the_token_of_the_moment(server):
    configuration = FakeConfiguration(server.url)
    async with Api(Credentials(configuration, "default"), lambda *_: None) as api:
        await api.get(PODS, "ns", "x")
        configuration.token = "bearer second"
        await api.delete(PODS, "ns", "x", uid="u")
    assert [r.headers["Authorization"] for r in server.seen] == ["bearer first", "bearer second"]
