"""A cluster with the operator installed as a user installs it, and jobs on it.

Everything goes through devcluster, helm and kubectl; only processes that are to be signalled are
looked up on this machine: nothing in Kubernetes can SIGKILL a container's PID 1, or two at once.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, Signals
from typing import Any

from devcluster import binaries
from support import cluster
from support.cluster import ROOT, Cluster
from support.manifest import ddpjob
from support.patience import WITHIN, T, wait_for
from support.plane import is_first, is_rank, processes_with, send
from support.rest import JOBS
from support.rounds import UNHURRIED, patch

IMAGES = ("ddpjob/operator:0.2.0", "ddpjob/trainer:0.2.0")
SYSTEM = "ddpjob-system"
OPERATOR_LABEL = "app.kubernetes.io/name=ddpjob-operator"
CLAIM = "snapshots"
DIGITS = "/workspace/examples/digits.py"
SLOW = Path(__file__).with_name("slow.py")
PATIENT = "unhurried"  # a directory of the claim
STEPS = 150  # of most gangs that are disturbed, so that one undisturbed run serves all
#: Let a disturbed job of STEPS end: its status, once its weights are those of an undisturbed one.
Finished = Callable[[str], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Site:
    """The cluster, the namespace that tests use, and the tools to look at it."""

    cluster: Cluster
    namespace: str

    def kubectl(self, *args: str, **more: Any) -> subprocess.CompletedProcess[str]:
        """Run kubectl in the tests' namespace."""
        return self.cluster.kubectl("-n", self.namespace, *args, **more)

    def get(self, *args: str) -> dict[str, Any]:
        """`kubectl get ARGS -o json`, parsed."""
        text = self.cluster.read("-n", self.namespace, "get", *args, "-o", "json")
        found: dict[str, Any] = json.loads(text)
        return found

    def apply(self, *objects: dict[str, Any]) -> None:
        """`kubectl apply` with its strict validation."""
        items = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.kubectl("apply", "-f", "-", input=json.dumps(items), check=True)

    def describe(self, name: str) -> str:
        """What `kubectl describe` shows of a job, its events included."""
        return self.cluster.read("-n", self.namespace, "describe", "ddpjob", name)

    def status(self, name: str) -> dict[str, Any]:
        """.status of a job; empty before the operator has seen it."""
        path = f"{JOBS}/namespaces/{self.namespace}/ddpjobs/{name}"
        found: dict[str, Any] = self.cluster.get(path).get("status", {})
        return found

    def progress(self, name: str, field: str) -> int:
        """A field of .status.progress; 0 before it is known."""
        return int(self.status(name).get("progress", {}).get(field, 0))

    def condition(self, name: str, type_: str) -> dict[str, Any]:
        """A condition of a job; empty if it was never set."""
        found = (c for c in self.status(name).get("conditions", []) if c["type"] == type_)
        return next(found, {})

    def pods(self, name: str) -> dict[str, dict[str, Any]]:
        """The job's pods by name, whatever their attempt."""
        chosen = f"labelSelector=ddpjob.dev/job-name%3D{name}"
        found = self.cluster.get(f"/api/v1/namespaces/{self.namespace}/pods?{chosen}")["items"]
        return {pod["metadata"]["name"]: pod for pod in found}

    def uids(self, name: str) -> dict[str, str]:
        """The uids of the job's pods by name."""
        return {pod: body["metadata"]["uid"] for pod, body in self.pods(name).items()}

    def nodes(self, name: str) -> set[str]:
        """The nodes of the job's pods."""
        return {pod["spec"]["nodeName"] for pod in self.pods(name).values()}

    # --- waiting --------------------------------------------------------------------------

    def wait(self, name: str, probe: Callable[[], T | None], what: str) -> T:
        """Wait for something of a job, and say how the job is if it does not come."""
        try:
            return wait_for(probe, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.explain(name)}") from None

    def wait_phase(self, name: str, phase: str) -> dict[str, Any]:
        """Wait until the job is in a phase; an end in another one fails at once."""

        def reached() -> dict[str, Any] | None:
            status = self.status(name)
            now = status.get("phase")
            if now in ("Succeeded", "Failed") and now != phase:
                raise AssertionError(
                    f"{name} is {now}, not {phase}: {json.dumps(status, indent=1)}"
                )
            return status if now == phase else None

        return self.wait(name, reached, f"{name} to be {phase}")

    def wait_running(
        self, name: str, attempt: int, *, step: int = 0, snapshot_after: int = -1
    ) -> dict[str, Any]:
        """Wait until attempt N runs and has reported a step, and a snapshot newer than one."""

        def reached() -> dict[str, Any] | None:
            status = self.status(name)
            there = status.get("phase") == "Running" and status["attempt"] >= attempt
            if status.get("phase") in ("Succeeded", "Failed"):
                raise AssertionError(f"{name} ended too early: {json.dumps(status, indent=1)}")
            progress = status.get("progress", {})
            on = progress.get("step", 0) >= step
            newer = progress.get("snapshotStep", 0) > snapshot_after
            return status if there and on and newer else None

        return self.wait(name, reached, f"{name}: attempt {attempt}, step {step}")

    def wait_condition(self, name: str, type_: str, reason: str) -> str:
        """Wait until a condition is true for that reason; return its message."""

        def told() -> str | None:
            found = self.condition(name, type_)
            right = found.get("status") == "True" and found.get("reason") == reason
            return str(found["message"]) if right else None

        return self.wait(name, told, f"{name} to be {type_} by {reason}")

    def wait_leader(self) -> tuple[str, str]:
        """Wait until there is a leader whose pod is there; return it and its node."""

        def named() -> tuple[str, str] | None:
            try:
                found = self.leader()
            except AssertionError:
                return None  # the pod of the lease is gone
            return found if all(found) else None

        return wait_for(named, "a leader whose pod is there")

    def explain(self, name: str) -> str:
        """What a person would look at when a job does not do what it should."""
        parts = [self.kubectl("describe", "ddpjob", name).stdout]
        parts.append(self.kubectl("get", "pods", "-o", "wide").stdout)
        parts += [
            f"--- {pod}\n" + self.kubectl("logs", pod, "--tail=30").stdout
            for pod in self.pods(name)
        ]
        parts.append(self.operator_log("--tail=40"))
        return "\n".join(parts)

    def operator_log(self, *args: str) -> str:
        """What all operators wrote that a kubelet can still tell of."""
        return self.cluster.kubectl(
            "-n", SYSTEM, "logs", "-l", OPERATOR_LABEL, "--prefix", *args
        ).stdout

    # --- disturbing -----------------------------------------------------------------------

    def volume(self) -> Path:
        """The directory of the claim's volume on this machine."""

        def bound() -> str | None:
            return self.get("pvc", CLAIM)["spec"].get("volumeName")

        volume = self.get("pv", wait_for(bound, f"claim {CLAIM} to be bound"))
        return Path(volume["spec"]["hostPath"]["path"])

    def hurry(self, name: str) -> None:
        """Let a job of `digits(slow=...)` train as fast as it can from now on."""
        (self.volume() / f"{name}.hurry").touch()

    def kill_training(self, *pods: str, signal: str = "KILL") -> None:
        """Signal a training process of each pod, from outside, as soon as each pod has one.

        Through kubectl the first would be dead, and its gang with it, before the second is reached.
        """

        def ranks() -> list[list[int]] | None:
            found = [self.ranks(pod) for pod in pods]
            return found if all(found) else None

        each = wait_for(ranks, f"a training process in each of {', '.join(pods)}")
        reached = send([min(pids) for pids in each], Signals[f"SIG{signal}"])
        assert reached == len(pods), f"{reached} of {len(pods)} were there"

    def ranks(self, pod: str) -> list[int]:
        """The training processes of a pod, as this machine numbers them."""
        inside = processes_with(DDPJOB_NAMESPACE=self.namespace, HOSTNAME=pod)
        return [pid for pid in inside if is_rank(pid)]

    def kill_launcher(self, pod: str) -> None:
        """Kill a pod's launcher, and so all of its container, from outside."""
        inside = processes_with(DDPJOB_NAMESPACE=self.namespace, HOSTNAME=pod)
        assert send([pid for pid in inside if is_first(pid)], Signals.SIGKILL) == 1

    def evict(self, pod: str) -> None:
        """Evict it through the API, as `kubectl drain` does."""
        meta = {"name": pod, "namespace": self.namespace}
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": meta}
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}/eviction"
        self.kubectl("create", "--raw", path, "-f", "-", input=json.dumps(body), check=True)

    def leader(self) -> tuple[str, str]:
        """The operator that holds the lease, and its node."""
        get = ("-n", SYSTEM, "get", "-o")
        holder = "jsonpath={.spec.holderIdentity}"
        pod = self.cluster.read(*get, holder, "lease", "ddpjob-operator")
        return pod, self.cluster.read(*get, "jsonpath={.spec.nodeName}", "pod", pod)

    def kill_operator(self) -> None:
        """SIGKILL the operator's processes, from outside their containers."""
        get = ("-n", SYSTEM, "get", "pods", "-l", OPERATOR_LABEL, "-o", "json")
        found = json.loads(self.cluster.read(*get))["items"]
        names = {pod["metadata"]["name"] for pod in found}
        assert names, f"no pod of the operator with label {OPERATOR_LABEL}"
        for name in names:  # HOSTNAME in a pod is the pod's name
            send([pid for pid in processes_with(HOSTNAME=name) if is_first(pid)], SIGKILL)

    # --- results --------------------------------------------------------------------------

    def result(self, name: str) -> dict[str, str]:
        """The `key=value` lines that digits.py prints at its end."""
        log = self.cluster.read("-n", self.namespace, "logs", f"{name}-0")
        return dict(re.findall(r"^(?:\[rank \d+\] )?(\w+)=(\S+)\s*$", log, re.MULTILINE))

    def resumed_from(self, name: str, *, at_least: int = 0) -> int:
        """The newest snapshot that rank 0 says it resumed from, as soon as it is that new."""

        def said() -> list[int]:
            log = self.kubectl("logs", f"{name}-0").stdout
            steps = map(int, re.findall(r"resuming after step (\d+)", log))
            return [step for step in steps if step >= at_least]

        return wait_for(said, f"{name} to resume from a snapshot of step {at_least} or later")[-1]

    def delete(self, name: str) -> None:
        """Delete a job and wait until nothing of it is left."""
        self.kubectl("delete", "ddpjob", name, "--wait", WITHIN, check=True)
        wait_for(lambda: not self.pods(name), f"pods of {name} to go")


def newest_snapshot(folder: Path) -> int:
    """The step of the newest snapshot of a job, or of one of its incarnations; 0 of none."""
    return max((int(path.stem.split("-")[1]) for path in folder.rglob("step-*.json")), default=0)


def digits(
    name: str,
    *,
    steps: int = 60,
    step_seconds: float = 0.1,
    slow: float = 0,
    every: int = 10,
    **spec: Any,
) -> dict[str, Any]:
    """The digits example as a DDPJob of 3 replicas, slowed down so that it can be disturbed.

    ``slow``: seconds of a step until `Site.hurry`: so a job that is to be disturbed is not over
    before, however late word of it comes, and takes no longer for that.
    """
    if slow:
        command = ["ddpjob-trainer", "run", f"/snapshots/{SLOW.name}"]
        command += [f"/snapshots/{name}.hurry", str(slow), DIGITS, "--total-steps", str(steps)]
    else:
        command = ["ddpjob-trainer", "run", DIGITS]
        command += ["--total-steps", str(steps), "--step-seconds", str(step_seconds)]
    claim = {"persistentVolumeClaim": {"claimName": CLAIM}}
    snapshot = {"path": "/snapshots", "volume": claim, "everySteps": every}
    return job(name, command, snapshot=snapshot, **spec)


def unhurried(obj: dict[str, Any]) -> dict[str, Any]:
    """For `digits`: a launcher that stands still, as on a busy machine, is not given up for it."""
    (trainer,) = obj["spec"]["template"]["spec"]["containers"]
    trainer["env"] = [{"name": "PYTHONPATH", "value": f"/snapshots/{PATIENT}"}]
    return obj


def job(name: str, command: list[str], **spec: Any) -> dict[str, Any]:
    """A DDPJob of 3 replicas that runs a command in the trainer image."""
    container = {
        "name": "trainer",
        "image": IMAGES[1],
        "command": command,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    security = {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    template = {"spec": {"securityContext": security, "containers": [container]}}
    # These tests count rounds; the drill has tests of its own.
    restart = spec.pop("restart", {})
    spec["restart"] = {**restart, "inPlace": {"drill": "Never", **restart.get("inPlace", {})}}
    return ddpjob(name, template=template, **{"nprocPerNode": 1, **spec})


def spread(body: dict[str, Any]) -> dict[str, Any]:
    """The job, with as many pods on one node as on another."""
    evenly: dict[str, Any] = {"maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"}
    evenly["labelSelector"] = {"matchLabels": {"ddpjob.dev/job-name": body["metadata"]["name"]}}
    evenly["topologyKey"] = "kubernetes.io/hostname"
    body["spec"]["template"]["spec"]["topologySpreadConstraints"] = [evenly]
    return body


def trainer(body: dict[str, Any]) -> dict[str, Any]:
    """Return the trainer container of a DDPJob."""
    found: dict[str, Any] = body["spec"]["template"]["spec"]["containers"][0]
    return found


@contextmanager
def installed(name: str, *args: str) -> Iterator[Site]:
    """A two-node cluster of one's own with the chart, and a namespace in it."""
    try:
        yield namespace(ready(name, *args))
    finally:
        if not os.environ.get("DDPJOB_KEEP_CLUSTER"):
            cluster.down(name)


def ready(name: str, *args: str) -> Cluster:
    """Bring up a two-node cluster and install the chart; ``args``: of `devcluster up`."""
    images = [word for image in IMAGES for word in ("--image", image)]
    plane = cluster.up(name, "--nodes", "2", *images, *args, timeout=3600)
    _helm_install(plane)
    return plane


def namespace(plane: Cluster) -> Site:
    """Make a namespace with a claim, for the tests of one worker."""
    site = Site(plane, f"tests-{uuid.uuid4().hex[:6]}")
    plane.kubectl("create", "namespace", site.namespace, check=True)
    # What the trainer image promises: it needs no rights at all.
    label = "pod-security.kubernetes.io/enforce=restricted"
    plane.kubectl("label", "namespace", site.namespace, label, check=True)
    site.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": CLAIM},
            "spec": {
                "accessModes": ["ReadWriteMany"],
                "resources": {"requests": {"storage": "1Gi"}},
            },
        }
    )
    shutil.copyfile(SLOW, site.volume() / SLOW.name)
    patch(site.volume() / PATIENT, UNHURRIED)
    return site


def _helm_install(plane: Cluster) -> None:
    helm = binaries.ensure(["helm"], print)["helm"]
    command = [helm, "--kubeconfig", plane.kubeconfig, "upgrade", "--install", "ddpjob"]
    command += [ROOT / "charts" / "ddpjob", "--namespace", SYSTEM, "--create-namespace"]
    # On a cluster that an interrupted run has left, the operator is to be of this checkout, too.
    command += [
        "--set",
        f"progressSeconds=1,kueue.enabled=true,podAnnotations.installed=at-{uuid.uuid4().hex[:6]}",
    ]
    command += ["--wait", WITHIN]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
