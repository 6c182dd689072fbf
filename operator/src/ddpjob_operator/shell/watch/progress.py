"""Asks replica 0 of each running job for its progress: GET /state on its metrics port.

app.py runs the reader; answers go into the store's ApiFeedback, and the planner decides whether
they become a status write. It also learns of rounds (restarts in place) there; they are over when
they show and decide nothing, so they are no reason to ask more often.

The answer is a stranger's: bounded in time and size, no redirects, and no answer is no failure.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

import aiohttp
from aiohttp.client_proto import ResponseHandler

import ddpjob_contract as contract
from ddpjob_operator.core.objects import compact_spec, observe, ports
from ddpjob_operator.core.objects.json_read import integer, mapping
from ddpjob_operator.core.objects.status import Progress
from ddpjob_operator.shell.cache.store import Key, Store

log = logging.getLogger(__name__)

_TIMEOUT = 2.0
_MAX_ANSWER = contract.STATE_MAX_BYTES + 8 * 1024  # with its head
_IN_PARALLEL = 32  # of those that answered last time, and as many of the others


class ProgressReader:
    """Reads each job at most every ``seconds``; calls ``changed(key)`` with news."""

    def __init__(
        self,
        store: Store,
        changed: Callable[[Key], None],
        leads: Callable[[], bool],
        seconds: float = 15.0,
    ) -> None:
        self._store, self._changed, self._leads = store, changed, leads
        self._seconds = seconds
        self._due: dict[str, float] = {}  # by job uid
        self._asking: set[str] = set()
        self._silent: set[str] = set()  # did not answer last time
        # Those that run into the timeout wait for one another only.
        self._gates = {silent: asyncio.Semaphore(_IN_PARALLEL) for silent in (False, True)}

    async def run(self) -> None:
        """Read until cancelled."""
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT)
        # The gates limit: a wait for one of the connector's would count against the timeout.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        kind: type[ResponseHandler] = _Bounded
        connector._factory = partial(kind, loop=asyncio.get_running_loop())
        async with (
            aiohttp.ClientSession(
                timeout=timeout, connector=connector, cookie_jar=aiohttp.DummyCookieJar()
            ) as session,
            asyncio.TaskGroup() as group,
        ):
            while True:
                if self._leads():
                    for job in self._take_due():
                        group.create_task(self._ask(session, job))
                await asyncio.sleep(min(1.0, self._seconds / 2))

    def _take_due(self) -> list[observe.Job]:
        now = time.monotonic()
        running = [job for job in self._store.jobs() if job.status.get("phase") == "Running"]
        due = [
            job
            for job in running
            if self._due.get(job.uid, 0.0) <= now and job.uid not in self._asking
        ]
        self._due = {job.uid: self._due.get(job.uid, 0.0) for job in running}
        self._due.update({job.uid: now + self._seconds for job in due})
        self._silent &= self._due.keys()
        return due

    async def _ask(self, session: aiohttp.ClientSession, job: observe.Job) -> None:
        """Read one job's progress when it is its turn; never raise an Exception."""
        self._asking.add(job.uid)
        try:
            async with self._gates[job.uid in self._silent]:
                await self._read(session, job)
        except Exception:
            log.exception("%s/%s: a bug in reading the progress (uid %s)", *job.key, job.uid)
        finally:
            self._asking.discard(job.uid)

    async def _read(self, session: aiohttp.ClientSession, job: observe.Job) -> None:
        address = self._address(job)
        if address is None:
            return
        try:
            raw = await _fetch(session, address, job.uid)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            log.debug("%s/%s: no progress from %s: %s", *job.key, address, error)
            self._silent.add(job.uid)
            return
        self._silent.discard(job.uid)
        ours = (job.uid, job.status.get("attempt"))
        if isinstance(raw, dict) and (
            (raw.get("uid") or job.uid, raw.get("attempt", ours[1])) != ours
        ):
            return  # the address or the port is another's now, or the gang was replaced meanwhile
        found, rounds = observe.progress(raw, datetime.now(UTC)), observe.rounds(raw)
        known = self._store.feedback(job.uid)
        if found is None or (_same(found, known.progress) and rounds == known.rounds):
            return
        self._store.set_feedback(job.uid, replace(known, progress=found, rounds=rounds))
        self._changed(job.key)

    def _address(self, job: observe.Job) -> str | None:
        attempt = job.status.get("attempt")
        for pod in self._store.pods_of(job.uid):
            if (pod.replica, pod.attempt) == (0, attempt) and pod.trainer.state == "running":
                master = integer(job.spec.get("port"), ports.MASTER)
                metrics = integer(mapping(job.spec.get("metrics")).get("port"), ports.METRICS)
                template = compact_spec.template(job.spec.get("template"))
                found = ports.of(template, master, metrics, job.uid, pod.attempt or 0, 0)
                return _url(pod.ip, found.metrics)
        return None


def _url(ip: str, port: int) -> str | None:
    """Build the URL; None for a forged address, so that it gets no request."""
    try:
        address = ipaddress.ip_address(ip)
    except ValueError:
        return None
    if address.is_loopback or address.is_link_local or address.is_multicast:
        return None
    host = f"[{address}]" if address.version == 6 else str(address)
    return f"http://{host}:{port}/state"


class _Bounded(ResponseHandler):
    """Bounds the bytes of an answer in all: interim answers have no other limit."""

    _left = _MAX_ANSWER

    def data_received(self, data: bytes) -> None:
        """Take data from the transport, at most 256 KiB."""
        self._left -= len(data)
        if self._left >= 0:
            super().data_received(data)
            return
        error = aiohttp.ClientPayloadError("the answer is too long")
        self.set_exception(error)
        if self._payload is not None:
            self._payload.set_exception(error)
        if self.transport is not None:
            self.transport.abort()


async def _fetch(session: aiohttp.ClientSession, url: str, uid: str) -> object:
    headers, params = {"Accept-Encoding": "identity"}, {"uid": uid}
    async with session.get(url, params=params, allow_redirects=False, headers=headers) as response:
        if response.status != 200:
            raise ValueError(f"status {response.status}")
        body = b""
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > contract.STATE_MAX_BYTES:
                raise ValueError("the answer is too long")
        try:
            found: object = json.loads(body)
        except RecursionError as error:
            raise ValueError("the answer is too deep") from error
        return found


def _same(found: Progress, known: Progress | None) -> bool:
    """Tell whether only the time of reading differs."""
    return known is not None and replace(found, updated_at=known.updated_at) == known
