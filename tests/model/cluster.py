"""A small deterministic Kubernetes: an API server with its store, nodes, kubelets, a user.

It knows what the operator's verbs may meet: resourceVersions, preconditions, taken names,
quotas, graceful deletion, a watch log that can be read late, a store that goes back to an
earlier state. Objects are replaced, never changed in place, so old states cost nothing.
What runs on the machines is kept apart from the objects: a process may outlive its pod.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from ddpjob_contract import crd
from ddpjob_operator.core.objects.json_read import parse_time
from ddpjob_operator.shell.api import PODGROUPS, ApiError, error_from_status
from support.invariants import Write
from support.objects import TERMINAL, ended

Object = Mapping[str, Any]
Key = tuple[str, str, str]  # plural, namespace, name

START = datetime(2026, 1, 1, tzinfo=UTC)
NAMESPACE = "ns"
GRACE = 30
NODES = ("node-0", "node-1")
PROTECTION = "scheduling.k8s.io/podgroup-protection"


@dataclass
class Cluster:
    """``by`` in the methods names who asks: an operator's name, or "" for everybody else."""

    now: datetime = START
    quota: int | None = None  # pods that have not ended
    refuse: Callable[[Object], ApiError | None] = lambda body: None  # admission
    nodes: tuple[str, ...] = NODES
    gang_api: bool = False  # PodGroups are served
    gang_scheduler: bool = True  # the scheduler's own gate is on
    rooms: dict[str, int] | None = None  # of pods, by node: a scheduler binds; None: always room
    silent: set[str] = field(default_factory=set)  # those that nobody hears of
    objects: dict[Key, Object] = field(default_factory=dict)
    history: list[Write] = field(default_factory=list)  # the watch log
    states: list[dict[Key, Object]] = field(default_factory=list)  # before each write
    processes: dict[str, Object] = field(default_factory=dict)  # pods that run, by uid
    exits: dict[str, int] = field(default_factory=dict)  # what kubelets know, by uid of the pod
    last_words: dict[str, str] = field(default_factory=dict)  # termination messages, by uid
    forced: set[str] = field(default_factory=set)  # uids whose objects went before their processes
    era: int = 0  # how often the store was set back
    _version: int = 1000
    _uid: int = 0

    def __post_init__(self) -> None:
        for name in self.nodes:
            self._set_node(name, ready=True)

    # --- the API server ---

    def get(self, plural: str, name: str) -> Object:
        self._check_served(plural)
        found = self.objects.get((plural, NAMESPACE, name))
        if found is None:
            raise _error(404, "NotFound", f"{plural} {name} not found")
        return found

    def list(self, plural: str, selector: str = "", behind: int = 0) -> tuple[list[Object], int]:
        """The objects and the version of the list; ``behind`` writes ago."""
        self._check_served(plural)
        at = max(0, len(self.history) - behind)
        if behind and self.history:
            state = self.states[at]
            version = int(self.history[at - 1].obj["metadata"]["resourceVersion"]) if at else 1
        else:
            state, version = self.objects, self._version
        return [o for k, o in state.items() if k[0] == plural and selects(selector, o)], version

    def create(self, plural: str, body: Object, by: str = "") -> Object:
        self._check_served(plural)
        name = body["metadata"]["name"]
        key = (plural, body["metadata"].get("namespace", NAMESPACE), name)
        if key in self.objects:
            raise _error(409, "AlreadyExists", f'{plural} "{name}" already exists')
        refused = self.refuse(body)
        if refused is not None:
            raise refused
        if plural == "pods" and self.quota is not None and self._living() >= self.quota:
            used = f"requested: pods=1, used: pods={self._living()}, limited: pods={self.quota}"
            words = f"exceeded quota: q, {used}"
            raise _error(403, "Forbidden", f'pods "{name}" is forbidden: {words}')
        self._uid += 1
        meta = {
            **body["metadata"],
            "namespace": key[1],
            "uid": f"uid-{self._uid}",
            "creationTimestamp": stamp(self.now),
        }
        obj = {**body, "metadata": meta}
        if plural == "pods":
            obj["status"] = {"phase": "Pending"}
            if not self.gang_api:  # a field whose gate is off is dropped without a word
                obj["spec"] = {k: v for k, v in body["spec"].items() if k != "schedulingGroup"}
        if plural == PODGROUPS:
            obj["metadata"]["finalizers"] = [PROTECTION]
        if plural == crd.PLURAL:
            obj["metadata"]["generation"] = 1
        return self._commit("ADDED", key, obj, by)

    def replace_status(self, plural: str, name: str, body: Object, by: str = "") -> Object:
        old, meta = self.get(plural, name), body["metadata"]
        if meta.get("uid") not in (None, old["metadata"]["uid"]):
            raise _error(409, "Conflict", "the uid in the precondition differs")
        if meta.get("resourceVersion") not in (None, old["metadata"]["resourceVersion"]):
            raise _error(409, "Conflict", "the object has been modified")
        if old.get("status") == body["status"]:
            return old
        new = {**old, "status": body["status"]}
        return self._commit("MODIFIED", (plural, NAMESPACE, name), new, by)

    def replace_spec(self, plural: str, name: str, body: Object, by: str = "") -> Object:
        old = self.get(plural, name)
        if body["metadata"].get("resourceVersion") != old["metadata"]["resourceVersion"]:
            raise _error(409, "Conflict", "the object has been modified")
        new = {**old, "spec": body["spec"]}
        return self._commit("MODIFIED", (plural, NAMESPACE, name), new, by)

    def delete(
        self,
        plural: str,
        name: str,
        uid: str | None = None,
        grace: int | None = None,
        by: str = "",
        version: str = "",
    ) -> Object:
        old = self.get(plural, name)
        if uid is not None and uid != old["metadata"]["uid"]:
            raise _error(409, "Conflict", "the uid in the precondition differs")
        if version not in ("", old["metadata"]["resourceVersion"]):
            raise _error(409, "Conflict", "the resourceVersion in the precondition differs")
        if plural == PODGROUPS and self.protected(name):
            gone = {**old["metadata"], "deletionTimestamp": stamp(self.now)}
            leaving = "deletionTimestamp" in old["metadata"]
            key = (plural, NAMESPACE, name)
            return old if leaving else self._commit("MODIFIED", key, {**old, "metadata": gone}, by)
        wanted = self._grace(old, grace) if plural == "pods" else 0
        if by and grace == 0 and plural == "pods" and not self.hears(old):
            self.forced.add(old["metadata"]["uid"])  # Fence: the lineage shuts the zombie out
        if wanted == 0 and not (plural == "pods" and old["metadata"].get("finalizers")):
            return self._remove((plural, NAMESPACE, name), by)
        meta, until = old["metadata"], stamp(self.now + timedelta(seconds=wanted))
        running = meta.get("deletionGracePeriodSeconds")
        if running is not None and running <= wanted:
            return old
        more = {"deletionTimestamp": until, "deletionGracePeriodSeconds": wanted}
        return self._commit(
            "MODIFIED", (plural, NAMESPACE, name), {**old, "metadata": {**meta, **more}}, by
        )

    def update(self, plural: str, name: str, **fields: Any) -> Object:
        """Somebody else changes top-level fields of an object; a new spec is a new generation."""
        old = self.get(plural, name)
        new = {**old, **fields}
        if "spec" in fields and plural == crd.PLURAL:
            meta = {**old["metadata"], "generation": old["metadata"]["generation"] + 1}
            new["metadata"] = meta
        return self._commit("MODIFIED", (plural, NAMESPACE, name), new, "")

    def touch(self, obj: Any) -> None:
        """Give an object that was changed in place its new version."""
        self._version += 1
        obj["metadata"]["resourceVersion"] = str(self._version)

    def restore(self, back: int) -> None:
        """The store is set back by so many writes; versions go back with it.

        What the nodes run meanwhile is killed as soon as the kubelets look: see reap().
        """
        at = max(len(self.nodes), len(self.history) - back)
        self.objects = dict(self.states[at] if at < len(self.states) else self.objects)
        self.era += 1
        versions = [int(o["metadata"]["resourceVersion"]) for o in self.objects.values()]
        self._version = max(versions, default=1000)
        # Nodes first: no restore goes back behind them, as kubelets keep theirs.
        in_order = sorted(
            self.objects.values(),
            key=lambda o: (_plural(o) != "nodes", int(o["metadata"]["resourceVersion"])),
        )
        # History begins anew: nobody can be held to what is forgotten.
        self.history = [Write("ADDED", _plural(o), o, self.now, "") for o in in_order]
        self.states = [dict[Key, Object]()]
        for write in self.history:
            self.states.append({**self.states[-1], _key(write): write.obj})
        del self.states[-1]
        bound = {o["metadata"]["uid"] for o in self.pods() if o["spec"].get("nodeName")}
        self.forced |= self.processes.keys() - bound

    def _living(self) -> int:
        return len([p for p in self.pods() if not ended(p)])

    def _grace(self, pod: Object, asked: int | None) -> int:
        if not pod["spec"].get("nodeName") or (pod.get("status") or {}).get("phase") in TERMINAL:
            return 0
        default = pod["spec"].get("terminationGracePeriodSeconds", GRACE)
        return int(default if asked is None else asked)

    def _remove(self, key: Key, by: str) -> Object:
        obj = self.objects[key]
        meta = {**obj["metadata"], "deletionTimestamp": stamp(self.now)}
        meta["deletionGracePeriodSeconds"] = 0
        gone = self._commit("DELETED", key, {**obj, "metadata": meta}, by)
        del self.objects[key]
        return gone

    def _commit(self, kind: str, key: Key, obj: Object, by: str) -> Object:
        self.states.append(dict(self.objects))
        self._version += 1
        meta = {**obj["metadata"], "resourceVersion": str(self._version)}
        new = {**obj, "metadata": meta}
        self.objects[key] = new
        self.history.append(Write(kind, key[0], new, self.now, by))
        return new

    def _check_served(self, plural: str) -> None:
        if plural == PODGROUPS and not self.gang_api:
            raise _error(404, "NotFound", "the server could not find the requested resource")

    # --- what is there ---

    @property
    def places_groups(self) -> bool:
        """A scheduler without its gate places the pods of a group one by one."""
        return self.gang_api and self.gang_scheduler

    def pods(self, job: str = "") -> list[Object]:
        found = [o for (plural, _, _), o in self.objects.items() if plural == "pods"]
        mine = [o for o in found if not job or label(o, crd.LABEL_JOB_NAME) == job]
        return sorted(mine, key=lambda o: o["metadata"]["name"])

    def groups(self) -> list[Object]:
        return [o for (plural, _, _), o in self.objects.items() if plural == PODGROUPS]

    def protected(self, group: str) -> bool:
        """Whether a pod that has not ended names the PodGroup, which therefore stays."""
        return any(group_of(pod) == group and not ended(pod) for pod in self.pods())

    def jobs(self) -> list[Object]:
        return [o for (plural, _, _), o in self.objects.items() if plural == crd.PLURAL]

    def job(self, name: str) -> Object | None:
        return self.objects.get((crd.PLURAL, NAMESPACE, name))

    def status(self, name: str) -> Mapping[str, Any]:
        found = self.job(name)
        return (found or {}).get("status") or {}

    # --- kubelets, scheduler, garbage collector ---

    def fitting(self, pod: Object) -> list[str]:
        """Nodes that are heard of and that its affinity allows, of which all terms say the same."""
        required = "requiredDuringSchedulingIgnoredDuringExecution"
        affinity = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
        terms = affinity.get(required, {}).get("nodeSelectorTerms", [])
        kept_off = {field["values"][0] for term in terms for field in term["matchFields"]}
        return [n for n in self.nodes if n not in self.silent and n not in kept_off]

    def start(self, pod: Object) -> None:
        """A scheduler binds it and a kubelet runs it."""
        name = pod["metadata"]["name"]
        fitting = self.fitting(pod)
        node = pod["spec"].get("nodeName") or fitting[self._uid % len(fitting)]
        spec = {**pod["spec"], "nodeName": node}
        state = {"running": {"startedAt": stamp(self.now)}}
        new = self.update("pods", name, spec=spec, status=self._pod_status(pod, "Running", state))
        self.processes[pod["metadata"]["uid"]] = new

    def refuse_image(self, pod: Object) -> None:
        """It is bound, and its image cannot be pulled."""
        heard = [n for n in self.nodes if n not in self.silent]
        spec = {**pod["spec"], "nodeName": heard[0]}
        state = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
        status = self._pod_status(pod, "Pending", state)
        self.update("pods", pod["metadata"]["name"], spec=spec, status=status)

    def finish(self, pod: Object, code: int) -> None:
        """The trainer container ends with that code."""
        reason = "Completed" if code == 0 else "Error"
        end = {"exitCode": code, "reason": reason, "finishedAt": stamp(self.now)}
        state = {"terminated": {**end, "message": self.last_words.get(pod["metadata"]["uid"], "")}}
        phase = "Succeeded" if code == 0 else "Failed"
        status = self._pod_status(pod, phase, state)
        self.update("pods", pod["metadata"]["name"], status=status)
        self.processes.pop(pod["metadata"]["uid"], None)
        self.exits[pod["metadata"]["uid"]] = code

    def report(self) -> bool:
        """After the store was set back, nodes and kubelets tell again what they know."""
        for name in self.nodes:
            told = "taints" not in self.objects["nodes", NAMESPACE, name]["spec"]
            if told == (name in self.silent):
                self._set_node(name, ready=not told)
                return True
        for pod in self.pods():
            uid = pod["metadata"]["uid"]
            if self.hears(pod) and pod["spec"].get("nodeName") and not ended(pod):
                if uid in self.exits:
                    self.finish(pod, self.exits[uid])
                    return True
                self.processes.setdefault(uid, pod)  # without a trace of it, it is run again
        return False

    def disrupt(self, pod: Object, reason: str) -> None:
        """The eviction API or the taint manager: a condition, then a graceful deletion."""
        status = dict(pod.get("status") or {})
        more = {"type": "DisruptionTarget", "status": "True", "reason": reason}
        status["conditions"] = [*status.get("conditions", ()), more]
        self.update("pods", pod["metadata"]["name"], status=status)
        self.delete("pods", pod["metadata"]["name"])

    def kill(self, pod: Object) -> None:
        """The kubelet has ended a pod that is being deleted, and lets go of its object."""
        if pod["metadata"]["uid"] in self.processes:
            self.finish(pod, 143)
        self._remove(("pods", NAMESPACE, pod["metadata"]["name"]), "")

    def force(self, pod: Object) -> None:
        """A person deletes the object with grace 0; the process does not know."""
        self.forced.add(pod["metadata"]["uid"])
        self._remove(("pods", NAMESPACE, pod["metadata"]["name"]), "")

    def reap(self) -> bool:
        """Kubelets that are heard of end what has no object any more."""
        known = {o["metadata"]["uid"] for o in self.pods()}
        gone = [u for u, p in self.processes.items() if u not in known and self.hears(p)]
        for uid in gone:
            del self.processes[uid]
        return bool(gone)

    def collect(self) -> bool:
        """The garbage collector deletes what a vanished job owned."""
        uids = {o["metadata"]["uid"] for o in self.jobs()}
        orphans = [
            (key, obj)
            for key, obj in list(self.objects.items())
            if key[0] not in (crd.PLURAL, "nodes", *([] if self.gang_api else [PODGROUPS]))
            and (owner := controller(obj)) is not None
            and owner not in uids
            and "deletionTimestamp" not in obj["metadata"]
        ]
        for key, obj in orphans:
            self.delete(key[0], key[2], uid=obj["metadata"]["uid"])
        return bool(orphans) or (self.gang_api and self._let_groups_go())

    def _let_groups_go(self) -> bool:
        """The controller manager takes the finalizer off PodGroups that nobody needs any more."""
        for group in self.groups():
            name = group["metadata"]["name"]
            if "deletionTimestamp" in group["metadata"] and not self.protected(name):
                self._remove((PODGROUPS, NAMESPACE, name), "")
                return True
        return False

    def runs(self, pod: Object) -> bool:
        return pod["metadata"]["uid"] in self.processes and not ended(pod)

    def hears(self, pod: Object) -> bool:
        return pod["spec"].get("nodeName") not in self.silent

    def silence(self, node: str) -> None:
        """The node is partitioned; the node controller notices."""
        self.silent.add(node)
        self._set_node(node, ready=False)

    def hear_again(self, node: str) -> None:
        self._set_node(node, ready=True)
        self.silent.discard(node)

    def heal_nodes(self) -> None:
        for node in sorted(self.silent):
            self.hear_again(node)

    def _set_node(self, name: str, *, ready: bool) -> None:
        since = {"lastTransitionTime": stamp(self.now), "reason": "model", "message": ""}
        ready_now = {"type": "Ready", "status": "True" if ready else "Unknown", **since}
        taint = {"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}
        body = {
            "metadata": {"name": name},
            "spec": {} if ready else {"taints": [taint]},
            "status": {"conditions": [ready_now]},
        }
        if ("nodes", NAMESPACE, name) in self.objects:
            self.update("nodes", name, spec=body["spec"], status=body["status"])
        else:
            self.create("nodes", body)

    def _pod_status(self, pod: Object, phase: str, state: Object) -> Object:
        containers = pod["spec"]["containers"]
        one = {"ready": phase == "Running", "restartCount": 0, "state": state}
        old = (pod.get("status") or {}).get("conditions", [])
        return {
            "phase": phase,
            "podIP": "10.0.0.1",
            "conditions": [c for c in old if (c["type"], c["status"]) != ("PodScheduled", "False")],
            "containerStatuses": [{"name": c["name"], **one} for c in containers],
        }


def stamp(at: datetime) -> str:
    """As Kubernetes prints it: whole seconds."""
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


def label(obj: Object, key: str) -> str | None:
    found = (obj["metadata"].get("labels") or {}).get(key)
    return None if found is None else str(found)


def group_of(pod: Object) -> str:
    """The PodGroup that it names; "": none."""
    return str((pod["spec"].get("schedulingGroup") or {}).get("podGroupName", ""))


def controller(obj: Object) -> str | None:
    owners = obj["metadata"].get("ownerReferences") or ()
    return next((o["uid"] for o in owners if o.get("controller")), None)


def selects(selector: str, obj: Object) -> bool:
    """``key``, ``key=value``, both also with ``,key in (value,value)``; or nothing."""
    first, _, few = selector.partition(",")
    key, _, value = first.partition("=")
    if key and (label(obj, key) is None or value not in ("", label(obj, key))):
        return False
    key, _, values = few.partition(" in ")
    return not key or label(obj, key) in values.strip("()").split(",")


def deadline(pod: Object) -> datetime | None:
    return parse_time(pod["metadata"].get("deletionTimestamp"))


def _plural(obj: Object) -> str:
    kinds = {"Service": "services", "NetworkPolicy": "networkpolicies", "Pod": "pods",
             "Secret": "secrets", "PodGroup": PODGROUPS, "Workload": "workloads",
             "ResourceFlavor": "resourceflavors",
             "WorkloadPriorityClass": "workloadpriorityclasses"}  # fmt: skip
    return kinds.get(obj.get("kind", ""), crd.PLURAL if "kind" in obj else "nodes")


def _key(write: Write) -> Key:
    meta = write.obj["metadata"]
    return (write.plural, meta.get("namespace", NAMESPACE), meta["name"])


def _error(code: int, reason: str, message: str) -> ApiError:
    return error_from_status(code, {"reason": reason, "message": message})
