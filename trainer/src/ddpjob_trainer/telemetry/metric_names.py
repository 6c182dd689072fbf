"""List every metric of trainer and launcher: name, type, labels, meaning.

docs/reference/metrics.md is held equal to these tables by tests/unit/trainer/test_metrics_doc.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

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
        "Mean loss over all ranks, of the newest step that told it: at most 16 short ones ago.",
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
        " snapshot (laid out and copied while training stands still), evaluation.",
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
    Spec("hangs", "counter", "Processes ended because they hung, by phase.", ("phase",)),
)
