"""Ask replica 0 of each running job for its progress: GET /state on its metrics port.

app.py runs the reader; answers go into the store's ApiFeedback, and the planner decides whether
they become a status write. It also receives rounds (restarts in place) there; they are over when
they show and decide nothing, so they are no reason to ask more often.

The answer is a stranger's: bounded in time and size, whatever it is, with no redirects and no
interim answers, for which aiohttp has no bound. No answer is no failure.
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

import ddpjob_contract as contract
from ddpjob_operator.core.objects import compact_spec, ledger, observe, ports, status
from ddpjob_operator.core.objects.json_read import integer, mapping
from ddpjob_operator.core.objects.status import Progress, Status
from ddpjob_operator.core.view import belongs
from ddpjob_operator.shell.store import Key, Store

log = logging.getLogger(__name__)

_TIMEOUT = 2.0
_FENCING = 5.0  # between two questions where a hub's word on lost links counts
_MOST = contract.STATE_MAX_BYTES + 8 * 1024  # with its head
#: Addresses made of IPv4 ones (compatible, translated, NAT64, Teredo, 6to4), and everybody.
_OF_NO_POD = tuple(
    map(
        ipaddress.ip_network,
        ("::/96", "::ffff:0:0/96", "::ffff:0:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48",
         "2001::/32", "2002::/16", "0.0.0.0/8", "255.255.255.255/32"),
    )
)  # fmt: skip
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

    @property
    def jobs(self) -> int:
        """Return how many jobs are asked."""
        return len(self._due)

    async def run(self) -> None:
        """Read until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                if self._leads():
                    for job in self._take_due():
                        group.create_task(self._ask(job))
                await asyncio.sleep(min(1.0, self._seconds / 2))

    def _take_due(self) -> list[observe.Job]:
        now = time.monotonic()
        running = [job for job in self._store.jobs() if _has_hub(job)]
        due = [
            job
            for job in running
            if self._due.get(job.uid, 0.0) <= now and job.uid not in self._asking
        ]
        self._due = {job.uid: self._due.get(job.uid, 0.0) for job in running}
        for job in due:
            fences = mapping(job.spec.get("nodeLost")).get("policy") == "Fence"
            pause = min(self._seconds, _FENCING) if fences else self._seconds
            self._due[job.uid] = now + pause
        self._silent &= self._due.keys()
        return due

    async def _ask(self, job: observe.Job) -> None:
        """Read one job's progress when it is its turn; never raise an Exception."""
        self._asking.add(job.uid)
        try:
            async with self._gates[job.uid in self._silent]:
                await self._read(job)
        except Exception:
            log.exception("%s/%s: a bug in reading the progress (uid %s)", *job.key, job.uid)
        finally:
            self._asking.discard(job.uid)

    async def _read(self, job: observe.Job) -> None:
        present = status.from_dict(job.status)
        address = self._address(job, present)
        if address is None:
            return
        try:
            raw = await _fetch(*address, job.uid)
        except (OSError, ValueError) as error:
            log.debug("%s/%s: no progress from %s:%d: %s", *job.key, *address, error)
            self._silent.add(job.uid)
            return
        self._silent.discard(job.uid)
        ours = (job.uid, present.hub)
        if isinstance(raw, dict) and (
            (raw.get("uid") or job.uid, raw.get("attempt", ours[1])) != ours
        ):
            return  # the address or the port is another's now, or the gang was replaced meanwhile
        now = datetime.now(UTC)
        found, rounds = observe.progress(raw, now), observe.rounds(raw)
        if found is None:
            return
        known, away = self._store.feedback(job.uid), observe.away(raw)
        pods = self._store.pods_of(job.uid) if away else ()
        lost = frozenset(p.uid for p in pods if p.replica in away and belongs(present, p))
        spent = ledger.read_account(mapping(raw).get("spent"), ours[1], now)
        # Who is away is asked about until that is decided.
        same = _same(found, known.progress, present.timings.running_at)
        if same and rounds == known.rounds and not lost | known.away:
            self._store.record(job.uid, spent=spent)
            return
        news = {"progress": found, "rounds": rounds, "spent": spent, "away": lost}
        self._store.record(job.uid, **news, away_at=now)
        self._changed(job.key)

    def _address(self, job: observe.Job, known: Status) -> tuple[str, int] | None:
        for pod in self._store.pods_of(job.uid):
            if (pod.replica, pod.attempt) == (0, known.hub) and pod.trainer.state == "running":
                master = integer(job.spec.get("port"), ports.MASTER)
                metrics = integer(mapping(job.spec.get("metrics")).get("port"), ports.METRICS)
                template = compact_spec.template(job.spec.get("template"))
                found = ports.of(template, master, metrics, job.uid, known.members_since, 0)
                return (pod.ip, found.metrics) if _is_of_a_pod(pod.ip) else None
        return None


def _has_hub(job: observe.Job) -> bool:
    """Return True if the hub may answer: it also runs while another pod is replaced."""
    known = job.status
    kept = known.get("phase") in ("Starting", "Restarting") and "births" in known
    return known.get("phase") == "Running" or kept


def _is_of_a_pod(ip: str) -> bool:
    """Return False for forged addresses, which get no request."""
    try:
        address = ipaddress.ip_address(ip)
    except ValueError:
        return False
    if "%" in ip:  # a zone names a link of the operator's own, and may hold line breaks
        return False
    odd = address.is_loopback or address.is_link_local or address.is_multicast
    return not (odd or any(address in one for one in _OF_NO_POD))


async def _fetch(ip: str, port: int, uid: str) -> object:
    """GET /state; raise OSError or ValueError for anything but a whole answer in time."""
    host = f"[{ip}]" if ":" in ip else ip
    request = f"GET /state?uid={uid} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n"
    answer = b""
    async with asyncio.timeout(_TIMEOUT):
        reader, writer = await asyncio.open_connection(ip, port)
        try:
            writer.write(request.encode())
            while len(answer) <= _MOST and (part := await reader.read(_MOST)):
                answer += part
        finally:
            writer.transport.abort()
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head.startswith((b"HTTP/1.1 200 ", b"HTTP/1.0 200 ")) or len(answer) > _MOST:
        raise ValueError(f"{len(answer)} bytes that begin with {head[:40]!r}")
    try:
        found: object = json.loads(body)
    except RecursionError as error:
        raise ValueError("the answer is too deep") from error
    return found


def _same(found: Progress, known: Progress | None, since: datetime | None) -> bool:
    """Return True if only the time of reading differs; one ``since`` the gang runs is news."""
    if known is None or (since and known.updated_at and known.updated_at < since):
        return False
    return replace(found, updated_at=known.updated_at) == known
