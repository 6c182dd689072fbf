"""A tiny world for the pure planner: carries out its actions on dicts, with a clock.

It is no API server (the api level has a real one): it knows just what plan() may see, so
that a whole story of a gang runs in a millisecond. A hand plays user and kubelet.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any

import jsonschema
import yaml

from ddpjob_contract import crd
from ddpjob_operator.core import actions as act
from ddpjob_operator.core import render
from ddpjob_operator.core.capacity import refusals
from ddpjob_operator.core.objects import observe
from ddpjob_operator.core.objects import spec as spec_
from ddpjob_operator.core.objects import status as status_
from ddpjob_operator.core.objects.json_read import parse_time
from ddpjob_operator.core.objects.nodes import FORBIDDEN, Lease, Node, Nodes
from ddpjob_operator.core.plan import plan
from ddpjob_operator.core.view import belongs
from support import objects
from support.cluster import ROOT
from support.workloads import Kueue

START = datetime(2026, 1, 1, tzinfo=UTC)
JOB_UID = "uid-of-job"
#: RFC 3339 as the API server reads it. jsonschema has no word on formats without another package.
DATE_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)")


def job_object(**spec: Any) -> dict[str, Any]:
    """A DDPJob of 3 replicas; keyword arguments replace fields of the spec."""
    template = {"spec": {"containers": [{"name": "trainer", "image": "trainer"}]}}
    return {
        "apiVersion": "ddpjob.dev/v1alpha1",
        "kind": "DDPJob",
        "metadata": {
            "namespace": "ns",
            "name": "job",
            "uid": JOB_UID,
            "resourceVersion": "1",
            "generation": 1,
        },
        "spec": {"replicas": 3, "template": template, **spec},
    }


def started(**spec: Any) -> World:
    return World(job_object(**spec)).settle()


def running(*, machines: Machines | None = None, graceful: bool = False, **spec: Any) -> World:
    """A gang that runs; what came before is not in its logs."""
    world = World(job_object(**spec), machines=machines, graceful=graceful).settle().run()
    for past in (world.log, world.events, world.measurements):
        past.clear()
    return world


def rendered(*avoided: str, attempt: int = 1, replica: int = 0, **spec: Any) -> dict[str, Any]:
    """The pod of such a job."""
    job = job_object(**spec)
    return render.pod(observe.job(job), spec_.parse(job["spec"]), attempt, replica, avoided)


def env_of(pod: dict[str, Any]) -> dict[str, str]:
    """Without what the kubelet fills in."""
    env = pod["spec"]["containers"][0]["env"]
    return {e["name"]: e["value"] for e in env if "valueFrom" not in e}


def refusal(world: World, code: int, message: str = "words", **more: Any) -> act.Refusal:
    """The API's answer to a creation of the attempt of now."""
    fields = {"reason": "Reason", "at": world.now, **more}
    return act.Refusal(world.status["attempt"], code, message=message, **fields)


@cache
def crd_schema() -> dict[str, Any]:
    definition = yaml.safe_load((ROOT / "manifests" / "crd.yaml").read_text())
    schema: dict[str, Any] = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def check_status(status: object) -> None:
    """Fail on what the API server would refuse or, without a word, drop."""
    json.dumps(status, allow_nan=False)
    schema = crd_schema()["properties"]["status"]
    jsonschema.Draft202012Validator(schema).validate(status)
    _check_fields(status, schema, "status")


def _check_fields(value: object, schema: dict[str, Any], path: str) -> None:
    if isinstance(value, dict):
        for key, part in value.items():
            known = schema.get("properties", {}).get(key, schema.get("additionalProperties"))
            assert known, f"the CRD does not know {path}.{key}"
            _check_fields(part, known, f"{path}.{key}")
    elif isinstance(value, list):
        for part in value:
            _check_fields(part, schema["items"], path)
    elif schema.get("format") == "int32":
        assert isinstance(value, int)
        assert abs(value) < 2**31, f"{path} is no int32"
    elif schema.get("format") == "date-time":
        assert isinstance(value, str)
        assert DATE_TIME.fullmatch(value), f"{path} is no date-time: {value}"


@dataclass
class Machines:
    """The nodes node1 and node2. ``read``: when a quorum last told of each."""

    down: dict[str, datetime] = field(default_factory=dict)  # since when
    gone: dict[str, datetime] = field(default_factory=dict)
    out_of_service: set[str] = field(default_factory=set)
    read: dict[str, datetime] = field(default_factory=dict)
    guessed: set[str] = field(default_factory=set)
    signals: dict[str, str] = field(default_factory=dict)  # what says that a node is about to go
    others_up: int = 0  # workers without a pod of the gang
    others_down: int = 0
    calm_since: datetime | None = None  # None: always
    leases: dict[str, Lease] = field(default_factory=dict)  # as a list shows them
    listed: datetime | None = None
    back: dict[str, datetime] = field(default_factory=dict)  # since when each is ready again
    #: What a read brings to light: the cache of the watch was behind.
    truth: Callable[[], None] = lambda: None

    def seen(self, now: datetime) -> Nodes:
        known = {name: self._one(name, now) for name in ("node1", "node2")}
        there = [node for node in known.values() if node.exists]
        unready = len([node for node in there if not node.ready])
        others = self.others_up + self.others_down
        calm = (now - self.calm_since).total_seconds() if self.calm_since else math.inf
        age = (now - self.listed).total_seconds() if self.listed else math.inf
        return Nodes(len(there) + others, unready + self.others_down, calm, known, age)

    def _one(self, name: str, now: datetime) -> Node:
        since = self.gone.get(name, self.down.get(name))
        return Node(
            name=name,
            exists=name not in self.gone,
            ready=since is None,
            out_of_service=name in self.out_of_service,
            down_seconds=(now - since).total_seconds() if since else 0.0,
            read_seconds=(now - self.read[name]).total_seconds() if name in self.read else None,
            guessed=name in self.guessed,
            signal=self.signals.get(name, ""),
            lease=self.leases.get(name, Lease()) if self.listed else Lease(),
            since=since or self.back.get(name),
        )


@dataclass
class World:
    """State of the cluster as far as one job goes; ``log`` lists every write of ours."""

    job: dict[str, Any] = field(default_factory=job_object)
    pods: dict[str, dict[str, Any]] = field(default_factory=dict)
    feedback: act.ApiFeedback = field(default_factory=act.ApiFeedback)
    now: datetime = START
    log: list[str] = field(default_factory=list)
    events: list[act.Event] = field(default_factory=list)
    measurements: list[act.Measurement] = field(default_factory=list)
    booked: list[act.Measurement] = field(default_factory=list)  # those of the ledger
    refuse: Callable[[act.CreatePod], act.Refusal | None] = lambda _: None
    refuse_network: Callable[[act.EnsureNetwork], act.Refusal | None] = lambda _: None
    prunes: frozenset[str] = frozenset()  # fields of the status that an older CRD does not know
    machines: Machines | None = None
    nodes: Nodes | None = FORBIDDEN  # without machines
    graceful: bool = False  # deletions wait until finish_deletions()
    hidden: dict[str, act.Existing] = field(default_factory=dict)  # pods that no watch shows
    gang_api: str = ""  # the version that serves PodGroups
    no_gang: str = ""  # why none can be had all the same
    groups: dict[str, act.Body] = field(default_factory=dict)  # PodGroups by name
    serial: int = 0
    seen: set[tuple[int, int]] = field(default_factory=set)  # attempt, replica: a pod was there
    kueue: Kueue | None = None  # None: its API is not served

    # --- the operator ---------------------------------------------------------------------

    def plan(self) -> act.Plan:
        nodes = self.machines.seen(self.now) if self.machines else self.nodes
        feedback = replace(self.feedback, seen=self._seen(), gang_api=self.gang_api)
        feedback = replace(feedback, workloads=self.kueue.seen() if self.kueue else None)
        return plan(observe.job(self.job), [observe.pod(p) for p in self.pods.values()],
                    feedback, self.now, nodes)  # fmt: skip

    def settle(self, rounds: int = 60) -> World:
        """Plan and act until nothing is left to do now. Fails if that never comes."""
        for _ in range(rounds):
            todo = self.plan().actions
            if not todo:
                return self
            for action in todo:
                self.carry_out(action)
            created = any(isinstance(action, act.CreatePod) for action in todo)
            if created and not self._was_refused():
                self.feedback = refusals.clear(self.feedback)
        raise AssertionError(f"no fixed point after {rounds} rounds: {self.log[-8:]}")

    def carry_out(self, action: act.Action) -> None:
        match action:
            case act.WriteStatus():
                check_status(action.status)
                stored = {k: v for k, v in action.status.items() if k not in self.prunes}
                pruned = (action.status, stored) if self.prunes else None
                self.job["status"] = stored
                read = None if action.takes_over else self.feedback.confirmed
                self.feedback = replace(
                    self.feedback, status_written_at=self.now, pruned=pruned, confirmed=read
                )
                if action.begins:
                    self.feedback = self.feedback.begin(action.status["attempt"])
                self.events += action.events
                for one in action.measurements:
                    ledger = one.name in ("pod_seconds_total", "gpu_seconds_total")
                    (self.booked if ledger else self.measurements).append(one)
                self.log.append(f"status {action.status['phase']} {action.status.get('attempt')}")
            case act.DeletePod():
                self._delete(action)
            case act.ConfirmGone():
                shown = [observe.pod(pod) for pod in self.pods.values()]
                status, before = status_.from_dict(self.job.get("status")), self.feedback.confirmed
                mine = {pod.replica for pod in shown if belongs(status, pod)}
                mine &= action.seats or mine  # of other seats it says nothing
                found = act.QuorumRead(
                    action.attempt,
                    self.now,
                    generation=self.job["metadata"]["generation"],
                    alone=all((pod.attempt or 0) >= status.floor(pod.replica) for pod in shown),
                    running=self.phase == "Running",
                    seen=self._seen(),
                    hidden=tuple(self.hidden.values()) if action.by_name else None,
                    replicas=frozenset(replica for replica in mine if replica is not None),
                    begun=bool(before and before.attempt == action.attempt and before.begun),
                    seats=action.seats,
                    over=status.parked or status.terminal,
                )
                self.feedback = replace(self.feedback, confirmed=found)
            case act.ReadNodes():
                assert self.machines
                self.machines.truth()
                self.machines.read |= dict.fromkeys(action.names, self.now)
                self.log.append(f"read {' '.join(action.names)}")
            case act.ReadLeases():
                assert self.machines
                self.machines.listed = self.now
                self.log.append("list leases")
            case act.EnsureNetwork():
                self._ensure_network(action)
            case act.CreatePod():
                self._create(action)
            case act.DeleteJob():
                self.log.append("delete job")
            case _:
                self._do_beside(action)

    def _do_beside(self, action: act.RemoveGroups | act.Queue | act.ReadFlavors) -> None:
        if isinstance(action, act.RemoveGroups):
            self.log.append("remove groups")
            self.groups.clear()
            self.feedback = replace(self.feedback, groups_removed=action.name)
            return
        assert self.kueue
        self.log.append(type(action).__name__)
        if isinstance(action, act.ReadFlavors):
            flavors = self.kueue.read(action.names)
            self.feedback = replace(self.feedback, flavors=(action.admission, flavors))
            return
        refusal = self.kueue.write(action, self.now)
        self.feedback = replace(self.feedback, workload_refusal=refusal)
        self._back_off(refusal)

    def restart_operator(self) -> World:
        self.feedback = act.ApiFeedback()
        self.seen.clear()
        return self

    # --- the hand: user, kubelet, clock ---------------------------------------------------

    def wait(self, seconds: float) -> World:
        self.now += timedelta(seconds=seconds)
        return self.settle()

    def run(self, *replicas: int) -> World:
        for replica in replicas or range(self.job["spec"]["replicas"]):
            self._state(replica, "Running", {"running": {}}, ready=True)
        return self.settle()

    def end(
        self,
        replica: int,
        code: int,
        *,
        reason: str = "Error",
        message: str = "",
        settle: bool = True,
    ) -> World:
        phase = "Failed" if code else "Succeeded"
        at = self.now.isoformat()
        state = {"exitCode": code, "reason": reason, "message": message, "finishedAt": at}
        self._state(replica, phase, {"terminated": state})
        return self.settle() if settle else self

    def all_end(self, code: int, *, phase: str = "") -> World:
        """Every container ends so, and nobody has looked; ``phase``: of pods that lag behind."""
        for replica in range(self.job["spec"]["replicas"]):
            self.end(replica, code, settle=False)
            if phase:
                self.pods[f"job-{replica}"]["status"]["phase"] = phase
        return self

    def all_run(self) -> World:
        for replica in range(self.job["spec"]["replicas"]):
            self._state(replica, "Running", {"running": {}})
        return self

    def all_wait(self, reason: str) -> World:
        for replica in range(self.job["spec"]["replicas"]):
            self.waiting(replica, reason)
        return self

    def sees_from_now(self) -> World:
        """What was before this moment no operator has seen."""
        self.feedback = replace(self.feedback, seen_since=self.now)
        return self

    def waiting(self, replica: int, reason: str, message: str = "") -> World:
        self._state(replica, "Pending", {"waiting": {"reason": reason, "message": message}})
        return self.settle()

    def vanish(self, replica: int) -> World:
        del self.pods[f"job-{replica}"]
        return self.settle()

    def terminate(self, replica: int, grace: int = 30) -> World:
        """kubectl delete pod: the object stays until its containers have ended."""
        self._mark(self.pods[f"job-{replica}"], grace)
        return self.settle()

    def finish_deletions(self, *nodes: str) -> World:
        """On these nodes, or everywhere."""
        for name, pod in list(self.pods.items()):
            there = not nodes or pod["spec"].get("nodeName", "node1") in nodes
            if there and "deletionTimestamp" in pod["metadata"]:
                del self.pods[name]
        return self.settle()

    def poll(self, *rounds: object, **state: Any) -> World:
        """GET /state of replica 0 says so."""
        counted = {"round": len(rounds), "rounds": list(rounds)}
        hub = status_.from_dict(self.status).hub
        raw = {"version": 1, "attempt": hub, **counted, **state}
        found = observe.progress(raw, self.now)
        self.feedback = replace(self.feedback, progress=found, rounds=observe.rounds(raw))
        return self.settle()

    def fall_silent(self, *nodes: str) -> World:
        assert self.machines
        self.machines.down |= dict.fromkeys(nodes, self.now)
        return self.settle()

    def node_gone(self, node: str, *, guessed: bool = False) -> World:
        """Its object is gone; ``guessed``: or new, since no watch has told of it."""
        assert self.machines
        self.machines.gone[node] = self.now
        if guessed:
            self.machines.guessed.add(node)
        return self

    def edit(self, **spec: Any) -> World:
        """So quickly that the operator has not looked yet."""
        self.job["spec"] |= spec
        self.job["metadata"]["generation"] += 1
        return self

    def patch(self, **spec: Any) -> World:
        return self.edit(**spec).settle()

    # --- reading --------------------------------------------------------------------------

    @property
    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.job["status"]
        return found

    @property
    def phase(self) -> str:
        return str(self.status["phase"])

    def condition(self, type_: str) -> dict[str, Any]:
        found = (c for c in self.status["conditions"] if c["type"] == type_)
        return next(found, {})

    def told(self, *reasons: str) -> list[str]:
        """The messages of the Events with these reasons."""
        return [event.message for event in self.events if event.reason in reasons]

    def pause(self) -> float:
        """Seconds until the next attempt is due."""
        due = parse_time(self.status["timings"].get("nextRestartAt"))
        return (due - self.now).total_seconds() if due else 0.0

    @property
    def stalled(self) -> str:
        """The reason of the condition, "" if it is not true."""
        found = self.condition("Stalled")
        return str(found["reason"]) if found.get("status") == "True" else ""

    @property
    def counts(self) -> tuple[int, int, int]:
        """How many restarts in all, how many charged, how many disruptions."""
        found = self.status["restarts"]
        return found["total"], found["charged"], found["disruptions"]

    @property
    def loss(self) -> dict[str, Any]:
        found: dict[str, Any] = self.status["lastFailure"]
        return found

    def attempts(self) -> set[int]:
        return {self._attempt(pod) for pod in self.pods.values()}

    # --- inside ---------------------------------------------------------------------------

    def _seen(self) -> frozenset[int]:
        attempt = self.job.get("status", {}).get("attempt")
        return frozenset(replica for number, replica in self.seen if number == attempt)

    @staticmethod
    def _attempt(pod: dict[str, Any]) -> int:
        return int(pod["metadata"]["labels"][crd.LABEL_ATTEMPT])

    def _mark(self, pod: dict[str, Any], grace: int) -> None:
        pod["metadata"] |= {
            "deletionTimestamp": self.now.isoformat(),
            "deletionGracePeriodSeconds": grace,
        }

    def _state(
        self, replica: int, phase: str, state: dict[str, Any], *, ready: bool = False
    ) -> None:
        status = {"name": "trainer", "state": state, "ready": ready, "restartCount": 0}
        pod = self.pods[f"job-{replica}"]
        pod["spec"]["nodeName"] = f"node{replica % 2 + 1}"
        pod["status"] = {"phase": phase, "containerStatuses": [status]}

    def _ensure_network(self, action: act.EnsureNetwork) -> None:
        refusal = self.refuse_network(action)
        attempt = self.feedback.network_attempt if refusal else action.attempt
        self.feedback = replace(
            self.feedback,
            network_attempt=attempt,
            network_at=self.feedback.network_at if refusal else self.now,
            network_refusal=refusal,
        )
        looks = bool(self.pods) and [one["kind"] for one in action.bodies] == ["PodGroup"]
        self._back_off(None if looks else refusal)
        for body in action.bodies:
            if body["kind"] == "PodGroup" and self.no_gang:
                self.feedback = replace(self.feedback, no_gang=(action.attempt, self.no_gang))
            elif body["kind"] == "PodGroup" and body["metadata"]["name"] not in self.groups:
                self.log.append(f"create group {body['metadata']['name']}")
                self.groups[body["metadata"]["name"]] = body

    def _create(self, action: act.CreatePod) -> None:
        refusal = self.refuse(action)
        refusals = {r: f for r, f in self.feedback.refusals.items() if r != action.replica}
        if refusal is None:
            self.serial += 1
            body: dict[str, Any] = dict(action.body)
            body["metadata"] = {
                **body["metadata"],
                "uid": f"pod-{self.serial}",
                "creationTimestamp": self.now.isoformat(),
            }
            name = body["metadata"]["name"]
            assert name not in self.pods, f"{name} created twice"
            self.pods[name] = body
            self.log.append(f"create {name} {action.attempt}")
            self.seen.add((action.attempt, action.replica))
        else:
            refusals[action.replica] = refusal
        self.feedback = replace(self.feedback, refusals=refusals)
        self._back_off(refusal)

    def _back_off(self, refusal: act.Refusal | None) -> None:
        if refusal and refusal.code != 409 and not self._was_refused():
            generation = self.job["metadata"]["generation"]
            runs = self.phase == "Running"
            self.feedback = refusals.back_off(self.feedback, refusal, generation, runs=runs)

    def _was_refused(self) -> bool:
        """At this very moment: a batch counts once."""
        return (
            self.feedback.create_backoff is not None and self.feedback.create_backoff.at == self.now
        )

    def _silent(self) -> set[str]:
        """Nodes whose kubelet never tells that a container has ended."""
        return {*self.machines.down, *self.machines.gone} if self.machines else set()

    def _delete(self, action: act.DeletePod) -> None:
        if action.name in self.hidden:
            self.hidden[action.name] = replace(self.hidden[action.name], deleting=True)
            self.log.append(f"delete {action.name} hidden")
            return
        pod = self.pods[action.name]
        assert pod["metadata"]["uid"] == action.uid
        self.log.append(f"delete {action.name} {self._attempt(pod)}")
        silent = pod["spec"].get("nodeName") in self._silent()
        # Of a pod that has ended, a finalizer keeps the object.
        kept = self.graceful and not silent and objects.ended(pod)
        if kept or ((self.graceful or silent) and action.grace_seconds != 0):
            self._mark(pod, 30 if action.grace_seconds is None else action.grace_seconds)
        else:
            del self.pods[action.name]
