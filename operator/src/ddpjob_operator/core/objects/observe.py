"""Turn raw API objects into the slim records that the planner reads.

The informer and the store call it for each event and keep one small record per pod. It bounds and
escapes all text that a stranger could have written, so nothing behind it has to.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final, get_args

import ddpjob_contract as contract
from ddpjob_contract import crd, exits
from ddpjob_operator.core.objects import compact_spec, ledger
from ddpjob_operator.core.objects.json_read import (
    INT32,
    mapping,
    opt_count,
    opt_number,
    parse_pairs,
    parse_time,
    sequence,
    shared_names,
    text,
)
from ddpjob_operator.core.objects.ledger import LauncherAccount
from ddpjob_operator.core.objects.status import Progress, Proof, Straggler, metrics

#: No attempt has so many rounds: a larger number is ignored.
_ROUNDS: Final = 100_000
MESSAGE_MAX: Final = 1024
#: Fewer seconds without a line are no news, and more only as often.
_SILENT: Final = 600
#: Kueue's API group, and the prefix of its labels.
KUEUE: Final = "kueue.x-k8s.io"
_UID: Final = re.compile("[0-9A-Za-z-]{1,64}")
#: What another program than that of the snapshot is, and where ranks may differ.
_CHANGED: Final = {"script": "another script", "arguments": "other arguments"}
_DIFFERS: Final = get_args(contract.Differs)
#: Probes whose failure makes the kubelet end the container.
_PROBES: Final = ("livenessProbe", "startupProbe")
#: Waiting reasons that persist. The kubelet alternates between the two of a failing pull; one name
#: for both keeps the condition still.
_BLOCKED: Final = {
    "ErrImagePull": "ImagePullBackOff",
    "ImagePullBackOff": "ImagePullBackOff",
    "InvalidImageName": "InvalidImageName",
    "ErrImageNeverPull": "ErrImageNeverPull",
    "CreateContainerConfigError": "CreateContainerConfigError",
    "CreateContainerError": "CreateContainerError",
    "RunContainerError": "RunContainerError",
}


@dataclass(frozen=True, slots=True)
class Round:
    """The end of a round, each field checked: contract.Round, and part of a TerminationReport."""

    number: int | None
    replica: int | None = None
    rank: int | None = None
    code: int | None = None
    signal: int | None = None
    kind: str = ""
    exception: str = ""
    step: int | None = None
    snapshot_step: int | None = None
    saved_step: int | None = None
    saved_by: int | None = None


@dataclass(frozen=True, slots=True)
class Rounds:
    """``count`` rounds of a hub have ended in place; ``known`` tells of the newest.

    ``attempt``: the hub's number. ``can_wait_for_replacement``: all its launchers would, or do.
    ``serving``: the seats of replicas that other pods than their own serve.
    """

    attempt: int
    count: int
    known: tuple[Round, ...] = ()
    can_wait_for_replacement: bool = False
    serving: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Report(Round):
    """A launcher's last words: the end of its last round; ``rounds``: those before it."""

    log: tuple[str, ...] = ()
    loss: float | None = None
    printed_step: int | None = None
    printed_total_steps: int | None = None
    metrics: Mapping[str, float] | None = None
    connected: bool | None = None
    file_at: datetime | None = None
    rounds: tuple[Round, ...] = ()
    spent: LauncherAccount | None = None
    resumed: str = ""
    other_job: bool = False


@dataclass(frozen=True, slots=True)
class Container:
    """State of a container. ``state``: waiting, running, terminated or unknown."""

    name: str = ""
    state: str = "unknown"
    reason: str = ""
    message: str = ""
    exit_code: int | None = None
    signal: int | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    ready: bool = False
    restart_count: int = 0
    report: Report | None = None
    hides: bool = False  # its command ended with 0 after the launcher had failed: a pipe, `; echo`
    memory: str = ""  # the limit as written
    probed: bool = False  # its kubelet ends it when a liveness or startup probe fails


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod that carries our labels."""

    namespace: str
    name: str
    uid: str
    owner_uid: str | None  # of its controller
    attempt: int | None
    replica: int | None
    phase: str
    reason: str = ""  # status.reason, e.g. Evicted
    message: str = ""
    node: str = ""
    ip: str = ""
    deleting: bool = False
    deletion_grace: int | None = None
    deletion_at: datetime | None = None  # when its grace period is over
    disruption: str = ""  # reason of a true DisruptionTarget condition
    disrupted_at: datetime | None = None  # by the cluster's clock
    unschedulable: str = ""  # message of PodScheduled=False
    scheduled_at: datetime | None = None  # when it got its node, by the cluster's clock
    waiting_reason: str = ""  # of the first container that cannot start, e.g. ErrImagePull
    waiting_message: str = ""
    created_at: datetime | None = None
    stopped: bool = False  # every container has ended, whatever the phase still says
    ends: bool = False  # its kubelet ends it: all but native sidecars have ended
    trainer: Container = Container()
    init: Container | None = None  # that failed, so that the trainer never starts
    awaits: Container | None = None  # the init container that keeps the trainer from its start
    end_seen_at: datetime | None = None  # when this process saw its trainer ended

    @property
    def ended(self) -> bool:
        """Tell whether the pod has ended for good."""
        return self.stopped or self.phase in ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True)
class Existing:
    """The object that already has the name of one to be created, and its owner."""

    kind: str
    name: str
    owner_uid: str | None
    attempt: int | None
    deleting: bool
    owner: str = ""  # kind and name of its controller, "DDPJob digits"
    uid: str = ""
    node: str = ""
    deletion_at: datetime | None = None  # when its grace period is over


@dataclass(frozen=True, slots=True)
class Job:
    """One DDPJob as it was last seen; ``spec``, packed, and ``status`` are raw objects."""

    namespace: str
    name: str
    uid: str
    resource_version: str
    generation: int
    deleting: bool
    spec: Mapping[str, Any]
    status: Mapping[str, Any]
    queue: str = ""  # of Kueue, by its label; "": none
    queue_priority: str = ""  # the WorkloadPriorityClass there

    @property
    def key(self) -> tuple[str, str]:
        """Return namespace and name."""
        return (self.namespace, self.name)


def job(obj: Mapping[str, Any], known: Job | None = None) -> Job:
    """Parse a DDPJob object; reuse the packed spec of ``known`` if it is the same."""
    meta = obj["metadata"]
    generation, labels = meta.get("generation", 0), mapping(meta.get("labels"))
    same = known is not None and known.uid == meta["uid"] and known.generation == generation != 0
    if known and same:
        spec = known.spec
    else:
        spec = shared_names(compact_spec.spec(mapping(obj.get("spec"))))
    return Job(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        resource_version=meta.get("resourceVersion", ""),
        generation=generation,
        deleting="deletionTimestamp" in meta,
        spec=spec,
        status=shared_names(mapping(obj.get("status"))),
        queue=text(labels.get(f"{KUEUE}/queue-name")),
        queue_priority=text(labels.get(f"{KUEUE}/priority-class")),
    )


def pod(obj: Mapping[str, Any]) -> Pod:
    """Parse a Pod object, whatever a user or a kubelet may have written into it."""
    meta, status, spec = obj["metadata"], mapping(obj.get("status")), mapping(obj.get("spec"))
    labels = mapping(meta.get("labels"))
    owners = [mapping(o) for o in meta.get("ownerReferences") or ()]
    owner = next((o for o in owners if o.get("controller")), mapping(None))
    disruption = _condition(status, "DisruptionTarget", "True")
    unscheduled, scheduled = (_condition(status, "PodScheduled", v) for v in ("False", "True"))
    waiting_reason, waiting_message = _blocked(status)
    # A copy under another name is no replica.
    number = _number(labels.get(crd.LABEL_REPLICA))
    named = owner.get("name", meta["name"].rpartition("-")[0])
    sidecars = compact_spec.sidecars(spec)
    init = _failed_init(status, sidecars)
    return Pod(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        owner_uid=owner.get("uid"),
        attempt=_number(labels.get(crd.LABEL_ATTEMPT)),
        replica=number if meta["name"] == f"{named}-{number}" else None,
        phase=str(status.get("phase") or "Pending"),
        reason=clean(status.get("reason"), 64),
        message=clean(status.get("message")) or (init.message if init else ""),
        node=str(spec.get("nodeName") or ""),
        ip=str(status.get("podIP") or ""),
        deleting="deletionTimestamp" in meta,
        deletion_grace=meta.get("deletionGracePeriodSeconds"),
        deletion_at=parse_time(meta.get("deletionTimestamp")),
        disruption=clean(disruption.get("reason"), 64) or ("Unknown" if disruption else ""),
        disrupted_at=parse_time(disruption.get("lastTransitionTime")),
        unschedulable=clean(unscheduled.get("message"), 300),
        scheduled_at=parse_time(scheduled.get("lastTransitionTime")),
        waiting_reason=waiting_reason,
        waiting_message=waiting_message,
        created_at=parse_time(meta.get("creationTimestamp")),
        stopped=_stopped(spec, status, sidecars),
        ends=_stopped(spec, status),
        trainer=_trainer(meta, spec, status),
        init=init,
        awaits=_awaited_init(status, sidecars),
    )


def existing(kind: str, obj: Mapping[str, Any]) -> Existing:
    """Describe the object that already has the name."""
    meta = obj["metadata"]
    owners = meta.get("ownerReferences") or ()
    owner: Mapping[str, Any] = next((o for o in owners if o.get("controller")), {})
    return Existing(
        kind=kind,
        name=meta["name"],
        owner_uid=owner.get("uid"),
        attempt=_number(mapping(meta.get("labels")).get(crd.LABEL_ATTEMPT)),
        deleting="deletionTimestamp" in meta,
        owner=f"{owner.get('kind')} {owner.get('name')}" if owner else "",
        uid=str(meta.get("uid") or ""),
        node=str((obj.get("spec") or {}).get("nodeName") or ""),
        deletion_at=parse_time(meta.get("deletionTimestamp")),
    )


def progress(raw: object, now: datetime) -> Progress | None:
    """Parse the body of GET /state as Progress; None if it is malformed."""
    if not isinstance(raw, Mapping):
        return None
    printed = mapping(raw.get("printed"))
    return Progress(
        step=opt_count(raw.get("step")),
        total_steps=opt_count(raw.get("totalSteps")),
        samples_per_second=_rounded(raw.get("samplesPerSecond"), 4),
        steps_per_second=_rounded(raw.get("stepsPerSecond", printed.get("stepsPerSecond")), 4),
        **_printed(raw),
        snapshot_step=opt_count(raw.get("snapshotStep")),
        snapshot_every=opt_count(raw.get("snapshotEvery")),
        file_at=parse_time(raw.get("fileModifiedAt")),
        **resumed(raw.get("resumed")),
        proof=proof(raw.get("proof")),
        straggler=straggler(raw.get("straggler")),
        silent=(opt_count(raw.get("silentSeconds")) or 0) // _SILENT * _SILENT,
        updated_at=now,
    )


def _printed(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Parse a loss, the steps that a program without the library has printed, and the like."""
    printed, connected = mapping(raw.get("printed")), raw.get("connected")
    step = opt_count(printed.get("step"))
    return {
        "loss": _rounded(raw.get("loss", printed.get("loss")), 6),
        "printed_step": step,
        # 0: not known any more, where None would leave the old one.
        "printed_total_steps": opt_count(printed.get("totalSteps", step and 0)),
        "connected": connected if isinstance(connected, bool) else None,
        "metrics": metrics(
            {clean(name, 40): _rounded(v, 6) for name, v in mapping(raw.get("metrics")).items()}
        ),
    }


def resumed(raw: object, done: object = None) -> dict[str, Any]:
    """Describe contract.Resumed, written by a stranger, for ``resumed`` and ``other_job``.

    ``done``: steps at the end, of a report. As many as another job's snapshot had are none.
    """
    body = mapping(raw)
    step, uid = opt_count(body.get("step")), text(body.get("uid"))
    if step is None:
        return {}
    whose = f"another DDPJob (uid {uid})" if _UID.fullmatch(uid) else ""
    changed = [word for key, word in _CHANGED.items() if key in sequence(body.get("changed"))]
    made_by = f"made by {' and '.join(changed)}" if changed else ""
    said = ", ".join(filter(None, [whose, made_by]))
    none = "; 0 steps trained" if whose and done == step else ""
    words = f"{said}: its snapshot of step {step}{none}" if said else ""
    return {"resumed": words, "other_job": bool(whose)}


def proof(raw: object) -> Proof | None:
    """Parse a stranger's contract.Proof into a Proof; None if it says nothing."""
    body = mapping(raw)
    names = ("first", "last", "step", "rank")
    first, last, step, rank = (opt_count(body.get(name)) for name in names)
    equal, what = body.get("equal"), body.get("what")
    if equal is True and first and last and first <= last:
        return Proof(True, f"steps {first} to {last}, repeated after a restart, are equal")
    if equal is False and step and rank is not None and what in _DIFFERS:
        return Proof(
            False,
            f"step {step}, repeated after a restart, differs on rank {rank} in its {what}:"
            " the script keeps something that no snapshot holds, so its result will not equal"
            " an undisturbed run's. The log of rank 0 tells the usual causes; keep it with"
            " run.state(...) or run.register(name, obj)",
        )
    return None


def straggler(raw: object) -> Straggler | None:
    """Parse which rank holds up the others; None: none does, or nobody says."""
    body = mapping(raw)
    rank, share = opt_count(body.get("rank"), INT32), opt_number(body.get("share"))
    if rank is None or share is None or not 0 < share <= 1:
        return None
    return Straggler(rank, share, fetching=body.get("by") == "data")


def rounds(raw: object) -> Rounds | None:
    """Parse what the body of GET /state says of the hub's rounds; None if it says nothing."""
    body = mapping(raw)
    attempt, count = opt_count(body.get("attempt"), INT32), opt_count(body.get("round"), _ROUNDS)
    holds = body.get("holds") is True
    if attempt is None or not (count or holds):
        return None
    serving = parse_pairs(body.get("serving"))
    return Rounds(attempt, count or 0, _round_records(body.get("rounds")), holds, serving)


def away(raw: object) -> frozenset[int]:
    """Parse which seats the body of GET /state calls away."""
    found = sequence(mapping(raw).get("away"))[: contract.STATE_MAX_AWAY]
    return frozenset(one for one in map(opt_count, found) if one is not None)


def clean(text: object, limit: int = MESSAGE_MAX) -> str:
    """Bound a stranger's text and replace what could forge a terminal or a log line."""
    if not isinstance(text, str):
        return ""
    cut = text.strip(" \n")[: limit + 1]  # before a look at each character of megabytes
    shown = "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in cut)
    return shown if len(shown) <= limit else shown[: limit - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _failed_init(status: Mapping[str, Any], sidecars: frozenset[str]) -> Container | None:
    """Find the first init container that failed, so that the trainer never starts."""
    for found in map(mapping, sequence(status.get("initContainerStatuses"))):
        ended = _container(found)
        kept = found.get("name") in sidecars  # its kubelet starts it again
        if ended.state == "terminated" and ended.exit_code and not kept:
            what = f"init container {found.get('name')}: exit code {ended.exit_code}"
            return replace(ended, message=clean(f"{what}\n{ended.message}"), report=None)
    return None


def _awaited_init(status: Mapping[str, Any], sidecars: frozenset[str]) -> Container | None:
    """Find the init container that runs, or that its kubelet starts again, while others wait.

    Of one that is to be started again the exit code is that of its last end.
    """
    for found in map(mapping, sequence(status.get("initContainerStatuses"))):
        one = _container(found)
        native = one.name in sidecars
        if found.get("started") is True if native else one.exit_code == 0:
            continue  # it is done, or as far as the next ones need it
        last = mapping(mapping(found.get("lastState")).get("terminated")).get("exitCode")
        if one.state == "waiting" and isinstance(last, int):
            return replace(one, exit_code=last)
        return one if one.state == "running" or (native and one.exit_code is not None) else None
    return None


def _trainer(
    meta: Mapping[str, Any], spec: Mapping[str, Any], status: Mapping[str, Any]
) -> Container:
    noted = mapping(meta.get("annotations")).get(crd.ANNOTATION_TRAINER)
    name = noted or compact_spec.trainer_container(spec).get("name")
    statuses = map(mapping, sequence(status.get("containerStatuses")))
    found = next((s for s in statuses if s.get("name") == name), mapping(None))
    if not found:
        return Container()
    own = compact_spec.container(spec, name)
    limits = mapping(mapping(own.get("resources")).get("limits"))
    memory = clean(str(limits.get("memory") or ""), 32)
    probed = any(own.get(probe) for probe in _PROBES)
    return replace(_container(found), memory=memory, probed=probed)


def _container(found: Mapping[str, Any]) -> Container:
    state = mapping(found.get("state"))
    kind = next((k for k in ("terminated", "running", "waiting") if k in state), "unknown")
    detail = mapping(state.get(kind))
    said, exit_code = detail.get("message"), detail.get("exitCode")
    report = _report(said)
    hides = exit_code == 0 and report is not None and report.kind not in ("", "success")
    if report is not None and hides:
        exit_code = report.code or 1
    return Container(
        name=clean(found.get("name"), 63),
        state=kind,
        reason=clean(detail.get("reason"), 64),
        message=clean(said[-MESSAGE_MAX:]) if report is None and isinstance(said, str) else "",
        exit_code=exit_code if isinstance(exit_code, int) else None,
        signal=detail.get("signal") or None,
        started_at=parse_time(detail.get("startedAt")),
        finished_at=parse_time(detail.get("finishedAt")),
        ready=bool(found.get("ready")),
        restart_count=int(found.get("restartCount") or 0),
        report=report,
        hides=hides,
    )


def _stopped(
    spec: Mapping[str, Any], status: Mapping[str, Any], sidecars: frozenset[str] = frozenset()
) -> bool:
    """Tell whether these and all containers have ended: the phase says so only seconds later."""
    found = [*map(mapping, sequence(status.get("containerStatuses")))]
    inits = map(mapping, sequence(status.get("initContainerStatuses")))
    found += [one for one in inits if one.get("name") in sidecars]
    count = len(sequence(spec.get("containers"))) + len(sidecars)
    return len(found) == count and all("terminated" in mapping(s.get("state")) for s in found)


def _condition(status: Mapping[str, Any], type_: str, value: str) -> Mapping[str, Any]:
    found = (mapping(c) for c in status.get("conditions") or ())
    wanted = (c for c in found if c.get("type") == type_ and c.get("status") == value)
    return next(wanted, {})


def _blocked(status: Mapping[str, Any]) -> tuple[str, str]:
    """Find the first container that cannot start and the reason; ("", "") if none."""
    for group in ("initContainerStatuses", "containerStatuses"):
        for found in status.get(group) or ():
            waiting = mapping(mapping(mapping(found).get("state")).get("waiting"))
            reason = clean(waiting.get("reason"), 64)
            if reason in _BLOCKED:
                return _BLOCKED[reason], clean(waiting.get("message"), 300)
    return "", ""


def _report(text: object) -> Report | None:
    """Parse the launcher's termination report; None for the output of another program."""
    if not isinstance(text, str) or not text.lstrip().startswith("{"):
        return None
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(raw, dict) or raw.get("version") != contract.REPORT_VERSION:
        return None
    lines = raw.get("log")
    log = tuple(clean(line, 200) for line in lines[-20:]) if isinstance(lines, list) else ()
    return Report(
        **_end(raw),
        log=log,
        **_printed(raw),
        file_at=parse_time(raw.get("fileModifiedAt")),
        rounds=_round_records(raw.get("rounds")),
        spent=ledger.read_account(raw.get("spent"), 0),
        **resumed(raw.get("resumed"), raw.get("step")),
    )


def _round_records(items: object) -> tuple[Round, ...]:
    """Parse the newest records that have the number of their round."""
    newest = [mapping(item) for item in sequence(items)[-contract.STATE_MAX_ROUNDS :]]
    return tuple(found for raw in newest if (found := Round(**_end(raw))).number is not None)


def _end(raw: Mapping[str, Any]) -> dict[str, Any]:
    said = clean(raw.get("exception"), 300)
    return {
        "number": opt_count(raw.get("round"), _ROUNDS),
        "replica": -1 if raw.get("replica") == -1 else opt_count(raw.get("replica"), INT32),
        "rank": opt_count(raw.get("rank"), INT32),
        "code": opt_count(raw.get("code"), INT32),
        "signal": opt_count(raw.get("signal"), INT32),
        "kind": exits.kind_of(clean(raw.get("kind"), 32), said),
        "exception": said,
        "step": opt_count(raw.get("step")),
        "snapshot_step": opt_count(raw.get("snapshotStep")),
        "saved_step": opt_count(raw.get("savedStep")),
        "saved_by": opt_count(raw.get("savedBy"), INT32),
    }


def _number(label: object) -> int | None:
    text = label if isinstance(label, str) else ""
    return int(text) if text.isdecimal() and len(text) <= 9 else None


def _rounded(value: object, digits: int) -> float | None:
    """Round to so many significant digits, since a column of kubectl shows them all."""
    number = opt_number(value)  # rounding up may make it infinite
    return None if number is None else opt_number(float(f"{number:.{digits}g}"))
