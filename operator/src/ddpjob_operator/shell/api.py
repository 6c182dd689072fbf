"""Offer the API server as ~8 verbs: dicts in, dicts out, failures as ApiError.

The elector, informers, executor and recorder call it. Typed models would drop fields that they do
not know and cost five times as much. No exception of aiohttp gets past this file.

A list is decoded item by item as it arrives, so that never more than one item is there as dicts,
and other tasks run between two items. What is nested so deep that Python's decoder gives up on it
(a DDPJob of 4 KB can be) is replaced by NaN, which no JSON of Kubernetes holds.
"""

# ruff: noqa: N818 - errors are named after the API's own reasons

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import re
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from ddpjob_contract import crd
from ddpjob_operator import __version__
from ddpjob_operator.core.objects import observe
from ddpjob_operator.settings import Credentials


class ApiError(Exception):
    """An unsuccessful call.

    ``code`` is the HTTP status, 0 without an answer: then a write may or may not have happened.
    ``reason`` and ``message`` are those of the Status object; without one the reason is empty and
    the message is the answer's text.
    """

    def __init__(
        self, code: int, reason: str, message: str, retry_after: float | None = None, what: str = ""
    ) -> None:
        answer = f"{code} {reason}".rstrip() if code else "no answer"
        super().__init__(": ".join(part for part in (what, answer, message) if part))
        self.code = code
        self.reason = reason
        self.message = message
        self.retry_after = retry_after

    @property
    def maybe_done(self) -> bool:
        """Return True if the write may have been carried out in spite of the error."""
        return self.code == 0 or self.code >= 500


class Invalid(ApiError):
    """400 or 422: the object itself is wrong, so sending it again cannot help."""


class Forbidden(ApiError):
    """401 or 403: no permission, or a quota or another admission rule refuses."""


class NotFound(ApiError):
    """404."""


class Conflict(ApiError):
    """409: a newer resourceVersion, another uid, or the name is taken (AlreadyExists)."""


class Gone(ApiError):
    """410: a watch or a paged list is too old and must start again."""


_BY_CODE: dict[int, type[ApiError]] = {
    400: Invalid,
    401: Forbidden,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Gone,
    422: Invalid,
}


def error_from_status(
    code: int, status: Mapping[str, Any], *, retry_after: float | None = None, what: str = ""
) -> ApiError:
    """Turn a metav1.Status (or another answer in its place) into an ApiError."""
    reason, message = str(status.get("reason") or ""), str(status.get("message") or "")
    return _BY_CODE.get(code, ApiError)(code, reason, message, retry_after=retry_after, what=what)


Object = dict[str, Any]
Body = Mapping[str, Any] | None
Params = Mapping[str, str] | None
Read = Callable[[aiohttp.ClientResponse], Awaitable[Object]] | None

_TIMEOUT = 20.0  # seconds for one call, or of silence in a list
_THROTTLE_PATIENCE = 5.0  # a longer Retry-After goes to the caller
_THROTTLE_RETRIES = 3
# The server gives up on a page that is not fetched within a minute, and a DDPJob may be a megabyte.
_PAGE = 500
_PAGE_OF_JOBS = 100
_CALLS = 128  # at once
_ERROR_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of object as its URLs spell it."""

    group: str  # "" is core
    version: str
    plural: str

    def path(self, namespace: str | None, name: str = "", sub: str = "") -> str:
        """Return the URL path of an object or a collection; namespace None: all of them."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        scope = f"/namespaces/{namespace}" if namespace else ""
        tail = "".join(f"/{part}" for part in (name, sub) if part)
        return f"{root}{scope}/{self.plural}{tail}"


JOBS = Resource(crd.GROUP, crd.VERSION, crd.PLURAL)
PODS = Resource("", "v1", "pods")
NODES = Resource("", "v1", "nodes")
EVENTS = Resource("", "v1", "events")
WORKLOADS = Resource(observe.KUEUE, "v1beta2", "workloads")
LEASES = Resource("coordination.k8s.io", "v1", "leases")
PODGROUPS = "podgroups"
#: What a gang has beside its pods, and the PodGroup.
OF_KIND = {
    "Secret": Resource("", "v1", "secrets"),
    "Service": Resource("", "v1", "services"),
    "NetworkPolicy": Resource("networking.k8s.io", "v1", "networkpolicies"),
}


@dataclass(frozen=True, slots=True)
class Listing:
    """A collection, as read or as ``keep`` made it, and the resourceVersion of its reading."""

    items: list[Any]
    resource_version: str


class Api:
    """The session with the API server, an async context manager.

    ``count(verb, resource, code)`` is called once per finished call; ``watches`` stay open.
    """

    def __init__(
        self, credentials: Credentials, count: Callable[[str, str, int], None], watches: int = 0
    ) -> None:
        self._credentials, self._watches = credentials, watches
        self._count = count
        self._server = credentials.server
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Api:
        context = self._credentials.ssl_context()
        connector = aiohttp.TCPConnector(limit=_CALLS + self._watches, ssl=context or True)
        self._session = aiohttp.ClientSession(
            connector=connector,
            proxy=self._credentials.proxy,
            headers={"User-Agent": f"ddpjob-operator/{__version__}", "Accept": "application/json"},
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session:
            await self._session.close()

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Object:
        """Read one object from a quorum."""
        return await self._call("get", resource, resource.path(namespace, name))

    async def create(
        self, resource: Resource, namespace: str, body: Mapping[str, Any], *, strict: bool = False
    ) -> Object:
        """POST the object; ``strict``: unknown fields are an error instead of being dropped."""
        params = {"fieldValidation": "Strict"} if strict else None
        return await self._call("create", resource, resource.path(namespace), body, params)

    async def replace(
        self, resource: Resource, namespace: str, name: str, body: Mapping[str, Any], sub: str = ""
    ) -> Object:
        """PUT the object; raise Conflict if metadata.resourceVersion is not the newest."""
        return await self._call("update", resource, resource.path(namespace, name, sub), body)

    async def delete(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        *,
        uid: str,
        version: str = "",
        grace: int | None = None,
    ) -> Object:
        """DELETE that exact object, at ``version`` if given; otherwise raise Conflict."""
        conditions = {"uid": uid, **({"resourceVersion": version} if version else {})}
        body: Object = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": conditions,
            "propagationPolicy": "Background",
        }
        if grace is not None:
            body["gracePeriodSeconds"] = grace
        return await self._call("delete", resource, resource.path(namespace, name), body)

    async def discover(self, path: str) -> Object:
        """List what the API server serves below ``path`` (/apis, /apis/<group>/<version>)."""
        return await self._call("get", Resource("", "", "discovery"), path)

    async def list_all(
        self,
        resource: Resource,
        namespace: str | None,
        selector: str = "",
        *,
        keep: Callable[[Object], Any] = lambda obj: obj,
    ) -> Listing:
        """List all objects from a quorum, in pages; return what ``keep`` makes of each.

        ``keep`` is called with one object at a time, as it arrives: whole ones would fill the
        memory. Raises Gone if the pages took too long.
        """
        path = resource.path(namespace)
        params = {"limit": str(_PAGE_OF_JOBS if resource == JOBS else _PAGE)}
        if selector:
            params["labelSelector"] = selector
        items: list[Any] = []

        async def read(response: aiohttp.ClientResponse) -> Object:
            found, rest = await read_list(response.content.iter_any(), keep)
            _version(rest)
            items.extend(found)
            return rest

        while True:
            page = await self._call("list", resource, path, None, params, read)
            meta = page["metadata"]
            if not meta.get("continue"):
                break
            params["continue"] = meta["continue"]
        return Listing(items, meta["resourceVersion"])

    async def watch(
        self,
        resource: Resource,
        namespace: str | None,
        since: str,
        *,
        selector: str = "",
        silence: float = 75.0,
    ) -> AsyncIterator[tuple[str, Object]]:
        """Yield (type, object) after resourceVersion ``since``; end when the server ends it.

        Bookmarks come every minute; ``silence`` seconds without anything end the stream, for a dead
        connection looks like a quiet one. Raises Gone when ``since`` is too old.
        """
        params = {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": since}
        if selector:
            params["labelSelector"] = selector
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=silence)
        what = f"watch {resource.plural}"
        try:
            path = resource.path(namespace)
            async with self._send("watch", path, None, params, timeout) as response:
                self._count("watch", resource.plural, response.status)
                if response.status != 200:
                    raise await _error(response, what)
                async for line in read_lines(response.content.iter_any()):
                    kind, obj = _event(line)
                    if kind == "ERROR":
                        raise error_from_status(int(obj.get("code") or 0), obj, what=what)
                    yield kind, obj
        except TimeoutError:
            return
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _no_answer(error, what) from error

    async def _call(
        self,
        verb: str,
        resource: Resource,
        path: str,
        body: Body = None,
        params: Params = None,
        read: Read = None,
    ) -> Object:
        """Make one call; repeat a 429, which changed nothing, if the server's delay is short."""
        tries = 0
        while True:
            try:
                return await self._call_once(verb, resource, path, body, params, read)
            except ApiError as error:
                wait = error.retry_after if error.retry_after is not None else 1.0
                tries += 1
                if error.code != 429 or wait > _THROTTLE_PATIENCE or tries > _THROTTLE_RETRIES:
                    raise
                await asyncio.sleep(wait)

    async def _call_once(
        self, verb: str, resource: Resource, path: str, body: Body, params: Params, read: Read
    ) -> Object:
        what, code = f"{verb} {path}", 0
        # For a list only the server's silence counts; our decoding takes its time.
        limits = aiohttp.ClientTimeout(
            total=None if read else _TIMEOUT, connect=_TIMEOUT, sock_connect=10, sock_read=_TIMEOUT
        )
        try:
            async with self._send(verb, path, body, params, limits) as response:
                if response.status >= 300:
                    code = response.status
                    raise await _error(response, what)
                found: Object = await read(response) if read else loads(await response.read())
                code = response.status
                return found
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _no_answer(error, what) from error
        finally:
            self._count(verb, resource.plural, code)

    def _send(
        self, verb: str, path: str, body: Body, params: Params, timeout: aiohttp.ClientTimeout
    ) -> aiohttp.client._RequestContextManager:
        assert self._session is not None, "the Api is used outside its context"
        authorization = self._credentials.authorization()
        headers = {"Authorization": authorization} if authorization else {}
        if body is not None:
            headers["Content-Type"] = "application/json"
        return self._session.request(
            _METHODS.get(verb, "GET"),
            self._server + path,
            params=params,
            data=None if body is None else json.dumps(body).encode(),
            headers=headers,
            timeout=timeout,
            allow_redirects=False,
            server_hostname=self._credentials.server_name,
        )


_METHODS = {"create": "POST", "update": "PUT", "delete": "DELETE"}


def _no_answer(error: Exception, what: str) -> ApiError:
    late = isinstance(error, TimeoutError)
    message = f"no answer within {_TIMEOUT:g} s" if late else str(error) or type(error).__name__
    return ApiError(0, "", message, what=what)


def _version(obj: Object) -> str:
    match obj:
        case {"metadata": {"resourceVersion": str(version)}} if version:
            return version
    raise ValueError("the answer has no metadata.resourceVersion")


def _event(line: bytes) -> tuple[str, Object]:
    match loads(line):
        case {"type": str(kind), "object": dict(obj)}:
            if kind != "ERROR":
                _version(obj)
            return kind, obj
    raise ValueError("a line that is no event of a watch")


async def _error(response: aiohttp.ClientResponse, what: str) -> ApiError:
    body = b""
    with contextlib.suppress(aiohttp.ClientError, OSError):  # the code is enough without the rest
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) >= _ERROR_BYTES:
                break
    text, status = body.decode(errors="replace"), None
    with contextlib.suppress(ValueError, RecursionError):
        status = json.loads(text)
    if not isinstance(status, dict) or status.get("kind") != "Status":
        # From a proxy or a filter in front. HTTP's own phrase ("Bad Gateway") is no reason.
        status = {"message": text[:500].strip()}
    retry_after = None
    with contextlib.suppress(ValueError):
        retry_after = float(response.headers.get("Retry-After", ""))
    return error_from_status(response.status, status, retry_after=retry_after, what=what)


_DEEPEST = 60  # Kubernetes' own types need less than 20
_SURELY_READ = 500  # brackets
_TURN = 0.01  # seconds of decoding before other tasks run
_SPACE = " \t\r\n,:"
#: Whole strings, for brackets within them are text; a quote alone begins an unfinished one.
_TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["\[{\]}]')
_decoder = json.JSONDecoder()


def loads(text: str | bytes) -> Any:
    """Decode like json.loads, but cut off what is nested too deep."""
    try:
        return json.loads(text)
    except RecursionError:
        return json.loads(_cut(text if isinstance(text, str) else text.decode())[0])


def shallow(text: bytes) -> bytes:
    """Return the JSON unchanged if decoders can read it, else cut the deepest parts."""
    if text.count(b"[") + text.count(b"{") < _SURELY_READ:
        return text
    try:
        json.loads(text)
    except RecursionError:
        return _cut(text.decode())[0].encode()
    return text


async def read_list(
    content: AsyncIterable[bytes], keep: Callable[[Object], Any]
) -> tuple[list[Any], Object]:
    """Decode the body of a list; return what ``keep`` makes of items, and the rest.

    Raises ValueError for anything else (no items are not the same as none left), and for what is no
    JSON, or incomplete.
    """
    text = _Text(content)
    items: list[Any] | None = None
    rest: Object = {}
    await text.expect("{")
    while await text.peek() != "}":
        name = await text.value()
        if name == "items" and await text.peek() == "[":
            await text.expect("[")
            items = []
            while await text.peek() != "]":
                items.append(await text.value(keep))
            await text.expect("]")
        else:
            rest[name] = await text.value()
    if items is None:
        nil = rest.pop("items", ...) is None  # as some servers in Go spell an empty one
        if not (nil and str(rest.get("kind")).endswith("List")):
            raise ValueError(f"no list: it has no items, but {list(rest)}"[:200])
        items = []
    return items, rest


class _Text:
    """JSON that is still arriving, read value by value; commas and colons count as spaces."""

    def __init__(self, content: AsyncIterable[bytes]) -> None:
        self._chunks = content.__aiter__()
        self._bytes = codecs.getincrementaldecoder("utf-8")()
        self._text, self._whole = "", False  # whole: no more will arrive
        self._turn = time.perf_counter()

    async def peek(self) -> str:
        """Return the next character that is no space."""
        while not (text := self._text.lstrip(_SPACE)):
            await self._more(1)
        self._text = text
        return text[0]

    async def expect(self, character: str) -> None:
        """Take that character; ValueError for any other one."""
        if await self.peek() != character:
            raise ValueError(f"no JSON list: {self._text[:80]!r}")
        self._text = self._text[1:]

    async def value(self, keep: Callable[[Any], Any] = lambda value: value) -> Any:
        """Return what ``keep`` makes of the next value."""
        await self.peek()
        while (found := _value(self._text)) is None:
            # Wait for twice as much: each byte is decoded twice at most.
            await self._more(len(self._text))
        self._text = self._text[found[1] :]
        if time.perf_counter() - self._turn > _TURN:
            await asyncio.sleep(0)
            self._turn = time.perf_counter()
        return keep(found[0])

    async def _more(self, characters: int) -> None:
        """Wait for so many characters more, or the end."""
        if self._whole:
            raise ValueError("the JSON ends too early")
        pieces = [self._text]
        while characters > 0 and not self._whole:
            chunk = await anext(self._chunks, b"")
            self._whole = not chunk
            pieces.append(self._bytes.decode(chunk, final=self._whole))
            characters -= len(pieces[-1])
        self._text = "".join(pieces)


def _value(text: str) -> tuple[Any, int] | None:
    """Decode the value at the beginning; return it and its end, None while it is not whole."""
    try:
        found, end = _decoder.raw_decode(text)
    except RecursionError:
        cut, end = _cut(text)
        found = json.loads(cut) if cut else None
    except ValueError:
        return None
    goes_on = end == len(text) and text[0] not in '{["'  # a number
    return None if goes_on or not end else (found, end)


def _cut(raw: str) -> tuple[str, int]:
    """Cut what is nested too deep in the first value; return it and its end, 0 if not whole."""
    pieces, depth, start = [], 0, 0
    for token in _TOKEN.finditer(raw):
        character = raw[token.start()]
        if character in "[{":
            depth += 1
            if depth == _DEEPEST:
                pieces += [raw[start : token.start()], "NaN"]
        elif character in "]}":
            if depth == _DEEPEST:
                start = token.end()
            depth -= 1
            if not depth:
                return "".join([*pieces, raw[start : token.end()]]), token.end()
        elif token.group() == '"':
            break
    return "", 0


async def read_lines(content: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """Yield whole lines of any length: aiohttp's own iteration fails on those above 128 KiB."""
    pieces: list[bytes] = []
    async for chunk in content:
        *ended, rest = chunk.split(b"\n")
        for line in ended:
            whole = b"".join([*pieces, line])
            pieces.clear()
            if whole:
                yield whole
        pieces.append(rest)


async def find(api: Api, resource: Resource, namespace: str | None, name: str) -> Object | None:
    """Read one object from a quorum; None if there is none."""
    try:
        return await api.get(resource, namespace, name)
    except NotFound:
        return None


def version_number(version: object) -> int | None:
    """Return a resourceVersion as a number, to be compared; None if it is none."""
    return int(version) if isinstance(version, str) and version.isdecimal() else None
