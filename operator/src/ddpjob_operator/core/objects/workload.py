"""Read and write Kueue's Workload of a job: the object that waits in a queue for quota.

The store keeps one slim record of each, capacity/kueue.py decides by it, and
shell/scheduling.py sends what is rendered here. Kueue's own words for conditions and
reasons are used as they are (v1beta2, pkg/controller/jobframework/reconciler.go). It has no
finalizer: a job that is gone could not take it off again, and Kueue too gives back the quota of a
deleted job at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from ddpjob_contract import crd
from ddpjob_operator.core.objects.json_read import counter, mapping, sequence, text
from ddpjob_operator.core.objects.observe import KUEUE, Job, clean

API_VERSION: Final = f"{KUEUE}/v1beta2"
LABEL_QUEUE: Final = f"{KUEUE}/queue-name"
LABEL_OWNER: Final = f"{KUEUE}/job-uid"
#: The template, the counts and the labels that it was made of.
ANNOTATION_MADE_OF: Final = f"{crd.GROUP}/made-of"
POD_SET: Final = "trainer"
#: Of Kueue's lists: a stranger may have written them.
_MOST: Final = 64
#: A Workload's name is a label's value, too.
_NAME_MAX: Final = 63 - 9


@dataclass(frozen=True, slots=True)
class Condition:
    """A metav1.Condition of a Workload; ``since`` as it is written."""

    true: bool
    reason: str
    message: str
    since: str


@dataclass(frozen=True, slots=True)
class Placement:
    """Labels and constraints that a flavour or an admission check asks of the pods."""

    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()


#: Of every pod of a job in a queue.
OWN: Final = Placement(labels={f"{KUEUE}/podset": "trainer"})


@dataclass(frozen=True, slots=True)
class Workload:
    """What decisions need of a Workload object."""

    namespace: str
    name: str
    uid: str
    version: str
    owner_uid: str
    made_of: str = ""
    queue: str = ""
    active: bool = True
    deleting: bool = False
    conditions: Mapping[str, Condition] = field(default_factory=dict)
    flavors: tuple[str, ...] = ()
    count: int = 0  # of pods that are admitted
    topology: bool = False  # Kueue wants to choose the node of each pod
    updates: tuple[Placement, ...] = ()  # of admission checks
    checks: str = ""  # in words, those that are not ready
    reclaimed: int = 0

    def true(self, type_: str) -> bool:
        """Tell whether that condition is true."""
        return self.said(type_).true

    def said(self, type_: str) -> Condition:
        """Return that condition; a false one without words if it was never set."""
        return self.conditions.get(type_, _NEVER)

    @property
    def reserved(self) -> bool:
        """Tell whether quota counts as in use for it."""
        return self.true("QuotaReserved") and not self.true("Finished")

    @property
    def admission(self) -> str:
        """Name this admission, unlike any other one."""
        return f"{self.uid} {self.said('Admitted').since}"


_NEVER: Final = Condition(False, "", "", "")


def workload(obj: Mapping[str, Any]) -> Workload:
    """Parse a Workload object, whatever Kueue or a user may have written into it."""
    meta, spec, status = obj["metadata"], mapping(obj.get("spec")), mapping(obj.get("status"))
    owners = map(mapping, sequence(meta.get("ownerReferences")))
    admission = mapping(status.get("admission"))
    assigned = _ours(admission.get("podSetAssignments"))
    checks = [mapping(one) for one in sequence(status.get("admissionChecks"))[:_MOST]]
    unready = (one for one in checks if one.get("state") != "Ready")
    return Workload(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        version=meta.get("resourceVersion", ""),
        owner_uid=next((text(one.get("uid")) for one in owners if one.get("controller")), ""),
        made_of=text(mapping(meta.get("annotations")).get(ANNOTATION_MADE_OF)),
        queue=text(spec.get("queueName")),
        active=spec.get("active") is not False,
        deleting="deletionTimestamp" in meta,
        conditions=dict(_conditions(status.get("conditions"))),
        count=counter(assigned.get("count")),
        flavors=tuple(dict.fromkeys(sorted(_strings(assigned.get("flavors")).values()))),
        topology=bool(assigned.get("topologyAssignment") or assigned.get("delayedTopologyRequest")),
        updates=tuple(placement(_ours(one.get("podSetUpdates"))) for one in checks),
        checks=", ".join(f"{text(one.get('name'))} ({text(one.get('state'))}) "
                         f"{clean(one.get('message'), 200)}".strip() for one in unready),
        reclaimed=counter(_ours(status.get("reclaimablePods")).get("count")),
    )  # fmt: skip


def placement(raw: Mapping[str, Any]) -> Placement:
    """Parse a podSetUpdate, or the spec of a ResourceFlavor."""
    return Placement(
        labels=_strings(raw.get("labels")),
        annotations=_strings(raw.get("annotations")),
        node_selector=_strings(raw.get("nodeSelector") or raw.get("nodeLabels")),
        tolerations=tuple(
            one for one in sequence(raw.get("tolerations"))[:_MOST] if isinstance(one, Mapping)
        ),
    )


def placed(template: Mapping[str, Any], parts: Iterable[Placement]) -> dict[str, Any] | str:
    """Add what is asked of the pods to their template; return in words instead what is in conflict.

    Kueue's rule: another value under a key is an error. Two flavours that differ are one here,
    where Kueue lets chance decide. By the label of a queue it would queue the pod, too.
    """
    meta, spec = {**mapping(template.get("metadata"))}, {**mapping(template.get("spec"))}
    for part in parts:
        for holder, name, asked in (
            (meta, "labels", part.labels),
            (meta, "annotations", part.annotations),
            (spec, "nodeSelector", part.node_selector),
        ):
            given = mapping(holder.get(name))
            for key, value in asked.items():
                if given.get(key, value) != value:
                    return f"{name}: {key} is to be {value}, and is {given[key]}"
            holder[name] = {key: v for key, v in {**given, **asked}.items() if key != LABEL_QUEUE}
        there = spec.get("tolerations") or []
        if isinstance(there, list):  # else the API server has to name it
            spec["tolerations"] = [*there, *(one for one in part.tolerations if one not in there)]
    return {**template, "metadata": meta, "spec": spec}


def name_of(job: Job) -> str:
    """Return the name of the job's Workload, which no other job's has."""
    return f"{crd.KIND.lower()}-{job.name}"[:_NAME_MAX].rstrip("-.") + f"-{job.uid[:8]}"


def with_status(
    found: Mapping[str, Any],
    reported: Mapping[str, Condition],
    now: datetime,
    *,
    reclaimed: int | None,
    give_back: bool,
) -> dict[str, Any]:
    """Return the object with these conditions. ``give_back``: without its quota."""
    status = {**mapping(found.get("status"))}
    old = {one.get("type"): one for one in map(mapping, sequence(status.get("conditions")))}
    stamp = now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    for type_, new in reported.items():
        before, value = mapping(old.get(type_)), "True" if new.true else "False"
        same = before.get("status") == value
        old[type_] = {
            "type": type_,
            "status": value,
            "reason": new.reason,
            "message": new.message,
            "lastTransitionTime": before.get("lastTransitionTime", stamp) if same else stamp,
            "observedGeneration": found["metadata"].get("generation", 0),
        }
    status["conditions"] = list(old.values())
    if reclaimed is not None:
        status["reclaimablePods"] = [{"name": POD_SET, "count": reclaimed}]
    if give_back:
        status.pop("admission", None)
        status.pop("reclaimablePods", None)
    return {**found, "status": status}


def _conditions(items: object) -> Iterable[tuple[str, Condition]]:
    for raw in map(mapping, sequence(items)[:_MOST]):
        reported = Condition(
            raw.get("status") == "True",
            clean(raw.get("reason"), 64),
            clean(raw.get("message"), 600),
            clean(raw.get("lastTransitionTime"), 64),
        )
        yield text(raw.get("type")), reported


def _ours(items: object) -> Mapping[str, Any]:
    """Find the entry of our podSet."""
    named = (one for one in map(mapping, sequence(items)[:_MOST]) if one.get("name") == POD_SET)
    return next(named, {})


def _strings(raw: object) -> dict[str, str]:
    pairs = list(mapping(raw).items())[:_MOST]
    return {key: value for key, value in pairs if isinstance(value, str)}
