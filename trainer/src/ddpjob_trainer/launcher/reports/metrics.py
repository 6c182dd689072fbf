"""Serve GET /metrics of a launcher: its ranks' metrics, and its own counters."""

from __future__ import annotations

import contextlib
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ddpjob_trainer.telemetry import metric_names
from ddpjob_trainer.telemetry.metric_names import PREFIX

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

_OF_A_RANK = re.compile(r"_rank\d+\.db$")
_OF_A_PROCESS = re.compile(r"(\d+)\.db$")
_ATTEMPTS = 3
_HELP = {spec.name: spec.help for spec in metric_names.WORKER}


@dataclass(slots=True)
class LauncherMetrics:
    """Counted by the supervisor's thread, read by the HTTP threads."""

    round: int = 0
    workers: int = 0
    teardown_seconds: float = 0.0
    rounds: Counter[str] = field(default_factory=Counter)  # by kind
    hangs: Counter[str] = field(default_factory=Counter)  # by phase
    printed: Mapping[str, float] = field(default_factory=dict)  # metrics of rank 0, by name


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


def as_text(directory: Path, counted: LauncherMetrics) -> bytes:
    """Return what the ranks have published and the launcher has counted, as Prometheus text."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(_Metrics(directory, counted))
    for _ in range(_ATTEMPTS - 1):
        # A file may have vanished, or be half written.
        with contextlib.suppress(OSError, ValueError, RuntimeError, struct.error):
            return generate_latest(registry)
    return generate_latest(registry)


@dataclass(eq=False, slots=True)
class _Metrics:
    directory: Path
    counted: LauncherMetrics

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
        from prometheus_client.multiprocess import MultiProcessCollector

        files = [str(path) for path in self.directory.glob("*.db") if path.stat().st_size]
        merged = [*MultiProcessCollector.merge(files)]  # type: ignore[no-untyped-call]
        yield from merged
        reported = {family.name for family in merged}
        for name, value in self.counted.printed.items():
            if PREFIX + name not in reported:  # what the library reports counts
                shown = GaugeMetricFamily(PREFIX + name, _HELP[name], labels=("rank",))
                shown.add_metric(["0"], value)
                yield shown
        for spec in metric_names.LAUNCHER:
            value = getattr(self.counted, spec.name)
            if spec.type == "gauge":
                yield GaugeMetricFamily(spec.full_name, spec.help, value=value)
                continue
            family = CounterMetricFamily(spec.full_name, spec.help, labels=spec.labels)
            for label, count in sorted(value.items()):
                family.add_metric([label], count)
            yield family
