"""What looks at a cluster say of its gangs: placed when, ever in parts, and in which order.

gangs.py takes a look about twice a second; all that is judged is judged here, from those looks and
the nodes' slots, without the operator's or the scheduler's own words. Nothing here asks anybody.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: kube-scheduler tries a waiting gang after a pause of up to 10 s, and looks are not gapless.
BACKOFF_SECONDS = 12.0
#: The same for a gang that has others preempted: their pods have 30 s to end.
PREEMPTING_SECONDS = BACKOFF_SECONDS + 35.0


@dataclass(frozen=True, slots=True)
class Gang:
    """One gang as it is applied; ``at`` and ``seconds`` (of its training) are planned."""

    name: str
    replicas: int
    slots: int  # of each pod
    priority: int
    at: float
    seconds: float

    @property
    def need(self) -> int:
        return self.replicas * self.slots


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod in one look. ``node``: "" while it waits; ``nominated``: where room is kept for it."""

    gang: str
    uid: str
    replica: int
    attempt: int
    node: str
    nominated: str
    phase: str

    @property
    def holds(self) -> bool:
        return bool(self.node) and self.phase not in ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True)
class Look:
    """All pods at one time, and status.membersSince of the jobs by name."""

    at: float
    pods: tuple[Pod, ...]
    since: Mapping[str, int] = field(default_factory=dict)

    def of(self, gang: str) -> list[Pod]:
        return [pod for pod in self.pods if pod.gang == gang]


@dataclass(frozen=True, slots=True)
class Inversion:
    """A later gang, of no higher priority, that was placed before an earlier one."""

    earlier: str
    later: str
    at: float
    free: int
    need: int
    reason: str
    explained: bool


def placed(gang: Gang, looks: Sequence[Look]) -> int | None:
    """The first look at which all pods of one attempt have a node."""
    for number, look in enumerate(looks):
        on: dict[int, set[int]] = defaultdict(set)
        for pod in look.of(gang.name):
            if pod.node:
                on[pod.attempt].add(pod.replica)
        if any(len(replicas) == gang.replicas for replicas in on.values()):
            return number
    return None


def halves(gang: Gang, looks: Sequence[Look]) -> list[tuple[int, float, float]]:
    """(attempt, since, seconds) of each time that only some pods of a whole start had nodes.

    Replacements belong to no whole start: their attempt is later than status.membersSince.
    """
    starts = {look.since.get(gang.name, 0) for look in looks}
    found: list[tuple[int, float, float]] = []
    for attempt in sorted(starts - {0}):
        ever: set[int] = set()
        since: float | None = None
        for look in looks:
            pods = [pod for pod in look.of(gang.name) if pod.attempt == attempt]
            ever |= {pod.replica for pod in pods if pod.node}
            some = any(pod.node for pod in pods) and len(ever) < gang.replicas
            if some and since is None:
                since = look.at
            if not some and since is not None:
                found.append((attempt, since, look.at - since))
                since = None
        if since is not None:
            found.append((attempt, since, looks[-1].at - since))
    return found


class Order:
    """Why gangs were placed in the order in which they were.

    ``applied``: seconds by name; ``nodes``: slots by node; priorities are those of the gangs.
    """

    def __init__(
        self,
        gangs: Iterable[Gang],
        applied: Mapping[str, float],
        nodes: Mapping[str, int],
        looks: Sequence[Look],
    ) -> None:
        self._gangs = {gang.name: gang for gang in gangs}
        self._applied, self._nodes, self._looks = applied, nodes, looks
        self.placed = {gang.name: placed(gang, looks) for gang in self._gangs.values()}

    def inversions(self) -> Iterator[Inversion]:
        """Each of them, by the time at which the later gang was placed."""
        pairs = [
            (number, earlier, later)
            for later, number in self.placed.items()
            for earlier, after in self.placed.items()
            if number is not None and (after is None or number < after)
            if earlier in self._applied and self._before(earlier, later)
        ]
        for number, earlier, later in sorted(pairs):
            yield self._judge(self._gangs[earlier], self._gangs[later], number)

    def _before(self, one: str, other: str) -> bool:
        """Whether it came earlier, and the other is no more urgent."""
        return (
            self._applied[one] < self._applied[other]
            and self._gangs[one].priority >= self._gangs[other].priority
        )

    def _judge(self, earlier: Gang, later: Gang, number: int) -> Inversion:
        look, spare = self._looks[number], self._taken_at(earlier, number)
        free = self._free(look, earlier, spare)
        fit, missing = _fit(free, earlier), self._missing(look, earlier)
        waiting = [pod for pod in look.of(earlier.name) if not pod.node]
        explained = True
        if len(waiting) < missing:
            reason = f"{len(waiting)} of its {missing} pods were there"
        elif fit >= missing:
            had = self._since(earlier, number, spare, preempts=False)
            explained = had <= BACKOFF_SECONDS
            reason = f"there was room, for {had:.1f} s"
            reason += ": within its pause between tries" if explained else ""
        else:
            reason = f"room for {fit} of {missing} pods of {earlier.slots}"
            had = self._since(earlier, number, spare, preempts=True)
            if had:
                explained = had <= PREEMPTING_SECONDS
                reason += f"; by preemption for all, for {had:.1f} s"
        need = missing * earlier.slots
        args = (earlier.name, later.name, look.at, sum(free.values()), need)
        return Inversion(*args, reason, explained)

    def _taken_at(self, earlier: Gang, number: int) -> frozenset[str]:
        """The pods that this look is the first to show on a node, and that it comes before."""
        before = {pod.uid for pod in self._looks[number - 1].pods if pod.node} if number else set()
        new = (pod for pod in self._looks[number].pods if pod.node and pod.uid not in before)
        return frozenset(p.uid for p in new if self._before(earlier.name, p.gang))

    def _since(self, gang: Gang, number: int, spare: frozenset[str], *, preempts: bool) -> float:
        """For how long it could have been placed at that look; 0.0: it could not."""
        for back in range(number, -1, -1):
            look = self._looks[back]
            free = self._free(look, gang, spare, preempts=preempts)
            there = sum(not pod.node for pod in look.of(gang.name))
            missing = self._missing(look, gang)
            if there < missing or _fit(free, gang) < missing:
                # With the look at which it could not: it may have been able to right after that.
                return self._looks[number].at - look.at if back < number else 0.0
        return self._looks[number].at - self._looks[0].at

    def _missing(self, look: Look, gang: Gang) -> int:
        """How many pods have no node yet: all of them, unless single ones are placed."""
        return gang.replicas - len({pod.replica for pod in look.of(gang.name) if pod.node})

    def _free(
        self, look: Look, gang: Gang, spare: frozenset[str], *, preempts: bool = False
    ) -> dict[str, int]:
        """Slots by node that a gang could have had; those of ``spare`` count as free."""
        free = dict(self._nodes)
        for pod in look.pods:
            other = self._gangs[pod.gang]
            kept = pod.nominated if pod.gang != gang.name and not pod.node else ""
            if pod.holds and pod.uid not in spare:
                free[pod.node] -= 0 if preempts and other.priority < gang.priority else other.slots
            elif kept and other.priority >= gang.priority:
                free[kept] -= other.slots
        return free


def lives(looks: Sequence[Look]) -> list[dict[str, Any]]:
    """Each pod's life: seconds at which it was made, had a node, had ended, was gone."""
    found: dict[str, dict[str, Any]] = {}
    for look in looks:
        for pod in look.pods:
            one = found.setdefault(
                pod.uid,
                {"gang": pod.gang, "replica": pod.replica, "attempt": pod.attempt, "made": look.at},
            )
            if pod.node:
                one.setdefault("node", pod.node)
                one.setdefault("placed", look.at)
            if pod.phase in ("Succeeded", "Failed"):
                one.setdefault("ended", look.at)
            one["last"] = look.at
    return list(found.values())


def _fit(free: Mapping[str, int], gang: Gang) -> int:
    """How many of its pods fit: they are all alike, so that no packing is to be sought."""
    return sum(max(0, slots) // gang.slots for slots in free.values())
