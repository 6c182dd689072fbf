"""The API server for benchmarks: one client for scripts, and a leaner one for stand-ins.

`Client` is aiohttp, as a script would take it. `Wire` is HTTP/1.1 by hand and reads no
more of an answer than its status: what plays a hundred kubelets must not take the processor from
those that are measured.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp

from support.rest import Object, Rest

METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
_PROTOBUF = "application/vnd.kubernetes.protobuf"


class Refused(Exception):  # noqa: N818 - an answer, not an error of ours
    """An answer that is no success."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text[:300]}")
        self.code = code


class Gone(Refused):
    """404: it is not there."""


class Client:
    """Use it as an async context manager. ``parallel``: calls at once."""

    def __init__(self, kubeconfig: Path, parallel: int = 32) -> None:
        rest = Rest(kubeconfig)
        self.server, self._context = rest.server, rest.context
        self._parallel = parallel
        self.writes = 0

    async def __aenter__(self) -> Client:
        # One more for each watch.
        connector = aiohttp.TCPConnector(limit=self._parallel + 8, ssl=self._context or True)
        self._session = aiohttp.ClientSession(connector=connector)
        self._gate = asyncio.Semaphore(self._parallel)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._session.close()

    async def text(self, method: str, path: str, body: Object | None = None) -> bytes:
        """The body of a successful answer; raises Refused."""
        merge = method == "PATCH"
        headers = {"Content-Type": "application/merge-patch+json" if merge else "application/json"}
        data = json.dumps(body).encode() if body is not None else None
        self.writes += method != "GET"
        async with (
            self._gate,
            self._session.request(method, self.server + path, data=data, headers=headers) as answer,
        ):
            found = await answer.read()
            if answer.status >= 300:
                kind = Gone if answer.status == 404 else Refused
                raise kind(answer.status, found.decode(errors="replace"))
            return found

    async def call(self, method: str, path: str, body: Object | None = None) -> Object:
        found: Object = json.loads(await self.text(method, path, body))
        return found

    async def version(self, path: str) -> str:
        """The resourceVersion of now, for a watch."""
        found = await self.call("GET", f"{path}?limit=1")
        return str(found["metadata"]["resourceVersion"])

    async def watch(
        self, path: str, since: str = "0", accept: str = "application/json"
    ) -> AsyncGenerator[Object, None]:
        """Events after that version; "0": of about now, after an ADDED for all that was there then.

        Ends when the server's answer does; raises Refused when the server cannot go on.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_read=None)
        url, headers = f"{self.server}{path}?watch=true&resourceVersion={since}", {"Accept": accept}
        async with self._session.get(url, headers=headers, timeout=timeout) as answer:
            rest = b""
            async for chunk in answer.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        status = event["object"]
                        raise Refused(int(status.get("code") or 0), str(status.get("message")))
                    yield event


class Wire:
    """``connections`` calls at once; each answers with the status code alone."""

    def __init__(self, rest: Rest, connections: int = 32) -> None:
        self._url, self._context = rest.url, rest.context
        self._free: asyncio.LifoQueue[_Connection] = asyncio.LifoQueue()
        for _ in range(connections):
            self._free.put_nowait(_Connection())

    async def call(self, method: str, path: str, body: Object, kind: str = "json") -> int:
        host, port = self._url.hostname or "", self._url.port
        connection = await self._free.get()
        try:
            if not connection.usable():
                connection = await _connect(host, port, self._context)
            data = json.dumps(body).encode()
            head = (
                f"{method} {path} HTTP/1.1\r\nHost: {host}:{port}\r\nAccept: {_PROTOBUF}\r\n"
                f"Content-Type: application/{kind}\r\nContent-Length: {len(data)}\r\n\r\n"
            )
            return await connection.send(head.encode() + data)
        finally:
            self._free.put_nowait(connection)


class _Connection(asyncio.Protocol):
    """One call at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._answer: asyncio.Future[int] | None = None
        self._status, self._left, self._chunked = 0, -1, False  # -1: the head is not whole yet

    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, request: bytes) -> asyncio.Future[int]:
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        self._left = -1
        self._transport.write(request)
        return self._answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer and not self._answer.done():
            self._answer.set_exception(exc or ConnectionError("the server hung up"))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._left < 0 and not self._read_head():
            return
        if self._chunked:
            if not self._read_chunks():
                return
        elif len(self._buffer) < self._left:
            return
        else:
            del self._buffer[: self._left]
        if self._answer and not self._answer.done():
            self._answer.set_result(self._status)

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        first, *lines = self._buffer[:end].decode("latin-1").lower().split("\r\n")
        del self._buffer[: end + 4]
        self._status = int(first.split(" ", 2)[1])
        fields = dict(line.split(": ", 1) for line in lines)
        self._chunked = fields.get("transfer-encoding") == "chunked"
        self._left = int(fields.get("content-length", 0))
        return True

    def _read_chunks(self) -> bool:
        """Drop whole chunks; True after the last one."""
        while True:
            end = self._buffer.find(b"\r\n")
            if end < 0:
                return False
            size = int(self._buffer[:end], 16)
            if len(self._buffer) < end + 4 + size:
                return False
            del self._buffer[: end + 4 + size]
            if not size:
                return True


async def _connect(host: str, port: int | None, context: ssl.SSLContext | None) -> _Connection:
    made: tuple[Any, _Connection] = await asyncio.get_running_loop().create_connection(
        _Connection, host, port, ssl=context
    )
    return made[1]
