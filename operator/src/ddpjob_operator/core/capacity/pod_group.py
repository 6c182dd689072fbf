"""Decide whether Kubernetes places an attempt's pods as one PodGroup, and wait for that.

start.py asks chosen() as a whole attempt begins and stores its name in status.podGroup; from then
on all of the attempt's pods name it, those of replacements too. While no pod of it has a node it
holds nothing, so there is no deadline and nothing is given back. Once a first one has, the deadline
runs: a scheduler that places single pods after all is treated as without a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

from ddpjob_contract import crd
from ddpjob_operator.core import render
from ddpjob_operator.core.actions import Action, ApiFeedback, Body, RemoveGroups
from ddpjob_operator.core.change import Change, Clock, Stall
from ddpjob_operator.core.nodes import avoid
from ddpjob_operator.core.objects.observe import Pod
from ddpjob_operator.core.objects.spec import Spec
from ddpjob_operator.core.objects.status import Failure, Status
from ddpjob_operator.core.seats import Seats
from ddpjob_operator.core.view import View

UNAVAILABLE: Final = "GangUnavailable"
#: Freed room is not reserved: preempted pods that came back at once would take it again.
PREEMPTED: Final = "PreemptionByScheduler"
PREEMPTED_SECONDS: Final = 15.0
#: A group that a stranger removed is made again after at most so long.
_LOOKS_AGAIN: Final = timedelta(minutes=1)
#: In the scheduler's message to members that would fit if the others did.
_OTHERS_DO_NOT_FIT: Final = "pod group is unschedulable"
#: Of a pod that no scheduler has spoken of, as those of a group that is not complete.
UNSEEN: Final = "no scheduler has looked at it yet"
_NOT_SERVED: Final = "the API server serves no PodGroups"
_CURE: Final = (
    "it needs Kubernetes 1.36 or later with its gates for gang scheduling on, and the chart's"
    " rights to podgroups (docs/guides/queues.md); or delete the job and apply it again with gang"
    " None and without a topologyKey: its snapshots stay"
)


@dataclass(frozen=True, slots=True)
class Group:
    """What this attempt has of a PodGroup.

    ``name``: which its pods name; "": none. ``refused``: why it can have none after all; "" too
    once it is placed. ``left_over``: one of an attempt that is over may be there still.
    """

    name: str
    refused: str
    left_over: bool


def of(view: View) -> Group:
    """Read status.podGroup: it is that of an attempt that is not over, or left over."""
    status = view.status
    refused = _refused(view.seats, view.feedback)
    live = not status.terminal and status.phase != "Suspended" and not refused
    begun = status.replacing or status.phase in ("Starting", "Running")
    own = status.pod_group == render.pod_group_name(view.job, status.members_since)
    name = status.pod_group if live and begun and own else ""
    left_over = not name and status.pod_group not in ("", view.feedback.groups_removed)
    return Group(name, refused, left_over)


def _refused(seats: Seats, known: ApiFeedback) -> str:
    status = seats.status
    if not status.pod_group or status.phase != "Starting" or status.replacing:
        return ""
    pods = seats.members.values()
    if not known.gang_api and not (pods and all(pod.node for pod in pods)):
        return _NOT_SERVED  # single pods of it may be placed from now on
    found = known.no_gang
    return found[1] if found is not None and found[0] == status.attempt else ""


def chosen(view: View) -> str:
    """Return the name of the group that this whole attempt shall have; "": none."""
    wanted = view.spec.scheduling
    if wanted.gang == "None" or not view.feedback.gang_api:
        return ""
    foreign = view.spec.template.placed or view.spec.template.scheduler != crd.SCHEDULER
    if not _demanded(view.spec) and (foreign or view.spec.replicas == 1):
        return ""
    return render.pod_group_name(view.job, view.status.attempt)


def ready(view: View) -> bool:
    """Tell whether an attempt may begin: no group of an earlier one is left, the API is there."""
    lacks = _demanded(view.spec) and not view.feedback.gang_api
    return not lacks and not of(view).left_over


def update(view: View, change: Change) -> Change:
    """Forget a removed group, and note when the first pod of a group has its node."""
    status, group = change.status, of(view)
    over = status.pod_group == view.status.pod_group and not (group.name or group.left_over)
    if status.pod_group and over:
        return change.with_status(pod_group="")
    goes_on = view.status.phase == "Starting" == status.phase and not view.status.replacing
    first = goes_on and status.attempt == view.status.attempt and status.pod_group
    if first and status.timings.placed_at is None and view.seats.any_placed:
        return change.with_status(timings=replace(status.timings, placed_at=view.now))
    return change


def without(spec: Spec, group: Group, change: Change) -> Change | Stall:
    """Go on without a group that was refused, unless spec.scheduling asks for one."""
    if _demanded(spec):
        return Stall(UNAVAILABLE, f"{group.refused}: {_CURE}")
    if group.left_over:
        return change  # its pods are not made before it is gone
    what = f"pods are made without a PodGroup: {group.refused}"
    return change.with_status(pod_group="").event("Warning", UNAVAILABLE, what)


def waits(view: View) -> bool:
    """Tell whether the whole group waits for room, holding none.

    Nodes that it avoids may be those that it needs: then start.py's deadline ends that.
    """
    status, seats = view.status, view.seats
    grouped = status.pod_group and status.phase == "Starting" and not status.replacing
    if not grouped or seats.missing or seats.any_placed:
        return False
    return not avoid.kept_off(status, view.begun_at or view.now)


def looks_again(view: View) -> datetime | None:
    """Return when to make sure again that a waiting group is there."""
    made = view.feedback.network_at or view.begun_at
    return made + _LOOKS_AGAIN if made and waits(view) else None


def bodies(view: View) -> tuple[Body, ...]:
    """Render the group before an attempt's first pod; a replacement has it."""
    attempt, version = view.status.members_since, view.feedback.gang_api
    if not of(view).name or view.status.replacing or not version:
        return ()
    return (render.pod_group(view.job, view.spec, attempt, version),)


def removals(view: View) -> tuple[Action, ...]:
    """Remove groups of attempts that are over."""
    todo = RemoveGroups(view.status.pod_group, view.feedback.gang_api)
    return (todo,) if of(view).left_over else ()


def preempted(seats: Seats, loss: Failure) -> bool:
    """Tell whether a higher priority takes the gang's room, not that of a standby pod.

    The first member may be gone before its condition was seen; the others still have theirs.
    """
    replicas = seats.spec.replicas
    needed = [pod for seat, pod in seats.members.items() if seat < replicas]
    taken = loss.reason == PREEMPTED and loss.replica < replicas
    return taken or any(pod.disruption == PREEMPTED for pod in needed)


def in_order(pods: list[Pod]) -> list[Pod]:
    """Put pods that do not fit by themselves before those that only wait for them."""
    return sorted(pods, key=only_waits)


def words(view: View) -> str:
    """Say in the message of a pod that finds no room that the others wait for it, too."""
    group = of(view).name
    return f"; all {view.spec.replicas} are placed together or none ({group})" if group else ""


def only_waits(pod: Pod) -> bool:
    """Tell whether the pod would fit if the others did: the cause is theirs, and named later."""
    return _OTHERS_DO_NOT_FIT in pod.unschedulable


def just_placed(status: Status, clock: Clock, patience: timedelta) -> bool:
    """Tell whether a group that has waited got its nodes too lately for a container to run."""
    if not status.pod_group or status.phase != "Starting" or status.replacing:
        return False
    placed = status.timings.placed_at
    return placed is None or not clock.reached(placed + patience)


def stalls(spec: Spec, status: Status, known: ApiFeedback) -> Iterator[Stall]:
    """Explain why an attempt that needs a group does not begin."""
    begins = status.phase in ("Pending", "Restarting") and not status.replacing
    if begins and _demanded(spec) and not known.gang_api:
        yield Stall(UNAVAILABLE, f"{_NOT_SERVED}, and spec.scheduling asks for one: {_CURE}")


def _demanded(spec: Spec) -> bool:
    """Tell whether pods without a group will not do: only a group keeps a topology."""
    return spec.scheduling.gang == "Native" or bool(spec.scheduling.topology_key)
