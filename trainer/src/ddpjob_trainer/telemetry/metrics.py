"""Publish a rank's metrics for Prometheus, by prometheus-client's multiprocess mode.

Progress calls it. The launcher sets PROMETHEUS_MULTIPROC_DIR and serves /metrics for all its ranks;
without a launcher metrics are off. Files are named after the rank and not after the process, so
counters continue over restarts in place and no file is left behind.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

# --- Every metric of trainer and launcher ---------------------------------------------------------
# docs/reference/metrics.md is held equal to these tables by
# tests/unit/trainer/test_metrics_doc.py.

PREFIX: Final = "ddpjob_trainer_"
_STEPS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # fmt: skip  # noqa: E501
_SNAPSHOTS: Final = (0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


@dataclass(frozen=True, slots=True)
class Spec:
    """One metric. ``name`` is its name in the code; Prometheus adds _total to counters."""

    name: str
    type: Literal["gauge", "counter", "histogram"]
    help: str
    labels: tuple[str, ...] = ("rank",)
    buckets: tuple[float, ...] = ()

    @property
    def full_name(self) -> str:
        """Return the name with the prefix, without _total."""
        return PREFIX + self.name

    @property
    def exposed(self) -> str:
        """Return the name as a scrape shows it."""
        return self.full_name + ("_total" if self.type == "counter" else "")


#: Published by every rank.
WORKER: Final = (
    Spec("step", "gauge", "Finished steps."),
    Spec(
        "loss",
        "gauge",
        "Mean loss over all ranks, of the newest step that has it: at most 16 short ones ago.",
    ),
    Spec("samples_per_second", "gauge", "Samples per second of the whole gang, recent mean."),
    Spec("learning_rate", "gauge", "Learning rate of the first parameter group."),
    Spec("grad_norm", "gauge", "Norm of all gradients before clipping; only when clipped."),
    Spec("heartbeat_timestamp_seconds", "gauge", "When the last step ended, Unix time."),
    Spec("samples", "counter", "Samples that this rank has seen, those seen again included."),
    Spec("skipped_updates", "counter", "Updates left out: gradients not finite."),
    Spec("step_seconds", "histogram", "Duration of a step.", buckets=_STEPS),
    Spec(
        "phase_seconds",
        "counter",
        "Time spent, by what was done: data, forward, backward, update, body, agreement,"
        " snapshot (laid out and copied while training waits), evaluation.",
        ("rank", "activity"),
    ),
    Spec("snapshot_step", "gauge", "Step of the newest snapshot that another rank has read back."),
    Spec(
        "snapshot_timestamp_seconds",
        "gauge",
        "When this rank learned of the newest snapshot, Unix time; time() minus it is its age.",
    ),
    Spec(
        "snapshot_seconds",
        "histogram",
        "Rank 0: from the end of the step until the whole snapshot was durable.",
        buckets=_SNAPSHOTS,
    ),
    Spec(
        "snapshot_verified_seconds",
        "histogram",
        "Rank 0: from the end of the step until other ranks had read it back.",
        buckets=_SNAPSHOTS,
    ),
    Spec(
        "resume_proven",
        "gauge",
        "1: the steps that the newest restart did again were equal bit for bit, 0: they were not."
        " Absent before a restart did any again.",
    ),
    Spec("snapshot_failures", "counter", "Rank 0: snapshots that could not be made or written."),
    Spec("snapshot_uploaded_step", "gauge", "Rank 0: step of the newest uploaded snapshot."),
    Spec("snapshot_upload_failures", "counter", "Rank 0: uploads that failed; tried again."),
    Spec("snapshots_skipped", "counter", "Snapshots left out: the one before was not done."),
    Spec(
        "recovery_seconds",
        "gauge",
        "How long the start of this process took, by stage: rendezvous, build (model and data,"
        " by the script), load (snapshot), first_step.",
        ("rank", "stage"),
    ),
)

#: Published by the launcher itself.
LAUNCHER: Final = (
    Spec("rounds", "counter", "Restarts in place, by what ended the round.", ("kind",)),
    Spec("round", "gauge", "The present round, from 0.", ()),
    Spec("workers", "gauge", "Training processes that run in this pod.", ()),
    Spec(
        "teardown_seconds",
        "gauge",
        "How long the processes of the last round took to end once they were killed.",
        (),
    ),
    Spec(
        "silent_seconds",
        "gauge",
        "Time since any rank of the gang printed a line, or gave the library a sign of life.",
        (),
    ),
    Spec(
        "value", "gauge", "A number of the program's own, of run.log() or spec.output.", ("name",)
    ),
    Spec("hangs", "counter", "Processes ended because they hung, by phase.", ("phase",)),
)


# --- A rank's metrics -----------------------------------------------------------------------------

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
            for spec in WORKER:  # from 0 on: Prometheus sees no increase from nothing to 1
                if spec.type == "counter" and spec.labels == ("rank",):
                    self.add(spec.name, 0.0)

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
