"""The API server's own watch of jobs, pods and Services, kept in the order of the store.

What it takes down is the input of support.invariants. A thread per resource reads its watch, by no
faulty proxy, and goes on where it ended: through connections that break and API servers that die.
When that is not possible (410, a store that was set back) history begins anew, as nobody can be
held to what is forgotten.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from support.invariants import ALWAYS, JOBS, NODES, PODS, SERVICES, State, Violation, Write, at_rest
from support.objects import owner
from support.patience import PATIENCE
from support.proxy import Call
from support.rest import Rest, RestError, eventually

_PATHS = {
    JOBS: "/apis/ddpjob.dev/v1alpha1/namespaces/{}/ddpjobs",
    PODS: "/api/v1/namespaces/{}/pods",
    SERVICES: "/api/v1/namespaces/{}/services",
    NODES: "/api/v1/nodes",
}
_QUIET = 0.3  # seconds without an event after which a watch has told what was there
_UID = re.compile(r'"uid":"([^"]+)"')
OPERATOR = "operator"  # in Write.by; which of two it was no watch tells
Listener = Callable[[str, str, Mapping[str, Any]], object]  # of plural, kind of event, object


@dataclass(frozen=True, slots=True)
class Told:
    """One event."""

    version: int
    write: Write


@dataclass
class _Stream:
    """What is known of one resource."""

    plural: str
    path: str
    version: str = ""  # where the watch goes on; "" before the first list
    latest: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # by uid
    heard: float = 0.0
    era: int = -1
    listed: int = 0  # the version of its list


class Chronicle:
    """Use it as a context manager.

    ``made``: the operator's calls that were taken, as a proxy saw them, tell which writes are its
    own; all events are kept then. Without it each creation of what a job owns counts as its own.
    """

    def __init__(
        self, rest: Rest, namespace: str, made: Callable[[], Iterable[Call]] | None = None
    ) -> None:
        self._rest, self._made = rest, made
        self._streams = {p: _Stream(p, path.format(namespace)) for p, path in _PATHS.items()}
        self._lock, self._telling, self._ended = (
            threading.Lock(),
            threading.Lock(),
            threading.Event(),
        )
        self._watches: dict[str, socket.socket] = {}  # of each plural the connection of now
        self._pending: list[Told] = []
        self._kept: list[Told] = []
        self._unreadable: set[str] = set()  # uids of what is nested too deep for Python
        self._judged = 0  # up to this version
        self._begun = False  # what all lists have shown was taken
        self.listeners: list[Listener] = []
        self.state = State()
        self.gaps = 0
        self.writes = 0
        self._threads = [
            threading.Thread(target=self._follow, args=[stream], daemon=True)
            for stream in self._streams.values()
        ]

    def __enter__(self) -> Chronicle:
        for thread in self._threads:
            thread.start()
        streams = self._streams.values()
        eventually("the watches begin", lambda: all(stream.version for stream in streams))
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for watch in list(self._watches.values()):
            with contextlib.suppress(OSError):  # it has ended by itself
                socket.socket.shutdown(watch, socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE)

    # --- reading --------------------------------------------------------------------------

    def all(self, plural: str) -> list[Mapping[str, Any]]:
        """The objects that are there, as the watch has told them last."""
        with self._lock:
            return list(self._streams[plural].latest.values())

    def latest(self, plural: str, name: str) -> Mapping[str, Any]:
        """The newest that was told of an object; empty if there is none."""
        return next((one for one in self.all(plural) if one["metadata"]["name"] == name), {})

    def events(self) -> list[Told]:
        """All so far, in their order; none without ``made``."""
        with self._lock:
            return sorted(self._kept, key=lambda one: one.version)

    def violations(
        self, seconds: float = PATIENCE, settled: Callable[[], object] = lambda: None
    ) -> list[Violation]:
        """Hold what came since the last call against every invariant; what is wrong.

        Waits until the watches have told all that is in the store now, and then for ``settled``.
        What only some of them have told yet is for the next call.
        """
        deadline = time.monotonic() + seconds
        told: list[Told] | None = None
        while told is None:
            era = self.gaps
            try:
                until = self._catch_up(deadline)
            except RecursionError:  # a list with what is nested too deep for Python: not judged
                return []
            settled()
            with self._lock:
                if era == self.gaps:
                    told = sorted(self._pending, key=lambda one: one.version)
                    self._pending = [one for one in told if one.version > until]
                    listed = max(one.listed for one in self._streams.values())
                    known, self._judged = max(self._judged, listed), until
        return list(self._judge([one for one in told if one.version <= until], listed, known))

    def verify(self, settled: Callable[[], object] = lambda: None) -> State:
        """Do the same; raises the first Violation."""
        for wrong in self.violations(settled=settled):
            raise wrong
        return self.state

    def orphans(self) -> list[str]:
        """Pods that are left of jobs that are gone."""
        gone = {uid: p for uid, p in self.state.pods.items() if uid not in self.state.jobs}
        return [what for _, what in at_rest(State(pods=gone), datetime.now(UTC))]

    def begin_anew(self) -> None:
        """Forget all: the store was set back. All streams, as their order is lost too."""
        with self._lock:
            self.gaps += 1
            self._pending.clear()
            self._judged, self._begun = 0, False
            self.state = State(deposed=self.state.deposed)

    # --- inside ---------------------------------------------------------------------------

    def _judge(self, told: list[Told], listed: int, known: int) -> Iterator[Violation]:
        """``listed``: the newest list; ``known``: that, or what was judged before.

        No rule is held against what came before the newest list: another list, read earlier, may
        know of a loss of which this one shows nothing. No watch tells who asked for what is not
        newer than ``known``: it comes too late, out of order.
        """
        calls = self._made() if self._made else ()
        ours = {mark for call in list(calls) if call.found for mark in _marks(call)}
        for one in told:
            write = one.write
            if one.version <= listed:
                self.state.take(replace(write, by=""))
                self.writes += 1
                continue
            if not self._begun:
                self._begun = True
                self.state.begin()
            by = _mark(write) in ours if self._made else write.by and one.version > known
            write = replace(write, by=OPERATOR if by else "")
            for rule in ALWAYS:
                if what := rule(self.state, write):
                    yield Violation(rule.__name__, f"{what} (version {one.version})")
            self.state.take(write)
            self.writes += 1

    def _catch_up(self, deadline: float) -> int:
        """Up to which version all watches have told everything."""
        until = []
        for stream in self._streams.values():
            while (version := self._has_told(stream)) is None:
                if time.monotonic() > deadline:
                    raise AssertionError(f"the watch of {stream.plural} stays behind the list")
                time.sleep(0.05)
            until.append(version)
        return min(until)

    def _has_told(self, stream: _Stream) -> int | None:
        """The version of a list of which the watch has told all."""
        try:
            body = self._rest.list_metadata(stream.path)
        except (OSError, RestError, http.client.HTTPException):
            return None
        there = {one["metadata"]["uid"]: one for one in body.get("items") or []}
        with self._lock:
            readable = (there.keys() | stream.latest.keys()) - self._unreadable
            current = all(
                uid in there and uid in stream.latest
                and _version(there[uid]) == _version(stream.latest[uid])
                for uid in readable
            )  # fmt: skip
            quiet = self._made or time.monotonic() - stream.heard > _QUIET
            return _version(body) if current and quiet and stream.era == self.gaps else None

    def _follow(self, stream: _Stream) -> None:
        while not self._ended.is_set():
            try:
                if stream.era != self.gaps or not stream.version:
                    self._list(stream)
                self._watch(stream)
            except RestError as error:
                if error.code == 410:
                    self.begin_anew()
                self._ended.wait(0.5)
            except (OSError, ValueError, http.client.HTTPException):
                self._ended.wait(0.5)

    def _list(self, stream: _Stream) -> None:
        era = self.gaps  # where history begins anew meanwhile, this is of the old one
        body = self._rest.get(stream.path)
        with self._lock:
            stream.era = era
            stream.latest.clear()
            stream.listed = _version(body)
            stream.heard = time.monotonic()
        kind = body["kind"].removesuffix("List")
        for obj in body.get("items") or []:
            self._take(stream, "ADDED", {"kind": kind, **obj}, listed=True)
        with self._lock:
            stream.version = str(body["metadata"]["resourceVersion"])

    def _watch(self, stream: _Stream) -> None:
        query = f"watch=1&allowWatchBookmarks=true&resourceVersion={stream.version}"
        connection = self._rest.connect()
        try:
            where = f"{stream.path}?{query}&timeoutSeconds=600"
            connection.request("GET", where, headers=self._rest.headers)
            self._watches[stream.plural] = connection.sock
            response = connection.getresponse()
            if response.status != 200:
                raise RestError(response.status, {"message": response.read().decode()})
            while self._follows(stream) and (line := response.readline()):
                try:
                    event = json.loads(line)
                except RecursionError:
                    self._unreadable |= set(_UID.findall(line.decode())[:1])
                    continue
                if event["type"] == "ERROR":
                    raise RestError(int(event["object"].get("code", 0)), event["object"])
                self._take(stream, event["type"], event["object"])
        finally:
            connection.close()

    def _follows(self, stream: _Stream) -> bool:
        return stream.era == self.gaps and not self._ended.is_set()

    def _take(
        self, stream: _Stream, kind: str, obj: Mapping[str, Any], listed: bool = False
    ) -> None:
        meta, now = obj["metadata"], time.monotonic()
        # Only jobs own what is looked at, and only the operator creates what a job owns.
        made = kind == "ADDED" and not listed and stream.plural != JOBS and owner(obj) is not None
        with self._lock:
            if stream.era != self.gaps:  # it was on its way when history began anew
                return
            stream.heard = now
            stream.version = str(meta["resourceVersion"])
            if kind == "BOOKMARK":
                return
            if kind == "DELETED":
                stream.latest.pop(meta["uid"], None)
            else:
                stream.latest[meta["uid"]] = obj
            write = Write(kind, stream.plural, obj, datetime.now(UTC), OPERATOR if made else "")
            self._pending.append(Told(_version(obj), write))
            if self._made:
                self._kept.append(self._pending[-1])
        with self._telling:
            for listener in self.listeners:
                listener(stream.plural, kind, obj)


def _version(obj: Mapping[str, Any]) -> int:
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


def _mark(write: Write) -> tuple[str, str, bool]:
    meta, gone = write.obj["metadata"], write.kind == "DELETED"
    version = "DELETED" if gone else meta["resourceVersion"]
    return meta["uid"], version, gone or "deletionTimestamp" in meta
