"""Name the DDPJob for the API server, and fill in what a manifest omits.

The operator reads specs with these, `ddpjob local` too; the launcher alone takes the same
defaults. The chart's CRD is held to them by tests/chart/test_crd.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

GROUP: Final = "ddpjob.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
KIND: Final = "DDPJob"
PLURAL: Final = "ddpjobs"

LABEL_JOB_NAME: Final = f"{GROUP}/job-name"
LABEL_JOB_UID: Final = f"{GROUP}/job-uid"
LABEL_ATTEMPT: Final = f"{GROUP}/attempt"
LABEL_REPLICA: Final = f"{GROUP}/replica"
#: Names the trainer container on a pod: a webhook may have put another one first.
ANNOTATION_TRAINER: Final = f"{GROUP}/trainer"
#: The container that trains, where a template has one of this name; else its first.
TRAINER_CONTAINER: Final = "trainer"

#: Phases that no job leaves.
TERMINAL_PHASES: Final = ("Succeeded", "Failed")

AUTO: Final = "Auto"  # snapshot.everySteps: the trainer chooses
#: Of .spec, by path.
DEFAULTS: Final[Mapping[str, Any]] = {
    "standby": 0,
    "standbyPriorityClassName": "",
    "nprocPerNode": "auto",
    "port": 29500,
    "suspend": False,
    "restart.maxRestarts": 3,
    "restart.maxDisruptions": 100,
    "restart.backoff.initialSeconds": 1,
    "restart.backoff.maxSeconds": 300,
    "restart.inPlace.enabled": True,
    "restart.inPlace.maxWithoutProgress": 3,
    "restart.inPlace.drill": "Auto",
    "restart.replaceSeconds": 300,
    "restart.healAfterSeconds": 3600,
    "snapshot.everySteps": AUTO,
    "snapshot.keep": 3,
    "snapshot.resume": "Auto",
    "hang.startupSeconds": 600,
    "hang.stepSeconds": 300,
    "hang.snapshotSeconds": 600,
    "scheduling.gang": "Auto",
    "scheduling.topologyKey": "",
    "scheduling.priorityClassName": "",
    "nodeLost.policy": "Wait",
    "nodeLost.afterSeconds": 30,
    "startupDeadlineSeconds": 600,
    "cleanPodPolicy": "Running",
    "metrics.port": 9400,
    "networkPolicy.enabled": True,
}
#: Kubernetes' own, of a pod that names none.
GRACE_SECONDS: Final = 30
SCHEDULER: Final = "default-scheduler"
#: Resources of which a process takes one. Not MIG's: CUDA shows one slice to a process, whatever
#: the container has. How many devices a ResourceClaim gives is not in the pod.
GPUS: Final = ("nvidia.com/gpu", "amd.com/gpu", "gpu.intel.com/xe", "gpu.intel.com/i915")
