"""Offer the API server as ~8 verbs: dicts in, dicts out, failures as ApiError.

The elector, informers, executor and recorder call it. Typed models would drop fields that they do
not know and cost five times as much.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp

from ddpjob_contract import crd
from ddpjob_operator import __version__
from ddpjob_operator.core.objects import observe
from ddpjob_operator.shell.api import decode, errors
from ddpjob_operator.shell.api.credentials import Credentials

Object = decode.Object

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
            found, rest = await decode.read_list(response.content.iter_any(), keep)
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
            async with self._send(
                "GET", resource.path(namespace), None, params, timeout
            ) as response:
                self._count("watch", resource.plural, response.status)
                if response.status != 200:
                    raise await _error(response, what)
                async for line in decode.lines(response.content.iter_any()):
                    kind, obj = _event(line)
                    if kind == "ERROR":
                        raise errors.from_status(int(obj.get("code") or 0), obj, what=what)
                    yield kind, obj
        except TimeoutError:
            return
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise errors.from_status(0, {"message": _describe(error)}, what=what) from error

    async def _call(
        self,
        verb: str,
        resource: Resource,
        path: str,
        body: Mapping[str, Any] | None = None,
        params: Mapping[str, str] | None = None,
        read: Callable[[aiohttp.ClientResponse], Awaitable[Object]] | None = None,
    ) -> Object:
        """Make one call; repeat a 429, which changed nothing, if the server's delay is short."""
        call = partial(self._call_once, verb, resource, path, body, params, read)
        for _ in range(_THROTTLE_RETRIES):
            try:
                return await call()
            except errors.Throttled as error:
                wait = error.retry_after if error.retry_after is not None else 1.0
                if wait > _THROTTLE_PATIENCE:
                    raise
                await asyncio.sleep(wait)
        return await call()

    async def _call_once(
        self,
        verb: str,
        resource: Resource,
        path: str,
        body: Mapping[str, Any] | None,
        params: Mapping[str, str] | None,
        read: Callable[[aiohttp.ClientResponse], Awaitable[Object]] | None,
    ) -> Object:
        what = f"{verb} {path}"
        code = 0
        try:
            # For a list only the server's silence counts; our decoding takes its time.
            total = None if read else _TIMEOUT
            limits = aiohttp.ClientTimeout(
                total=total, connect=_TIMEOUT, sock_connect=10, sock_read=_TIMEOUT
            )
            async with self._send(_METHODS[verb], path, body, params, limits) as response:
                if response.status >= 300:
                    code = response.status
                    raise await _error(response, what)
                found = await (read or _object)(response)
                code = response.status
                return found
        except TimeoutError as error:
            message = f"no answer within {_TIMEOUT:g} s"
            raise errors.from_status(0, {"message": message}, what=what) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise errors.from_status(0, {"message": _describe(error)}, what=what) from error
        finally:
            self._count(verb, resource.plural, code)

    def _send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        params: Mapping[str, str] | None,
        timeout: aiohttp.ClientTimeout,
    ) -> aiohttp.client._RequestContextManager:
        assert self._session is not None, "the Api is used outside its context"
        headers = {}
        authorization = self._credentials.authorization()
        if authorization:
            headers["Authorization"] = authorization
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        return self._session.request(
            method,
            self._server + path,
            params=params,
            data=data,
            headers=headers,
            timeout=timeout,
            allow_redirects=False,
            server_hostname=self._credentials.server_name,
        )


_METHODS = {"get": "GET", "list": "GET", "create": "POST", "update": "PUT", "delete": "DELETE"}


def _describe(error: BaseException) -> str:
    return str(error) or type(error).__name__


async def _object(response: aiohttp.ClientResponse) -> Object:
    found: Object = decode.loads(await response.read())
    return found


def _version(obj: Object) -> str:
    match obj:
        case {"metadata": {"resourceVersion": str(version)}} if version:
            return version
    raise ValueError("the answer has no metadata.resourceVersion")


def _event(line: bytes) -> tuple[str, Object]:
    match decode.loads(line):
        case {"type": str(kind), "object": dict(obj)}:
            if kind != "ERROR":
                _version(obj)
            return kind, obj
    raise ValueError("a line that is no event of a watch")


async def _error(response: aiohttp.ClientResponse, what: str) -> errors.ApiError:
    body = b""
    with contextlib.suppress(aiohttp.ClientError, OSError):  # the code is enough without the rest
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) >= _ERROR_BYTES:
                break
    text = body.decode(errors="replace")
    try:
        status = json.loads(text)
    except (ValueError, RecursionError):
        status = None
    if not isinstance(status, dict) or status.get("kind") != "Status":
        # From a proxy or a filter in front. HTTP's own phrase ("Bad Gateway") is no reason.
        status = {"message": text[:500].strip()}
    try:
        retry_after: float | None = float(response.headers.get("Retry-After", ""))
    except ValueError:
        retry_after = None
    return errors.from_status(response.status, status, retry_after=retry_after, what=what)
