"""DDPJobs as people send them by mistake or on purpose: each a change to a good one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from support.manifest import DELETE, changed

_POD: Final = "spec.template.spec"
_TRAINER: Final = f"{_POD}.containers.0"
_SIDECAR: Final = {"name": "log", "image": "example/log:1"}

#: What it is -> (dotted path, value), more than one of them for some.
ODD: Final[Mapping[str, tuple[tuple[str, Any], ...]]] = {
    # --- typos
    "kind in other letters": (("kind", "DDPjob"),),
    "apiVersion of another version": (("apiVersion", "ddpjob.dev/v1"),),
    "metadata.label": (("metadata.label", {"team": "a"}),),
    "spec.replica": (("spec.replica", 3),),
    "snapshot.everyStep": (("spec.snapshot.everyStep", 10),),
    "container for containers": (
        (f"{_POD}.containers", DELETE),
        (f"{_POD}.container", [{"name": "trainer", "image": "i"}]),
    ),
    "imagePullPolcy": ((f"{_TRAINER}.imagePullPolcy", "Always"),),
    "resources.limit": ((f"{_TRAINER}.resources.limit", {"cpu": "1"}),),
    "serviceAcount": ((f"{_POD}.serviceAcount", "train"),),
    "env valeu": ((f"{_TRAINER}.env.0", {"name": "A", "valeu": "1"}),),
    "claimname for claimName": (
        (f"{_POD}.volumes.0", {"name": "d", "persistentVolumeClaim": {"claimname": "c"}}),
    ),
    "snapshot.volume.pvc": (("spec.snapshot.volume", {"pvc": {"claimName": "c"}}),),
    "a namespace in the template": (("spec.template.metadata", {"namespace": "kube-system"}),),
    # --- words and types
    "imagePullPolicy Sometimes": ((f"{_TRAINER}.imagePullPolicy", "Sometimes"),),
    "command a string": ((f"{_TRAINER}.command", "python train.py"),),
    "env value a number": ((f"{_TRAINER}.env.0", {"name": "A", "value": 1}),),
    "a mapping for env": ((f"{_TRAINER}.env", {"A": "1"}),),
    "labels with a boolean": (("spec.template.metadata", {"labels": {"gpu": True}}),),
    "imagePullSecrets without name:": ((f"{_POD}.imagePullSecrets", ["registry"]),),
    "env: and nothing below it": ((f"{_TRAINER}.env", None),),
    "snapshot: and nothing below it": (("spec.snapshot", None),),
    "template a text": (("spec.template", "containers: []"),),
    "replicas a text": (("spec.replicas", "3"),),
    "replicas 0": (("spec.replicas", 0),),
    "maxRestarts -1": (("spec.restart.maxRestarts", -1),),
    "restartPolicy OnFailure": ((f"{_POD}.restartPolicy", "OnFailure"),),
    "RANK in env": ((f"{_TRAINER}.env.0", {"name": "RANK", "value": "0"}),),
    "a name with a dot": (("metadata.name", "resnet.50"),),
    "two containers of one name": (
        (f"{_POD}.containers.1", {"name": "trainer", "image": "example/train:1"}),
    ),
    "no image": ((f"{_TRAINER}.image", DELETE),),
    "image with blanks": ((f"{_TRAINER}.image", "example/train: 1"),),
    "no command and no args": ((f"{_TRAINER}.command", DELETE),),
    "container name in capitals": ((f"{_TRAINER}.name", "Trainer"),),
    "tolerations operator Equals": (
        (f"{_POD}.tolerations.0", {"key": "gpu", "operator": "Equals", "effect": "NoSchedule"}),
    ),
    "grace period negative": ((f"{_POD}.terminationGracePeriodSeconds", -5),),
    "activeDeadlineSeconds of the pod 0": ((f"{_POD}.activeDeadlineSeconds", 0),),
    "priorityClass that is not there": ((f"{_POD}.priorityClassName", "urgent"),),
    "serviceAccount that is not there": ((f"{_POD}.serviceAccountName", "nobody"),),
    "a scheduling gate": ((f"{_POD}.schedulingGates", [{"name": "example.com/wait"}]),),
    "a label of the template with a blank": (
        ("spec.template.metadata", {"labels": {"my team": "a"}}),
    ),
    "runAsUser a name": ((f"{_POD}.securityContext.runAsUser", "root"),),
    # --- units
    "memory 16gb": ((f"{_TRAINER}.resources.limits", {"memory": "16gb"}),),
    "memory 128m": ((f"{_TRAINER}.resources.limits", {"memory": "128m"}),),
    "cpu a number": ((f"{_TRAINER}.resources.limits", {"cpu": 0.5}),),
    "requests above limits": (
        (f"{_TRAINER}.resources", {"requests": {"cpu": "4"}, "limits": {"cpu": "2"}}),
    ),
    "deadline with a unit": (("spec.activeDeadlineSeconds", "1h"),),
    "replicas 3.5": (("spec.replicas", 3.5),),
    # --- devices
    "half a GPU": ((f"{_TRAINER}.resources.limits", {"nvidia.com/gpu": "0.5"}),),
    "a GPU requested without a limit": ((f"{_TRAINER}.resources.requests", {"nvidia.com/gpu": 1}),),
    "nvidia/gpu": ((f"{_TRAINER}.resources.limits", {"nvidia/gpu": 1}),),
    # --- volumes
    "a mount without a volume": (
        (f"{_TRAINER}.volumeMounts.0", {"name": "data", "mountPath": "/data"}),
    ),
    "two volumes at one path": (
        (f"{_POD}.volumes", [{"name": "a", "emptyDir": {}}, {"name": "b", "emptyDir": {}}]),
        (
            f"{_TRAINER}.volumeMounts",
            [{"name": "a", "mountPath": "/x"}, {"name": "b", "mountPath": "/x"}],
        ),
    ),
    # --- hostile
    "a name with terminal escapes": (("metadata.name", "a\x1b[31mb"),),
    "a label value with a line feed": (("metadata.labels", {"team": "a\nb"}),),
    "a command with escapes and a line feed": (
        (f"{_TRAINER}.command", ["sh", "-c", "echo '\x1b[2J'\nkill -9 1"]),
    ),
    "a command with a NUL": ((f"{_TRAINER}.command", ["sh", "-c", "a\x00b"]),),
    "a label of another gang": (
        ("spec.template.metadata", {"labels": {"ddpjob.dev/job-uid": "another"}}),
    ),
    "a command of 1.4 MB": ((f"{_TRAINER}.command", ["sh", "-c", "x" * 1_400_000]),),
    "a template nested 200 deep": ((f"{_POD}.{'.'.join(['affinity'] * 200)}", {}),),
    "a sidecar that is privileged": (
        (f"{_POD}.containers.1", {**_SIDECAR, "securityContext": {"privileged": True}}),
    ),
    "the host's root as a volume": (
        (f"{_POD}.volumes.0", {"name": "root", "hostPath": {"path": "/"}}),
    ),
    "a status in the manifest": (("status", {"phase": "Succeeded", "attempt": 7}),),
}


def manifest(number: int, name: str) -> dict[str, Any]:
    """The DDPJob of one of them."""
    container = {"name": "trainer", "image": "example/train:1", "command": ["train"]}
    spec = {"schedulerName": "hand", "containers": [container]}
    body: dict[str, Any] = {
        "apiVersion": "ddpjob.dev/v1alpha1",
        "kind": "DDPJob",
        "metadata": {"name": f"odd-{number}"},
        "spec": {
            "replicas": 1,
            "snapshot": {"path": "/snapshots", "volume": {"emptyDir": {}}},
            "template": {"spec": spec},
        },
    }
    for path, value in ODD[name]:
        body = changed(body, path, value)
    return body
