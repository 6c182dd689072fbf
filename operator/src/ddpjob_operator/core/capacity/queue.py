"""Wait in a queue of Kueue: a job with its label has pods only while its Workload is admitted.

plan() asks wait() whether the job may have pods, and actions to keep the Workload right. A job
that waits is parked as a suspended one is (Status.parked): its pods end with their own grace
period, nothing is charged and no deadline counts; the admission is a new start. Quota is given back
once a quorum read has shown that no pod is left. Restarts and replacements, and pods that stand by,
are within the admitted count, so Kueue is not asked again.

A webhook keeps the label of Kueue's own jobs as it is while they run. Here the same follows from
what is seen: while a Workload holds quota its queue stays, whatever the label says by then.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ddpjob_operator.core import actions, render
from ddpjob_operator.core.actions import Action, ConfirmGone, ReadFlavors, WriteWorkload
from ddpjob_operator.core.capacity import refusals, template_guard
from ddpjob_operator.core.change import Stall
from ddpjob_operator.core.objects import workload as workloads
from ddpjob_operator.core.objects.observe import Pod
from ddpjob_operator.core.objects.status import Status
from ddpjob_operator.core.objects.workload import Condition, Placement, Workload
from ddpjob_operator.core.view import View

QUEUED: Final = "Queued"
UNAVAILABLE: Final = "QueueUnavailable"
#: After these the job is back in its queue at once; after others Kueue decides when.
_AT_ONCE: Final = ("Preempted", "NodeFailures")
_UNKNOWN: Final = (
    "the label kueue.x-k8s.io/queue-name asks for Kueue, and its Workloads cannot be read: install"
    " Kueue and give the operator the right (its chart's value kueue.enabled), or remove the label"
)
_AGAIN: Final = "suspend the job and resume it to ask again"


def own(view: View) -> Workload | None:
    """Return the job's Workload, if it is seen."""
    found = view.feedback.workloads or ()
    name, uid = workloads.name_of(view.job), view.job.uid
    return next((one for one in found if (one.name, one.owner_uid) == (name, uid)), None)


def managed(view: View) -> bool:
    """Tell whether Kueue decides when the job may have pods."""
    found = own(view)
    return bool(view.job.queue) or (found is not None and (found.reserved or view.status.parked))


def wait(view: View) -> str:
    """Say why the job may have no pods now; "" if it may.

    Where Workloads cannot be read a gang that has pods keeps them: reads() holds back new ones.
    """
    if not managed(view):
        return ""
    if view.feedback.workloads is None:
        return _UNKNOWN if view.status.parked else ""
    found = own(view)
    if found is None:
        return _refused(view) or _new(view.job.queue)
    if view.status.parked and not view.job.queue:
        return f"the label {workloads.LABEL_QUEUE} was removed: its Workload goes first"
    admitted = found.true("Admitted") and not (found.deleting or found.true("Evicted"))
    if not admitted or found.true("Finished") or not found.active:
        return _words(found)
    if found.reclaimed > len(view.seats.succeeded):
        return "finished replicas released part of the quota; the next attempt needs all of it"
    if not view.status.parked:
        return ""
    if _other(view, found):
        return "its Workload was made of another template or label: it is made again"
    unread = f"admitted: pods of before end, then its flavours are read: {', '.join(found.flavors)}"
    return _trouble(view) or ("" if asked(view) else unread)


def reads(view: View) -> tuple[Action, ...] | None:
    """Return what to read before pods can be made; None if they can, () if it cannot be read."""
    found = own(view)
    if asked(view) or not managed(view):
        return () if _trouble(view) else None
    return (ReadFlavors(found.admission, found.flavors),) if found else ()


def asked(view: View) -> tuple[Placement, ...]:
    """Return what pods are made with; nothing without Kueue, or before it was read."""
    found, read = own(view), view.feedback.flavors
    if not managed(view) or found is None or read is None or read[0] != found.admission:
        return ()
    return (*read[1].values(), *found.updates, workloads.OWN)


def _trouble(view: View) -> str:
    """Say why no pod can be made as Kueue asks: its template contradicts that; "" if it can."""
    found, parts = own(view), asked(view)
    if found and found.reserved and found.topology:
        what = "Kueue wants to place each pod by its topology, which the operator cannot do"
        return f"{what}: use a queue whose flavours have no topologyName"
    if not parts:
        return ""
    made = workloads.placed(view.spec.template.packed.unpack(), parts)
    what = "the flavour or an admission check does not go with spec.template"
    return f"{what}: {made}" if isinstance(made, str) else ""


def stalls(view: View) -> Iterator[Stall]:
    """Explain why a gang that lost pods gets no new ones."""
    if managed(view) and view.seats.missing:
        if view.feedback.workloads is None:
            yield Stall(UNAVAILABLE, _UNKNOWN)
        elif what := _trouble(view):
            yield Stall(QUEUED, f"{what}; {_AGAIN}")


def unproven(view: View) -> bool:
    """Tell whether something waits for the proof that no pod of a parked job is left."""
    found, status = own(view), view.status
    holds = found is not None and not found.true("Finished")
    over = status.queued or (found and status.phase == "Suspended") or (holds and status.terminal)
    if not over or status.attempt == 0 or _on(view.seats.pods):
        return False
    read = view.seats.read
    asked = read is not None and read.over and read.hidden is not None
    return not asked or view.clock.reached(template_guard.looks_again(view))


def parked(view: View) -> tuple[Action, ...]:
    """Ask for quota while the job waits, and give it back, once no pod is left."""
    found, waits = own(view), view.status.queued
    if view.feedback.workloads is None or _on(view.seats.pods) or not _proven(view):
        return ()
    if found is None:
        able = waits and view.job.queue and not template_guard.why(view)
        body = render.workload(view.job, view.spec, _made_of(view))
        wanted = actions.EnsureWorkload(body, view.job.queue_priority)
        return (wanted,) if able and not refusals.resting(view, _refusal(view)) else ()
    if not waits or not view.job.queue or _other(view, found) or template_guard.why(view):
        return () if found.deleting else (actions.DeleteWorkload(found.name, found.uid),)
    if found.reserved and (found.true("Evicted") or found.reclaimed):
        return (_give_back(found),)
    if found.reserved and found.true("Admitted"):
        if what := _trouble(view):
            failed = Condition(True, "FailedToStart", what, "")
            return (WriteWorkload(found.name, found.version, {"Finished": failed}),)
        return reads(view) or ()
    return ()


def running(view: View) -> tuple[Action, ...]:
    """Keep the Workload of a gang that has its quota up to date."""
    found = own(view)
    if found is not None and not (view.job.queue or found.reserved):
        gone = found.deleting  # else it was admitted as its label went
        return () if gone else (actions.DeleteWorkload(found.name, found.uid),)
    if found is None or not found.reserved or not found.true("Admitted"):
        return ()
    reported = dict(_pods_ready(view.status, found))
    on = {
        view.seats.served(pod) for pod in view.seats.members.values() if not pod.ended
    }  # a sidecar runs
    done = len(view.status.succeeded - on) if view.clock.reached(view.seats.lingering_at) else 0
    reclaimed = done if done > found.reclaimed else None
    if not reported and reclaimed is None:
        return ()
    return (WriteWorkload(found.name, found.version, reported, reclaimed),)


def finish(view: View) -> tuple[Action, ...]:
    """Give the quota of a job that has ended back once its last pod has."""
    found, status = own(view), view.status
    if found is None or found.true("Finished") or found.deleting:
        return ()
    if unproven(view):
        return (ConfirmGone(status.attempt, by_name=True),)
    if _on(view.seats.pods) or not _proven(view):
        return ()
    end = status.condition("Complete" if status.phase == "Succeeded" else "Failed")
    reported = Condition(True, str(status.phase), end.message if end else "", "")
    return (WriteWorkload(found.name, found.version, {"Finished": reported}),)


def _proven(view: View) -> bool:
    """Tell whether a quorum read made since then has shown that no pod is left."""
    read = view.seats.read
    return view.status.attempt == 0 or (read is not None and read.over and read.hidden == ())


def _on(pods: tuple[Pod, ...]) -> bool:
    """Tell whether the cache shows a pod that has not ended."""
    return any(not pod.ended for pod in pods)


def _made_of(view: View) -> str:
    job, spec = view.job, view.spec
    counts = f"{spec.replicas}+{spec.standby}"
    return f"{spec.template_hash} {counts} {job.queue} {job.queue_priority}".strip()


def _other(view: View, found: Workload) -> bool:
    """Tell whether it is of another template, or admitted for fewer pods."""
    return found.made_of != _made_of(view) or 0 < found.count < view.spec.seats


def _refusal(view: View) -> actions.Refusal | None:
    return view.feedback.workload_refusal


def _refused(view: View) -> str:
    refusal = _refusal(view)
    return f"its Workload is refused: {refusals.stall(view, refusal).message}" if refusal else ""


def _new(queue: str) -> str:
    return f"in the queue {queue}: Kueue has not looked at it yet"


def _words(found: Workload) -> str:
    """Say in Kueue's words why it is not admitted, or not any more."""
    reported = found.said("QuotaReserved")
    if found.true("Finished"):
        return f"{found.said('Finished').message}; {_AGAIN}"
    if found.deleting:
        return f"its Workload {found.name} was deleted"
    if not found.active:
        said = found.said("Evicted").message or "the Workload is deactivated"
        return f"{said}: set spec.active of Workload {found.name} to true, or {_AGAIN}"
    if found.true("Evicted") and reported.true:
        return found.said("Evicted").message
    if reported.true and found.checks:
        return f"{reported.message}, and it waits for admission checks: {found.checks}"
    return reported.message or _new(found.queue)


def _give_back(found: Workload) -> Action:
    """End the reservation: from then on Kueue lends the quota to others."""
    why = found.said("Evicted")
    message = why.message or "asking for the whole quota again"
    reported = {
        "QuotaReserved": Condition(False, "Pending", message, ""),
        "Admitted": Condition(False, "NoReservation", "The workload has no reservation", ""),
    }
    if why.true:
        reported["Requeued"] = Condition(why.reason in _AT_ONCE, why.reason, message, "")
    if "PodsReady" in found.conditions:  # a recovery's timeout would be over at the next admission
        reported["PodsReady"] = Condition(False, "WaitForStart", _UNREADY, "")
    return WriteWorkload(found.name, found.version, reported, give_back=True)


_UNREADY: Final = "Not all pods are ready or succeeded"


def _pods_ready(status: Status, found: Workload) -> Iterator[tuple[str, Condition]]:
    """Tell Kueue when the gang runs, and when it does not any more."""
    said, runs = found.said("PodsReady"), status.phase == "Running"
    if runs and not said.true:
        reason = "Recovered" if said.reason in ("WaitForRecovery", "Recovered") else "Started"
        yield "PodsReady", Condition(True, reason, "All pods run", "")
    if not runs and said.true:
        yield "PodsReady", Condition(False, "WaitForRecovery", _UNREADY, "")
