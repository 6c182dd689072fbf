"""Publish a rank's metrics for Prometheus, by prometheus-client's multiprocess mode.

Progress calls it. The launcher sets PROMETHEUS_MULTIPROC_DIR and serves /metrics for all its ranks;
without a launcher metrics are off. Files are named after the rank and not after the process, so
counters continue over restarts in place and no file is left behind.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Final, Literal

from ddpjob_trainer.telemetry.metric_names import WORKER

Stage = Literal["rendezvous", "build", "load", "first_step"]
#: The most frequent writes to shared memory: a step may be shorter than all of them.
FLUSH_SECONDS: Final = 0.25


class Metrics:
    """The gauges, counters and histograms of one rank."""

    def __init__(self, rank: int) -> None:
        self.on = bool(os.environ.get("PROMETHEUS_MULTIPROC_DIR"))
        self._next = 0.0
        self._gauges: dict[str, float] = {}
        self._counts: dict[tuple[str, str], float] = {}
        self._rank = str(rank)
        if self.on:
            self._made = _make(rank)

    def set(self, name: str, value: float) -> None:
        """Set a gauge; others see it after the next flush."""
        self._gauges[name] = value

    def add(self, name: str, amount: float = 1.0, label: str = "") -> None:
        """Add to a counter; others see it after the next flush."""
        key = (name, label)
        self._counts[key] = self._counts.get(key, 0.0) + amount

    def observe(self, name: str, value: float) -> None:
        """Record one duration in a histogram, at once."""
        if self.on:
            self._child(name, "").observe(value)

    def due(self, *, force: bool = False) -> bool:
        """Return whether it is time to flush()."""
        return self.on and (force or time.monotonic() >= self._next)

    def flush(self) -> None:
        """Publish the gathered values, once due()."""
        self._next = time.monotonic() + FLUSH_SECONDS
        for name, value in self._gauges.items():
            self._child(name, "").set(value)
        for (name, label), amount in self._counts.items():
            self._child(name, label).inc(amount)
        self._gauges.clear()
        self._counts.clear()

    def stage(self, stage: Stage, seconds: float) -> None:
        """Record the duration of one stage of this process's start."""
        if self.on:
            self._child("recovery_seconds", stage).set(seconds)

    def _child(self, name: str, label: str) -> Any:
        return self._made[name].labels(self._rank, *([label] if label else []))


def _make(rank: int) -> Mapping[str, Any]:
    # Imported late: only a launcher needs it.
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, values

    identity = f"rank{rank}"

    def forked() -> None:  # a child, of multiprocessing say, must not write to our files
        nonlocal identity
        identity = f"rank{rank}.{os.getpid()}"

    os.register_at_fork(after_in_child=forked)
    values.ValueClass = values.MultiProcessValue(lambda: identity)  # type: ignore[no-untyped-call]
    registry, made = CollectorRegistry(), {}
    newest = partial(Gauge, multiprocess_mode="mostrecent")
    kinds: Mapping[str, Any] = {"gauge": newest, "counter": Counter, "histogram": Histogram}
    for spec in WORKER:
        options = {"buckets": spec.buckets} if spec.buckets else {}
        make = partial(kinds[spec.type], labelnames=spec.labels, registry=registry, **options)
        made[spec.name] = make(spec.full_name, spec.help)
    return made
