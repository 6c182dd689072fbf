"""What a rank publishes for Prometheus, through prometheus-client's multiprocess mode.

The launcher sets PROMETHEUS_MULTIPROC_DIR and serves /metrics for all its ranks. Without a
launcher nobody would read them, so nothing is kept.
"""

from __future__ import annotations

import os
import time
from typing import Any


class Metrics:
    """The gauges and counters of one rank."""

    def __init__(self, rank: int) -> None:
        self._rank = str(rank)
        self._on = bool(os.environ.get("PROMETHEUS_MULTIPROC_DIR"))
        if not self._on:
            return
        # Imported late: prometheus_client reads the variable when it is imported.
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        registry = CollectorRegistry()
        common: dict[str, Any] = {"labelnames": ["rank"], "registry": registry}
        recent: dict[str, Any] = {**common, "multiprocess_mode": "mostrecent"}
        name = "ddpjob_trainer_"
        self._step = Gauge(name + "step", "Finished steps.", **recent)
        self._loss = Gauge(name + "loss", "Mean loss of the last step.", **recent)
        self._heartbeat = Gauge(
            name + "heartbeat_timestamp_seconds", "When the last step ended.", **recent
        )
        self._snapshot_step = Gauge(
            name + "snapshot_step", "Step of the newest committed snapshot.", **recent
        )
        self._samples = Counter(name + "samples", "Samples seen by this rank.", **common)
        self._step_seconds = Histogram(name + "step_seconds", "Duration of a step.", **common)
        self._snapshot_seconds = Histogram(
            name + "snapshot_seconds", "Duration of a snapshot.", **common
        )
        self._snapshot_failures = Counter(
            name + "snapshot_failures", "Snapshots that could not be written.", **common
        )

    def step(self, step: int, loss: float, samples: int, seconds: float) -> None:
        """Account for a finished step."""
        if self._on:
            self._step.labels(self._rank).set(step)
            self._loss.labels(self._rank).set(loss)
            self._heartbeat.labels(self._rank).set(time.time())
            self._samples.labels(self._rank).inc(samples)
            self._step_seconds.labels(self._rank).observe(seconds)

    def snapshot(self, step: int) -> None:
        """Account for a snapshot known to be durable."""
        if self._on:
            self._snapshot_step.labels(self._rank).set(step)

    def snapshot_took(self, seconds: float) -> None:
        """Account for the time of a snapshot that this rank wrote."""
        if self._on:
            self._snapshot_seconds.labels(self._rank).observe(seconds)

    def snapshot_failed(self) -> None:
        """Account for a snapshot that failed."""
        if self._on:
            self._snapshot_failures.labels(self._rank).inc()
