"""A world whose nodes have little room and whose scheduler knows PodGroups; and its promises.

Each write, and each time at which everybody has done all there is to do, is held against what
gangs are promised: nobody holds half of what he needs for longer than the startup deadline, who
waits whole is left alone, and no PodGroup outlives its attempt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from ddpjob_contract import crd
from ddpjob_operator.shell.api import PODGROUPS
from model.cluster import NODES, Cluster, Object, group_of
from model.operators import Planner
from model.scheduler import HIGH
from model.story import Fate, World, finishes
from support.invariants import State, Violation, Write, check, gang_of
from support.objects import TERMINAL, attempt, leaving, name, owner, replica, status, uid_of

Gang = tuple[str, int]  # uid of the job and the attempt in which the gang began

#: The model's timers after a deadline: a resync, a grace period, a wait for the cause of a loss.
TIMERS = timedelta(seconds=75)
#: An attempt that is over, or a scheduler's eviction, is acted upon within so long.
SOON = timedelta(seconds=60)
#: Room that was taken for a higher priority is left to it for so long.
PREEMPTED = timedelta(seconds=15)
#: A gap after which an operator counts deadlines again.
_GAP = timedelta(seconds=31)
_STARTUP_SECONDS = 600


@dataclass
class Promises:
    """What was seen so far; ``excused``: gangs that met an API that was switched off."""

    blind: bool = False  # some operator may have missed something
    excused: set[Gang] = field(default_factory=set)
    users: dict[str, Gang] = field(default_factory=dict)  # of a group, by its name
    preempted: dict[str, datetime] = field(default_factory=dict)  # jobs that have to wait
    halves: dict[Gang, datetime] = field(default_factory=dict)  # since when
    left: dict[str, datetime] = field(default_factory=dict)  # groups, by uid
    forgotten: set[str] = field(default_factory=set)  # left while nobody could remove them

    def take(self, state: State, write: Write) -> None:
        """Hold one write against them; ``state`` is that before it."""
        if write.plural == PODGROUPS and write.kind == "ADDED" and not _needed(state, write.obj):
            self.forgotten.add(write.uid)  # it was under way for long
        if write.plural == crd.PLURAL and write.kind == "MODIFIED" and write.uid in state.jobs:
            self._take_status(state, write)
        if write.plural == "pods" and write.kind == "ADDED" and write.by:
            self._take_pod(state, write)

    def _take_status(self, state: State, write: Write) -> None:
        job = state.jobs[write.uid]
        old, new = status(job), status(write.obj)
        ended = (old.get("failures") or ())[-1:] != (new.get("failures") or ())[-1:]
        loss = (new.get("failures") or ({},))[-1]
        if new.get("phase") == "Suspended":
            self.preempted.pop(write.uid, None)
        elif ended and loss.get("class") == "Disruption" and self._evicted(state, job):
            assert write.at is not None
            self.preempted[write.uid] = write.at + PREEMPTED
        again = new.get("attempt", 0) > old.get("attempt", 0)
        if again and self._waits(state, job) and not state.deposed:
            what = f"{name(job)} waited whole, and attempt {new['attempt']} begins: {loss}"
            raise Violation("g4_waits_in_peace", what)

    def _evicted(self, state: State, job: Object) -> bool:
        """Those who look at its pods see that a higher priority takes their room."""
        pods = state.gang(uid_of(job)) if status(job).get("podGroup") and not self.blind else ()
        since = status(job).get("membersSince", 0)
        told = (c for p in pods if gang_of(state, p) == since for c in _conditions(p))
        return any(c.get("reason") == "PreemptionByScheduler" for c in told)

    def _waits(self, state: State, job: Object) -> bool:
        """All of a gang is there with its group and nobody has a node, nor was anybody lost."""
        now, uid = status(job), uid_of(job)
        pods = _members(state, job)
        whole = now.get("phase") == "Starting" and _begins(now) and now.get("podGroup")
        whole = whole and len(pods) == job["spec"]["replicas"] and not now.get("avoidedNodes")
        lost = any(a >= now.get("membersSince", 0) for a, _ in state.hurt.get(uid, ()))
        free = not any(pod["spec"].get("nodeName") for pod in pods)
        named = all(group_of(pod) == now.get("podGroup") for pod in pods)
        return bool(whole and free and named and not lost) and _gang(job) not in self.excused

    def _take_pod(self, state: State, write: Write) -> None:
        job = state.jobs.get(owner(write.obj) or "")
        began = gang_of(state, write.obj)
        if job is None or began is None or began != status(job).get("membersSince"):
            return  # late: a gang that is over
        gang, group = (uid_of(job), began), group_of(write.obj)
        until = self.preempted.get(uid_of(job))
        if until and write.at and write.at < until:
            raise Violation("g7_leaves_room", f"{name(write.obj)} is made before {until}")
        if (replica(write.obj) or 0) >= job["spec"]["replicas"]:
            if group:
                raise Violation("g1_one_group", f"{name(write.obj)} stands by in {group}")
            return
        others = {group_of(pod) for pod in _members(state, job) if gang_of(state, pod) == began}
        if gang not in self.excused and others - {group}:
            raise Violation("g1_one_group", f"{name(write.obj)}: {group!r} beside {others}")
        if group and self.users.setdefault(group, gang) != gang:
            raise Violation("g2_one_gang", f"{group} was that of {self.users[group]}, now {gang}")

    def excuse(self, state: State, groups: list[Object]) -> None:
        """The API is not served, or an operator takes it to be so."""
        self.excused |= set(map(_gang, state.jobs.values()))
        self.forgotten |= {uid_of(group) for group in groups if not _needed(state, group)}

    def must_be_placed_whole(self, state: State) -> None:
        """No scheduler that knows the group has placed a part of a gang of which none was lost."""
        for job in state.jobs.values():
            now = status(job)
            lost = any(a >= now.get("membersSince", 0) for a, _ in state.hurt.get(uid_of(job), ()))
            if not now.get("podGroup") or _gang(job) in self.excused or lost:
                continue
            placed = _placed(state, job)
            if _begins(now) and 0 < placed < job["spec"]["replicas"]:
                raise Violation("g5_placed_whole", f"{name(job)} has {placed} pods on nodes")

    def look(self, state: State, groups: list[tuple[Object, bool]], now: datetime) -> None:
        """Note halves, and groups that nobody needs; each group with whether a pod keeps it."""
        halves = {_gang(job) for job in state.jobs.values() if _half(state, job)}
        self.halves = {gang: self.halves.get(gang, now) for gang in halves}
        left = {uid_of(one) for one, kept in groups if not (kept or _needed(state, one))}
        self.left = {uid: self.left.get(uid, now) for uid in left - self.forgotten}

    def must_be_kept(self, state: State, now: datetime, calm: datetime) -> None:
        """Nobody is late, measured from ``calm``: nothing has disturbed the operators since."""
        for gang, since in self.halves.items():
            job = state.jobs[gang[0]]
            most = timedelta(seconds=job["spec"].get("startupDeadlineSeconds", _STARTUP_SECONDS))
            if now - max(since, calm) > most + TIMERS:
                what = f"{name(job)} has {_placed(state, job)} pods on nodes since {since}"
                raise Violation("g3_half", what)
        late = [uid for uid, since in self.left.items() if now - max(since, calm) > SOON]
        if late:
            raise Violation("g6_group_goes", f"PodGroups {late} are left of attempts that are over")


class GroupWorld(World):
    """Nodes have room for ``rooms`` pods each, and PodGroups are served."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        fate: Fate = finishes,
        rooms: int = 2,
        **more: Planner,
    ) -> None:
        cluster = Cluster(gang_api=True, rooms=dict.fromkeys(NODES, rooms))
        self.promises = Promises()
        self._calm, self._steady = cluster.now, 0
        super().__init__(loop, fate=fate, cluster=cluster, **more)

    def verify(self) -> None:
        self.promises.blind = self.state.deposed or bool(self.frozen)
        self.promises.blind |= any(one.blind for one in self.operators)
        for write in self.cluster.history[self.checked :]:
            self.promises.take(self.state, write)
            self.state = check((write,), self.state)
            self.checked += 1
        super().verify()
        groups = self.cluster.groups()
        if not self.cluster.places_groups or any(not one.gang_api for one in self.operators):
            self.promises.excuse(self.state, groups)
        self.promises.must_be_placed_whole(self.state)
        kept = [(one, self.cluster.protected(name(one))) for one in groups]
        self.promises.look(self.state, kept, self.cluster.now)
        if self.frozen or self.named != self._steady or not self.operators:
            self.disturbed()

    def disturbed(self) -> None:
        """From now on deadlines count again."""
        self._calm, self._steady = self.cluster.now, self.named

    def sleep(self, seconds: float | None = None) -> None:
        if all(one.at_rest and one.leading for one in self.operators):
            self.promises.must_be_kept(self.state, self.cluster.now, self._calm)
        before = self.cluster.now
        super().sleep(seconds)
        if self.cluster.now - before > _GAP:
            self.disturbed()

    def heal(self) -> None:
        """There is room for the largest gang, not for two."""
        super().heal()
        self.cluster.gang_api = True
        most = max((job["spec"]["replicas"] for job in self.cluster.jobs()), default=1)
        self.cluster.rooms = dict.fromkeys(NODES, (most + 1) // 2)
        self.operator.discover()
        self.disturbed()


def scheduled(gang: str = "Auto", *, high: bool = False) -> dict[str, Any]:
    """The field of a job's spec."""
    return {"scheduling": {"gang": gang, **({"priorityClassName": HIGH} if high else {})}}


def _gang(job: Object) -> Gang:
    return uid_of(job), status(job).get("membersSince", 0)


def _begins(now: Any) -> bool:
    """It is about a whole start, not a replacement."""
    return now.get("phase") == "Starting" and now.get("attempt") == now.get("membersSince")


def _members(state: State, job: Object) -> list[Object]:
    """Those that count for the gang, without who stands by or is about to go."""
    since, replicas = status(job).get("membersSince", 0), job["spec"]["replicas"]
    mine = (p for p in state.gang(uid_of(job)) if (replica(p) or 0) < replicas)
    return [p for p in mine if (attempt(p) or 0) >= since and not leaving(p)]


def _conditions(pod: Object) -> Sequence[Object]:
    return status(pod).get("conditions") or ()


def _placed(state: State, job: Object) -> int:
    return len([pod for pod in _members(state, job) if pod["spec"].get("nodeName")])


def _half(state: State, job: Object) -> bool:
    return _begins(status(job)) and 0 < _placed(state, job) < job["spec"]["replicas"]


def _needed(state: State, group: Object) -> bool:
    """Its job lives, and it is that of the gang of now."""
    job = state.jobs.get(owner(group) or "")
    if job is None or leaving(job) or status(job).get("phase") in (*TERMINAL, "Suspended"):
        return False
    return bool(status(job).get("podGroup") == name(group))
