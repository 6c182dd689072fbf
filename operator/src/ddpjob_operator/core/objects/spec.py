"""Define a DDPJob's .spec as data, with the defaults of the CRD.

plan() calls read() in each planning round. The CRD's schema and CEL rules refuse most bad input at
`kubectl apply`; the rest is refused here with SpecError, which becomes the condition Invalid.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

from ddpjob_contract import output
from ddpjob_contract.crd import AUTO, DEFAULTS, TRAINER_CONTAINER
from ddpjob_operator.core.objects import compact_spec, ports
from ddpjob_operator.core.objects.compact_spec import Packed, Template
from ddpjob_operator.core.objects.json_read import (
    INT32,
    integer,
    mapping,
    opt_count,
    sequence,
    text,
)

#: As the CRD has it.
MAX_REPLICAS: Final = 10_000
MAX_STANDBY: Final = 64
_PATH_MAX: Final = 512  # as in the CRD
_MOST_STEPS: Final = 10**9


class SpecError(ValueError):
    """A spec that can never work; the message names the field and the cure."""


@dataclass(frozen=True, slots=True)
class Rule:
    """spec.restart.rules[]: the failures that it matches, and the action."""

    exit_codes: frozenset[int]
    reasons: frozenset[str]
    action: str  # Restart | RestartFree | Fail


@dataclass(frozen=True, slots=True)
class Restart:
    """spec.restart. Times in seconds."""

    max_restarts: int
    max_disruptions: int
    initial_seconds: float
    max_seconds: float
    in_place: int  # rounds without progress before the attempt ends; 0: no rounds
    drill: str  # Auto, Always or Never: a round that only checks the resume
    heal_after: int  # seconds without a failure that heal the budgets; 0: never by time
    progress_path: str  # a file or directory whose newer mtime is progress; "": none
    resume_args: tuple[str, ...]  # more arguments from the second start on, by the launcher
    resume_when: str  # glob of checkpoints; "": they need none
    replace_seconds: int  # members wait so long for a lost one's replacement; 0: they do not
    rules: tuple[Rule, ...]

    def ruled(self, exit_code: int | None, reasons: Set[str]) -> str | None:
        """Return the action of the first rule that matches, None if none does."""
        matching = (r for r in self.rules if exit_code in r.exit_codes or r.reasons & reasons)
        return next((rule.action for rule in matching), None)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """spec.snapshot. ``volume`` is any VolumeSource."""

    path: str
    volume: Packed
    every_steps: int | None  # None: Auto, the trainer chooses
    keep: int
    resume: str  # Auto | Never


@dataclass(frozen=True, slots=True)
class Hang:
    """Seconds without a sign of life before the trainer's watchdog ends a phase.

    ``output``: without a line of any rank; None: a program may be silent.
    """

    startup: int
    step: int
    snapshot: int
    output: int | None


@dataclass(frozen=True, slots=True)
class Scheduling:
    """spec.scheduling. ``priority``: the pods' PriorityClass, wherever it is named; "": none."""

    gang: str  # Auto | Native | None
    topology_key: str  # label of nodes that all pods share; "": none
    priority: str


@dataclass(frozen=True, slots=True)
class Spec:
    """The whole spec with defaults filled in. Times in seconds."""

    replicas: int
    standby: int  # pods beyond replicas that take over a lost one's place
    standby_priority: str  # their PriorityClass; "": that of the others
    nproc_per_node: int
    template: Template
    port: int
    suspend: bool
    restart: Restart
    snapshot: Snapshot | None
    hang: Hang
    scheduling: Scheduling
    fence_after: float | None  # nodeLost: seconds until Fence acts; None: Wait
    startup_deadline: float
    active_deadline: float | None
    ttl: float | None
    clean_pod_policy: str  # Running | All
    metrics_port: int
    network_policy: bool
    output: str  # how the program prints its numbers, as JSON; "": as usual
    flaw: str = ""  # why no pod can be made of it

    @property
    def seats(self) -> int:
        """Return how many pods there are with those that stand by."""
        return self.replicas + self.standby

    @property
    def template_hash(self) -> str:
        """Return a hash that differs whenever the template does."""
        return self.template.packed.digest

    @property
    def snapshot_hash(self) -> str:
        """Return a hash of the snapshot volume; empty without one."""
        return self.snapshot.volume.digest if self.snapshot else ""


def read(raw: Mapping[str, Any], name: str = "") -> Spec:
    """Parse a job's raw .spec; put the first error into ``flaw`` and keep the rest."""
    try:
        return parse(raw, name)
    except SpecError as error:
        # The pods that run came from a valid spec: looking after them needs none of these.
        left_out = ("template", "nprocPerNode", "nodeLost", "snapshot", "scheduling", "output")
        rest = {key: raw[key] for key in raw if key not in left_out}
        rest["template"] = {"spec": {"containers": [{"name": TRAINER_CONTAINER}]}}
        return replace(parse(rest), flaw=str(error))


def parse(raw: Mapping[str, Any], name: str = "") -> Spec:
    """Parse a job's raw .spec; ``name`` is that of the directory of its snapshots.

    Raises:
        SpecError: the field that cannot work and what to do about it.
    """
    template, snapshot = compact_spec.template(raw.get("template")), _snapshot(raw.get("snapshot"))
    if not template.has_trainer:
        raise SpecError("spec.template.spec.containers: at least one container is needed")
    hang = mapping(raw.get("hang"))
    flaw = template.packed.flaw or (snapshot and _unusable(snapshot, template, name))
    standby = min(_number(raw, "standby"), MAX_STANDBY)
    if standby and template.host_network:
        flaw = "spec.standby: pods on the host's network are never replaced alone: remove one"
    scheduling = _scheduling(mapping(raw.get("scheduling")), template)
    if flaw:
        raise SpecError(flaw)
    return Spec(
        # The CRD refuses others; each seat takes room in every planning round.
        replicas=min(max(1, integer(raw.get("replicas"), 1)), MAX_REPLICAS),
        standby=standby,
        standby_priority=text(raw.get("standbyPriorityClassName")),
        nproc_per_node=_nproc(raw.get("nprocPerNode", DEFAULTS["nprocPerNode"]), template),
        template=template,
        port=integer(raw.get("port"), ports.MASTER),
        suspend=bool(raw.get("suspend", DEFAULTS["suspend"])),
        restart=_restart(mapping(raw.get("restart"))),
        snapshot=snapshot,
        hang=Hang(
            startup=_number(hang, "hang.startupSeconds"),
            step=_number(hang, "hang.stepSeconds"),
            snapshot=_number(hang, "hang.snapshotSeconds"),
            output=opt_count(hang.get("outputSeconds"), INT32),
        ),
        scheduling=scheduling,
        fence_after=_fence_after(mapping(raw.get("nodeLost")), raw.get("snapshot")),
        startup_deadline=_number(raw, "startupDeadlineSeconds"),
        active_deadline=opt_count(raw.get("activeDeadlineSeconds"), INT32),
        ttl=opt_count(raw.get("ttlSecondsAfterFinished"), INT32),
        clean_pod_policy=text(raw.get("cleanPodPolicy")) or DEFAULTS["cleanPodPolicy"],
        metrics_port=integer(mapping(raw.get("metrics")).get("port"), ports.METRICS),
        network_policy=bool(
            mapping(raw.get("networkPolicy")).get("enabled", DEFAULTS["networkPolicy.enabled"])
        ),
        output=_output(raw.get("output")),
    )


def _output(raw: object) -> str:
    kept = output.bounded(mapping(raw))
    text = json.dumps(kept, sort_keys=True) if kept else ""
    if why := _flaw_of_output(text):
        raise SpecError(f"spec.output.{why}")
    return text


@lru_cache(maxsize=1024)  # each planning round asks, and compiling takes longer than the rest of it
def _flaw_of_output(text: str) -> str:
    return output.flaw(json.loads(text)) if text else ""


def _number(raw: Mapping[str, Any], path: str) -> int:
    """Read a whole number by its path in spec; ``raw``: the object that holds it."""
    found = opt_count(raw.get(path.rpartition(".")[2]), INT32)
    return DEFAULTS[path] if found is None else found


def _nproc(value: object, template: Template) -> int:
    gpus = template.gpu_count
    if value == "auto" and template.gpus and not gpus:
        raise SpecError(
            f"spec.nprocPerNode is auto, and the limit {template.gpu} of the trainer container is"
            f" {template.gpus[:40]!r}: write that as a plain number, or set nprocPerNode"
        )
    if value == "auto":
        return gpus or 1
    written = text(value, 10) or str(integer(value))
    given = int(written) if written.isdecimal() and len(written) < 10 else 0
    if given < 1:
        raise SpecError(f'spec.nprocPerNode: must be "auto" or a number >= 1, not {written!r}')
    if 0 < gpus < given:
        raise SpecError(
            f"spec.nprocPerNode is {given}, but the limit {template.gpu} of the trainer container"
            f" is {gpus}, and a process needs its own GPU: leave it out (auto), or raise the"
            " limit"
        )
    return given


def _restart(raw: Mapping[str, Any]) -> Restart:
    backoff = mapping(raw.get("backoff"))
    rules = tuple(
        Rule(
            exit_codes=frozenset(map(integer, sequence(rule.get("exitCodes")))),
            reasons=frozenset(map(text, sequence(rule.get("reasons")))),
            action=text(rule.get("action")),
        )
        for rule in map(mapping, sequence(raw.get("rules")))
    )
    max_restarts = _number(raw, "restart.maxRestarts")
    in_place = mapping(raw.get("inPlace"))
    on = in_place.get("enabled", True) is not False and max_restarts > 0
    return Restart(
        max_restarts=max_restarts,
        max_disruptions=_number(raw, "restart.maxDisruptions"),
        initial_seconds=float(_number(backoff, "restart.backoff.initialSeconds")),
        max_seconds=float(_number(backoff, "restart.backoff.maxSeconds")),
        in_place=_number(in_place, "restart.inPlace.maxWithoutProgress") if on else 0,
        drill=text(in_place.get("drill")) or DEFAULTS["restart.inPlace.drill"],
        heal_after=_number(raw, "restart.healAfterSeconds"),
        progress_path=text(raw.get("progressPath")),
        resume_args=tuple(map(text, sequence(raw.get("resumeArgs")))),
        resume_when=text(raw.get("resumeWhen")),
        replace_seconds=_number(raw, "restart.replaceSeconds"),
        rules=rules,
    )


def _scheduling(raw: Mapping[str, Any], template: Template) -> Scheduling:
    gang, key = (
        text(raw.get(one)) or DEFAULTS[f"scheduling.{one}"] for one in ("gang", "topologyKey")
    )
    if template.placed and (gang == "Native" or key):
        raise SpecError(
            f"spec.template.spec.{template.placed} and spec.scheduling both place the pods:"
            " remove one"
        )
    asked = text(raw.get("priorityClassName"))
    if asked and template.priority not in ("", asked):
        raise SpecError(
            f"spec.scheduling.priorityClassName is {asked} and that of spec.template.spec is"
            f" {template.priority}, but all pods of a group have the same: remove one"
        )
    return Scheduling(gang, key, asked or template.priority)


def _snapshot(raw: object) -> Snapshot | None:
    if not isinstance(raw, Mapping):
        return None
    every = raw.get("everySteps")
    steps = opt_count(every, _MOST_STEPS + 1)
    if not steps and every not in (None, AUTO):
        raise SpecError(
            f"spec.snapshot.everySteps: must be {AUTO} or a number from 1 to {_MOST_STEPS}"
        )
    return Snapshot(
        path=text(raw.get("path"), _PATH_MAX) or "/snapshots",
        volume=compact_spec.volume(raw.get("volume")),
        every_steps=steps,
        keep=_number(raw, "snapshot.keep"),
        resume=text(raw.get("resume")) or DEFAULTS["snapshot.resume"],
    )


def _unusable(snapshot: Snapshot, template: Template, name: str) -> str:
    """Say why the job's snapshots would miss their volume; empty if they reach it."""
    path = compact_spec.normal_path(snapshot.path)
    # CEL compares the path as written, and knows nothing of the directory in it.
    if mount := min(template.mounts & {path, f"{path}/{name}"}, default=""):
        return (
            f"spec.template mounts a volume at {mount} in the trainer container, over this job's"
            f" snapshots in {path}/{name}: mount it elsewhere, or create a new DDPJob with another"
            " spec.snapshot.path"
        )
    return snapshot.volume.flaw


def _fence_after(raw: Mapping[str, Any], snapshot: object) -> float | None:
    if raw.get("policy") != "Fence":
        return None
    if not isinstance(snapshot, Mapping):  # CEL refuses it too; without lineage files may be lost
        raise SpecError("spec.nodeLost.policy Fence needs spec.snapshot: set it or use Wait")
    return float(_number(raw, "nodeLost.afterSeconds"))
