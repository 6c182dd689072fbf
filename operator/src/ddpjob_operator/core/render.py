"""Render the objects of a gang: Secret, headless Service, NetworkPolicy, PodGroup and the pods.

plan() puts them into its actions. The pod template stays as the user wrote it; only what the
contract promises is added, our variables first, so that the user's may refer to them as $(RANK).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from ddpjob_contract import OUTPUT, POD_UID, RESERVED_ENV, TOKEN, TOKEN_KEY, crd, exits
from ddpjob_contract.environment import Member, Snapshots
from ddpjob_operator.core.actions import Event
from ddpjob_operator.core.objects import compact_spec, ports
from ddpjob_operator.core.objects import workload as workloads
from ddpjob_operator.core.objects.json_read import integer, mapping, sequence
from ddpjob_operator.core.objects.observe import Job, clean
from ddpjob_operator.core.objects.spec import Restart, Spec
from ddpjob_operator.core.objects.workload import Placement

SNAPSHOT_VOLUME: Final = "ddpjob-snapshot"
SHM_VOLUME: Final = "ddpjob-shm"
METRICS_PORT: Final = "metrics"
#: Kubernetes' default of 300 s would hold a gang on a dead node for five minutes.
NODE_LOST_TOLERATION_SECONDS: Final = 30
#: The API of PodGroups is younger than we are: its versions, the newest first, and how each says
#: that preemption takes the whole group.
GROUP_API: Final = "scheduling.k8s.io"
WHOLE_GROUP: Final[Mapping[str, Any]] = {
    "v1beta1": {"all": {}},  # Kubernetes 1.37
    "v1alpha2": "PodGroup",  # 1.36
}
#: Fields where an addition changes the meaning, as another label of a selector does.
_WHOLE: Final = ("selector", "podSelector", "ingress")
_NODE_TAINTS: Final = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


def network(
    job: Job, spec: Spec, metrics_from: Sequence[Mapping[str, Any]] = (), *, secret: bool = True
) -> tuple[dict[str, Any], ...]:
    """Render the objects that come before the first pod: Secret, Service, NetworkPolicy.

    ``metrics_from``: NetworkPolicyPeers that may read metrics; none: everybody.
    ``secret``: the Secret may be missing.
    """
    bodies = [_service(job, spec)]
    if secret:
        bodies.insert(0, _secret(job))
    if spec.network_policy:
        bodies.append(_network_policy(job, spec, metrics_from))
    return tuple(bodies)


def repaired(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the object as it should be written; None if nothing differs.

    Additions of others stay: the API server's defaults, labels of other tools.
    """
    parts = {"labels": wanted["metadata"]["labels"]}
    body = {**found, "metadata": _with(found["metadata"], parts)}
    body["spec"] = _with(found.get("spec"), wanted["spec"])
    return None if body == found else body


def _with(found: Any, wanted: Any) -> Any:
    if isinstance(wanted, Mapping) and isinstance(found, Mapping):
        repaired = {
            key: value if key in _WHOLE else _with(found.get(key), value)
            for key, value in wanted.items()
        }
        return {**found, **repaired}
    if isinstance(wanted, list) and isinstance(found, list) and len(found) == len(wanted):
        return [_with(old, new) for old, new in zip(found, wanted, strict=True)]
    return wanted


def repair_event(what: str, trouble: str = "") -> Event:
    """Say that such an object was put right, or why it could not be."""
    if trouble:
        message = f"{what} has been changed and cannot be put right: {trouble}"
        return Event("Warning", "NetworkNotRepaired", clean(message))
    return Event("Normal", "NetworkRepaired", f"{what} had been changed")


def pod(
    job: Job,
    spec: Spec,
    attempt: int,
    replica: int,
    avoided: Sequence[str] = (),
    *,
    suspected: Sequence[str] = (),
    since: int = 0,
    hub: int = 0,
    reached: int = 0,
    saved: int = 0,
    group: str = "",
    placements: Sequence[Placement] = (),
) -> dict[str, Any]:
    """Render the pod of one replica in one attempt, with name and hostname `<job>-<replica>`.

    ``avoided``: names of nodes that it must not be scheduled to, ``suspected``: of those that it is
    only where no other has room. ``since``: the attempt of the last whole start, and ``hub``: the
    hub's number, where they are others. ``reached``: the last step that is known to have ended.
    ``saved``: that of the newest snapshot that is known. ``group``: the PodGroup of those that do
    not stand by. ``placements``: what Kueue asks of it, all of it compatible.
    """
    template = spec.template.packed.unpack()
    if placements and isinstance(placed := workloads.placed(template, placements), dict):
        template = placed
    written, body = mapping(template.get("metadata")), template["spec"]
    name = f"{job.name}-{replica}"
    body["hostname"], body["subdomain"] = name, job.name
    body["restartPolicy"] = "Never"
    is_standby = replica >= spec.replicas
    if is_standby and spec.standby_priority:
        body["priorityClassName"] = spec.standby_priority
    elif spec.scheduling.priority:
        body["priorityClassName"] = spec.scheduling.priority
    if group and not is_standby:
        body["schedulingGroup"] = {"podGroupName": group}
    _default(body, "automountServiceAccountToken", False)
    _default(body, "enableServiceLinks", False)
    if not body.get("nodeName"):  # else it meets no scheduler
        if avoided:
            body["affinity"] = _kept_off(avoided, mapping(body.get("affinity")))
        if suspected:
            body["affinity"] = _rather_off(suspected, mapping(body.get("affinity")))
    body["tolerations"] = _tolerations(body.get("tolerations"))
    # With 0 the pod object would go before its containers, and the barrier would miss them. The CRD
    # refuses 0; a job that an older CRD took gets 1 here.
    grace = max(1, integer(body.get("terminationGracePeriodSeconds"), crd.GRACE_SECONDS))
    body["terminationGracePeriodSeconds"] = grace
    trainer = compact_spec.trainer_container(body)
    assert isinstance(trainer, dict)  # JSON of our own
    given = trainer.get("env") or []
    names = {variable.get("name") for variable in given}
    since, hub = since or attempt, hub or attempt
    ours = _env(job, spec, attempt, replica, grace, since, hub, reached, saved)
    # Only PYTHONUNBUFFERED can be in both: it is a default, not a part of the contract.
    trainer["env"] = [
        {"name": POD_UID, "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
        {"name": TOKEN, "valueFrom": {"secretKeyRef": _token(job)}},
        *({"name": name, "value": value} for name, value in ours.items() if name not in names),
        *given,
    ]
    inits = [one for one in sequence(body.get("initContainers")) if isinstance(one, dict)]
    for container in (trainer, *inits):  # what is none the API server has to name
        _default(container, "terminationMessagePolicy", "FallbackToLogsOnError")
    for container in inits:  # a check of the gang before training needs no launcher
        found = [{"name": name, "value": ours[name]} for name in RESERVED_ENV if name in ours]
        container["env"] = [*found, *sequence(container.get("env"))]
    if spec.template.host_network:
        # Else its DNS is the node's, which does not know the gang. No port is declared: it would be
        # the node's, and only one pod would fit on each.
        _default(body, "dnsPolicy", "ClusterFirstWithHostNet")
    else:
        _declare_metrics_port(trainer, spec.metrics_port)
    _mount(body, trainer, spec)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": job.namespace,
            "labels": {  # those that charts set for all of a release are the user's to choose
                **_labels(job),
                **mapping(written.get("labels")),
                crd.LABEL_JOB_NAME: job.name,
                crd.LABEL_JOB_UID: job.uid,
                crd.LABEL_ATTEMPT: str(attempt),
                crd.LABEL_REPLICA: str(replica),
            },
            "annotations": {
                "kubectl.kubernetes.io/default-container": trainer.get("name"),
                **mapping(written.get("annotations")),
                crd.ANNOTATION_TRAINER: trainer.get("name"),
            },
            "ownerReferences": [_owner(job)],
        },
        "spec": body,
    }


def _labels(job: Job) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "ddpjob",
        "app.kubernetes.io/instance": job.name,
        "app.kubernetes.io/managed-by": "ddpjob-operator",
        crd.LABEL_JOB_NAME: job.name,
        crd.LABEL_JOB_UID: job.uid,
    }


def _owner(job: Job) -> dict[str, Any]:
    return {
        "apiVersion": crd.API_VERSION,
        "kind": crd.KIND,
        "name": job.name,
        "uid": job.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def workload(job: Job, spec: Spec, made_of: str) -> dict[str, Any]:
    """Render Kueue's Workload: all pods as one podSet, and what is added to them needs no quota."""
    body = spec.template.packed.unpack()["spec"]
    if spec.scheduling.priority:
        body["priorityClassName"] = spec.scheduling.priority
    pods = {"name": workloads.POD_SET, "count": spec.seats, "template": {"spec": body}}
    return {
        "apiVersion": workloads.API_VERSION,
        "kind": "Workload",
        "metadata": {
            **meta(job),
            "name": workloads.name_of(job),
            "labels": {**_labels(job), workloads.LABEL_OWNER: job.uid},
            "annotations": {workloads.ANNOTATION_MADE_OF: made_of},
        },
        "spec": {"queueName": job.queue, "podSets": [pods]},
    }


def pod_group_name(job: Job, attempt: int) -> str:
    """Return the name of the PodGroup of an attempt; with the uid in it no other job has it."""
    return f"{job.name}-{job.uid[:8]}-{attempt}"


def pod_group(job: Job, spec: Spec, attempt: int, version: str) -> dict[str, Any]:
    """Render the PodGroup of an attempt in the words of that version of the API.

    Pods that stand by belong to no group: nothing waits for them.
    """
    wanted: dict[str, Any] = {
        "schedulingPolicy": {"gang": {"minCount": spec.replicas}},
        "disruptionMode": WHOLE_GROUP[version],
    }
    if spec.scheduling.priority:
        wanted["priorityClassName"] = spec.scheduling.priority
    if spec.scheduling.topology_key:
        wanted["schedulingConstraints"] = {"topology": [{"key": spec.scheduling.topology_key}]}
    about = meta(job)
    # Its protection outlives pods that end slowly: it must not hold up a job's deletion.
    owner = {**about["ownerReferences"][0], "blockOwnerDeletion": False}
    about |= {"name": pod_group_name(job, attempt), "ownerReferences": [owner]}
    about["labels"] = {**about["labels"], crd.LABEL_ATTEMPT: str(attempt)}
    api = f"{GROUP_API}/{version}"
    return {"apiVersion": api, "kind": "PodGroup", "metadata": about, "spec": wanted}


def meta(job: Job) -> dict[str, Any]:
    """Return name, labels and owner of an object that the whole gang has."""
    return {
        "name": job.name,
        "namespace": job.namespace,
        "labels": _labels(job),
        "ownerReferences": [_owner(job)],
    }


def _token(job: Job) -> dict[str, str]:
    # With the uid in it the name is nobody else's, so that nobody has to read the object.
    return {"name": f"{job.name}-{job.uid[:8]}", "key": TOKEN_KEY}


def _secret(job: Job) -> dict[str, Any]:
    """Render the Secret by which launchers know one another, without what it holds."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {**meta(job), "name": _token(job)["name"]},
        "type": "Opaque",
        "immutable": True,  # kubelets need not watch it
    }


def _service(job: Job, spec: Spec) -> dict[str, Any]:
    """Render the Service; its ports are only documentation, as it has no cluster IP."""
    hub = ports.hub(spec.template, spec.port, spec.metrics_port)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": meta(job),
        "spec": {
            "clusterIP": "None",
            # Ranks look each other up before any of them can be ready.
            "publishNotReadyAddresses": True,
            "selector": {crd.LABEL_JOB_UID: job.uid},
            "ports": [
                {"name": "master", "port": spec.port, "targetPort": spec.port},
                {"name": "hub", "port": hub, "targetPort": hub},
                {"name": "metrics", "port": spec.metrics_port, "targetPort": spec.metrics_port},
            ],
        },
    }


def _network_policy(
    job: Job, spec: Spec, metrics_from: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Admit only the gang: torch's store and gloo/NCCL have no authentication."""
    selector = {"matchLabels": {crd.LABEL_JOB_UID: job.uid}}
    metrics: dict[str, Any] = {"ports": [{"protocol": "TCP", "port": spec.metrics_port}]}
    if metrics_from:
        metrics["from"] = [dict(peer) for peer in metrics_from]
    ingress = [{"from": [{"podSelector": selector}]}, metrics]
    # Who declares a port has it asked: TensorBoard's, or that of an exporter.
    if own := sorted(spec.template.ports - {spec.port, spec.metrics_port}):
        ingress.append({**metrics, "ports": [{"protocol": "TCP", "port": port} for port in own]})
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": meta(job),
        "spec": {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": ingress},
    }


def _env(
    job: Job,
    spec: Spec,
    attempt: int,
    replica: int,
    grace: int,
    since: int,
    hub: int,
    reached: int,
    saved: int,
) -> dict[str, str]:
    # Members of several attempts have to agree on the ports.
    found = ports.of(spec.template, spec.port, spec.metrics_port, job.uid, since, replica)
    snapshots = None
    if given := spec.snapshot:
        snapshots = Snapshots(
            directory=f"{given.path.rstrip('/')}/{job.name}",
            every_steps=given.every_steps,
            keep=given.keep,
            resume=given.resume,
            step=saved,
            ephemeral=not {"emptyDir", "ephemeral"}.isdisjoint(given.volume.unpack()),
        )
    env = Member(
        name=job.name,
        namespace=job.namespace,
        uid=job.uid,
        attempt=attempt,
        replica=replica,
        replicas=spec.replicas,
        nproc=spec.nproc_per_node,
        address=f"{job.name}-0.{job.name}.{job.namespace}.svc",
        master_port=found.master,
        hub_port=found.hub,
        metrics_port=found.metrics,
        grace=grace,
        max_without_progress=spec.restart.in_place,
        drill=spec.restart.drill,
        final_exit_codes=_final_exit_codes(spec.restart),
        heal_after=spec.restart.heal_after,
        hub=hub,
        replacement=attempt > since or replica >= spec.replicas,
        standby=spec.standby,
        # Where pods share a host's network, launchers of one node would share the hub's port.
        replace_seconds=0 if spec.template.host_network else spec.restart.replace_seconds,
        hang_startup=spec.hang.startup,
        hang_step=spec.hang.step,
        hang_snapshot=spec.hang.snapshot,
        hang_output=spec.hang.output,
        snapshots=snapshots,
        progress_path=spec.restart.progress_path,
        resume_args=spec.restart.resume_args,
        resume_when=spec.restart.resume_when,
        reached=reached,
    ).environment()
    # The kubelet puts variables in place of $(NAME).
    return env | ({OUTPUT: spec.output.replace("$", "$$")} if spec.output else {})


@lru_cache(maxsize=64)  # the same for all pods of a gang
def _final_exit_codes(restart: Restart) -> tuple[int, ...]:
    return tuple(exits.final_codes(restart.ruled))


def _declare_metrics_port(trainer: dict[str, Any], number: int) -> None:
    """Declare the port by name for a PodMonitor, unless the template declares it."""
    declared = sequence(trainer.get("ports"))
    taken = [mapping(port) for port in declared]
    if not any(p.get("name") == METRICS_PORT or p.get("containerPort") == number for p in taken):
        trainer["ports"] = [*declared, {"name": METRICS_PORT, "containerPort": number}]


def _mount(body: dict[str, Any], trainer: dict[str, Any], spec: Spec) -> None:
    """Add the snapshot volume and a /dev/shm in memory, unless the user mounts one there."""
    volumes = list(body.get("volumes") or [])
    mounts = list(trainer.get("volumeMounts") or [])
    if spec.snapshot:
        volumes.append({"name": SNAPSHOT_VOLUME, **spec.snapshot.volume.unpack()})
        mounts.append({"name": SNAPSHOT_VOLUME, "mountPath": spec.snapshot.path})
    if "/dev/shm" not in spec.template.mounts:
        # The runtime's own /dev/shm has 64 MiB; data loaders and NCCL need more.
        volumes.append({"name": SHM_VOLUME, "emptyDir": {"medium": "Memory"}})
        mounts.append({"name": SHM_VOLUME, "mountPath": "/dev/shm"})
    body["volumes"], trainer["volumeMounts"] = volumes, mounts


def _kept_off(nodes: Sequence[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Add required terms against these nodes, by name since hostname labels may differ."""
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    node_affinity = mapping(given.get("nodeAffinity"))
    # A matchField takes one value; all in a term must hold, and one of the terms.
    not_these = [{"key": "metadata.name", "operator": "NotIn", "values": [n]} for n in nodes]
    terms = [
        # An empty term matches nothing, and has to stay so.
        {**term, "matchFields": [*sequence(term.get("matchFields")), *not_these]}
        if term and isinstance(term, Mapping)
        else term
        for term in sequence(mapping(node_affinity.get(required)).get("nodeSelectorTerms"))
    ]
    terms = terms or [{"matchFields": not_these}]
    return {**given, "nodeAffinity": {**node_affinity, required: {"nodeSelectorTerms": terms}}}


def _rather_off(nodes: Sequence[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Add preferred terms against these nodes, each as strong as one may be."""
    preferred = "preferredDuringSchedulingIgnoredDuringExecution"
    node_affinity = mapping(given.get("nodeAffinity"))
    not_these = [{"key": "metadata.name", "operator": "NotIn", "values": [n]} for n in nodes]
    terms = [{"weight": 100, "preference": {"matchFields": [field]}} for field in not_these]
    terms = [*sequence(node_affinity.get(preferred)), *terms]
    return {**given, "nodeAffinity": {**node_affinity, preferred: terms}}


def _default(body: dict[str, Any], field: str, value: object) -> None:
    if body.get(field) is None:
        body[field] = value


def _tolerations(written: object) -> object:
    """Add our tolerations; leave a malformed list for the API server to refuse."""
    given = written or []
    if not isinstance(given, list) or not all(isinstance(t, Mapping) for t in given):
        return written
    covered = [t.get("key") for t in given if t.get("effect") in (None, "", "NoExecute")]
    if None in covered or "" in covered:  # an empty key tolerates everything
        return given
    ours: dict[str, Any] = {"operator": "Exists", "effect": "NoExecute"}
    ours |= {"tolerationSeconds": NODE_LOST_TOLERATION_SECONDS}
    return given + [{"key": taint, **ours} for taint in _NODE_TAINTS if taint not in covered]
