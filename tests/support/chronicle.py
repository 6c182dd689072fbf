"""The API server's own watch of jobs, pods and Services, kept in the order of the store.

What it takes down is the input of support.invariants. A thread per resource reads its watch and
goes on where it ended: through connections that break and API servers that die. When that is not
possible (410, a store that was set back) history begins anew, as nobody can be held to what is
forgotten.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from support.invariants import ALWAYS, JOBS, NODES, PODS, SERVICES, State, Write, at_rest
from support.objects import owner
from support.patience import PATIENCE
from support.rest import Rest, RestError

_PATHS = {
    JOBS: "/apis/ddpjob.dev/v1alpha1/namespaces/{}/ddpjobs",
    PODS: "/api/v1/namespaces/{}/pods",
    SERVICES: "/api/v1/namespaces/{}/services",
    NODES: "/api/v1/nodes",
}
_QUIET = 0.3  # seconds without an event after which a watch has told what was there
OPERATOR = "operator"  # in Write.by; which of two it was no watch tells


@dataclass(frozen=True, slots=True)
class Told:
    """One event, and when it arrived here."""

    version: int
    at: float  # monotonic
    write: Write


@dataclass
class _Stream:
    """What is known of one resource."""

    plural: str
    version: str = ""  # where the watch goes on; "" before the first list
    latest: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # by name
    heard: float = 0.0
    era: int = -1
    listed: int = 0  # the version of its list


class Chronicle:
    """Use it as a context manager. ``deposed``: see invariants.State."""

    def __init__(self, kubeconfig: Path, namespace: str, *, deposed: bool = False) -> None:
        self._rest = Rest(kubeconfig)
        self._namespace, self._deposed = namespace, deposed
        self._streams = {plural: _Stream(plural) for plural in _PATHS}
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._watches: dict[str, socket.socket] = {}  # of each plural the connection of now
        self._pending: list[Told] = []
        self._judged = 0  # up to this version
        self.state = State(deposed=deposed)
        self.gaps = 0
        self.writes = 0
        self._threads = [
            threading.Thread(target=self._follow, args=[stream], daemon=True)
            for stream in self._streams.values()
        ]

    def __enter__(self) -> Chronicle:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for watch in list(self._watches.values()):
            with contextlib.suppress(OSError):  # it has ended by itself
                socket.socket.shutdown(watch, socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE)

    # --- reading --------------------------------------------------------------------------

    def latest(self, plural: str, name: str) -> Mapping[str, Any]:
        """The newest that was told of an object; empty if there is none."""
        with self._lock:
            return self._streams[plural].latest.get(name, {})

    def violations(self, seconds: float = PATIENCE) -> list[str]:
        """Hold what came since the last call against every invariant; what is wrong.

        Waits until the watches have told all that is in the store now. What only some of them
        have told yet is for the next call.
        """
        deadline = time.monotonic() + seconds
        told: list[Told] | None = None
        while told is None:
            era = self.gaps
            until = self._catch_up(deadline)
            with self._lock:
                if era == self.gaps:
                    told = sorted(self._pending, key=lambda one: one.version)
                    self._pending = [one for one in told if one.version > until]
                    known = max(self._judged, *(one.listed for one in self._streams.values()))
                    self._judged = until
        return list(self._judge([one for one in told if one.version <= until], known))

    def orphans(self) -> list[str]:
        """Pods that are left of jobs that are gone."""
        gone = {uid: p for uid, p in self.state.pods.items() if uid not in self.state.jobs}
        return [what for _, what in at_rest(State(pods=gone), datetime.now(UTC))]

    def begin_anew(self) -> None:
        """Forget all: the store was set back. All streams, as their order is lost too."""
        with self._lock:
            self.gaps += 1
            self._pending.clear()
            self._judged = 0
            self.state = State(deposed=self._deposed)

    # --- inside ---------------------------------------------------------------------------

    def _judge(self, told: list[Told], known: int) -> Iterator[str]:
        """``known``: the newest list, or what was judged before.

        Who asked for what is not newer can no more be judged: it comes too late, out of order.
        """
        for one in told:
            write = one.write if one.version > known else replace(one.write, by="")
            wrong = [(rule.__name__, rule(self.state, write)) for rule in ALWAYS]
            yield from (f"{name}: {what} (version {one.version})" for name, what in wrong if what)
            self.state.take(write)
            self.writes += 1

    def _catch_up(self, deadline: float) -> int:
        """Up to which version all watches have told everything."""
        until = []
        for plural, stream in self._streams.items():
            while (version := self._has_told(plural, stream)) is None:
                if time.monotonic() > deadline:
                    raise AssertionError(f"the watch of {plural} stays behind the list")
                time.sleep(0.05)
            until.append(version)
        return min(until)

    def _has_told(self, plural: str, stream: _Stream) -> int | None:
        """The version of a list of which the watch has told all."""
        try:
            body = self._rest.get(_PATHS[plural].format(self._namespace))
        except (OSError, RestError, http.client.HTTPException):
            return None
        metas = [one["metadata"] for one in body.get("items") or []]
        there = {meta["name"]: meta["resourceVersion"] for meta in metas}
        with self._lock:
            known = {n: o["metadata"]["resourceVersion"] for n, o in stream.latest.items()}
            current = stream.era == self.gaps and there == known
            quiet = time.monotonic() - stream.heard > _QUIET
            return int(body["metadata"]["resourceVersion"]) if current and quiet else None

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
        body = self._rest.get(_PATHS[stream.plural].format(self._namespace))
        with self._lock:
            stream.era = era
            stream.latest.clear()
            stream.listed = int(body["metadata"]["resourceVersion"])
            stream.heard = time.monotonic()
        for obj in body.get("items") or []:
            self._take(stream, "ADDED", obj, listed=True)
        with self._lock:
            stream.version = str(body["metadata"]["resourceVersion"])

    def _watch(self, stream: _Stream) -> None:
        path = _PATHS[stream.plural].format(self._namespace)
        query = f"watch=1&allowWatchBookmarks=true&resourceVersion={stream.version}"
        connection = http.client.HTTPSConnection(
            self._rest.url.hostname or "", self._rest.url.port, context=self._rest.context,
            timeout=90,
        )  # fmt: skip
        try:
            connection.request("GET", f"{path}?{query}&timeoutSeconds=600")
            self._watches[stream.plural] = connection.sock
            response = connection.getresponse()
            if response.status != 200:
                raise RestError(response.status, {"message": response.read().decode()})
            while self._follows(stream) and (line := response.readline()):
                event = json.loads(line)
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
                stream.latest.pop(meta["name"], None)
            else:
                stream.latest[meta["name"]] = obj
            write = Write(kind, stream.plural, obj, datetime.now(UTC), OPERATOR if made else "")
            self._pending.append(Told(int(meta["resourceVersion"]), now, write))
