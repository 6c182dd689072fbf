"""Serve GET /metrics of a launcher: its ranks' metrics, and its own counters."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ddpjob_trainer.telemetry import metric_names

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import Collector

_OF_A_RANK = re.compile(r"_rank\d+\.db$")
_OF_A_PROCESS = re.compile(r"(\d+)\.db$")


@dataclass(slots=True)
class LauncherMetrics:
    """Counted by the supervisor's thread, read by the HTTP threads."""

    round: int = 0
    workers: int = 0
    teardown_seconds: float = 0.0
    rounds: Counter[str] = field(default_factory=Counter)  # by kind
    hangs: Counter[str] = field(default_factory=Counter)  # by phase


def forget_dead(directory: Path) -> None:
    """Remove the files of processes that are gone; keep the ranks' own.

    Others come from forked children, and from a script with its own metrics: a spare that
    has imported them, a worker by now perhaps, is alive.
    """
    for path in directory.glob("*.db"):
        pid = _OF_A_PROCESS.search(path.name)
        alive = pid is not None and Path("/proc", pid[1]).exists()
        if not alive and not _OF_A_RANK.search(path.name):
            path.unlink(missing_ok=True)


def worker_metrics(directory: Path) -> bytes:
    """Return what the ranks have published, as Prometheus text."""
    return _render(_Files(directory))


def launcher_metrics(counted: LauncherMetrics) -> bytes:
    """Return what the launcher has counted, as Prometheus text."""
    return _render(_Own(counted))


def _render(collector: Collector) -> bytes:
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry)


class _Files:
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def collect(self) -> Iterable[Metric]:
        from prometheus_client.multiprocess import MultiProcessCollector

        files = [str(path) for path in self._directory.glob("*.db") if path.stat().st_size]
        merged: Iterable[Metric] = MultiProcessCollector.merge(files)  # type: ignore[no-untyped-call]
        return merged


class _Own:
    def __init__(self, counted: LauncherMetrics) -> None:
        self._counted = counted

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for spec in metric_names.LAUNCHER:
            value = getattr(self._counted, spec.name)
            if spec.type == "gauge":
                yield GaugeMetricFamily(spec.full_name, spec.help, value=value)
                continue
            family = CounterMetricFamily(spec.full_name, spec.help, labels=spec.labels)
            for label, count in sorted(value.items()):
                family.add_metric([label], count)
            yield family
