"""A recording HTTP proxy in front of a real kube-apiserver, which can also do harm.

It stands between one operator process and the API server, in a thread of the test process.
Every call is recorded. Faults, one after another, meet the calls that they match: a call can
be refused, lost on the way there or on the way back, or be the operator's last.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
from aiohttp import web

from support.patience import PATIENCE
from support.policy import ACCOUNT
from support.rest import Object, Rest

#: What a fault does to the call that it meets.
#: kill-before: the operator dies and the call never arrives.
#: kill-commit: it arrives, but the operator dies before it hears the answer.
#: kill-reply: the operator dies right after the answer went out.
#: answer: a made-up error instead of forwarding; with ``text`` no Status but that, as from
#: something in between. answer-after: that error though it was carried out. lose-call: the
#: connection breaks before, lose-reply: after it was carried out.
#: late: as lose-call, but it was only held up, and arrives when another call passes (``until``).
#: again: it is carried out, and once more then. stale: a list shows the store as of ``version``.
Harm = Literal[
    "kill-before",
    "kill-commit",
    "kill-reply",
    "answer",
    "answer-after",
    "lose-call",
    "lose-reply",
    "late",
    "again",
    "stale",
]


@dataclass(slots=True)
class Call:
    """One request as it arrived; ``code`` is what the API server said, None if not asked.

    ``found``: the metadata of the object that it answered a write with.
    """

    method: str
    path: str
    query: str
    agent: str = ""
    body: Object | None = None
    code: int | None = None
    found: Object = field(default_factory=dict)

    @property
    def is_write(self) -> bool:
        """A write of the operator proper: its Lease and Events are not counted."""
        side = "/leases" in self.path or "/events" in self.path
        return self.method != "GET" and not side

    @property
    def watches(self) -> bool:
        return "watch=true" in self.query

    @property
    def target(self) -> str:
        """Method and object, names of pods being created included; to be counted."""
        path = self.path
        if self.method == "POST" and self.body:
            path = f"{path}/{self.body['metadata']['name']}"
        return f"{self.method} {re.sub(r'^.*/namespaces/[^/]+/', '', path)}"


@dataclass(slots=True)
class Fault:
    """Meets the calls that ``match``, ``times`` times.

    Watches are met only ``watches`` True. ``then`` is called when it has met one.
    """

    harm: Harm
    match: Callable[[Call], bool]
    times: int = 1
    code: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    text: str | None = None
    met: int = 0
    watches: bool = False
    until: Callable[[Call], bool] = lambda _: True
    version: str = ""
    then: Callable[[], None] = lambda: None


@dataclass(slots=True)
class _Held:
    """A request that is delivered when another one passes."""

    call: Call
    url: str
    data: bytes
    headers: dict[str, str]
    until: Callable[[Call], bool] | None


class Proxy:
    """Use it as a context manager; ``url`` is what the operator's kubeconfig names."""

    def __init__(self, rest: Rest) -> None:
        self._rest = rest
        self.calls: list[Call] = []
        self.made: list[Call] = []  # writes that the API server took; clear() leaves them
        self.faults: list[Fault] = []
        self.kill: Callable[[], None] = lambda: None
        self.notice: Callable[[Call], None] = lambda _: None  # each call, before it is met
        self.swallow: Callable[[Object], bool] = lambda _: False
        self.repeat: Callable[[Object], bool] = lambda _: False
        self.stall: Callable[[Object], float] = lambda _: 0.0  # it and all after it, so long
        self.tokens: set[str] | None = None  # the only ones that are let in; None: everybody
        self.own_rights = False  # the operator's token goes on to the API server, not ours
        self.unanswered = 0  # writes that were forwarded and not answered yet
        self._held: list[_Held] = []
        self.errors_next: list[tuple[str, int]] = []  # (path end, code) of ERROR events
        self.url = ""
        self._streams: set[web.StreamResponse] = set()
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        assert self._ready.wait(PATIENCE), "the proxy did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def writes(self) -> list[Call]:
        """The writes so far, in the order of their arrival."""
        return [call for call in self.calls if call.is_write]

    def clear(self) -> None:
        """Forget what was recorded."""
        self.calls.clear()

    def cut_watches(self) -> None:
        """Break every open watch."""

        def cut() -> None:
            for stream in list(self._streams):
                if stream._req is not None and stream._req.transport is not None:
                    stream._req.transport.abort()

        self._loop.call_soon_threadsafe(cut)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as self._session:
            app = web.Application(client_max_size=64 << 20)
            app.router.add_route("*", "/{path:.*}", self._handle)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            self._ready.set()
            await self._stop.wait()
            await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        call = Call(request.method, request.path, request.query_string)
        call.agent = request.headers.get("User-Agent", "")
        call.body = json.loads(data) if data else None
        self.calls.append(call)
        self.notice(call)
        if self.tokens is not None and _token(request) not in self.tokens:
            return _status(401, "Unauthorized", {})
        fault = self._meet(call)
        url = self._rest.server + request.path_qs
        if fault and fault.harm == "stale":
            url += f"&resourceVersion={fault.version}&resourceVersionMatch=Exact"
        copy = _Held(call, url, data, self._headers(request), fault.until if fault else None)
        if fault and fault.harm == "late":
            self._held.append(copy)
        if fault and fault.harm in ("kill-before", "lose-call", "answer", "late"):
            return self._instead(request, fault)
        await self.deliver_held(call)
        if call.watches:
            with contextlib.suppress(aiohttp.ClientError):
                return await self._watch(request, call)
            return _break(request)
        try:
            reply = await self._forward(call, url, data, self._headers(request))
        except aiohttp.ClientError:  # the API server is not there
            return _break(request)
        if fault and fault.harm == "again":
            self._held.append(copy)
        if fault:
            return await self._afterwards(request, fault, reply)
        return reply

    async def _forward(
        self, call: Call, url: str, data: bytes, headers: dict[str, str]
    ) -> web.Response:
        self.unanswered += call.is_write
        try:
            async with self._session.request(
                call.method,
                url,
                data=data or None,
                headers=headers,
                ssl=self._context(),
                skip_auto_headers=("Content-Type",),
            ) as answer:
                body = await answer.read()
            call.code = answer.status
            if call.is_write and answer.status < 300:
                with contextlib.suppress(RecursionError):  # too deep for Python: nobody's write
                    call.found = json.loads(body).get("metadata") or {}
                    self.made.append(call)
        finally:
            self.unanswered -= call.is_write  # last: whoever saw none has all that was made
        return web.Response(body=body, status=answer.status, headers=_pass(answer))

    async def deliver_held(self, passing: Call | None = None) -> None:
        """Let what was held up arrive: what waits for this call, or all."""
        due = [one for one in self._held if not (passing and one.until) or one.until(passing)]
        self._held = [one for one in self._held if one not in due]
        for one in due:
            again = Call(one.call.method, one.call.path, one.call.query, "held up", one.call.body)
            self.calls.append(again)
            await self._forward(again, one.url, one.data, one.headers)

    def release(self) -> None:
        """Let all that was held up arrive, and wait until it has."""
        asyncio.run_coroutine_threadsafe(self.deliver_held(), self._loop).result(PATIENCE)

    def _meet(self, call: Call) -> Fault | None:
        for fault in self.faults:
            if fault.times > 0 and (fault.watches or not call.watches) and fault.match(call):
                fault.times -= 1
                fault.met += 1
                fault.then()
                return fault
        return None

    def _instead(self, request: web.Request, fault: Fault) -> web.StreamResponse:
        if fault.harm == "answer" and fault.text is not None:
            return web.Response(text=fault.text, status=fault.code, headers=fault.headers)
        if fault.harm == "answer":
            return _status(fault.code, "Injected", fault.headers)
        if fault.harm == "kill-before":
            self.kill()
        return _break(request)

    async def _afterwards(
        self, request: web.Request, fault: Fault, reply: web.StreamResponse
    ) -> web.StreamResponse:
        if fault.harm in ("again", "stale"):
            return reply
        if fault.harm == "answer-after":
            return _status(fault.code, "Injected", fault.headers)
        if fault.harm == "kill-reply":
            await reply.prepare(request)
            await reply.write_eof()
            self.kill()
            return reply
        if fault.harm == "kill-commit":
            self.kill()
        return _break(request)

    async def _watch(self, request: web.Request, call: Call) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"Content-Type": "application/json"})
        for number, (end, code) in enumerate(self.errors_next):
            if request.path.endswith(end):
                del self.errors_next[number]
                await stream.prepare(request)
                status = {"kind": "Status", "code": code, "reason": "X", "message": "injected"}
                event = {"type": "ERROR", "object": status}
                await stream.write(json.dumps(event).encode() + b"\n")
                return stream
        async with self._session.get(
            self._rest.server + request.path_qs, headers=self._headers(request), ssl=self._context()
        ) as answer:
            call.code = answer.status
            if answer.status != 200:
                return web.Response(body=await answer.read(), status=answer.status)
            await stream.prepare(request)
            self._streams.add(stream)
            try:
                await self._pump(answer, stream)
            finally:
                self._streams.discard(stream)
        return stream

    async def _pump(self, answer: aiohttp.ClientResponse, stream: web.StreamResponse) -> None:
        buffer = b""
        async for chunk in answer.content.iter_any():
            *lines, buffer = (buffer + chunk).split(b"\n")
            for line in filter(None, lines):
                try:
                    event = json.loads(line)
                except RecursionError:  # nested too deep for Python: no fault is about that
                    await stream.write(line + b"\n")
                    continue
                if self.swallow(event):
                    continue
                await asyncio.sleep(self.stall(event))
                try:
                    for _ in range(1 + self.repeat(event)):
                        await stream.write(line + b"\n")
                except ConnectionError:
                    return

    def _context(self) -> ssl.SSLContext | bool:
        rest = self._rest
        return (rest.nobodys_context if self.own_rights else rest.context) or True

    def _headers(self, request: web.Request) -> dict[str, str]:
        wanted = ("Content-Type", "Accept", "User-Agent")
        headers = {name: request.headers[name] for name in wanted if name in request.headers}
        token = _token(request) if self.own_rights else self._rest.token
        if not self.own_rights:  # all rights, and the policy about the operator's account
            headers |= {"Impersonate-User": ACCOUNT, "Impersonate-Group": "system:masters"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        return headers


def _break(request: web.Request) -> web.StreamResponse:
    """Close the connection without a word."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=502)


def _token(request: web.Request) -> str:
    return request.headers.get("Authorization", "").removeprefix("Bearer ")


def _status(code: int, reason: str, headers: dict[str, str]) -> web.Response:
    status = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "code": code,
        "reason": reason,
        "message": "injected by the test",
    }
    return web.json_response(status, status=code, headers=headers)


def _pass(answer: aiohttp.ClientResponse) -> dict[str, Any]:
    wanted = ("Content-Type", "Retry-After")
    return {name: answer.headers[name] for name in wanted if name in answer.headers}
