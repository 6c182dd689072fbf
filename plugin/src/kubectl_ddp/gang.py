"""Read a job, its pods and its trainers' pages, for the commands.

The status is the operator's and has the CRD's schema; the pages of trainers are text from
containers: a malformed value counts as absent.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

import ddpjob_contract as contract
from ddpjob_contract import crd
from kubectl_ddp import podproxy
from kubectl_ddp.kubectl import DDPJOBS, Failure, Kubectl, Missing, Object
from kubectl_ddp.text import clean, ranges

METRIC_SNAPSHOT_AT = "ddpjob_trainer_snapshot_timestamp_seconds"
METRIC_PHASES = "ddpjob_trainer_phase_seconds_total"
#: In a backward a rank computes gradients and waits for those of others, in an agreement it waits.
_EXCHANGES = ("backward", "agreement")
_STEPS = ("data", "forward", *_EXCHANGES, "update", "body", "snapshot", "evaluation")
_SAMPLE = re.compile(r"^(\w+)(?:\{([^}\n]*)\})? ([-+.\deE]+)$", re.MULTILINE)
_ACTIVITY = re.compile(r'activity="(\w+)"')
#: No trainer counts higher: infinity and numbers of 400 digits are no steps.
_MOST = 1e18


@dataclass(frozen=True, slots=True)
class Named:
    """An object as the API server has it."""

    obj: Object

    @property
    def name(self) -> str:
        """Return its name."""
        return str(self.obj["metadata"]["name"])

    @property
    def uid(self) -> str:
        """Return the uid, which no other object of its name has."""
        return str(self.obj["metadata"].get("uid", ""))


class Job(Named):
    """A DDPJob."""

    @property
    def namespace(self) -> str:
        """Return the namespace of the job and its pods."""
        return str(self.obj["metadata"]["namespace"])

    @property
    def version(self) -> str:
        """Return the resourceVersion, which each write changes."""
        return str(self.obj["metadata"].get("resourceVersion", ""))

    @property
    def spec(self) -> Object:
        """Return spec with the defaults of the CRD."""
        return dict(self.obj["spec"])

    @property
    def pod(self) -> Object:
        """Return the template's spec."""
        return dict(self.spec["template"].get("spec") or {})

    @property
    def trainer(self) -> Object:
        """Return the template's trainer container."""
        containers: list[Object] = self.pod.get("containers") or [{}]
        named = (one for one in containers if one.get("name") == crd.TRAINER_CONTAINER)
        return next(named, containers[0])

    @property
    def status(self) -> Object:
        """Return the status, empty until the operator has seen the job."""
        return dict(self.obj.get("status") or {})

    @property
    def phase(self) -> str:
        """Return the phase, empty as long as the status is."""
        return str(self.status.get("phase", ""))

    @property
    def replicas(self) -> int:
        """Return the number of replicas."""
        return int(self.spec["replicas"])

    @property
    def seats(self) -> int:
        """Return the number of pods, with those that stand by."""
        return self.replicas + int(self.spec.get("standby", 0))

    @property
    def places(self) -> list[tuple[int | None, int]]:
        """List each replica and the number of the pod that serves it, then None and the others."""
        moved = _pairs(self.status.get("serving"))
        serve = [moved.get(replica, replica) for replica in range(self.replicas)]
        others = (seat for seat in range(self.seats) if seat not in serve)
        return [*enumerate(serve), *((None, seat) for seat in others)]

    def true(self, *types: str) -> list[Object]:
        """Return the conditions of these types that are true."""
        found = self.status.get("conditions") or []
        return [one for one in found if one["status"] == "True" and one["type"] in types]

    @property
    def failures(self) -> list[Object]:
        """Return the failures, oldest first; without a history the last one alone."""
        last = self.status.get("lastFailure")
        return list(self.status.get("failures") or ([last] if last else []))

    @property
    def replaced(self) -> list[int]:
        """Return the replicas whose lost pods are being replaced now, while the others wait."""
        births, now = _pairs(self.status.get("births")), self.status.get("attempt")
        wait = self.phase in ("Restarting", "Starting")
        return [replica for replica, birth in births.items() if wait and birth == now]

    def page(self, name: str, replica: int, member: Member | None) -> str:
        """Return the API server's path of a replica's page: state, metrics; stacks need the uid."""
        drawn = member.environment(contract.METRICS_PORT) if member else ""
        # Else that of the spec, where the CRD's default is filled in.
        port = int(drawn if drawn.isdecimal() else self.spec["metrics"]["port"])
        pod = f"/api/v1/namespaces/{self.namespace}/pods/{self.name}-{replica}:{port}"
        return f"{pod}/proxy/{name}?uid={self.uid}"


class Member(Named):
    """The pod of one replica."""

    @property
    def replica(self) -> int:
        """Return the replica, from 0."""
        return int(self.obj["metadata"]["labels"][crd.LABEL_REPLICA])

    @property
    def attempt(self) -> int:
        """Return the attempt that the pod was created for."""
        return int(self.obj["metadata"]["labels"][crd.LABEL_ATTEMPT])

    @property
    def node(self) -> str:
        """Return the node, empty while it has none."""
        return str(self.obj["spec"].get("nodeName", ""))

    @property
    def container(self) -> str:
        """Name of the container that trains."""
        noted = (self.obj["metadata"].get("annotations") or {}).get(crd.ANNOTATION_TRAINER)
        return str(noted or self.obj["spec"]["containers"][0]["name"])

    @property
    def ready(self) -> bool:
        """Tell whether the trainer container is ready."""
        return bool(self._trainer.get("ready"))

    @property
    def running(self) -> bool:
        """Tell whether the trainer container runs."""
        return "running" in self._state

    @property
    def started(self) -> bool:
        """Tell whether there is a log."""
        return self.running or "terminated" in self._state

    @property
    def state(self) -> str:
        """Name it as `kubectl get pods` does: Running, Terminating, ImagePullBackOff, ..."""
        if "deletionTimestamp" in self.obj["metadata"]:
            return "Terminating"
        if not self.started and self.failed_init:
            return "Init:Error"
        for kind in ("terminated", "waiting"):
            if reason := self._state.get(kind, {}).get("reason"):
                return str(reason)
        status = self.obj.get("status") or {}
        for condition in status.get("conditions") or []:
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                return str(condition.get("reason") or "Pending")
        return str(status.get("reason") or status.get("phase", "Pending"))

    @property
    def failed_init(self) -> str:
        """Return the name of the init container that failed; empty if none did."""
        found = (self.obj.get("status") or {}).get("initContainerStatuses") or []
        inits = self.obj["spec"].get("initContainers") or []
        kept = {one["name"] for one in inits if one.get("restartPolicy") == "Always"}
        found = [one for one in found if one["name"] not in kept]
        ends = ((one["name"], (one.get("state") or {}).get("terminated")) for one in found)
        return next((str(name) for name, end in ends if end and end.get("exitCode")), "")

    def environment(self, name: str) -> str:
        """Return a variable of the trainer container, an empty string without it."""
        all_of = (one for one in self.obj["spec"]["containers"] if one["name"] == self.container)
        env = (one for container in all_of for one in container.get("env") or [])
        return next((str(one.get("value", "")) for one in env if one["name"] == name), "")

    @property
    def _trainer(self) -> Object:
        found = (self.obj.get("status") or {}).get("containerStatuses") or []
        return next((one for one in found if one["name"] == self.container), {})

    @property
    def _state(self) -> Object:
        return dict(self._trainer.get("state") or {})


@dataclass(frozen=True, slots=True)
class Report:
    """The pages of one pod's trainer; a field without a value is None.

    ``state``: the body of /state. ``snapshot_at``: Unix time. ``rate``: steps per second of the
    last minute. ``data``, ``exchange``: shares of the time of its steps.
    """

    state: Mapping[str, Any] = field(default_factory=dict)
    snapshot_at: float | None = None
    rate: float | None = None
    data: float | None = None
    exchange: float | None = None

    def number(self, name: str) -> float | None:
        """Return a number of the state."""
        found = self.state.get(name)
        if not isinstance(found, int | float) or isinstance(found, bool):
            return None
        return found if abs(found) < _MOST else None

    def text(self, name: str) -> str:
        """Return a text of the state, or an empty one."""
        found = self.state.get(name)
        return found if isinstance(found, str) else ""

    @property
    def silent(self) -> bool:
        """Tell whether the trainer has reported nothing yet, as a plain script never does."""
        return self.text("phase") == "startup" and not self.text("updatedAt")


def _pairs(text: object) -> dict[int, int]:
    """Read "1:5,7:6" of a status."""
    pairs = (pair.partition(":") for pair in str(text or "").split(","))
    return {int(a): int(b) for a, _, b in pairs if a.isdecimal() and b.isdecimal()}


def named(replicas: Sequence[int]) -> str:
    """Name replicas: replica 1, replicas 0-2."""
    return f"replica{'s' * (len(replicas) > 1)} {ranges(replicas)}"


def find_job(kubectl: Kubectl, name: str) -> Job:
    """Read a job; raise Failure."""
    return Job(kubectl.get(DDPJOBS, name))


def look_again(kubectl: Kubectl, job: Job) -> Job:
    """Read the job again; raise Missing if it is gone, or another has its name."""
    found = Job(kubectl.get(DDPJOBS, job.name, "-n", job.namespace))
    if found.uid != job.uid:
        raise Missing(f"{job.name} was deleted; the job that has its name now is another one")
    return found


def chosen(job: Job, replica: int | None) -> set[int]:
    """Return the replicas that --replica asks for, by their pods' numbers; raise Failure."""
    if replica is None:
        return set(range(job.seats))
    if not 0 <= replica < job.seats:
        raise Failure(f"--replica {replica}: {job.name} has 0 to {job.seats - 1}")
    return {replica}


def find_members(kubectl: Kubectl, job: Job) -> dict[int, Member]:
    """Return the job's pods by replica. By uid: a job of the same name may have left some."""
    found = kubectl.items("pods", "-n", job.namespace, "-l", f"{crd.LABEL_JOB_UID}={job.uid}")
    ours = [Member(pod) for pod in found if _is_ours(job, pod)]
    return {one.replica: one for one in sorted(ours, key=lambda one: one.attempt)}


def _is_ours(job: Job, pod: Object) -> bool:
    """Tell whether the job owns the pod under its own name: anybody may set labels."""
    meta = pod["metadata"]
    owners = meta.get("ownerReferences") or []
    labels = (crd.LABEL_REPLICA, crd.LABEL_ATTEMPT)
    replica, attempt = (meta["labels"].get(label, "") for label in labels)
    return (
        any(one.get("controller") and one["uid"] == job.uid for one in owners)
        and replica.isdecimal()
        and attempt.isdecimal()
        and meta["name"] == f"{job.name}-{replica}"
    )


def find_first(kubectl: Kubectl, jobs: Iterable[Job], *where: str) -> dict[str, Member]:
    """Return replica 0's pods on the host's network, where each draws its ports, by job's uid."""
    on_host = {job.uid: job for job in jobs if job.pod.get("hostNetwork")}
    if not on_host:
        return {}
    found = kubectl.items("pods", *where, "-l", f"{crd.LABEL_REPLICA}=0")
    uids = [(pod["metadata"]["labels"].get(crd.LABEL_JOB_UID), pod) for pod in found]
    return {uid: Member(pod) for uid, pod in uids if uid in on_host and _is_ours(on_host[uid], pod)}


def ask(
    kubectl: Kubectl, pods: Iterable[tuple[Job, int, Member | None]], *names: str
) -> tuple[dict[tuple[str, str, int], Report], str]:
    """Ask these replicas' trainers; return answers by namespace, job and replica, or why none came.

    ``names``: the pages to read, of state and metrics.
    """
    pods = list(pods)
    pages = [job.page(name, n, member) for job, n, member in pods for name in names]
    bodies, refusal = podproxy.read(kubectl, pages)
    reports = {}
    for job, n, member in pods:
        parts = (bodies.get(job.page(name, n, member), b"") for name in ("state", "metrics"))
        reports[job.namespace, job.name, n] = understood(*parts)
    return reports, refusal


def understood(state: bytes, metrics: bytes) -> Report:
    """Parse the two pages of a trainer, or the rest of them."""
    try:
        body = json.loads(state)
    except (ValueError, RecursionError):
        body = None
    newest, spent = 0.0, dict.fromkeys(_STEPS, 0.0)
    for name, labels, number in _samples(metrics.decode(errors="replace")):
        activity = _ACTIVITY.search(labels)
        if name == METRIC_SNAPSHOT_AT:
            newest = max(number, newest)
        elif name == METRIC_PHASES and activity and activity[1] in spent and number >= 0:
            spent[activity[1]] += number
    total = sum(spent.values())
    data = spent["data"] / total if total else None
    exchange = sum(spent[one] for one in _EXCHANGES) / total if total else None
    report = Report(with_printed(body), newest or None, None, data, exchange)
    return replace(report, rate=report.number("stepsPerSecond"))


def _samples(page: str) -> Iterator[tuple[str, str, float]]:
    for name, labels, value in _SAMPLE.findall(page):
        with contextlib.suppress(ValueError):
            if abs(number := float(value)) < _MOST:
                yield name, labels, number


def with_printed(body: object) -> Mapping[str, Any]:
    """Put what a program has printed in the place of what it does not report."""
    state = body if isinstance(body, dict) else {}
    printed = state.get("printed")
    return {**printed, **state} if isinstance(printed, dict) else state


def moment(text: str | None) -> datetime | None:
    """Parse a time of the API server (RFC 3339); None for anything else."""
    return datetime.fromisoformat(text) if text else None


T = TypeVar("T")

_PAUSE = 2.0  # seconds between two looks
#: A replaced API server is back in seconds; an expired login is not.
_GIVE_UP = 300.0


def looks(kubectl: Kubectl, job: Job) -> Iterator[Job]:
    """Yield the job, and each later reading, without end; raise Failure."""
    while True:
        yield job
        time.sleep(_PAUSE)
        job = patiently(partial(look_again, kubectl, job))


def patiently(ask: Callable[[], T]) -> T:
    """Ask until the API server answers; print once why it does not; raise Failure."""
    give_up, warned = time.monotonic() + _GIVE_UP, False
    while True:
        try:
            return ask()
        except Missing:
            raise
        except Failure as failure:
            if time.monotonic() > give_up:
                raise
            if not warned:
                print(f"kubectl-ddp: {clean(str(failure))}: trying on", file=sys.stderr)
            warned = True
        time.sleep(_PAUSE)
