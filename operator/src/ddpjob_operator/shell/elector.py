"""Which of several operators acts: a Lease, held by renewing it.

Leadership is for speed only; what guards the objects are the preconditions of each write.
Times are compared on this process's monotonic clock: a lease counts as expired once it has
not *changed* here for its whole duration, whatever time somebody wrote into it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, Protocol

from ddpjob_operator.core.status import format_time
from ddpjob_operator.shell import errors
from ddpjob_operator.shell.api import LEASES, Object, Resource

log = logging.getLogger(__name__)

_RELEASE_TRIES = 3


class LeaseApi(Protocol):
    """The three calls that the elector makes."""

    async def get(self, resource: Resource, namespace: str, name: str) -> Object:
        """Read the Lease."""

    async def create(self, resource: Resource, namespace: str, body: Object) -> Object:
        """Make the Lease."""

    async def replace(self, resource: Resource, namespace: str, name: str, body: Object) -> Object:
        """Write the Lease, guarded by its resourceVersion."""


class Elector:
    """Holds, renews and releases one Lease. ``seconds`` is its duration.

    The holder renews every fifth of it and stops acting when two thirds have passed without a
    renewal, well before anybody else may begin. ``on_change(True)`` is also called when a late
    renewal ends such a pause, for what was left undone in it. ``clock`` and ``sleep`` are for
    tests.
    """

    def __init__(
        self,
        api: LeaseApi,
        *,
        namespace: str,
        name: str,
        identity: str,
        seconds: float = 15.0,
        on_change: Callable[[bool], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._api, self._namespace, self._name = api, namespace, name
        self.identity = identity
        self._seconds = seconds
        self._renew_deadline = seconds * 2 / 3
        self._period = seconds / 5
        self._on_change = on_change
        self._clock, self._sleep = clock, sleep
        self._leading = self._to_release = False
        self._renewed_at = 0.0
        self._seen: tuple[str, str] | None = None  # holder, resourceVersion
        self._seen_at = 0.0

    def leads(self) -> bool:
        """Whether this process may act now. Ask again right before each write."""
        return self._leading and self._clock() - self._renewed_at < self._renew_deadline

    async def run(self) -> None:
        """Take the lease as soon as possible and hold it; return when it is lost."""
        waiting = False
        while not (ours := await self._try_once()):
            if ours is False and not waiting:
                log.info("standing by: somebody holds the lease %s", self._where)
                waiting = True
            await self._sleep(self._period)
        self._leading = self._to_release = True
        self._on_change(True)
        log.info("leading as %s (lease %s)", self.identity, self._where)
        try:
            while self.leads():
                await self._sleep(self._period)
                if await self._try_once() is False:
                    break
            log.error("lost the lease %s", self._where)
        finally:
            self._leading = False
            self._on_change(False)

    async def release(self) -> None:
        """Let the next one begin at once. Failing to is not a failure: the lease expires."""
        if not self._to_release:
            return
        for _ in range(_RELEASE_TRIES):
            try:
                await self._give_back()
                return
            except errors.Conflict:
                continue  # a renewal of ours, cancelled on its way here, was stored meanwhile
            except errors.ApiError as error:
                log.warning("cannot give the lease %s back: %s", self._where, error)
                return
        log.warning("cannot give the lease %s back: it is written all the time", self._where)

    async def _give_back(self) -> None:
        lease = await self._api.get(LEASES, self._namespace, self._name)
        if (lease.get("spec") or {}).get("holderIdentity") == self.identity:
            lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
            await self._api.replace(LEASES, self._namespace, self._name, lease)

    @property
    def _where(self) -> str:
        return f"{self._namespace}/{self._name}"

    async def _try_once(self) -> bool | None:
        """Take or renew the lease: ours now, somebody else's, or None for unknown."""
        started = self._clock()
        try:
            # A call that hangs must not outlive the deadline by which we stop acting.
            async with asyncio.timeout(self._renew_deadline / 2):
                ours = await self._acquire()
        except errors.Conflict:
            return None  # somebody wrote it just now; the next look tells who
        except (errors.ApiError, TimeoutError) as error:
            log.warning("cannot reach the lease %s: %s", self._where, error or "no answer")
            return None
        if ours:
            # From before the call: the others count from when they saw it, which is later.
            paused = self._leading and not self.leads()
            self._renewed_at = started
            if paused:
                log.warning("renewed the lease %s late: nothing was done meanwhile", self._where)
                self._on_change(True)
        return ours

    async def _acquire(self) -> bool:
        try:
            lease = await self._api.get(LEASES, self._namespace, self._name)
        except errors.NotFound:
            body = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": self._name, "namespace": self._namespace},
                "spec": self._spec({}),
            }
            await self._api.create(LEASES, self._namespace, body)
            return True
        spec = lease.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        self._notice(holder, lease["metadata"]["resourceVersion"])
        if holder not in ("", self.identity) and not self._expired(spec):
            return False
        lease["spec"] = self._spec(spec)
        await self._api.replace(LEASES, self._namespace, self._name, lease)
        return True

    def _notice(self, holder: str, version: str) -> None:
        if self._seen != (holder, version):
            self._seen, self._seen_at = (holder, version), self._clock()

    def _expired(self, spec: dict[str, Any]) -> bool:
        duration = spec.get("leaseDurationSeconds") or self._seconds
        return self._clock() - self._seen_at >= float(duration)

    def _spec(self, old: dict[str, Any]) -> dict[str, Any]:
        now = format_time(datetime.now(UTC))
        kept = old.get("holderIdentity") == self.identity
        transitions = int(old.get("leaseTransitions") or 0)
        return {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": max(1, round(self._seconds)),
            "acquireTime": (kept and old.get("acquireTime")) or now,
            "renewTime": now,
            "leaseTransitions": transitions if kept else transitions + 1,
        }
