"""Kubernetes Events about jobs, as `kubectl describe ddpjob` shows them.

The executor sends them. A job with too many events is cut short. Sending delays and fails nothing
else.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ddpjob_contract import crd
from ddpjob_operator.core.actions import Event
from ddpjob_operator.core.objects import observe
from ddpjob_operator.shell.api import errors
from ddpjob_operator.shell.api.client import EVENTS, Api

log = logging.getLogger(__name__)

_COMPONENT = "ddpjob-operator"
_BURST = 40  # events that one job may send at once ...
_REFILL = 20.0  # ... and one more every so many seconds
_REMEMBERED = 4096
_QUEUE = 1000
_MESSAGE_MAX = 1024


@dataclass(slots=True)
class _Bucket:
    tokens: float
    at: float


class Recorder:
    """The sender of Events: ``send`` only puts them in line; ``run`` sends them."""

    def __init__(
        self,
        api: Api,
        instance: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api, self._instance, self._clock = api, instance, clock
        self._line: asyncio.Queue[tuple[observe.Job, Event]] = asyncio.Queue(_QUEUE)
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def send(self, job: observe.Job, events: Iterable[Event]) -> None:
        """Put the events in line; drop what exceeds the job's rate or a full line."""
        for event in events:
            if not self._allows(job.uid):
                log.debug("%s/%s: too many events, dropped %s", *job.key, event.reason)
                continue
            try:
                self._line.put_nowait((job, event))
            except asyncio.QueueFull:
                log.warning("too many events wait to be sent, dropped %s", event.reason)

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            job, event = await self._line.get()
            try:
                await self._api.create(EVENTS, job.namespace, _body(job, event, self._instance))
            except errors.ApiError as error:
                log.info("%s/%s: event %s not sent: %s", *job.key, event.reason, error)
            except Exception:
                log.exception("%s/%s: event %s not sent: a bug", *job.key, event.reason)
            finally:
                self._line.task_done()

    async def flush(self) -> None:
        """Wait until every event in line has been tried, for an orderly end."""
        await self._line.join()

    def _allows(self, uid: str) -> bool:
        now = self._clock()
        bucket = self._buckets.setdefault(uid, _Bucket(_BURST, now))
        self._buckets.move_to_end(uid)
        if len(self._buckets) > _REMEMBERED:
            self._buckets.popitem(last=False)
        bucket.tokens = min(_BURST, bucket.tokens + (now - bucket.at) / _REFILL)
        bucket.at = now
        if bucket.tokens < 1:
            return False
        bucket.tokens -= 1
        return True


def _body(job: observe.Job, event: Event, instance: str) -> dict[str, Any]:
    now = _stamp()
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{job.name}.{secrets.token_hex(8)}",
            "namespace": job.namespace,
        },
        "involvedObject": {
            "apiVersion": f"{crd.GROUP}/{crd.VERSION}",
            "kind": crd.KIND,
            "namespace": job.namespace,
            "name": job.name,
            "uid": job.uid,
            "resourceVersion": job.resource_version,
        },
        "type": event.type,
        "reason": event.reason,
        "message": event.message[:_MESSAGE_MAX],
        "source": {"component": _COMPONENT},
        "reportingComponent": _COMPONENT,
        "reportingInstance": instance[:128],
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }


def _stamp() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
