"""kopf, embedded: its watch of DDPJobs, each event handed on, and nothing else.

Only on.event and on.login are used: no annotation, no finalizer, no patch, no Event of kopf's.
This module is imported in kopf's thread (see watcher.py), for importing kopf takes a second.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import kopf

from ddpjob_operator.core import observe
from ddpjob_operator.shell.credentials import Credentials

Deliver = Callable[[str | None, dict[str, Any]], None]

_LOGIN_LIFETIME = timedelta(minutes=5)  # tokens are rotated; kopf itself reads one only once


def run_kopf(
    credentials: Credentials,
    namespaces: tuple[str, ...],
    deliver: Deliver,
    stop: threading.Event,
) -> None:
    """Run until ``stop`` is set, or until kopf gives up and raises.

    ``deliver(type, object)`` must not fail: kopf logs what a handler raises and never retries.
    """
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def login(**_: Any) -> kopf.ConnectionInfo:
        return _connection(credentials)

    @kopf.on.event(observe.GROUP, observe.VERSION, observe.PLURAL, registry=registry)
    async def on_event(event: Any, **_: Any) -> None:
        deliver(event["type"], dict(event["object"]))

    async def run() -> None:
        try:
            await kopf.operator(
                registry=registry,
                settings=_settings(),
                standalone=True,
                clusterwide=not namespaces,
                namespaces=namespaces,
                stop_flag=stop,
            )
        finally:
            # A thread of kopf's waits for the flag, and asyncio.run waits for that thread.
            stop.set()

    asyncio.run(run())


def _connection(credentials: Credentials) -> kopf.ConnectionInfo:
    endpoint = credentials.endpoint
    scheme, _, token = (credentials.authorization() or "").partition(" ")
    return kopf.ConnectionInfo(
        server=endpoint.server,
        ca_path=endpoint.ca_file,
        insecure=not endpoint.verify,
        certificate_path=endpoint.cert_file,
        private_key_path=endpoint.key_file,
        scheme=scheme or None,
        token=token or None,
        proxy_url=endpoint.proxy,
        default_namespace=endpoint.namespace,
        expiration=datetime.now(UTC) + _LOGIN_LIFETIME if token else None,
    )


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.process.ultimate_exiting_timeout = None  # it would kill the whole process
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.watching.chunk_size = 500
    settings.watching.connect_timeout = 10
    settings.watching.reconnect_backoff = 1
    settings.networking.request_timeout = 30
    settings.networking.enforce_retry_after = True
    settings.networking.error_backoffs = _Backoffs()
    settings.queueing.exit_timeout = 1
    settings.persistence.diffbase_storage = _NoDiffBase()
    settings.persistence.progress_storage = _NoProgress()
    return settings


class _Backoffs:
    """1, 2, 4 ... 30, 30, 30 ... for ever: kopf iterates anew for each request."""

    def __iter__(self) -> Iterator[float]:
        delay = 1.0
        while True:
            yield delay
            delay = min(delay * 2, 30.0)


class _NoDiffBase(kopf.DiffBaseStorage):
    """Nothing is compared, so nothing is copied: by default each event is copied thrice."""

    def build(self, **_: Any) -> Any:
        return {}

    def fetch(self, **_: Any) -> Any:
        return None

    def store(self, **_: Any) -> None:
        """Nothing is stored in the object."""


class _NoProgress(kopf.ProgressStorage):
    """on.event has no progress to keep."""

    def fetch(self, **_: Any) -> Any:
        return None

    def store(self, **_: Any) -> None:
        """Nothing is stored in the object."""

    def purge(self, **_: Any) -> None:
        """Nothing was stored."""

    def touch(self, **_: Any) -> None:
        """Nothing is stored in the object."""

    def clear(self, *, essence: Any) -> Any:
        return essence
