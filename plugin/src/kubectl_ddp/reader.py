"""Read a job's snapshot volume when none of its pods runs: in a pod for that, for some seconds.

evidence.py calls it. The pod has the job's image and user, and its volume or, where that went with
the pods and the job uploads its snapshots, its environment. It is deleted at the end, also after
Ctrl-C. It is made with the rights of who asks, which may be an administrator's, and what runs in it
is the job's: so it gets no more than an ordinary pod needs, and the user is asked.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ddpjob_contract import USER_ENV
from ddpjob_contract.text import clean as one_line
from ddpjob_contract.text import without_credentials
from kubectl_ddp.gang import Job
from kubectl_ddp.kubectl import Failure, Kubectl, Object
from kubectl_ddp.text import clean

UPLOAD = USER_ENV[0]
_SECONDS = 180.0  # until it has ended; an image may have to be pulled
_PAUSE = 0.5
_SAY_AFTER = 5.0
#: The kubelet ends it then, whatever became of this command.
_DEADLINE = 300
_OPEN_SECONDS = 6 * 3600  # of one that files are copied from or to
#: The one kind of volume that gives its pod nothing of a node, nor of another namespace.
_CLAIM = "persistentVolumeClaim"
#: What the pod takes over from the template, and what with --trust-job only.
_OF_POD = ("imagePullSecrets", "runtimeClassName")
_OF_POD_TRUSTED = ("nodeSelector", "tolerations", "affinity")
_OF_USER = ("runAsUser", "runAsGroup")
_OF_GROUPS = ("fsGroup", "fsGroupChangePolicy", "supplementalGroups")
#: Volumes that go with their pods.
_SHORT_LIVED = ("emptyDir", "ephemeral")
#: A kubelet's words on a pod that must not run as root.
_ROOT = re.compile("^CreateContainerConfigError: .*(runAsNonRoot|non-root)")
_MOST_SHOWN = 1000  # characters of an image or a volume


@dataclass(frozen=True, slots=True)
class Consent:
    """What the user allows. ``yes``: not to be asked. ``node``: where the pod is to run.

    ``trusted``: all that the job's template asks for, as if its owner had the user's rights.
    """

    yes: bool = False
    trusted: bool = False
    node: str = ""


def consent(options: argparse.Namespace) -> Consent:
    """Return what the command line allows."""
    return Consent(options.yes, options.trust_job, options.node)


def refusal(job: Job) -> str:
    """Return why no other pod can mount the volume, "" if one can."""
    volume = job.spec["snapshot"].get("volume") or {}
    kind = next((kind for kind in _SHORT_LIVED if kind in volume), "")
    if not volume:
        return "its spec.snapshot names no volume, so what pods wrote went with them"
    return f"its snapshot volume ({kind}) went with its pods" if kind else ""


def place(job: Job) -> str:
    """Return where the evidence is: below the volume's path, else where uploads go.

    The URL of uploads may hold a password: the kubelet puts it in. Raises Failure where the
    evidence went with the pods.
    """
    why, upload = refusal(job), _upload(job)
    if why and not (upload.get("value") or upload.get("valueFrom")):
        raise Failure(f"no pod of {job.name} runs, and {why}")
    return f"$({UPLOAD})" if why else f"{job.spec['snapshot']['path']}/{job.name}"


def _upload(job: Job) -> Object:
    env = job.trainer.get("env") or []
    return next((one for one in env if one.get("name") == UPLOAD), {})


def _contexts(job: Job) -> tuple[Object, Object]:
    """Return the security contexts of the pod and of the container, which goes before."""
    return job.pod.get("securityContext") or {}, job.trainer.get("securityContext") or {}


def objection(job: Job) -> str:
    """Return what the pod would be given that not everybody may have, "" for nothing."""
    found = []
    kinds = () if refusal(job) else job.spec["snapshot"]["volume"].keys() - {_CLAIM}
    if kinds:
        found.append(f"its snapshot volume is of the kind {', '.join(sorted(kinds))}")
    users = [one["runAsUser"] for one in _contexts(job) if one.get("runAsUser") is not None]
    if users and not (type(users[-1]) is int and users[-1] > 0):
        found.append(f"it runs as uid {users[-1]}")
    return clean(" and ".join(found))


def read(kubectl: Kubectl, job: Job, command: Sequence[str], allowed: Consent) -> str:
    """Run a command in a pod with the volume; return its output. Raises Failure."""
    body = _agreed(job, command, allowed, by_hand(job))
    name = body["metadata"]["name"]
    with made(kubectl, body, by_hand(job)):
        phase, body = _reached(kubectl, body, by_hand(job), trusted=allowed.trusted)
        said = kubectl.read("logs", "-n", job.namespace, name)
    if "hostPath" in (job.spec["snapshot"].get("volume") or {}) and not allowed.node:
        what = f"this is what {body['spec'].get('nodeName', 'a node')} has"
        print(f"the volume is a hostPath: {what}; --node reads another node's", file=sys.stderr)
    if phase != "Succeeded":
        lines = said.strip().splitlines() or [f"it ended as {phase} without a word"]
        why = without_credentials(lines[-1], str(_upload(job).get("value", "")))
        raise Failure(f"pod {name}: {why.removeprefix('ddpjob-trainer: ')}")
    return said


@contextlib.contextmanager
def opened(kubectl: Kubectl, job: Job, allowed: Consent) -> Iterator[str]:
    """Yield the name of a pod with the volume and a /tmp, to run commands in. Raises Failure."""
    if why := refusal(job):
        raise Failure(f"no pod of {job.name} runs, and {why}")
    hand = by_hand(job, "tar c")
    body = _agreed(job, (), allowed, hand)
    # A model has any size: what the node has.
    _give_scratch(body["spec"], {})
    with staying(kubectl, body, hand, trusted=allowed.trusted) as name:
        yield name


@contextlib.contextmanager
def staying(
    kubectl: Kubectl, body: Object, hand: str, *, trusted: bool = True, patient: bool = False
) -> Iterator[str]:
    """Make a pod that waits for commands; yield its name. Raises Failure."""
    (container,), spec = body["spec"]["containers"], body["spec"]
    container["command"] = ["sleep", str(_OPEN_SECONDS)]
    spec["activeDeadlineSeconds"] = _OPEN_SECONDS
    del container["resources"]["limits"]  # a model may be exported
    with made(kubectl, body, hand):
        ends, name = ("Running", "Succeeded", "Failed"), str(body["metadata"]["name"])
        phase, _ = _reached(kubectl, body, hand, ends, trusted=trusted, patient=patient)
        if phase != "Running":
            raise Failure(
                f"pod {name} does not stay: its image may have no `sleep`; by hand: {hand}"
            )
        yield name


def _give_scratch(spec: Object, size: Object) -> None:
    (container,) = spec["containers"]
    container.setdefault("volumeMounts", []).append({"name": "scratch", "mountPath": "/tmp"})
    spec.setdefault("volumes", []).append({"name": "scratch", "emptyDir": size})


def _agreed(job: Job, command: Sequence[str], allowed: Consent, hand: str) -> Object:
    """Build the pod, and show it to who asks. Raises Failure where it is not to be made."""
    if not allowed.trusted and (what := objection(job)):
        raise Failure(
            f"no pod of {job.name} runs, and none is made to read what they kept: {what},"
            " and a pod with your rights would give that to the job's image. --trust-job makes it,"
            f" where you would let the job's owner have it; else, by hand, {hand}"
        )
    name = f"{job.name[:40]}-evidence-{secrets.token_hex(3)}"
    body = manifest(job, name, command, allowed)
    _ask(job, body, allowed)
    return body


def _ask(job: Job, body: Object, allowed: Consent) -> None:
    """Show what is about to be made, and ask unless that is not wanted. Raises Failure."""
    spec = body["spec"]
    volume = job.spec["snapshot"].get("volume") or {}
    claim = volume.keys() == {_CLAIM} and (volume[_CLAIM] or {}).get("claimName")
    url = str(_upload(job).get("value") or "the URL of its uploads")
    if refusal(job):
        what = (
            f"no volume, but {without_credentials(url, url)} and the job's environment, Secrets too"
        )
    else:
        what = f"{f'claim {claim}' if claim else json.dumps(volume)}, read-only"
    user = spec["securityContext"] | spec["containers"][0]["securityContext"]
    of_image = "the image's, root too" if allowed.trusted else "the image's, not root"
    who = user.get("runAsUser", of_image)
    groups = [user[key] for key in ("runAsGroup", "fsGroup") if key in user]
    groups += user.get("supplementalGroups") or []
    if groups:
        who = f"{who}, groups {', '.join(map(str, groups))}"
    where = f" on {allowed.node}" if allowed.node else ""
    pod = body["metadata"]["name"]
    about = f"no pod of {job.name} runs: reading what it kept in pod {pod}{where}, which is deleted"
    lines = (
        f"{about} then. It is made with your rights, and what runs in it is the job's:",
        f"  image   {spec['containers'][0]['image']}",
        f"  user    {who}",
        f"  volume  {what}",
    )
    for line in map(one_line, lines):
        print(line if len(line) <= _MOST_SHOWN else f"{line[:_MOST_SHOWN]}...", file=sys.stderr)
    if allowed.yes:
        return
    if not (os.isatty(0) and os.isatty(2)):
        raise Failure(
            "the pod was not made, since nobody can be asked here: look at image and volume above,"
            " then add --yes"
        )
    print("Make it? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise Failure("the pod was not made")


def manifest(
    job: Job, name: str, command: Sequence[str], allowed: Consent, *, writes: bool = False
) -> Object:
    """Build the pod: of what the template asks for only what is named here."""
    snapshot, pod = job.spec["snapshot"], job.pod
    trains, (of_pod, own) = job.trainer, _contexts(job)
    more = ("seLinuxOptions",) if allowed.trusted else ()
    security = _taken(own, *_OF_USER, *more) | {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    if not allowed.trusted:
        security["runAsNonRoot"] = True
    container = {
        "name": "reader",
        "image": trains.get("image"),
        "command": list(command),
        "securityContext": security,
        "resources": {
            "requests": {"cpu": "50m", "memory": "64Mi"},
            "limits": {"cpu": "500m", "memory": "512Mi"},
        },
    } | _taken(trains, "imagePullPolicy")
    spec: dict[str, Any] = _taken(pod, *_OF_POD, *(_OF_POD_TRUSTED if allowed.trusted else ()))
    spec |= {
        "securityContext": _taken(of_pod, *_OF_USER, *_OF_GROUPS, *more),
        "restartPolicy": "Never",
        "activeDeadlineSeconds": _DEADLINE,
        "automountServiceAccountToken": False,
        "containers": [container],
    }
    if refusal(job):  # the store needs the job's credentials, and its files a place
        scratch = {"name": "TMPDIR", "value": "/tmp"}
        container |= _taken(trains, "envFrom") | {"env": [*(trains.get("env") or []), scratch]}
        _give_scratch(spec, {"sizeLimit": "1Gi"})
        spec |= _taken(pod, "serviceAccountName") if allowed.trusted else {}
    else:
        mount = {"name": "snapshots", "mountPath": snapshot["path"]}
        container["volumeMounts"] = [mount if writes else {**mount, "readOnly": True}]
        spec["volumes"] = [{"name": "snapshots", **snapshot["volume"]}]
    if allowed.node:
        selector = spec.get("nodeSelector") or {}
        spec["nodeSelector"] = {**selector, "kubernetes.io/hostname": allowed.node}
    use = "files" if writes else "evidence"
    labels = {"app.kubernetes.io/name": f"ddpjob-{use}", "app.kubernetes.io/part-of": "ddpjob"}
    meta = {"name": name, "labels": labels, **_taken(job.obj["metadata"], "namespace")}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}


def _taken(found: Object, *names: str) -> Object:
    return {name: found[name] for name in names if found.get(name) is not None}


@contextlib.contextmanager
def made(kubectl: Kubectl, body: Object, hand: str) -> Iterator[None]:
    """Create the pod, and delete it whatever happens. Raises Failure, which names ``hand``."""
    name, where = body["metadata"]["name"], _where(body)
    try:
        try:
            kubectl.read("create", *where, "-f", "-", given=json.dumps(body))
        except Failure as failure:
            raise Failure(f"{failure}; by hand: {hand}") from None
        yield
    finally:
        delete = ("delete", "pod", *where, name, "--ignore-not-found", "--wait=false", "--now")
        try:
            kubectl.read(*delete)
        except Failure as failure:
            said = f"pod {name} is left: kubectl delete pod {name} {' '.join(where)}".rstrip()
            print(f"kubectl-ddp: {clean(str(failure))}; {said}", file=sys.stderr)


def _where(body: Object) -> tuple[str, ...]:
    namespace = body["metadata"].get("namespace")
    return ("-n", namespace) if namespace else ()  # else kubectl's own


def by_hand(job: Job, command: str = "ddpjob-trainer evidence show") -> str:
    """Return the command that does the same without this one, and the pod that it needs."""
    path = job.spec["snapshot"]["path"]
    volume = job.spec["snapshot"].get("volume") or {}
    claim = (volume.get("persistentVolumeClaim") or {}).get("claimName")
    what = f"claim {claim}" if claim else "its snapshot volume"
    return f"`{command} {path}/{job.name}` in a pod that mounts {what} at {path}"


def _reached(
    kubectl: Kubectl,
    body: Object,
    hand: str,
    phases: Sequence[str] = ("Succeeded", "Failed"),
    *,
    trusted: bool,
    patient: bool = False,
) -> tuple[str, Object]:
    """Wait until the pod is in one of the phases; return that and its object. Raises Failure."""
    name, where = body["metadata"]["name"], _where(body)
    begun, shown = time.monotonic(), ""
    while True:
        body = kubectl.get("pod", *where, name)
        phase = str((body.get("status") or {}).get("phase", ""))
        if phase in phases:
            return phase, body
        waited, why = time.monotonic() - begun, _why(body)
        if _ROOT.search(why):
            raise Failure(
                f"pod {name} does not start: {why}. Its image runs as root, or as a user without a"
                " number; --trust-job lets it, where you would let the job's owner do so"
            )
        if waited > _SECONDS and not patient:
            more = "" if trusted else "with --trust-job it goes where the job's pods go; "
            late = f"pod {name} has not run within {_SECONDS:.0f} s: {why}"
            raise Failure(f"{late}; {more}by hand: {hand}")
        if waited > _SAY_AFTER and why != shown:
            shown = why
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
