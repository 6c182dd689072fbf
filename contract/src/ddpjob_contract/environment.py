"""Write the environment of a trainer container, as the operator and `ddpjob local` set it.

Any program that torchrun can start finds in it what torchrun and init_method="env://" read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import ddpjob_contract as contract


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshots:
    """spec.snapshot, as a program sees it. ``directory``: of this job alone.

    ``step``: of the newest snapshot that this job is known to have had there; 0: of none.
    ``ephemeral``: the volume ends with the pod. ``every_steps`` None: Auto, which is not said: an
    older trainer, which does not know it, takes its own default.
    """

    directory: str
    every_steps: int | None
    keep: int
    resume: str
    step: int = 0
    ephemeral: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One replica of one attempt. Times in seconds."""

    name: str
    namespace: str
    uid: str
    attempt: int
    replica: int
    replicas: int
    nproc: int
    address: str  # of replica 0
    master_port: int
    hub_port: int
    metrics_port: int
    grace: int
    max_without_progress: int  # 0: no rounds
    drill: str  # Auto, Always or Never
    final_exit_codes: Iterable[int]
    heal_after: int
    hub: int  # the hub's number
    replacement: bool  # of a lost pod, or a standby
    standby: int = 0  # pods that stand by
    replace_seconds: int  # 0: no replacement of one pod alone
    hang_startup: int
    hang_step: int
    hang_snapshot: int
    hang_output: int | None
    snapshots: Snapshots | None
    progress_path: str  # "": none
    resume_args: Sequence[str] = ()
    resume_when: str = ""
    reached: int = 0  # the last step that is known to have ended

    def environment(self) -> dict[str, str]:
        """Return name -> value."""
        env: dict[str, str | int] = {
            "MASTER_ADDR": self.address,
            "MASTER_PORT": self.master_port,
            "PET_NNODES": self.replicas,
            "PET_NPROC_PER_NODE": self.nproc,
            "PET_NODE_RANK": self.replica,
            "PET_MASTER_ADDR": self.address,
            "PET_MASTER_PORT": self.master_port,
            # A straggler of an older attempt must not join this one.
            "PET_RDZV_ID": f"{self.uid}-{self.attempt}",
            contract.NAME: self.name,
            contract.NAMESPACE: self.namespace,
            contract.UID: self.uid,
            contract.ATTEMPT: self.attempt,
            contract.REPLICA: self.replica,
            contract.REPLICAS: self.replicas,
            contract.NPROC_PER_NODE: self.nproc,
            contract.METRICS_PORT: self.metrics_port,
            contract.HUB_PORT: self.hub_port,
            contract.GRACE_SECONDS: self.grace,
            contract.IN_PLACE_MAX_WITHOUT_PROGRESS: self.max_without_progress,
            contract.DRILL: self.drill,
            contract.IN_PLACE_FINAL_EXIT_CODES: ",".join(map(str, self.final_exit_codes)),
            contract.HEAL_AFTER_SECONDS: self.heal_after,
            contract.HUB: self.hub,
            contract.REPLACE_SECONDS: self.replace_seconds,
            contract.HANG_STARTUP_SECONDS: self.hang_startup,
            contract.HANG_STEP_SECONDS: self.hang_step,
            contract.HANG_SNAPSHOT_SECONDS: self.hang_snapshot,
            "PYTHONUNBUFFERED": 1,
        }
        # Else RANK counts processes, and the launcher or torchrun sets it.
        if self.nproc == 1 and self.replica < self.replicas:
            env |= {"RANK": self.replica, "WORLD_SIZE": self.replicas, "GROUP_RANK": self.replica}
            env |= {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        if self.snapshots:
            env |= {
                contract.SNAPSHOT_DIR: self.snapshots.directory,
                contract.SNAPSHOT_KEEP: self.snapshots.keep,
                contract.SNAPSHOT_RESUME: self.snapshots.resume,
            }
            if self.snapshots.every_steps is not None:
                env[contract.SNAPSHOT_EVERY_STEPS] = self.snapshots.every_steps
            if self.snapshots.step > 0:
                env[contract.SNAPSHOT_STEP] = self.snapshots.step
            if self.snapshots.ephemeral:
                env[contract.SNAPSHOT_EPHEMERAL] = 1
        if self.hang_output:
            env[contract.HANG_OUTPUT_SECONDS] = self.hang_output
        if self.standby:
            env[contract.STANDBY] = self.standby
        if self.replacement:
            env[contract.REPLACEMENT] = 1
        if self.progress_path:
            env[contract.PROGRESS_PATH] = self.progress_path
        if self.resume_args:
            env[contract.RESUME_ARGS] = json.dumps([*self.resume_args])
            env[contract.RESUME_WHEN] = self.resume_when
        if self.reached:
            env[contract.REACHED_STEP] = self.reached
        return {name: str(value) for name, value in env.items()}
