"""Define a DDPJob's .status as data: parsed leniently, written whole.

plan() reads it with from_dict() and stores it with to_dict(). Anyone with access to the subresource
may have written it: what does not parse counts as absent, and what is read has the bounds that the
CRD sets, so that one job's status costs little memory and can always be written again.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from typing import Any, Final, Literal, get_args

from ddpjob_contract.crd import TERMINAL_PHASES
from ddpjob_contract.exits import SEVERITY
from ddpjob_operator.core.objects import ledger
from ddpjob_operator.core.objects.json_read import (
    INT32,
    counter,
    format_pairs,
    format_ranges,
    format_time,
    integer,
    mapping,
    names,
    opt_count,
    opt_integer,
    opt_number,
    parse_pairs,
    parse_ranges,
    parse_time,
    sequence,
    text,
)
from ddpjob_operator.core.objects.ledger import Ledger
from ddpjob_operator.core.objects.spec import MAX_REPLICAS

Phase = Literal["Pending", "Starting", "Running", "Restarting", "Suspended", "Succeeded", "Failed"]
PHASES: Final = get_args(Phase)
#: What a stall's message knows, the more the later.
Known = Literal["", "Cause", "Cure"]
#: status.failures and status.avoidedNodes keep so many, newest last: etcd has a limit.
MAX_FAILURES: Final = 10
MAX_AVOIDED: Final = 16
#: status.handedOver has room for so many and forgets none: each is acted on once.
MAX_HANDED_OVER: Final = 32
#: status.min_attempt_by_seat names so many replicas.
MAX_MIN_ATTEMPTS: Final = 256
#: Conditions of ours, and the number that there is room for: others' are kept up to that.
_CONDITIONS: Final = (
    "Ready", "Running", "Complete", "Failed", "Suspended", "Stalled", "Invalid", "Unsupported",
    "ResumeProven", "Straggling", "Silent", "Apart",
)  # fmt: skip
_MAX_CONDITIONS: Final = 32
_MESSAGE: Final = 32_768
_REASON: Final = re.compile("[A-Za-z]([A-Za-z0-9_,:]{0,1022}[A-Za-z0-9_])?")
#: Characters of a text in a record.
_TEXT: Final = 4096
_BUDGETS: Final = ("maxRestarts", "maxDisruptions")
_CLASSES: Final = {*SEVERITY, "Startup", "Deadline", "Invalid"} - {"Collateral"}
#: What is booked with each write, and is no reason for one.
_BOOKED: Final = frozenset({"ledger", "goodput", "eta", "operator"})
#: The label of a pod holds no more (observe.py); a larger number starts again from 0.
MOST_ATTEMPTS: Final = 10**9 - 1


@dataclass(frozen=True, slots=True)
class Condition:
    """A metav1.Condition; with_condition keeps the time of its last transition."""

    type: str
    status: Literal["True", "False"]
    reason: str
    message: str
    since: datetime

    def to_dict(self, generation: int) -> dict[str, Any]:
        """Return it in the form of metav1.Condition."""
        return {
            "type": self.type,
            "status": self.status,
            "reason": self.reason,
            "message": self.message,
            "lastTransitionTime": self.since.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "observedGeneration": generation,
        }


@dataclass(frozen=True, slots=True)
class Restarts:
    """Counters of restarts.

    ``charged`` and ``disruptions`` are the two budgets in use; verdict.py sets both to
    0. ``snapshot_step`` and ``file_at``, the mtime of the progress path, are the newest at the
    last restart: what is newer is progress. ``consecutive`` drives the backoff and heals too.
    ``in_place``: restarts of processes only; ``round``: those under the current hub, so that each
    is counted once. ``released``: tries in a row that were given back before all replicas ran.
    ``replaced``: those of ``total`` that kept the pods that were not lost.
    """

    total: int = 0
    charged: int = 0
    disruptions: int = 0
    consecutive: int = 0
    released: int = 0
    replaced: int = 0
    in_place: int = 0
    round: int = 0
    snapshot_step: int = 0
    file_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure that ended an attempt or, with ``in_place``, one of its rounds.

    Text comes from strangers and is already bounded and escaped.
    """

    attempt: int
    replica: int
    cls: str  # "class" in the API
    reason: str
    message: str
    detected_at: datetime
    pod: str = ""
    node: str = ""
    round: int | None = None
    rank: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    in_place: bool = False  # processes were restarted and the pods kept
    replaced: bool = False  # only lost pods were replaced
    step: int | None = None  # that it had finished
    exception: str = ""  # the exception, or another cause, in one line
    charged_to: str = ""  # the budget that it was charged to: maxRestarts or maxDisruptions
    charge: int | None = None  # how much of that was used up with it
    kind: str = ""  # of the launcher's report; it is not stored


@dataclass(frozen=True, slots=True)
class Proof:
    """Whether steps that a restart did again came out ``equal``; ``message``: for the condition."""

    equal: bool
    message: str


@dataclass(frozen=True, slots=True)
class Straggler:
    """The rank for which the others wait, for a ``share`` of each step."""

    rank: int
    share: float
    fetching: bool = False  # it waits for its data; else it computes


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of training: finished optimizer steps; a loss without dimension.

    ``printed_step``, ``printed_total_steps``: by a program that reports none. They are only shown:
    by ``step`` a loss is judged.
    """

    step: int | None = None
    total_steps: int | None = None
    printed_step: int | None = None
    printed_total_steps: int | None = None
    metrics: Mapping[str, float] | None = None  # the program's own numbers
    loss: float | None = None
    samples_per_second: float | None = None
    steps_per_second: float | None = None
    snapshot_step: int | None = None
    snapshot_every: int | None = None  # steps, where the trainer chooses
    file_at: datetime | None = None
    resumed: str = ""  # whose snapshot it began from, if not this job's with this program
    other_job: bool = False  # that was another job's; it is not stored
    proof: Proof | None = None  # as it was reported; the condition ResumeProven keeps it
    straggler: Straggler | None = None  # the same, for the condition Straggling
    connected: bool | None = None  # replica 0 with another one; for a condition
    silent: int = 0  # seconds since any rank printed a line, see observe.py; for a condition
    updated_at: datetime | None = None

    @property
    def shown(self) -> tuple[int | None, int | None]:
        """Return the steps to show, and of how many; None: unknown."""
        if self.step is not None:
            return self.step, self.total_steps
        return self.printed_step, self.printed_total_steps or None


@dataclass(frozen=True, slots=True)
class Timings:
    """UTC times of the operator's clock, stored so that deadlines survive its restart."""

    started_at: datetime | None = None
    attempt_started_at: datetime | None = None
    placed_at: datetime | None = None  # when a pod of its PodGroup was first seen on a node
    running_at: datetime | None = None
    last_round_at: datetime | None = None  # the newest restart in place of this attempt
    next_restart_at: datetime | None = None
    replacing_since: datetime | None = None  # the first loss of a replacement under way
    completed_at: datetime | None = None
    last_recovery_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Eta:
    """An estimate of when training ends; ``remaining``: in words, from when it was made."""

    at: datetime
    remaining: str = ""


@dataclass(frozen=True, slots=True)
class Stalled:
    """What the condition Stalled says, as data: more of it is news, other words are none.

    ``known``: "" while no cause is known, Cause, or Cure if a person can end the wait. ``until``:
    so long the other pods wait.
    """

    known: Known = ""
    until: datetime | None = None


@dataclass(frozen=True, slots=True)
class Replicas:
    """Counts of the current attempt's pods."""

    desired: int = 0
    active: int = 0
    ready: int = 0
    succeeded: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class Operator:
    """Which operator acts on the job, by its Lease, and which ``other`` asks whether it lives.

    ``asked`` is by the clock of the one that asks, ``answered`` by that of the one that acts.
    """

    lease: str = ""  # NAMESPACE/NAME
    version: str = ""
    other: str = ""  # its Lease
    asked: datetime | None = None
    answered: datetime | None = None


@dataclass(frozen=True, slots=True)
class Status:
    """The whole .status. ``phase`` None: no status was ever written.

    ``members_since`` is the attempt of the last whole start, ``min_attempt_by_seat`` that of each
    later replacement. ``can_wait_for_replacement``: the gang's launchers would. ``serving``: the
    seats of replicas that other pods than their own serve. ``pod_group``: the PodGroup of this
    attempt, or of an earlier one until that is removed; "": there is none. ``unknown``: fields of
    a newer operator, which are kept unless they are large.
    """

    phase: Phase | None = None
    reason: str = ""  # why the job is not as it should be, in one word of its conditions
    message: str = ""  # the same in few words
    stalled: Stalled = field(default_factory=Stalled)
    observed_generation: int = 0
    conditions: tuple[Condition, ...] = ()
    attempt: int = 0
    members_since: int = 0
    min_attempt_by_seat: Mapping[int, int] = field(default_factory=dict)
    can_wait_for_replacement: bool = False
    serving: Mapping[int, int] = field(default_factory=dict)
    pod_group: str = ""
    template_hash: str = ""
    snapshot_hash: str = ""  # empty: stored by an older operator, or there is no snapshot
    restarts: Restarts = field(default_factory=Restarts)
    replicas: Replicas = field(default_factory=Replicas)
    succeeded: frozenset[int] = frozenset()
    progress: Progress = field(default_factory=Progress)
    failures: tuple[Failure, ...] = ()
    avoided_nodes: tuple[str, ...] = ()  # failed or about to go: new pods go elsewhere
    handed_over: tuple[str, ...] = ()  # node and signal, each acted on once
    timings: Timings = field(default_factory=Timings)
    ledger: Ledger = field(default_factory=Ledger)
    goodput: float | None = None
    eta: Eta | None = None
    operator: Operator = field(default_factory=Operator)
    unknown: Mapping[str, Any] = field(default_factory=dict)

    @property
    def terminal(self) -> bool:
        """Tell whether the job is Succeeded or Failed: absorbing."""
        return self.phase in TERMINAL_PHASES

    @property
    def parked(self) -> bool:
        """Tell whether no pods are wanted now: those of the last attempt, if any, are to go."""
        return self.phase in (None, "Suspended") or self.members_since > self.attempt

    @property
    def queued(self) -> bool:
        """Tell whether it is parked until Kueue admits it."""
        return self.phase == "Pending" and self.members_since > self.attempt

    @property
    def replacing(self) -> bool:
        """Tell whether lost pods are being replaced while the other members wait."""
        return self.attempt > self.members_since and self.phase in ("Restarting", "Starting")

    def replacing_since(self, now: datetime) -> datetime:
        """Return when the replacement under way began; a time ahead is another clock's."""
        since = self.timings.replacing_since if self.replacing else None
        return min(since or now, now)

    def min_attempt(self, replica: int | None) -> int:
        """Return the lowest attempt whose pod is this replica's member (rule O1)."""
        birth = 0 if replica is None else self.min_attempt_by_seat.get(replica, 0)
        return max(birth, self.members_since)

    @property
    def hub(self) -> int:
        """Return the hub's number: the attempt in which its pod, replica 0's, was made."""
        return min(self.min_attempt(0), self.attempt)

    @property
    def last_failure(self) -> Failure | None:
        """Return the newest recorded failure."""
        return self.failures[-1] if self.failures else None

    @property
    def last_loss(self) -> Failure | None:
        """Return the newest recorded failure that ended an attempt."""
        return next((f for f in reversed(self.failures) if not f.in_place), None)

    def condition(self, type_: str) -> Condition | None:
        """Return the condition of that type, if it was ever set."""
        return next((c for c in self.conditions if c.type == type_), None)


def to_dict(status: Status) -> dict[str, Any]:
    """Return the JSON form without absent values."""
    return {**status.unknown, **_present(_fields(status))}


def _fields(status: Status) -> dict[str, Any]:
    last, replicas, restarts = status.last_failure, status.replicas, status.restarts
    # For a job that has ended "0/3" would read as trouble.
    ready = "" if status.terminal else f"{replicas.ready}/{replicas.desired}"
    return {
        "observedGeneration": status.observed_generation,
        "phase": status.phase,
        "reason": status.reason,
        "message": status.message,
        "stalled": _written(status.stalled, _STALLED) or None,
        "conditions": [c.to_dict(status.observed_generation) for c in status.conditions],
        "attempt": status.attempt,
        "membersSince": status.members_since,
        "births": format_pairs(status.min_attempt_by_seat),
        "holds": status.can_wait_for_replacement,
        "serving": format_pairs(status.serving),
        "podGroup": status.pod_group,
        "templateHash": status.template_hash,
        "snapshotHash": status.snapshot_hash,
        "restarts": _written(restarts, _RESTARTS),
        "restarted": f"{restarts.total}" + f"+{restarts.in_place}" * bool(restarts.in_place),
        "ready": ready,
        "replicas": asdict(replicas),
        "succeededReplicas": format_ranges(status.succeeded),
        "progress": _progress_to_dict(status.progress) or None,
        "lastFailure": _written(last, _FAILURE) if last else None,
        "failures": [_written(one, _FAILURE) for one in status.failures] or None,
        "avoidedNodes": list(status.avoided_nodes) or None,
        "handedOver": list(status.handed_over) or None,
        "timings": _written(status.timings, _TIMINGS) or None,
        "ledger": ledger.to_dict(status.ledger),
        "goodput": status.goodput,
        "eta": _written(status.eta, _ETA) if status.eta else None,
        "operator": _written(status.operator, _OPERATOR) or None,
    }


def decided(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a status without what changes with every write."""
    return {name: value for name, value in body.items() if name not in _BOOKED}


#: JSON of the fields that a newer operator has added, all together.
_UNKNOWN_BYTES: Final = 4096


def _unknown(raw: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in sorted(raw.keys() - _NAMES):
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            if len(json.dumps({**found, name: raw[name]}, allow_nan=False)) <= _UNKNOWN_BYTES:
                found[name] = raw[name]
    return found


def from_dict(body: object, replicas: int = MAX_REPLICAS) -> Status:
    """Parse .status of a job with so many replicas; what does not parse counts as absent."""
    raw = mapping(body)
    counts, births = mapping(raw.get("replicas")), parse_pairs(raw.get("births"))
    phase, attempt = raw.get("phase"), integer(raw.get("attempt"))
    attempt = attempt if 0 <= attempt < MOST_ATTEMPTS else 0
    # Later than that, its pods would belong to no attempt.
    since = min(integer(raw.get("membersSince")), attempt + (phase in ("Suspended", "Pending")))
    since = since if since > 0 else attempt
    handed_over, eta = sequence(raw.get("handedOver")), _read(raw.get("eta"), _ETA)
    return Status(
        phase=phase if phase in PHASES else None,
        reason=text(raw.get("reason"), 1024),
        message=text(raw.get("message"), _TEXT),
        stalled=Stalled(**_read(raw.get("stalled"), _STALLED)),
        # The CRD's default is -1, which a condition may not say.
        observed_generation=max(0, integer(raw.get("observedGeneration"))),
        conditions=tuple(_conditions(raw.get("conditions"))),
        attempt=attempt,
        members_since=since,
        min_attempt_by_seat={r: n for r, n in births.items() if since < n <= attempt},
        can_wait_for_replacement=raw.get("holds") is True,
        serving=parse_pairs(raw.get("serving")),
        pod_group=text(raw.get("podGroup"), 253),
        template_hash=text(raw.get("templateHash"), 128),
        snapshot_hash=text(raw.get("snapshotHash"), 128),
        restarts=Restarts(**_read(raw.get("restarts"), _RESTARTS)),
        replicas=Replicas(**{f.name: counter(counts.get(f.name)) for f in fields(Replicas)}),
        succeeded=parse_ranges(raw.get("succeededReplicas"), replicas),
        progress=Progress(**_read(raw.get("progress"), _PROGRESS)),
        failures=tuple(_failures(raw.get("failures"))),
        avoided_nodes=names(sequence(raw.get("avoidedNodes"))[-2 * MAX_AVOIDED :])[-MAX_AVOIDED:],
        handed_over=tuple(text(one, 640) for one in handed_over[:MAX_HANDED_OVER]),
        timings=Timings(**_read(raw.get("timings"), _TIMINGS)),
        ledger=ledger.from_dict(raw.get("ledger")),
        goodput=opt_number(raw.get("goodput")),
        eta=Eta(**eta) if eta["at"] else None,
        operator=Operator(**_read(raw.get("operator"), _OPERATOR)),
        unknown=_unknown(raw),
    )


def with_condition(
    reported: Sequence[Condition], type_: str, value: bool, reason: str, message: str, now: datetime
) -> tuple[Condition, ...]:
    """Set one condition; its transition time moves only when its status changes."""
    status: Literal["True", "False"] = "True" if value else "False"
    old = next((c for c in reported if c.type == type_), None)
    since = old.since if old and old.status == status else now.replace(microsecond=0)
    new = Condition(type_, status, reason, message, since)
    if old is None:
        return (*reported, new)
    return tuple(new if c.type == type_ else c for c in reported)


def _conditions(items: object) -> list[Condition]:
    found: dict[str, Condition] = {}
    room = _MAX_CONDITIONS - len(_CONDITIONS)
    for raw in map(mapping, sequence(items)[:_MAX_CONDITIONS]):
        status, since = raw.get("status"), parse_time(raw.get("lastTransitionTime"))
        type_, reason = text(raw.get("type"), 316), text(raw.get("reason"))
        if status in ("True", "False") and since and _REASON.fullmatch(reason):
            room -= type_ not in _CONDITIONS
            if type_ in _CONDITIONS or room >= 0:
                message = text(raw.get("message"), _MESSAGE)
                found[type_] = Condition(type_, status, reason, message, since)
    return list(found.values())


def _failures(items: object) -> list[Failure]:
    found = [_read(one, _FAILURE) for one in sequence(items)[-MAX_FAILURES:]]
    return [Failure(**one) for one in found if one["detected_at"] and one["cls"] in _CLASSES]


def metrics(raw: object) -> dict[str, float] | None:
    """Read the first numbers of a mapping, None if there is none."""
    found = ((str(name)[:40], opt_number(value)) for name, value in mapping(raw).items())
    return dict(islice(((name, value) for name, value in found if value is not None), 8)) or None


def _progress_to_dict(progress: Progress) -> dict[str, Any]:
    found = _written(progress, _PROGRESS)
    step, total = progress.shown
    if step is not None:
        found["stepOfTotal"] = f"{step}/{total}" if total else f"{step}"
    return found


#: Of a record: a field's name in the API, its name here, and its reader.
Fields = Mapping[str, tuple[str, Callable[[object], Any]]]

#: By the type of the field. One of another type is not stored.
_READERS: Final[Mapping[str, Callable[[object], Any]]] = {
    "int": counter,
    "int | None": opt_count,
    "float | None": opt_number,
    "str": partial(text, limit=_TEXT),
    "bool": lambda value: value is True,
    "datetime": parse_time,
    "datetime | None": parse_time,
}
#: The API's names that are not just ours in camelCase.
_SPELT: Final = {"cls": "class", "file_at": "fileModifiedAt"}
_NOT_STORED: Final = ("kind", "other_job", "silent")


def _table(record: type[Any], **readers: Callable[[object], Any]) -> Fields:
    """Derive a record's table from its fields; ``readers``: in place of those of their types."""
    found = {}
    for one in fields(record):
        if one.name in _NOT_STORED:
            continue
        first, *rest = one.name.split("_")
        name = _SPELT.get(one.name, first + "".join(map(str.capitalize, rest)))
        if read := readers.get(one.name, _READERS.get(str(one.type))):
            found[name] = (one.name, read)
    return found


_INT32: Final = partial(opt_count, limit=INT32)
_FAILURE: Final = _table(
    Failure,
    round=_INT32,
    rank=_INT32,
    signal=_INT32,
    exit_code=partial(opt_integer, limit=INT32),
    charged_to=lambda value: value if value in _BUDGETS else "",
    charge=_INT32,
)
_STALLED: Final = _table(Stalled, known=lambda value: value if value in get_args(Known) else "")
_RESTARTS: Final = _table(Restarts, snapshot_step=lambda value: opt_count(value) or 0)
_PROGRESS: Final = _table(Progress, metrics=metrics)
_TIMINGS: Final = _table(Timings)
_ETA: Final = _table(Eta, remaining=partial(text, limit=32))
_LEASE: Final = partial(text, limit=400)
_OPERATOR: Final = _table(Operator, lease=_LEASE, version=partial(text, limit=64), other=_LEASE)


def _read(body: object, table: Fields) -> dict[str, Any]:
    raw = mapping(body)
    return {key: read(raw.get(name)) for name, (key, read) in table.items()}


def _written(record: object, table: Fields) -> dict[str, Any]:
    return _present({name: getattr(record, key) for name, (key, _) in table.items()})


def _present(found: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out absent values; a flag that is not set is one."""
    kept = {k: v for k, v in found.items() if v is not False and v not in (None, "")}
    return {k: format_time(v) if isinstance(v, datetime) else v for k, v in kept.items()}


_NAMES: Final = frozenset(_fields(Status()))
