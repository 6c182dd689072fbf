"""What happened to the jobs, pods and Services of a namespace, as the store's own watch tells it.

It watches the API server itself, by no faulty proxy, and puts the events of all kinds into the
order in which etcd took them. With what the proxy saw of the operator's calls they become the
writes that support.invariants judges: the same functions as in the model.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any

import aiohttp

from support import invariants
from support.invariants import State, Write
from support.patience import PATIENCE
from support.proxy import Call
from support.rest import JOBS, Object, Rest, eventually

_PATHS = {
    invariants.JOBS: f"{JOBS}/namespaces/{{}}/ddpjobs",
    invariants.PODS: "/api/v1/namespaces/{}/pods",
    invariants.SERVICES: "/api/v1/namespaces/{}/services",
    invariants.NODES: "/api/v1/nodes",
}
_BY = "operator"
_UID = re.compile(r'"uid":"([^"]+)"')


class History:
    """A context manager. ``calls`` of a proxy tell which of the writes are the operator's."""

    def __init__(self, rest: Rest, namespace: str) -> None:
        self._rest = rest
        self._paths = {plural: path.format(namespace) for plural, path in _PATHS.items()}
        self._events: list[tuple[int, str, str, Object]] = []  # version, plural, kind, object
        self._checked = 0
        self._ready = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._watch()), daemon=True)
        self.objects: dict[str, dict[str, Object]] = {plural: {} for plural in _PATHS}  # by uid
        self.listeners: list[Callable[[str, str, Object], None]] = []
        self.state = State()
        self.trouble = ""
        self.unreadable: set[str] = set()  # uids of jobs nested too deep for Python
        self._gone: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []

    def __enter__(self) -> History:
        self._thread.start()
        assert self._ready.wait(PATIENCE), "the history did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def newest(self, plural: str, name: str) -> Object | None:
        """The object of that name as the watch has told it last."""
        with self._lock:
            found = list(self.objects[plural].values())
        return next((obj for obj in found if obj["metadata"]["name"] == name), None)

    def versions(self) -> list[int]:
        """The resourceVersions of all events of the namespace so far."""
        with self._lock:
            events = [one for one in self._events if one[1] != invariants.NODES]
        return sorted(version for version, *_ in events)

    def writes(self, calls: Iterable[Call]) -> list[Write]:
        """All events so far in their order, each with who made it."""
        ours = {mark for call in list(calls) if call.found for mark in _marks(call)}
        with self._lock:
            events = sorted(self._events, key=lambda event: event[0])
        return [_write(kind, plural, obj, ours) for _, plural, kind, obj in events]

    def verify(self, calls: Iterable[Call], unanswered: Callable[[], int] = lambda: 0) -> State:
        """Hold what came since the last time against the invariants; raises Violation."""
        try:
            until = self.catch_up()
        except RecursionError:  # a list with what is nested too deep for Python: not judged
            return self.state
        eventually("no write is under way", lambda: not unanswered())
        writes = self.writes(calls)
        new = [write for write in writes if self._checked < _version(write.obj) <= until]
        self._checked = until
        self.state = invariants.check(new, self.state)
        return self.state

    def catch_up(self) -> int:
        """Wait until the watches have told all that lists show now; up to which version."""
        lists = {plural: self._rest.list_metadata(path) for plural, path in self._paths.items()}
        for plural, listing in lists.items():
            eventually(
                f"the watch of {plural} has told all",
                lambda plural=plural, listing=listing: self._knows(plural, listing),
            )
        return min(_version(listing) for listing in lists.values())

    def _knows(self, plural: str, listing: Object) -> bool:
        assert not self.trouble, self.trouble
        listed = {one["metadata"]["uid"]: _version(one) for one in listing.get("items") or ()}
        with self._lock:
            known = {uid: _version(one) for uid, one in self.objects[plural].items()}
            seen = self.unreadable | self._gone
        late = [u for u, v in known.items() if u not in listed and v <= _version(listing)]
        return not late and all(u in seen or known.get(u, 0) >= v for u, v in listed.items())

    async def _watch(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        connector = aiohttp.TCPConnector(ssl=self._rest.context or True)
        timeout = aiohttp.ClientTimeout(total=None)
        headers = {"Authorization": f"Bearer {self._rest.token}"} if self._rest.token else {}
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, headers=headers
        ) as self._session:
            await self._follow_all()
            self._ready.set()
            await self._stop.wait()
            await self._unfollow()

    async def _unfollow(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow_all(self) -> None:
        since = {plural: await self._first(plural) for plural in self._paths}
        self._tasks = [asyncio.create_task(self._follow(*one)) for one in since.items()]

    async def _first(self, plural: str) -> str:
        while True:
            async with self._session.get(self._rest.server + self._paths[plural]) as answer:
                found = await answer.json()
            if answer.status == 200:  # not so while an API server starts
                break
            await asyncio.sleep(0.1)
        for obj in found["items"]:
            self._take(plural, "ADDED", {"kind": found["kind"].removesuffix("List"), **obj})
        return str(found["metadata"]["resourceVersion"])

    async def _follow(self, plural: str, since: str) -> None:
        """Watch, and where a watch ends after some minutes watch on from there."""
        params = {"watch": "true", "resourceVersion": since}
        while True:
            async with self._session.get(
                self._rest.server + self._paths[plural], params=params, read_bufsize=1 << 22
            ) as answer:
                async for line in answer.content:
                    try:
                        event = json.loads(line)
                    except RecursionError:
                        self.unreadable |= set(_UID.findall(line.decode())[:1])
                        continue
                    if event["type"] == "ERROR":
                        self.trouble = f"the history of {plural} has a gap: {event['object']}"
                        return
                    self._take(plural, event["type"], event["object"])
                    params["resourceVersion"] = event["object"]["metadata"]["resourceVersion"]

    def _take(self, plural: str, kind: str, obj: Object) -> None:
        uid = obj["metadata"]["uid"]
        with self._lock:
            self._events.append((_version(obj), plural, kind, obj))
            if kind == "DELETED":
                self.objects[plural].pop(uid, None)
                self._gone.add(uid)
            else:
                self.objects[plural][uid] = obj
        for listener in self.listeners:
            listener(plural, kind, obj)


def _version(obj: Object) -> int:
    return int(obj["metadata"]["resourceVersion"])


def _marks(call: Call) -> Iterable[tuple[str, str, bool]]:
    """By what an event shows that this call made it: uid, version or DELETED, whether it is to go.

    A deletion that comes second, or ends the object at once, is answered with the version before.
    """
    uid, version = call.found.get("uid", ""), call.found.get("resourceVersion", "")
    deletion = call.method == "DELETE"
    stays = call.found.get("deletionGracePeriodSeconds") or call.found.get("finalizers")
    if deletion and not stays:
        yield uid, "DELETED", True
    yield uid, version, deletion


def _write(kind: str, plural: str, obj: Object, ours: set[tuple[str, str, bool]]) -> Write:
    meta: Any = obj["metadata"]
    gone = kind == "DELETED"
    goes = gone or "deletionTimestamp" in meta
    mark = (meta["uid"], "DELETED" if gone else meta["resourceVersion"], goes)
    return Write(kind, plural, obj, datetime.now(UTC), _BY if mark in ours else "")
