"""Send Kubernetes Events about jobs, as `kubectl describe ddpjob` shows them.

The executor sends them. A job with too many events is cut short. Sending delays and fails nothing
else.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any

from ddpjob_contract import crd
from ddpjob_operator.core.actions import Event
from ddpjob_operator.core.objects import observe
from ddpjob_operator.shell.api import errors
from ddpjob_operator.shell.api.client import EVENTS, Api

log = logging.getLogger(__name__)

_COMPONENT = "ddpjob-operator"
_MOST = 40  # events of one job ...
_PERIOD = 600.0  # ... in so many seconds
_QUEUE = 1000
_MESSAGE_MAX = 1024


class Recorder:
    """The sender of Events: ``send`` only puts them in line; ``run`` sends them."""

    def __init__(
        self, api: Api, instance: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._api, self._instance, self._clock = api, instance, clock
        self._line: asyncio.Queue[tuple[observe.Job, Event]] = asyncio.Queue(_QUEUE)
        self._begun = clock()
        self._sent: Counter[str] = Counter()  # in this period, by job uid

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
        if self._clock() - self._begun > _PERIOD:
            self._begun = self._clock()
            self._sent.clear()
        self._sent[uid] += 1
        return self._sent[uid] <= _MOST


def _body(job: observe.Job, event: Event, instance: str) -> dict[str, Any]:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{job.name}.{secrets.token_hex(8)}", "namespace": job.namespace},
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
