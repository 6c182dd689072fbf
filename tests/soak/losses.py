"""What the soak does with --losses: pods and launchers are lost, and nothing else breaks.

Each replica, the hub's among them, several at once, newcomers, and operators and hubs while a
replacement is under way. So the gangs have several replicas and are long enough to be disturbed in
the middle. Nothing of it holds up an operator that lives: all invariants hold to the letter.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from signal import SIGKILL
from typing import Any

from soak.disturbances import (
    FAULTS,
    Draw,
    Fault,
    Mend,
    Stage,
    inside,
    nothing,
    operators,
    pod,
    signalled,
)
from soak.gangs import KINDS
from soak.record import Hit
from support.cluster import wait_for
from support.invariants import JOBS, PODS
from support.objects import status, uid_of
from support.plane import is_first, processes_with
from support.rest import RestError

LOSING = (
    replace(KINDS[0], steps=300),
    replace(KINDS[1], steps=200, replicas=3, processes=1),
    replace(KINDS[2], steps=300),
)
#: What may hit while another loss is made good, in the same gang or in another.
MORE = ("launcher-kill", "pod-force-delete", "pod-delete")
_PATIENCE = 60.0


def launchers(*replicas: int) -> Callable[[Stage, Draw], Mend]:
    """SIGKILL those of these replicas, counted from the one that was drawn."""
    return lambda s, d: signalled(inside(s, d, is_first, replicas), SIGKILL)


def hub(stage: Stage, draw: Draw) -> Mend:
    return launchers(0)(stage, replace(draw, replica=0))


def pods(stage: Stage, draw: Draw, count: int, *, grace: int | None = 0) -> Mend:
    for replica in range(min(count, stage.gangs[draw.gang].kind.replicas)):
        with suppress(RestError):  # a slower one is gone with the others
            pod(stage, replace(draw, replica=draw.replica + replica), grace=grace)
    return nothing


def pod_and_launcher(stage: Stage, draw: Draw) -> Mend:
    pod(stage, draw)
    return launchers(1)(stage, draw)


def then(after: Callable[[Stage, Draw], object], apart: int = 0) -> Callable[[Stage, Draw], Mend]:
    """Lose a pod, wait until its replacement is under way and a moment more, then do that.

    ``apart``: 1 for another pod than the hub's.
    """

    def breaks(stage: Stage, draw: Draw) -> Mend:
        gang = stage.gangs[draw.gang]
        replica = apart + draw.replica % (gang.kind.replicas - apart)
        draw = replace(draw, replica=replica)
        old = gang.chronicle.latest(JOBS, gang.name)
        pod(stage, draw, grace=0)

        def begun() -> bool:
            now = gang.chronicle.latest(JOBS, gang.name)
            return not now or status(now).get("attempt") != status(old).get("attempt")

        wait_for(begun, f"{gang.name} to be restarted", _PATIENCE)
        time.sleep(draw.rest / 5)
        after(stage, draw)
        return nothing

    return breaks


def newcomer(how: Callable[[Stage, Draw, str], object]) -> Callable[[Stage, Draw], Mend]:
    """Lose a pod by force, and the one that comes in its place; ``how`` gets that one's uid."""

    def breaks(stage: Stage, draw: Draw) -> Mend:
        gang = stage.gangs[draw.gang]
        name = gang.pod(draw.replica)

        def other(than: str) -> str | None:
            found = gang.chronicle.latest(PODS, name)
            return uid_of(found) if found and uid_of(found) != than else None

        old = wait_for(lambda: other(""), f"pod {name}", _PATIENCE)
        pod(stage, draw, grace=0)
        how(stage, draw, wait_for(lambda: other(old), f"another pod {name}", _PATIENCE))
        return nothing

    return breaks


def launcher_of(uid: str) -> Mend:
    """SIGKILL a pod's launcher as soon as it is there."""

    def there() -> list[int]:
        return [pid for pid in processes_with(DDPJOB_POD_UID=uid) if is_first(pid)]

    return signalled(wait_for(there, f"the launcher of pod {uid}", _PATIENCE), SIGKILL)


LOSSES: Mapping[str, Fault] = {
    **{kind: FAULTS[kind] for kind in ("launcher-kill", "pod-delete", "pod-force-delete")},
    **{kind: FAULTS[kind] for kind in ("pod-evict", "operators-kill", "leader-delete")},
    "hub-kill": Fault("SIGKILL of the hub's launcher", hub, alone=True),
    "hub-delete": Fault(
        "The hub's pod is deleted by force",
        lambda s, d: pod(s, replace(d, replica=0), grace=0), alone=True,
    ),
    "pods-force-delete": Fault(
        "Two pods of a gang are deleted by force at once", lambda s, d: pods(s, d, 2), alone=True
    ),
    "pods-delete": Fault(
        "Two pods of a gang are deleted at once, with their time to end",
        lambda s, d: pods(s, d, 2, grace=None), alone=True,
    ),
    "all-force-delete": Fault(
        "All pods of a gang are deleted by force", lambda s, d: pods(s, d, 12), alone=True
    ),
    "launchers-kill": Fault("SIGKILL of two launchers of a gang", launchers(0, 1), alone=True),
    "pod-and-launcher": Fault(
        "A pod is deleted with its time to end, and another's launcher killed",
        pod_and_launcher, alone=True,
    ),
    "newcomer-delete": Fault(
        "A pod is deleted by force, and the one that comes in its place",
        newcomer(lambda s, d, _: pod(s, d, grace=0)), alone=True,
    ),
    "newcomer-kill": Fault(
        "A pod is deleted by force, and the launcher of the next one killed",
        newcomer(lambda _, __, uid: launcher_of(uid)), alone=True,
    ),
    "operators-between": Fault(
        "SIGKILL of both operators while a pod is replaced", then(operators), alone=True
    ),
    "hub-between": Fault(
        "SIGKILL of the hub's launcher while another pod is replaced", then(hub, 1), alone=True
    ),
    "hub-and-operators-between": Fault(
        "SIGKILL of the hub's launcher and of both operators while another pod is replaced",
        then(lambda s, d: (hub(s, d), operators(s, d)), 1), alone=True,
    ),
}  # fmt: skip


@dataclass
class Counts:
    """Listens to the watch of jobs: each new attempt is a replacement or a whole restart."""

    begun: Counter[str] = field(default_factory=Counter)
    _known: dict[str, tuple[int, int]] = field(default_factory=dict)  # by uid of the job

    def __call__(self, plural: str, kind: str, obj: Mapping[str, Any]) -> None:
        if plural != JOBS or kind == "DELETED":
            return
        now = (status(obj).get("attempt", 0), status(obj).get("membersSince", 0))
        attempt, since = self._known.get(uid_of(obj), now)
        self._known[uid_of(obj)] = now
        if since and now[1] > since:
            self.begun["whole restarts"] += 1
        elif since and now[0] > attempt:
            self.begun["replacements"] += 1

    def told(self, hits: Sequence[Hit]) -> dict[str, int]:
        done = Counter(hit.kind for hit in hits if not hit.missed)
        done.update(hit.second for hit in hits if hit.second)
        return {**dict(sorted(done.items())), **self.begun}
