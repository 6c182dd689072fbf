"""What must hold of a job and its pods after every write, whoever wrote: the safety of a gang.

Input is the store's own watch, as plain writes in their order: the model records it, at the
api and cluster levels a watch of jobs, pods and Services does. Each invariant is one pure
function of what was there before and of one write; it returns what is wrong, or None. The
names say which; their numbers only keep them apart.

What holds only when nothing moves any more (counts, explanations, no orphans) is `at_rest`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from ddpjob_contract import crd
from ddpjob_operator.core.objects import compact_spec
from ddpjob_operator.core.objects.json_read import parse_pairs, parse_ranges, parse_time
from ddpjob_operator.core.objects.spec import MAX_REPLICAS
from support.objects import (
    TERMINAL,
    Object,
    attempt,
    ended,
    hurt,
    images,
    labelled,
    labels,
    leaving,
    name,
    node,
    owner,
    ready,
    replica,
    status,
    succeeded,
    trainer_state,
    trains,
    uid_of,
)

#: So long some replicas may be done and others not before the status must say so.
LINGERING = timedelta(minutes=11)
JOBS, PODS, SERVICES, NODES = crd.PLURAL, "pods", "services", "nodes"
#: What says in tests that a node is about to go.
SIGNAL = "KernelDeadlock"


Seat = tuple[int, int]  # attempt and replica of a pod


class Violation(AssertionError):  # noqa: N818 - it is what it says
    """An invariant does not hold; ``name`` says which."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"{name}: {what}")
        self.name = name


@dataclass(frozen=True, slots=True)
class Write:
    """One event of a watch. ``by``: the operator that made it, "" for anybody else."""

    kind: str  # ADDED | MODIFIED | DELETED
    plural: str
    obj: Object
    at: datetime | None = None
    by: str = ""

    @property
    def uid(self) -> str:
        return str(self.obj["metadata"]["uid"])


@dataclass
class State:
    """What the writes so far have left. ``deposed``: another operator may act on an old view.

    Then a pod may still be created for an intent that is no longer stored. Such a late pod is
    kept out of the gang by its attempt and must go, but it breaks no promise by being there.
    """

    deposed: bool = False
    jobs: dict[str, Object] = field(default_factory=dict)  # by uid, those below too
    deleted: dict[str, Object] = field(default_factory=dict)  # jobs, as they were at last
    pods: dict[str, dict[str, Object]] = field(default_factory=dict)  # by uid of the job
    services: dict[str, Object] = field(default_factory=dict)
    unserved: set[str] = field(default_factory=set)  # jobs whose Service somebody else took
    late: set[str] = field(default_factory=set)  # pods
    tampered: set[str] = field(default_factory=set)  # pods whose labels somebody changed
    top: dict[str, int] = field(default_factory=dict)  # highest attempt of any pod, by job
    silent: set[str] = field(default_factory=set)  # nodes: their pods are lost, and look well
    going: set[str] = field(default_factory=set)  # nodes that once had the condition SIGNAL
    hurt: dict[str, set[Seat]] = field(default_factory=dict)  # of lost pods, by job
    counted: dict[str, set[Seat]] = field(default_factory=dict)  # of losses that were counted
    done: dict[str, int] = field(default_factory=dict)  # attempt that has succeeded, by job
    proven: dict[str, set[Seat]] = field(default_factory=dict)  # successes, by job
    gangs: dict[str, int] = field(default_factory=dict)  # membersSince of its gang, by uid of a pod
    #: Attempts in which only lost pods were made, by job, and the replicas that had one there.
    born: dict[tuple[str, int], set[int]] = field(default_factory=dict)
    #: Who made the first pod of replica 0, by job and attempt.
    hubs: dict[tuple[str, int], str] = field(default_factory=dict)

    def before(self, write: Write) -> Object | None:
        """The object as it was."""
        if write.plural == JOBS:
            return self.jobs.get(write.uid)
        return self.pods.get(owner(write.obj) or "", {}).get(write.uid)

    def gang(self, job: str) -> list[Object]:
        """The pods of a job, without late ones and those of which nobody knows what they are."""
        outside = self.late | self.tampered
        return [p for uid, p in self.pods.get(job, {}).items() if uid not in outside]

    def begin(self) -> None:
        """Take the members that running gangs lack for lost before the history began."""
        for uid, job in self.jobs.items():
            now, there = status(job), {replica(pod) for pod in self.gang(uid)}
            if now.get("phase") == "Running":
                seats = set(range(job["spec"].get("replicas", 1))) - there
                self.hurt.setdefault(uid, set()).update((_floor(seat, now), seat) for seat in seats)

    def take(self, write: Write) -> None:
        """Let the write happen."""
        if write.plural == JOBS:
            self._take_job(write)
        elif write.plural == SERVICES:
            _put(self.services, write)
            if write.kind == "DELETED" and not write.by:
                self.unserved.add(owner(write.obj) or "")
        elif write.plural == NODES:
            self._notice_silence(write)
            conditions = status(write.obj).get("conditions") or ()
            if any((c["type"], c["status"]) == (SIGNAL, "True") for c in conditions):
                self.going.add(name(write.obj))
        elif write.plural == PODS and (job := owner(write.obj)) is not None:
            self._take_pod(job, write)

    def _take_job(self, write: Write) -> None:
        if (pair := _statuses(self, write)) and (loss := _counted(pair)):
            mine = {seat for seat in self.hurt.get(write.uid, ()) if seat[1] == loss["replica"]}
            self.counted.setdefault(write.uid, set()).update(mine)
        _put(self.jobs, write)
        now = status(write.obj)
        if write.kind == "ADDED":  # a job of before the history began
            done = {(now.get("attempt", 0), r) for r in _done(now)}
            self.proven.setdefault(write.uid, set()).update(done)
            for pod in self.pods.get(write.uid, {}).values():
                self._notice_gang(pod)
        if now.get("phase") == "Starting" and now.get("attempt", 0) > now.get("membersSince", 0):
            self.born.setdefault((write.uid, now["attempt"]), set())
        if write.kind == "DELETED":
            self.deleted[write.uid] = write.obj
            self.done.pop(write.uid, None)

    def _take_pod(self, job: str, write: Write) -> None:
        if untimely(self, write):
            self.late.add(write.uid)
        if relabels(self, write):
            self.tampered.add(write.uid)
            self.hurt.setdefault(job, set()).add(_seat(self.before(write) or write.obj))
        _put(self.pods.setdefault(job, {}), write)
        if write.kind == "ADDED":
            self._notice_gang(write.obj)
            key = (job, attempt(write.obj) or 0)
            self.born.get(key, set()).add(replica(write.obj) or 0)
            if write.by and replica(write.obj) == 0 and write.uid not in self.late:
                self.hubs.setdefault(key, write.by)
        self.top[job] = max(self.top.get(job, 0), attempt(write.obj) or 0)
        self._notice_success(job, write)
        if write.kind == "DELETED" or hurt(write.obj) or node(write.obj) in self.silent:
            self.hurt.setdefault(job, set()).add(_seat(write.obj))

    def _notice_gang(self, pod: Object) -> None:
        now = _asked(self, pod)
        if now and _belongs(pod, now):
            self.gangs[uid_of(pod)] = now.get("membersSince", 0)

    def _notice_silence(self, write: Write) -> None:
        if write.kind != "DELETED" and ready(write.obj):
            self.silent.discard(name(write.obj))
            return
        self.silent.add(name(write.obj))
        for job, pods in self.pods.items():
            lost = {_seat(pod) for pod in pods.values() if node(pod) == name(write.obj)}
            self.hurt.setdefault(job, set()).update(lost)

    def _notice_success(self, job: str, write: Write) -> None:
        known = self.jobs.get(job)
        if succeeded(write.obj) and write.kind != "DELETED":
            done, now = _served(write.obj), status(known or {}).get("attempt", 0)
            seat = _seat(write.obj) if done == replica(write.obj) else (now, done)
            self.proven.setdefault(job, set()).add(seat)
        if known is None:
            return
        now, wanted = status(known).get("attempt", 0), known["spec"].get("replicas", 1)
        mine = [p for p in self.gang(job) if _belongs(p, status(known)) and succeeded(p)]
        if {_served(p) for p in mine} >= set(range(wanted)):
            self.done.setdefault(job, now)
        elif self.done.get(job) == now:
            del self.done[job]  # somebody removed a pod before the success was stored


Invariant = Callable[[State, Write], str | None]


# --- The gang -----------------------------------------------------------------------------


def i1_single_incarnation(state: State, write: Write) -> str | None:
    """Never do pods of two gangs, or two pods of one replica, train side by side."""
    if write.plural != PODS or write.kind == "DELETED" or not trains(write.obj):
        return None
    if write.uid in state.late | state.tampered or untimely(state, write) or relabels(state, write):
        return None
    if write.kind == "ADDED" and not write.by and _stored(state, write.obj) is None:
        return None  # of before the history began
    others = [p for p in state.gang(owner(write.obj) or "") if uid_of(p) != write.uid and trains(p)]
    for other in others:
        if gang_of(state, other) != gang_of(state, write.obj):
            return f"{name(write.obj)} trains beside {name(other)} of another gang"
        if replica(other) == replica(write.obj):
            return f"two pods of replica {replica(other)} train"
    return None


def i1_barrier(state: State, write: Write) -> str | None:
    """No pod is created while an object is there that is older than the gang's members."""
    if not _created(write) or untimely(state, write):
        return None
    mine, now = attempt(write.obj) or 0, _asked(state, write.obj)
    older = (p for p in state.gang(owner(write.obj) or "") if (attempt(p) or 0) < mine)
    old = [p for p in older if not _belongs(p, now)]
    if not old:
        return None
    return f"{name(write.obj)} of attempt {mine} is created beside {name(old[0])} of an older one"


def i3_service_first(state: State, write: Write) -> str | None:
    """A gang's headless Service stands before its first pod."""
    job = owner(write.obj)
    if not _created(write) or job in state.unserved:
        return None
    found = any(owner(service) == job for service in state.services.values())
    return None if found else f"{name(write.obj)} is created, its Service is not there"


def i2_one_birth(state: State, write: Write) -> str | None:
    """Where lost pods are replaced, an attempt and a replica name one pod: one hub per number."""
    there = state.born.get((owner(write.obj) or "", attempt(write.obj) or 0), ())
    if not _created(write) or replica(write.obj) not in there:
        return None
    return f"{name(write.obj)} of attempt {attempt(write.obj)} is made a second time"


def i2_one_hub(state: State, write: Write) -> str | None:
    """Nor does another operator than the first make a second pod with the hub of an attempt."""
    maker = state.hubs.get((owner(write.obj) or "", attempt(write.obj) or 0))
    mine = _created(write) and replica(write.obj) == 0 and not untimely(state, write)
    if not mine or maker in (None, write.by):
        return None
    return f"{name(write.obj)} of attempt {attempt(write.obj)} was made by {maker} before"


def i4_attempt_monotone(state: State, write: Write) -> str | None:
    """Attempts only grow, one at a time (or past what a pod already carries)."""
    if (pair := _statuses(state, write)) is None:
        return None
    old, new = pair
    was, now = old.get("attempt", 0), new.get("attempt", 0)
    highest = max(was, state.top.get(write.uid, 0))
    if now < was:
        return f"the attempt falls from {was} to {now}"
    if now > highest + 1:
        return f"the attempt jumps from {was} to {now}"
    if new.get("membersSince", 0) < old.get("membersSince", 0):
        return f"membersSince falls to {new.get('membersSince', 0)}"
    return None


def i4_one_cause(state: State, write: Write) -> str | None:
    """An attempt's end is counted once, with one recorded cause."""
    if (pair := _statuses(state, write)) is None:
        return None
    old, new = pair
    grown = _restarts(new, "total") - _restarts(old, "total")
    ends = [f["attempt"] for f in new.get("failures") or () if not f.get("inPlace")]
    if ends != sorted(set(ends)):
        return f"one attempt has two causes: {ends}"
    if grown not in (0, 1):
        return f"restarts.total changes by {grown} in one write"
    if grown and not (ends and ends[-1] == old.get("attempt")):
        return f"a restart is counted without a cause in attempt {old.get('attempt')}: {ends}"
    if grown and new.get("attempt", 0) <= old.get("attempt", 0):
        return "a restart is counted and no new attempt begins"
    return None


def i4_cause_earned(state: State, write: Write) -> str | None:
    """Who counts a loss has lost something, or its node is about to go: a healthy gang stays."""
    if (pair := _statuses(state, write)) is None or state.deposed:
        return None
    loss, hurt = _counted(pair), state.hurt.get(write.uid, set())
    if loss is None or loss.get("class") == "Startup" or _handed_over(state, loss):
        return None
    if not _members(hurt, pair[0]):
        return f"a loss of attempt {loss['attempt']} is counted, and all its pods are well"
    mine = {seat for seat in hurt if seat[1] == loss["replica"] and _members({seat}, pair[0])}
    if mine and mine <= state.counted.get(write.uid, set()):
        return f"the loss of replica {loss['replica']} is counted a second time"
    return None


def _handed_over(state: State, loss: dict[str, Any]) -> bool:
    return loss.get("reason") == "HandedOver" and loss.get("node") in state.going


def i4_replaces_the_lost(state: State, write: Write) -> str | None:
    """Only the seats of lost pods are filled anew: who waits for them keeps his."""
    if (pair := _statuses(state, write)) is None or state.deposed:
        return None
    old, new = pair
    if new.get("membersSince", 0) != old.get("membersSince", 0):
        return None
    lost = _members(state.hurt.get(write.uid, set()), old)
    for pod in state.gang(write.uid):
        number = replica(pod)
        given_up = _belongs(pod, old) and not _belongs(pod, new)
        going = (pod.get("spec") or {}).get("nodeName") in state.going
        if given_up and number not in lost and not going:
            return (
                f"{name(pod)} is well, and attempt {new.get('attempt')} makes another in its place"
            )
    return None


def i4_intent_first(state: State, write: Write) -> str | None:
    """Nothing is done to a pod that no stored status asks for."""
    if write.plural != PODS or not write.by:
        return None
    if write.kind == "ADDED":
        if state.deposed or not untimely(state, write):
            return None
        now = _asked(state, write.obj)
        where = f"{now.get('phase')}, attempt {now.get('attempt')}" if now else "no such job"
        return f"{name(write.obj)} of attempt {attempt(write.obj)} is created; stored: {where}"
    now = _stored(state, write.obj)
    if now is None or not _belongs(write.obj, now) or now.get("phase") in TERMINAL:
        return None
    return f"{name(write.obj)}, a member of attempt {attempt(write.obj)}, is deleted"


def i16_bijection(state: State, write: Write) -> str | None:
    """Replica r of N is pod <job>-r, knows its rank, its attempt and the size of the world."""
    if not _created(write):
        return None
    job = state.jobs.get(owner(write.obj) or "")
    trainer = compact_spec.trainer_container(write.obj["spec"])
    env = {one["name"]: one.get("value") for one in trainer.get("env") or ()}
    told = (env.get("DDPJOB_REPLICA"), env.get("DDPJOB_ATTEMPT"), env.get("PET_NODE_RANK"))
    mine = (str(replica(write.obj)), str(attempt(write.obj)), str(replica(write.obj)))
    if told != mine:
        return f"{name(write.obj)} is told {told}, its labels say {mine}"
    right = job is None or name(write.obj) == f"{name(job)}-{replica(write.obj)}"
    return None if right else f"{name(write.obj)} carries replica {replica(write.obj)}"


def i21_one_template(state: State, write: Write) -> str | None:
    """All pods of a gang are made of one template."""
    if not _created(write) or untimely(state, write):
        return None
    for other in state.gang(owner(write.obj) or ""):
        if gang_of(state, other) == gang_of(state, write.obj) and images(other) != images(
            write.obj
        ):
            return f"{name(write.obj)} and {name(other)} differ: {images(other)}"
    return None


# --- Counts and ends ----------------------------------------------------------------------


def i5_budget(state: State, write: Write) -> str | None:
    """Charged and free restarts stay within their limits; each restart is one or the other."""
    if (pair := _statuses(state, write)) is None:
        return None
    old, new = pair
    limits = _limits(state.jobs.get(write.uid), write.obj)
    for kind, limit in limits.items():
        if _restarts(new, kind) > max(limit, _restarts(old, kind)):
            return f"restarts.{kind} is {_restarts(new, kind)}, allowed are {limit}"
    if _restarts(new, "total") < _restarts(new, "charged") + _restarts(new, "disruptions"):
        return f"more charged and free restarts than restarts: {new.get('restarts')}"
    if _restarts(new, "total") > _restarts(old, "total"):
        change = {kind: _restarts(new, kind) - _restarts(old, kind) for kind in limits}
        healed = {kind: _restarts(new, kind) for kind in limits}
        one = [{"charged": 1, "disruptions": 0}, {"charged": 0, "disruptions": 1}]
        if change not in one and healed not in one:
            return f"one restart changes the budgets by {change}"
    return None


def i6_terminal_final(state: State, write: Write) -> str | None:
    """Succeeded and Failed are never left."""
    pair = _statuses(state, write)
    if pair is None or pair[0].get("phase") not in TERMINAL:
        return None
    kept = all(pair[0].get(part) == pair[1].get(part) for part in ("phase", "attempt", "restarts"))
    return None if kept else f"{pair[0].get('phase')} becomes {pair[1].get('phase')}"


def i7_success_earned(state: State, write: Write) -> str | None:
    """Succeeded means: every replica's member ended with 0."""
    pair = _statuses(state, write)
    if pair is None or pair[1].get("phase") != "Succeeded" or pair[0].get("phase") in TERMINAL:
        return None
    now, wanted = pair[1].get("attempt", 0), write.obj["spec"].get("replicas", 1)
    lacking = set(range(wanted)) - _members(state.proven.get(write.uid, set()), pair[1])
    return f"Succeeded, but replicas {sorted(lacking)} of {now} never did" if lacking else None


def i7_success_kept(state: State, write: Write) -> str | None:
    """A gang of which every replica has succeeded is never failed, restarted or suspended."""
    pair, done = _statuses(state, write), state.done.get(write.uid)
    if pair is None or done is None or pair[0].get("phase") in TERMINAL or _parked(pair[0]):
        return None
    new = pair[1]
    lost = new.get("phase") == "Failed" or _parked(new) or new.get("attempt", 0) > done
    return f"attempt {done} had succeeded; now {new.get('phase')}" if lost else None


# --- Manners ------------------------------------------------------------------------------


def i11_ownership(state: State, write: Write) -> str | None:
    """Nothing is written to, or deleted, that a job of ours does not own by uid."""
    if not write.by or write.plural == JOBS or write.kind == "ADDED":
        return None
    known = {*state.jobs, *state.top}  # a job may have been deleted a moment ago
    return None if owner(write.obj) in known or state.deposed else f"{name(write.obj)} is not ours"


def i12_spec_untouched(state: State, write: Write) -> str | None:
    """Of a job the operator writes the status only."""
    old = state.jobs.get(write.uid)
    if write.plural != JOBS or not write.by or old is None or write.kind != "MODIFIED":
        return None
    parts = ("generation", "labels", "annotations", "finalizers")
    before, after = old["metadata"], write.obj["metadata"]
    changed = [part for part in parts if before.get(part) != after.get(part)]
    if changed or old["spec"] != write.obj["spec"]:
        return f"the operator changes {changed or 'the spec'}"
    return None


def i18_generation(state: State, write: Write) -> str | None:
    """The status never claims to have seen a spec that was not there yet."""
    if write.plural != JOBS:
        return None
    seen, now = status(write.obj).get("observedGeneration", 0), write.obj["metadata"]["generation"]
    return f"observedGeneration {seen} of {now}" if seen > now else None


def i18_suspended(state: State, write: Write) -> str | None:
    """Whoever is told that a job is suspended finds none of its pods at work."""
    pair = _statuses(state, write)
    if pair is None or not _suspended(pair[1]) or _suspended(pair[0]):
        return None
    left = [p for p in state.gang(write.uid) if not ended(p)]
    return f"{name(write.obj)} is told as suspended, {name(left[0])} runs" if left else None


def i22_booked_once(state: State, write: Write) -> str | None:
    """Every second of every seat gets into the ledger once, whoever writes it."""
    pair = _statuses(state, write)
    before, after = ((one.get("ledger") or {}) for one in pair or ({}, {}))
    old, new = parse_time(before.get("until")), parse_time(after.get("until"))
    if pair is None or old is None or new is None:
        return None
    if before["since"] != after["since"]:
        return "the ledger began again"
    took, spec = (new - old).total_seconds(), write.obj["spec"]
    sums = [sum(one["podSeconds"].values()) for one in (before, after)]
    added, pods = sums[1] - sums[0], spec.get("replicas", 1)
    least = 0 if pair[0].get("phase") == "Suspended" else took * pods
    most = took * (pods + spec.get("standby", 0))
    if least - 0.05 <= added <= most + 0.05:
        return None
    return f"{added:.3f} pod-seconds are booked for {took:.3f} s of {pods} pods"


ALWAYS: tuple[Invariant, ...] = (
    i6_terminal_final,  # first: who leaves the end breaks others, too
    i1_single_incarnation,
    i1_barrier,
    i2_one_birth,
    i2_one_hub,
    i3_service_first,
    i4_attempt_monotone,
    i4_one_cause,
    i4_cause_earned,
    i4_replaces_the_lost,
    i4_intent_first,
    i5_budget,
    i7_success_earned,
    i7_success_kept,
    i11_ownership,
    i12_spec_untouched,
    i16_bijection,
    i18_generation,
    i18_suspended,
    i21_one_template,
    i22_booked_once,
)


def check(history: Iterable[Write], state: State | None = None) -> State:
    """Hold every write against every invariant; what is left after the last one.

    Raises Violation. With the state of an earlier call only what came since is looked at.
    """
    state = State() if state is None else state
    for write in history:
        for invariant in ALWAYS:
            wrong = invariant(state, write)
            if wrong is not None:
                raise Violation(invariant.__name__, wrong)
        state.take(write)
    return state


# --- Reading objects ----------------------------------------------------------------------


def untimely(state: State, write: Write) -> bool:
    """A pod that an operator creates for an attempt that is not the one being created.

    Where pods stand by, they and those that follow a lost one are made in a running gang.
    """
    if not _created(write):
        return False
    now = _asked(state, write.obj)
    if now is None or now.get("attempt") != attempt(write.obj):
        return True
    spec = (state.jobs.get(owner(write.obj) or "") or {}).get("spec") or {}
    begins = _floor(replica(write.obj), now) == attempt(write.obj)
    later = begins or (replica(write.obj) or 0) >= spec.get("replicas", 1)
    joins = now.get("phase") == "Running" and spec.get("standby") and later
    return now.get("phase") != "Starting" and not joins


def relabels(state: State, write: Write) -> bool:
    """Somebody changes what a pod says it is."""
    old = state.before(write) if write.plural == PODS else None
    return old is not None and labels(old) != labels(write.obj)


def _created(write: Write) -> bool:
    return write.plural == PODS and write.kind == "ADDED" and bool(write.by)


def _suspended(found: Mapping[str, Any]) -> bool:
    told = found.get("conditions") or ()
    return any((c["type"], c["status"]) == ("Suspended", "True") for c in told)


def _stored(state: State, pod: Object) -> Mapping[str, Any] | None:
    job = state.jobs.get(owner(pod) or "")
    return None if job is None else status(job)


def _asked(state: State, pod: Object) -> Mapping[str, Any] | None:
    """The status last stored for the pod's job; a deletion shows late to a silent watch."""
    gone = state.deleted.get(owner(pod) or "")
    return _stored(state, pod) or (None if gone is None else status(gone))


def _floor(number: int | None, now: Mapping[str, Any]) -> int:
    """The lowest attempt whose pod is that replica's member, as the stored status has it."""
    births = parse_pairs(now.get("births"))
    return max(births.get(-1 if number is None else number, 0), int(now.get("membersSince", 0)))


def _served(pod: Object) -> int:
    """The replica that a pod served in the end, by its report where pods stand by, else its own."""
    end = trainer_state(pod).get("terminated") or {}
    words = end.get("message") or ""
    told = json.loads(words).get("replica") if words.startswith("{") else None
    return (replica(pod) or 0) if told is None else int(told)


def _seat(pod: Object) -> Seat:
    return attempt(pod) or 0, replica(pod) or 0


def _members(seats: set[Seat], now: Mapping[str, Any]) -> set[int]:
    """The replicas of those that are members, as the stored status has it."""
    current = now.get("attempt", 0)
    return {r for number, r in seats if _floor(r, now) <= number <= current}


def _belongs(pod: Object, now: Mapping[str, Any] | None) -> bool:
    """Whether the pod is a member, as the stored status has it."""
    known, number = now or {}, attempt(pod)
    return number is not None and _floor(replica(pod), known) <= number <= known.get("attempt", 0)


def gang_of(state: State, pod: Object) -> int | None:
    """The attempt in which the pod's gang began; None if its job was gone as the history began."""
    now = _asked(state, pod)
    mine = attempt(pod) if now else None
    if now and _belongs(pod, now):
        mine = now.get("membersSince", 0)
    return state.gangs.get(uid_of(pod), mine)


def _statuses(state: State, write: Write) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
    """The status before and after a write to a job."""
    old = state.jobs.get(write.uid)
    if write.plural != JOBS or write.kind != "MODIFIED" or old is None:
        return None
    return status(old), status(write.obj)


def _counted(pair: tuple[Mapping[str, Any], Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The loss that a write counts as an attempt's end; the list of them is bounded."""
    known, told = ([f for f in one.get("failures") or () if not f.get("inPlace")] for one in pair)
    if not told or (known and told[-1]["attempt"] == known[-1]["attempt"]):
        return None
    found: Mapping[str, Any] = told[-1]
    return found


def _restarts(found: Mapping[str, Any], kind: str) -> int:
    return int((found.get("restarts") or {}).get(kind, 0))


def _limits(old: Object | None, new: Object) -> dict[str, int]:
    """A limit that was lowered in between is not yet known to who counted."""
    found = {"charged": 0, "disruptions": 0}
    for job in filter(None, (old, new)):
        restart = job["spec"].get("restart") or {}
        found["charged"] = max(found["charged"], restart.get("maxRestarts", 3))
        found["disruptions"] = max(found["disruptions"], restart.get("maxDisruptions", 100))
    return found


def _put(objects: dict[str, Object], write: Write) -> None:
    if write.kind == "DELETED":
        objects.pop(write.uid, None)
    else:
        objects[write.uid] = write.obj


# --- When nothing moves any more ----------------------------------------------------------


def at_rest(state: State, now: datetime) -> Iterator[tuple[str, str]]:
    """What is wrong with a cluster in which nothing moves any more, as (name, what)."""
    for uid, pods in state.pods.items():
        if pods and uid not in state.jobs:
            yield "i10_no_orphan", f"{len(pods)} pods of a job that is gone"
    for job in state.jobs.values():
        yield from ((rule.__name__, wrong) for rule in AT_REST if (wrong := rule(state, job, now)))


def i18_counts(state: State, job: Object, now: datetime) -> str | None:
    """The status shows what is there."""
    told = status(job).get("replicas") or {}
    mine = [p for p in state.gang(uid_of(job)) if _belongs(p, status(job))]
    ready = len([p for p in mine if _alive(p)])
    if status(job).get("phase") in (*TERMINAL, "Suspended") or told.get("ready", 0) == ready:
        return None
    return f"{name(job)} shows {told.get('ready', 0)} ready, {ready} are"


def i6_cleaned(state: State, job: Object, now: datetime) -> str | None:
    """A finished or suspended job runs nothing, and no pod is left that is no member."""
    phase = status(job).get("phase")
    pods = state.pods.get(uid_of(job), {}).values()
    stuck = [p for p in pods if labelled(p) and not leaving(p)]
    if phase in (*TERMINAL, "Suspended"):
        left = [p for p in stuck if not ended(p)]
    else:
        left = [p for p in stuck if not _belongs(p, status(job))]
    return f"{name(job)} is {phase}, {name(left[0])} is still there" if left else None


def i19_explained(state: State, job: Object, now: datetime) -> str | None:
    """Either the gang trains, or the job has ended or is suspended, or a reason is given."""
    found = status(job)
    phase, wanted = found.get("phase"), job["spec"].get("replicas", 1)
    if phase in TERMINAL or (phase == "Suspended" and job["spec"].get("suspend")):
        return None
    mine = [p for p in state.gang(uid_of(job)) if _belongs(p, found)]
    on = {replica(p) for p in mine if _alive(p) or succeeded(p)}
    done = _done(found) - on  # and their pods are gone
    began = parse_time((found.get("timings") or {}).get("runningAt"))
    new = began is not None and now - began < LINGERING
    more = job["spec"].get("standby", 0)
    if phase == "Running" and wanted <= len(on | done) <= wanted + more and (new or not done):
        return None
    conditions = found.get("conditions") or ()
    told = [c for c in conditions if c["type"] in ("Stalled", "Invalid") and c["status"] == "True"]
    waits = (found.get("timings") or {}).get("nextRestartAt")
    if (told and told[0].get("reason")) or (waits and waits > now.strftime("%Y-%m-%dT%H:%M:%S")):
        return None
    return f"{name(job)} is {phase} with {len(on)} of {wanted} alive, and nothing says why"


def _parked(found: Mapping[str, Any]) -> bool:
    """Suspended, or waiting for a queue: no pod is a member."""
    return found.get("phase") == "Suspended" or found.get("membersSince", 0) > found.get(
        "attempt", 0
    )


def _done(found: Object) -> set[int]:
    return set(parse_ranges(found.get("succeededReplicas"), MAX_REPLICAS))


AT_REST = (i6_cleaned, i18_counts, i19_explained)


def _alive(pod: Object) -> bool:
    return "running" in trainer_state(pod) and not leaving(pod)
