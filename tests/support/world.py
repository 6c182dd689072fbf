"""One job in the model's cluster: the real planner, executor and store, without watches or timers.

Its operator sees at once what there is and acts when asked to, so that a whole story of a gang
runs in a millisecond. A hand plays user and kubelet.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import cache
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import jsonschema
import yaml

from ddpjob_contract import crd
from ddpjob_operator.core import actions as act
from ddpjob_operator.core import render
from ddpjob_operator.core.objects import observe
from ddpjob_operator.core.objects import spec as spec_
from ddpjob_operator.core.objects import status as status_
from ddpjob_operator.core.objects.json_read import parse_time
from ddpjob_operator.core.objects.nodes import FORBIDDEN, Lease, Node, Nodes
from ddpjob_operator.core.plan import plan
from ddpjob_operator.shell.api import JOBS, PODGROUPS, ApiError, Resource, error_from_status
from ddpjob_operator.shell.executor import Executor
from ddpjob_operator.shell.store import JobState, Store
from model.cluster import NAMESPACE, START, Cluster, Object, label
from model.wire import ModelApi, Wire
from support.cluster import ROOT
from support.invariants import Write
from support.objects import leaving
from support.workloads import PRIORITY, QUEUE, Kueue, condition, true

JOB_UID = "uid-of-job"
LABELS = {"queue": QUEUE, "priority": PRIORITY}
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


def intent(world: World) -> tuple[int, int, str]:
    """Whom the status wants: the attempt, since which, and the seats that are younger."""
    status = world.status
    return status["attempt"], status["membersSince"], status.get("births", "")


def kept_off(pod: dict[str, Any]) -> list[str]:
    """Nodes that no term of the pod's node affinity allows."""
    affinity = pod["spec"].get("affinity", {}).get("nodeAffinity", {})
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {})
    terms = [
        {f["values"][0] for f in term.get("matchFields", ()) if f["operator"] == "NotIn"}
        for term in required.get("nodeSelectorTerms", ())
    ]
    return sorted(set.intersection(*terms)) if terms else []


def refusal(code: int, message: str = "words", reason: str = "Reason") -> ApiError:
    """The API's answer to a creation."""
    return error_from_status(code, {"reason": reason, "message": message})


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


class Pods(MutableMapping[str, dict[str, Any]]):
    """The pods in the cluster by name, to be changed in place by whoever plays user or kubelet."""

    def __init__(self, cluster: Cluster) -> None:
        self._objects = cluster.objects

    def __getitem__(self, name: str) -> dict[str, Any]:
        return self._objects["pods", NAMESPACE, name]  # type: ignore[return-value]

    def __setitem__(self, name: str, pod: dict[str, Any]) -> None:
        self._objects["pods", NAMESPACE, name] = pod

    def __delitem__(self, name: str) -> None:
        del self._objects["pods", NAMESPACE, name]

    def __iter__(self) -> Iterator[str]:
        return iter([name for plural, _, name in self._objects if plural == "pods"])

    def __len__(self) -> int:
        return len([*iter(self)])


class _Api(ModelApi):
    """Refuse a status that the CRD does not know; ``prunes``: fields that an older one drops."""

    prunes: frozenset[str] = frozenset()

    async def replace(
        self, resource: Resource, namespace: str, name: str, body: Object, *, sub: str = ""
    ) -> Any:
        if resource == JOBS:
            check_status(body["status"])
            stored = {k: v for k, v in body["status"].items() if k not in self.prunes}
            body = {**body, "status": stored}
        return await super().replace(resource, namespace, name, body, sub=sub)


class World:
    """One job in a cluster; ``log`` lists every write of ours.

    ``refuse`` and ``refuse_network``: what admission says of pods, and of the other objects.
    ``graceful``: deletions wait until finish_deletions(). ``nodes``: without ``machines``.
    """

    name, dead, working = "operator", False, True

    def __init__(
        self,
        job: dict[str, Any] | None = None,
        *,
        machines: Machines | None = None,
        graceful: bool = False,
        gang_api: str = "",
        kueue: Kueue | None = None,
    ) -> None:
        self.cluster = Cluster(START, nodes=(), refuse=self._admit)
        self.wire = Wire(self.cluster)
        self.api = _Api(self)
        self.machines, self.graceful, self.kueue = machines, graceful, kueue
        self.nodes: Nodes | None = FORBIDDEN
        self.gang_api = gang_api  # the version that serves PodGroups
        self.report_after = timedelta()
        self.no_gang = ""  # why none can be had all the same
        self.refuse: Callable[[act.CreatePod], ApiError | None] = lambda _: None
        self.refuse_network: Callable[[act.Body], ApiError | None] = lambda _: None
        self.log: list[str] = []
        self.events: list[act.Event] = []
        self.measurements: list[act.Measurement] = []
        self.booked: list[act.Measurement] = []  # those of the ledger
        job = job or job_object()
        self._name = job["metadata"]["name"]
        self.job = job
        self._creating: dict[str, act.CreatePod] = {}
        if kueue:
            kueue.join(self.cluster)
        self.restart_operator()

    # --- the operator ---------------------------------------------------------------------

    def restart_operator(self) -> World:
        self.store = Store(self._now)
        api: Any = self.api
        ears: Any = SimpleNamespace(
            send=self._hear, record=self._measure, count_refusal=self._ignore
        )
        self.executor = Executor(api, self.store, ears, ears, leads=self._leads, now=self._now)
        self._show()
        return self

    def _show(self) -> JobState:
        """Let the watches show all that there is."""
        self.cluster.gang_api = bool(self.gang_api)
        self.cluster.touch(self.job)
        self.store.put_job(observe.job(self.job))  # whatever its generation
        uid, shown = self.job["metadata"]["uid"], set()
        for pod in self.pods.values():
            self.cluster.touch(pod)
            if label(pod, crd.LABEL_JOB_UID) is not None:
                shown.add(pod["metadata"]["uid"])
                self.store.put_pod(pod)
        for known in self.store.pods_of(uid):
            if known.uid not in shown:
                self.store.remove_pod(known.uid)
        found = self.store.snapshot(("ns", self._name))
        assert found
        return found

    def plan(self) -> act.Plan:
        nodes = self.machines.seen(self.now) if self.machines else self.nodes
        found = self._show()
        seen = self.store.seen(found.job.uid, self.job.get("status", {}).get("attempt"))
        feedback = replace(
            found.feedback, seen=seen, gang_api=self.gang_api, report_after=self.report_after
        )
        feedback = replace(feedback, workloads=self.kueue.seen() if self.kueue else None)
        return plan(found.job, found.pods, feedback, self.now, nodes)

    def settle(self, rounds: int = 60) -> World:
        """Plan and act until nothing is left to do now. Fails if that never comes."""
        for _ in range(rounds):
            todo = self.plan().actions
            if not todo:
                return self
            self.carry_out(*todo)
        raise AssertionError(f"no fixed point after {rounds} rounds: {self.log[-8:]}")

    def until(self, kind: type[act.Action]) -> World:
        """Carry out what comes before an action of that kind."""
        while not isinstance((todo := self.plan().actions)[0], kind):
            self.carry_out(*todo)
        return self

    def carry_out(self, *todo: act.Action) -> None:
        """Have the executor do it, but for what it reads of nodes and Events."""
        for beside, actions in groupby(todo, key=self._is_beside):
            if beside:
                for action in actions:
                    self._do_beside(action)
            else:
                self._execute(list(actions))

    def _execute(self, todo: list[act.Action]) -> None:
        job, written = self._show().job, len(self.cluster.history)
        pods = [action for action in todo if isinstance(action, act.CreatePod)]
        self._creating = {action.body["metadata"]["name"]: action for action in pods}
        if any(isinstance(action, act.RemoveGroups) for action in todo):
            self.log.append("remove groups")
        _loop().run_until_complete(self.executor.carry_out(job, todo))
        for write in self.cluster.history[written:]:
            self._note(write)
        for action in todo:
            if isinstance(action, act.DeletePod) and action.name in self.pods:
                silent = self.pods[action.name]["spec"].get("nodeName") in self._silent()
                if not self.graceful and not silent:
                    del self.pods[action.name]

    def _note(self, write: Write) -> None:
        name, made = write.obj["metadata"]["name"], write.kind == "ADDED"
        if write.plural == crd.PLURAL:
            status = write.obj["status"]
            self.log.append(f"status {status['phase']} {status.get('attempt')}")
        elif write.plural == "pods":
            seen = label(write.obj, crd.LABEL_JOB_UID) is not None
            what = self._attempt(write.obj) if seen else "hidden"
            self.log.append(f"{'create' if made else 'delete'} {name} {what}")
        elif write.plural == PODGROUPS and made:
            self.log.append(f"create group {name}")

    @staticmethod
    def _is_beside(action: act.Action) -> bool:
        return isinstance(action, act.ReadNodes | act.ReadLeases | act.DeleteJob)

    def _do_beside(self, action: act.Action) -> None:
        match action:
            case act.ReadNodes():
                assert self.machines
                self.machines.truth()
                self.machines.read |= dict.fromkeys(action.names, self.now)
                self.log.append(f"read {' '.join(action.names)}")
            case act.ReadLeases():
                assert self.machines
                self.machines.listed = self.now
                self.log.append("list leases")
            case act.DeleteJob():
                self.log.append("delete job")

    def _admit(self, body: Object) -> ApiError | None:
        kind = body.get("kind")
        if kind == "Pod":
            return self.refuse(self._creating[body["metadata"]["name"]])
        if kind == "Workload":
            return None
        if kind == "PodGroup" and self.no_gang:
            return error_from_status(403, {"reason": "Forbidden", "message": self.no_gang})
        return self.refuse_network(body)

    def _hear(self, job: object, events: Iterable[act.Event]) -> None:
        self.events += events

    def _measure(self, namespace: str, measurements: Iterable[act.Measurement]) -> None:
        for one in measurements:
            ledger = one.name in ("pod_seconds_total", "gpu_seconds_total")
            (self.booked if ledger else self.measurements).append(one)

    def _ignore(self, *_: object) -> None:
        """A metric that no plan depends on."""

    def _leads(self) -> bool:
        return True

    def _now(self) -> datetime:
        return self.cluster.now

    @property
    def now(self) -> datetime:
        return self.cluster.now

    @now.setter
    def now(self, at: datetime) -> None:
        self.cluster.now = at

    @property
    def job(self) -> dict[str, Any]:
        return self.cluster.objects[crd.PLURAL, NAMESPACE, self._name]  # type: ignore[return-value]

    @job.setter
    def job(self, job: dict[str, Any]) -> None:
        self.cluster.objects[crd.PLURAL, NAMESPACE, self._name] = job

    @property
    def pods(self) -> Pods:
        return Pods(self.cluster)

    @pods.setter
    def pods(self, pods: Mapping[str, dict[str, Any]]) -> None:
        left = dict(pods)
        self.pods.clear()
        self.pods.update(left)

    @property
    def feedback(self) -> act.ApiFeedback:
        return self.store.feedback(self.job["metadata"]["uid"])

    @feedback.setter
    def feedback(self, known: act.ApiFeedback) -> None:
        self.store.set_feedback(self.job["metadata"]["uid"], known)

    @property
    def groups(self) -> dict[str, Object]:
        """The PodGroups by name."""
        return {o["metadata"]["name"]: o for o in self.cluster.groups() if not leaving(o)}

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
        pod = self.pods[f"job-{replica}"]
        if self.graceful and not leaving(pod):  # somebody's finalizer keeps the object
            pod["metadata"]["finalizers"] = ["test/keeps"]
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

    def hide(self, replica: int) -> str:
        """Somebody takes the label off by which watches and lists find the pod; returns its uid."""
        meta = self.pods[f"job-{replica}"]["metadata"]
        del meta["labels"][crd.LABEL_JOB_UID]
        return str(meta["uid"])

    def occupy(self, plural: str, name: str, owner: str | None = None, node: str = "") -> World:
        """An object of a stranger, or of a deleted namesake, has the name."""
        meta: dict[str, Any] = {"name": name, "namespace": NAMESPACE, "uid": "another"}
        if owner:
            kind, _, named = owner.partition(" ")
            one = {"controller": True, "uid": "older job", "kind": kind, "name": named}
            meta["ownerReferences"] = [one]
        there = {"metadata": meta, "spec": {"nodeName": node}, "status": {}}
        self.cluster.touch(there)
        self.cluster.objects[plural, NAMESPACE, name] = there
        return self

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

    def kueue_does(self, what: Callable[..., object], *flavors: str, **more: Any) -> World:
        """Kueue writes the job's Workload, and the operator looks."""
        what(self.workload, self.now, *flavors, **more)
        self._kueue.touch(self.workload)
        return self.settle()

    def label(self, **labels: str) -> World:
        """The job has these labels and no other; the queue's is ``queue``."""
        self.job["metadata"]["labels"] = {LABELS[name]: value for name, value in labels.items()}
        return self.settle()

    def do(self, what: Callable[[World], object]) -> World:
        what(self)
        return self

    # --- reading --------------------------------------------------------------------------

    def sees(self, *words: str, **facts: Any) -> World:
        """Check ``facts``, and that the condition Stalled has the words.

        A fact is one of FACTS, an attribute of the world, or a field of the status.
        """
        assert {name: self._fact(name) for name in facts} == facts
        if words:
            said = self.condition("Stalled")["message"]
            assert [word for word in words if word not in said] == [], said
        return self

    def _fact(self, name: str) -> Any:
        if name in FACTS:
            return FACTS[name](self)
        found = getattr(self, name) if hasattr(self, name) else self.status.get(name)
        return found() if callable(found) else found

    def tells(self, reason: str, *words: str, times: int = 1) -> World:
        """Check that so many Events have the reason, and that the last one has the words."""
        told = self.told(reason)
        assert len(told) == times, self.events
        assert [word for word in words if word not in told[-1]] == [], told
        return self

    @property
    def _kueue(self) -> Kueue:
        assert self.kueue
        return self.kueue

    @property
    def workload(self) -> Object:
        return self._kueue.only

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

    def tries(self, plural: str, name: str = "") -> int:
        """How often its creation was tried."""
        calls = [call for call in self.wire.calls if (call.verb, call.plural) == ("create", plural)]
        return len([call for call in calls if name in ("", call.name)])

    def attempts(self) -> set[int]:
        return {self._attempt(pod) for pod in self.pods.values()}

    # --- inside ---------------------------------------------------------------------------

    @staticmethod
    def _attempt(pod: Object) -> int:
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

    def _silent(self) -> set[str]:
        """Nodes whose kubelet never tells that a container has ended."""
        return {*self.machines.down, *self.machines.gone} if self.machines else set()


#: What a story may be asked for by name, besides attributes and fields of the status.
FACTS: dict[str, Callable[[World], Any]] = {
    "intent": intent,
    "why": lambda world: world.loss["reason"],
    "made": lambda world: len(world.pods),
    "total": lambda world: world.counts[0],
    "replacing": lambda world: "replacingSince" in world.status["timings"],
    "replaced": lambda world: world.status["restarts"]["replaced"],
    "rounds": lambda world: (
        world.status["restarts"]["inPlace"],
        world.status["restarts"]["round"],
    ),
    "workloads": lambda world: len(world._kueue.objects),
    "quota": lambda world: true(world.workload, "QuotaReserved"),
    "queue": lambda world: world.workload["spec"]["queueName"],
    "ready_word": lambda world: condition(world.workload, "PodsReady").get("reason"),
    "finished": lambda world: condition(world.workload, "Finished").get("reason"),
}


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()
