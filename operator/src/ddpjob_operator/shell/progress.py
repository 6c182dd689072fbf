"""Asks replica 0 of each running job how far training is: GET /state on its metrics port.

The answer is a stranger's: bounded in time and size, no redirects, and failing to get one
is not a failure. Whether it becomes a status write is the planner's business.
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

import aiohttp

from ddpjob_operator.core import contract, observe
from ddpjob_operator.core.status import Progress
from ddpjob_operator.shell.store import Key, Store

log = logging.getLogger(__name__)

_TIMEOUT = 2.0
_IN_PARALLEL = 32
_DEFAULT_PORT = 9400


class ProgressReader:
    """Reads each job at most every ``seconds``; ``changed(key)`` is told of news."""

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

    async def run(self) -> None:
        """Read until cancelled."""
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT)
        connector = aiohttp.TCPConnector(limit=_IN_PARALLEL, force_close=True)
        async with aiohttp.ClientSession(
            timeout=timeout, connector=connector, cookie_jar=aiohttp.DummyCookieJar()
        ) as session:
            while True:
                if self._leads():
                    reads = (self._read(session, job) for job in self._take_due())
                    await asyncio.gather(*reads, return_exceptions=True)
                await asyncio.sleep(min(1.0, self._seconds / 2))

    def _take_due(self) -> list[observe.Job]:
        now = time.monotonic()
        running = [job for job in self._store.jobs() if job.status.get("phase") == "Running"]
        due = [job for job in running if self._due.get(job.uid, 0.0) <= now]
        self._due = {job.uid: self._due.get(job.uid, 0.0) for job in running}
        self._due.update({job.uid: now + self._seconds for job in due})
        return due

    async def _read(self, session: aiohttp.ClientSession, job: observe.Job) -> None:
        address = self._address(job)
        if address is None:
            return
        try:
            raw = await _fetch(session, address)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            log.debug("%s/%s: no progress from %s: %s", *job.key, address, error)
            return
        found = observe.progress(raw, datetime.now(UTC))
        known = self._store.outcomes(job.uid)
        if found is None or _same(found, known.progress):
            return
        self._store.set_outcomes(job.uid, replace(known, progress=found))
        self._changed(job.key)

    def _address(self, job: observe.Job) -> str | None:
        attempt = job.status.get("attempt")
        for pod in self._store.pods_of(job.uid):
            if (pod.replica, pod.attempt) == (0, attempt) and pod.trainer.state == "running":
                metrics = job.spec.get("metrics")
                port = metrics.get("port") if isinstance(metrics, dict) else None
                return _url(pod.ip, port if isinstance(port, int) else _DEFAULT_PORT)
        return None


def _url(ip: str, port: int) -> str | None:
    """None for an address that no pod has: whoever forges one gets no request sent there."""
    try:
        address = ipaddress.ip_address(ip)
    except ValueError:
        return None
    if address.is_loopback or address.is_link_local or address.is_multicast:
        return None
    host = f"[{address}]" if address.version == 6 else str(address)
    return f"http://{host}:{port}/state"


async def _fetch(session: aiohttp.ClientSession, url: str) -> object:
    headers = {"Accept-Encoding": "identity"}
    async with session.get(url, allow_redirects=False, headers=headers) as response:
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
    """Whether only the time of reading differs."""
    return known is not None and replace(found, updated_at=known.updated_at) == known
