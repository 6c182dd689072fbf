"""Hold the parts of one process of a run, made by start()."""

from __future__ import annotations

from dataclasses import dataclass

from ddpjob_trainer.comm.world import World
from ddpjob_trainer.gradients.ddp import DdpAveraging
from ddpjob_trainer.gradients.elastic import ElasticAveraging
from ddpjob_trainer.snapshot.manager import SnapshotManager
from ddpjob_trainer.telemetry.profile import Profiler
from ddpjob_trainer.telemetry.progress import Progress
from ddpjob_trainer.training.replay.records import Recorder
from ddpjob_trainer.training.replay.replay import Drill, Replay
from ddpjob_trainer.training.rescue import Rescue
from ddpjob_trainer.training.shutdown import CallMismatch, Shutdown


@dataclass(frozen=True, slots=True)
class RunContext:
    """What one process of a run works with."""

    world: World
    shutdown: Shutdown
    progress: Progress
    snapshots: SnapshotManager
    averaging: DdpAveraging | ElasticAveraging  # start.py chooses by the level
    recorder: Recorder
    mismatch: CallMismatch
    replay: Replay
    drill: Drill
    profiler: Profiler
    rescue: Rescue | None = None  # None: it is off
    resizes: bool = False  # the job is elastic

    def wait_for_readers(self) -> None:
        """Wait until nobody reads the parameters any more."""
        self.snapshots.wait_for_readers()
        if self.rescue is not None:
            self.rescue.wait_for_readers()
