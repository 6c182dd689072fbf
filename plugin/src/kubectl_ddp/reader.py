"""Read a job's snapshot volume when none of its pods runs: in a pod for that, for some seconds.

evidence.py calls it. The pod has the job's image, user and volume (read-only), no GPU and no
rights; it is deleted at the end, also after Ctrl-C. Where the volume went with the pods and the job
uploads its snapshots, it has the job's environment and reads the store.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ddpjob_contract import USER_ENV
from kubectl_ddp.failure import Failure
from kubectl_ddp.gang import Job
from kubectl_ddp.kubectl import Kubectl, Object, explained
from kubectl_ddp.text import clean

UPLOAD = USER_ENV[0]
_SECONDS = 180.0  # until it has ended; an image may have to be pulled
_PAUSE = 0.5
_SAY_AFTER = 5.0
#: The kubelet ends it then, whatever became of this command.
_DEADLINE = 300
_OF_POD = ("nodeSelector", "tolerations", "affinity", "imagePullSecrets", "runtimeClassName")
_OF_CONTAINER = ("runAsUser", "runAsGroup", "runAsNonRoot", "seccompProfile", "seLinuxOptions")
#: Volumes that go with their pods.
_SHORT_LIVED = ("emptyDir", "ephemeral")


def refusal(job: Job) -> str:
    """Return why no other pod can mount the volume, "" if one can."""
    volume = job.spec["snapshot"].get("volume") or {}
    kind = next((kind for kind in _SHORT_LIVED if kind in volume), "")
    if not volume:
        return "its spec.snapshot names no volume, so what pods wrote went with them"
    return f"its snapshot volume ({kind}) went with its pods" if kind else ""


def place(job: Job) -> str:
    """Return where the evidence is: below the volume's path, else where uploads go.

    Raises Failure where it went with the pods.
    """
    why, url = refusal(job), _literal(job, UPLOAD)
    if why and not url:
        raise Failure(f"no pod of {job.name} runs, and {why}")
    return url if why else f"{job.spec['snapshot']['path']}/{job.name}"


def _literal(job: Job, name: str) -> str:
    env = job.trainer.get("env") or []
    return next((str(one.get("value", "")) for one in env if one.get("name") == name), "")


def read(kubectl: Kubectl, job: Job, command: Sequence[str], node: str = "") -> str:
    """Run a command in a pod with the volume; return its output. Raises Failure."""
    name = f"{job.name[:40]}-evidence-{secrets.token_hex(3)}"
    where = f" on {node}" if node else ""
    print(
        f"no pod of {job.name} runs: reading its snapshot volume in pod {name}{where}, which is"
        " deleted then",
        file=sys.stderr,
    )
    with _made(kubectl, job, manifest(job, name, command, node)):
        phase, body = _ended(kubectl, job, name)
        said = kubectl.read("logs", "-n", job.namespace, name)
    if "hostPath" in (job.spec["snapshot"].get("volume") or {}) and not node:
        what = f"this is what {body['spec'].get('nodeName', 'a node')} has"
        print(f"the volume is a hostPath: {what}; --node reads another node's", file=sys.stderr)
    if phase != "Succeeded":
        lines = said.strip().splitlines() or [f"it ended as {phase} without a word"]
        raise Failure(f"pod {name}: {lines[-1].removeprefix('ddpjob-trainer: ')}")
    return said


def manifest(job: Job, name: str, command: Sequence[str], node: str) -> Object:
    """Build the pod."""
    snapshot, pod = job.spec["snapshot"], job.spec["template"].get("spec") or {}
    trains = job.trainer
    own = trains.get("securityContext") or {}
    security = {key: own[key] for key in _OF_CONTAINER if key in own}
    security |= {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    container = {
        "name": "reader",
        "image": trains.get("image"),
        "command": list(command),
        "securityContext": security,
        "resources": {
            "requests": {"cpu": "50m", "memory": "64Mi"},
            "limits": {"cpu": "500m", "memory": "512Mi"},
        },
    }
    if "imagePullPolicy" in trains:
        container["imagePullPolicy"] = trains["imagePullPolicy"]
    spec: dict[str, Any] = {key: pod[key] for key in _OF_POD if key in pod}
    if "securityContext" in pod:
        spec["securityContext"] = pod["securityContext"]
    spec |= {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": _DEADLINE,
        "automountServiceAccountToken": False,
        "containers": [container],
    }
    if refusal(job):  # the store needs the job's credentials
        container |= {key: trains[key] for key in ("env", "envFrom") if key in trains}
        spec |= {key: pod[key] for key in ("serviceAccountName",) if key in pod}
    else:
        mount = {"name": "snapshots", "mountPath": snapshot["path"], "readOnly": True}
        container["volumeMounts"] = [mount]
        spec["volumes"] = [{"name": "snapshots", **snapshot["volume"]}]
    if node:
        spec["nodeSelector"] = {**pod.get("nodeSelector", {}), "kubernetes.io/hostname": node}
    labels = {"app.kubernetes.io/name": "ddpjob-evidence", "app.kubernetes.io/part-of": "ddpjob"}
    meta = {"name": name, "namespace": job.namespace, "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}


@contextlib.contextmanager
def _made(kubectl: Kubectl, job: Job, body: Object) -> Iterator[None]:
    """Create the pod, and delete it whatever happens. Raises Failure."""
    name = body["metadata"]["name"]
    where = ("-n", job.namespace)
    try:
        with kubectl.running(
            "create", *where, "-f", "-",
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        ) as process:  # fmt: skip
            _, said = process.communicate(json.dumps(body))
        if process.returncode:
            raise Failure(f"{explained(said)}; {by_hand(job)}")
        yield
    finally:
        delete = ("delete", "pod", *where, name, "--ignore-not-found", "--wait=false", "--now")
        try:
            kubectl.read(*delete)
        except Failure as failure:
            said = f"pod {name} is left: kubectl delete pod {name} -n {job.namespace}"
            print(f"kubectl-ddp: {clean(str(failure))}; {said}", file=sys.stderr)


def by_hand(job: Job) -> str:
    """Say how to do the same without this command."""
    path = job.spec["snapshot"]["path"]
    volume = job.spec["snapshot"].get("volume") or {}
    claim = (volume.get("persistentVolumeClaim") or {}).get("claimName")
    what = f"claim {claim}" if claim else "its snapshot volume"
    return (
        f"by hand: `ddpjob-trainer evidence show {path}/{job.name}` in a pod that mounts {what} at"
        f" {path}"
    )


def _ended(kubectl: Kubectl, job: Job, name: str) -> tuple[str, Object]:
    """Wait until the pod has ended; return its phase and object. Raises Failure."""
    begun, said = time.monotonic(), ""
    while True:
        body = kubectl.get("pod", "-n", job.namespace, name)
        phase = str((body.get("status") or {}).get("phase", ""))
        if phase in ("Succeeded", "Failed"):
            return phase, body
        waited, why = time.monotonic() - begun, _why(body)
        if waited > _SECONDS:
            raise Failure(f"pod {name} has not run within {_SECONDS:.0f} s: {why}; {by_hand(job)}")
        if waited > _SAY_AFTER and why != said:
            said = why
            print(f"waiting for pod {name}: {clean(why)}", file=sys.stderr)
        time.sleep(_PAUSE)


def _why(body: Object) -> str:
    """Word what a pod waits for."""
    status = body.get("status") or {}
    for one in status.get("containerStatuses") or []:
        waiting = (one.get("state") or {}).get("waiting") or {}
        if waiting:
            return f"{waiting.get('reason', 'waiting')}: {waiting.get('message', '')}".rstrip(": ")
    for one in status.get("conditions") or []:
        if one.get("type") == "PodScheduled" and one.get("status") == "False":
            return f"{one.get('reason', 'Pending')}: {one.get('message', '')}"
    return str(status.get("phase") or "Pending")
