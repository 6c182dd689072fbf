"""Elect the one operator that acts: a Lease, held by renewing it.

app.py runs it; the executor asks leads() before each write. Leadership is for speed only: the
preconditions of each write guard the objects. Times are on this process's monotonic clock: a lease
counts as expired once it has not *changed* here for its whole duration, whatever time is written in
it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any

from ddpjob_operator.core.objects.json_read import format_time
from ddpjob_operator.shell.api import LEASES, Api, ApiError, Conflict, NotFound, Object

log = logging.getLogger(__name__)

_RELEASE_PAUSE = 0.2  # seconds between two tries to give the lease back


class Elector:
    """Holds, renews and releases one Lease. ``seconds`` is its duration.

    The holder renews every fifth of it and stops acting when two thirds have passed without a
    renewal, well before another operator may begin. ``on_change(True)`` is also called when a late
    renewal ends such a pause, for the work left undone in it.
    """

    def __init__(
        self,
        api: Api,
        *,
        namespace: str,
        name: str,
        identity: str,
        seconds: float = 15.0,
        on_change: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self._api, self._namespace, self._name = api, namespace, name
        self.where, self.identity = f"{namespace}/{name}", identity
        self._seconds = seconds
        self._renew_deadline = seconds * 2 / 3
        self._period = seconds / 5
        self._on_change = on_change
        self._leading = False
        self._tried_at = self._renewed_at = 0.0
        self._written_at: float | None = None  # from then on it may be ours, even without an answer
        self._seen: Object | None = None  # the spec; only its holder's writes change that
        self._seen_at = 0.0

    def leads(self) -> bool:
        """Return True if this process may act now. Ask again right before each write."""
        return self._leading and time.monotonic() - self._renewed_at < self._renew_deadline

    async def run(self) -> None:
        """Take the lease as soon as possible and hold it; return when it is lost."""
        waiting = False
        while not (ours := await self._try_once()):
            if ours is False and not waiting:
                log.info("standby: another operator holds the lease %s", self.where)
                waiting = True
            await self._pause()
        self._leading = True
        self._on_change(True)
        log.info("leading as %s (lease %s)", self.identity, self.where)
        try:
            while self.leads():
                await self._pause()
                if await self._try_once() is False:
                    break
            log.error("lost the lease %s", self.where)
        finally:
            self._leading = False
            self._on_change(False)

    async def release(self, seconds: float) -> None:
        """Release the lease, so that the next operator begins at once; try for ``seconds``.

        Failing to is not a failure: the lease expires.
        """
        if self._written_at is None:
            return
        why = "no answer"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while why := await self._return_lease():  # noqa: ASYNC110 - no event tells
                    await asyncio.sleep(_RELEASE_PAUSE)
        if why:
            log.warning("cannot give the lease %s back: %s", self.where, why)

    async def _return_lease(self) -> str:
        """Try to release once; return why to try again, or ""."""
        try:
            lease = await self._call(self._api.get(LEASES, self._namespace, self._name))
            spec = lease.get("spec") or {}
            if spec.get("holderIdentity") == self.identity:
                lease["spec"] = spec | {"holderIdentity": "", "leaseDurationSeconds": 1}
                await self._call(self._api.replace(LEASES, self._namespace, self._name, lease))
        except NotFound:
            return ""  # it was deleted: no operator holds it
        # A conflict: a renewal of ours, cancelled on its way there, was stored meanwhile.
        except (ApiError, TimeoutError) as error:
            return str(error) or "no answer"
        return ""

    async def _call(self, call: Coroutine[Any, Any, Object]) -> Object:
        """Give the call half of the time until we stop acting, in case it hangs."""
        async with asyncio.timeout(self._renew_deadline / 2):
            return await call

    async def _pause(self) -> None:
        """Wait a period from the *beginning* of the last try, which may have hung."""
        await asyncio.sleep(max(0.0, self._tried_at + self._period - time.monotonic()))

    async def _try_once(self) -> bool | None:
        """Take or renew the lease: True if ours now, False if another's, None if unknown."""
        self._tried_at = time.monotonic()
        try:
            ours = await self._acquire()
        except Conflict:
            return None  # another operator just wrote it; the next look shows which
        except (ApiError, TimeoutError) as error:
            log.warning("cannot reach the lease %s: %s", self.where, str(error) or "no answer")
            return None
        if ours:
            # From before the write: the others count from when they saw it, which is later.
            paused = self._leading and not self.leads()
            self._renewed_at = self._written_at or 0.0
            if paused:
                log.warning("renewed the lease %s late: nothing was done meanwhile", self.where)
                self._on_change(True)
        return ours

    async def _acquire(self) -> bool:
        try:
            lease = await self._call(self._api.get(LEASES, self._namespace, self._name))
        except NotFound:
            body = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": self._name, "namespace": self._namespace},
                "spec": self._spec({}),
            }
            self._written_at = time.monotonic()
            await self._call(self._api.create(LEASES, self._namespace, body))
            return True
        spec = lease.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        if self._seen != spec:
            self._seen, self._seen_at = spec, time.monotonic()
        duration = float(spec.get("leaseDurationSeconds") or self._seconds)
        expired = time.monotonic() - self._seen_at >= duration
        if holder not in ("", self.identity) and not expired:
            return False
        lease["spec"] = self._spec(spec)
        self._written_at = time.monotonic()
        await self._call(self._api.replace(LEASES, self._namespace, self._name, lease))
        return True

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
