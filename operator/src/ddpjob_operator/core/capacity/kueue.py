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
from dataclasses import dataclass
from typing import Final

from ddpjob_operator.core import actions, render
from ddpjob_operator.core.actions import (
    Action,
    ConfirmGone,
    ReadFlavors,
    ReadWorkload,
    WriteWorkload,
)
from ddpjob_operator.core.capacity import refusals, template_guard
from ddpjob_operator.core.change import Stall
from ddpjob_operator.core.objects import workload as workloads
from ddpjob_operator.core.objects.observe import Job
from ddpjob_operator.core.objects.spec import Spec
from ddpjob_operator.core.objects.workload import Condition, Placement, Workload
from ddpjob_operator.core.seats import Seats
from ddpjob_operator.core.view import View

QUEUED: Final = "Queued"
UNAVAILABLE: Final = "QueueUnavailable"
#: After these the job is back in its queue at once; after others Kueue decides when.
_AT_ONCE: Final = ("Preempted", "NodeFailures")
_UNKNOWN: Final = (
    "the label kueue.x-k8s.io/queue-name asks for Kueue, and its Workloads cannot be read: install"
    " Kueue and give the operator the right (its chart's value kueue.enabled), or remove the label"
)
_UNREADY: Final = "Not all pods are ready or succeeded"
_AGAIN: Final = "suspend the job and resume it to ask again"


@dataclass(frozen=True, slots=True)
class Claim:
    """What the job has with Kueue.

    ``workload``: None: none is seen. ``managed``: Kueue decides when the job may have pods.
    ``placements``: what pods are made with; none without Kueue, or before that was read.
    """

    workload: Workload | None
    managed: bool
    placements: tuple[Placement, ...] = ()


def claim(view: View) -> Claim:
    """Find the job's Workload, and the flavours of its admission."""
    job, read = view.job, view.feedback.flavors
    listed, mine = view.feedback.workloads or (), (workloads.name_of(job), job.uid)
    found = next((one for one in listed if (one.name, one.owner_uid) == mine), None)
    managed = bool(job.queue) or (found is not None and (found.reserved or view.status.parked))
    if not managed or found is None or read is None or read[0] != found.admission:
        return Claim(found, managed)
    return Claim(found, managed, (*read[1].values(), *found.updates, workloads.OWN))


def wait(view: View) -> str:
    """Say why the job may have no pods now; "" if it may.

    Where Workloads cannot be read a gang that has pods keeps them: reads() holds back new ones.
    """
    ours, job, parked = claim(view), view.job, view.status.parked
    if not ours.managed:
        return ""
    if view.feedback.workloads is None:
        return _UNKNOWN if parked else ""
    found = ours.workload
    if found is None:
        if refusal := view.feedback.workload_refusal:
            return f"its Workload is refused: {refusals.stall(job, refusal, view.clock).message}"
        return _new(job.queue)
    if parked and not job.queue:
        return f"the label {workloads.LABEL_QUEUE} was removed; deleting its Workload"
    admitted = found.true("Admitted") and not (found.deleting or found.true("Evicted"))
    if not admitted or found.true("Finished") or not found.active:
        return _words(found)
    if found.reclaimed > len(view.seats.succeeded):
        return "finished replicas released part of the quota; the next attempt needs all of it"
    if not parked:
        return ""
    if _is_of_another(job, view.spec, found):
        return "its Workload has an older template or label; replacing it"
    unread = f"admitted; reads its flavours once old pods have ended: {', '.join(found.flavors)}"
    return _trouble(view.spec, ours) or ("" if ours.placements else unread)


def reads(view: View) -> tuple[Action, ...] | None:
    """Return what to read before pods can be made; None if they can, () if it cannot be read."""
    ours = claim(view)
    found = ours.workload
    if ours.placements or not ours.managed:
        return () if _trouble(view.spec, ours) else None
    return (ReadFlavors(found.admission, found.flavors),) if found else ()


def confirm(view: View) -> tuple[Action, ...]:
    """Read the Workload just before pods are made of its quota: a watch may be silent."""
    found = claim(view).workload if claim(view).managed else None
    return (ReadWorkload(found.name, found.version),) if found else ()


def _trouble(spec: Spec, ours: Claim) -> str:
    """Say why no pod can be made as Kueue asks: its template contradicts that; "" if it can."""
    found = ours.workload
    if found and found.reserved and found.topology:
        what = "Kueue wants to place each pod by its topology, which the operator cannot do"
        return f"{what}: use a queue whose flavours have no topologyName"
    if not ours.placements:
        return ""
    made = workloads.placed(spec.template.packed.unpack(), ours.placements)
    what = "the flavour or an admission check conflicts with spec.template"
    return f"{what}: {made}" if isinstance(made, str) else ""


def stalls(view: View) -> Iterator[Stall]:
    """Explain why a gang that lost pods gets no new ones."""
    ours = claim(view)
    if ours.managed and view.seats.missing:
        if view.feedback.workloads is None:
            yield Stall(UNAVAILABLE, _UNKNOWN)
        elif what := _trouble(view.spec, ours):
            yield Stall(QUEUED, f"{what}; {_AGAIN}")


def needs_proof(view: View) -> bool:
    """Tell whether quota waits for the proof that no pod of a parked job is left."""
    found, status = claim(view).workload, view.status
    holds = found is not None and not found.true("Finished")
    over = status.queued or (found and status.phase == "Suspended") or (holds and status.terminal)
    return bool(over) and not (view.seats.pods_left or _proven(view.seats))


def parked(view: View) -> tuple[Action, ...]:
    """Ask for quota while the job waits, and give it back, once no pod is left."""
    ours, waits = claim(view), view.status.queued
    job, spec, found = view.job, view.spec, ours.workload
    if view.feedback.workloads is None or not _proven(view.seats):
        return ()
    if found is None:
        able = waits and job.queue and not template_guard.why(view)
        body = render.workload(job, spec, _made_of(job, spec))
        wanted = actions.EnsureWorkload(body, job.queue_priority)
        refusal = view.feedback.workload_refusal
        return (wanted,) if able and not refusals.resting(view, refusal) else ()
    another = not job.queue or _is_of_another(job, spec, found)
    if not waits or another or template_guard.why(view):
        return () if found.deleting else (actions.DeleteWorkload(found.name, found.uid),)
    if found.reserved and (found.true("Evicted") or found.reclaimed):
        return (_give_back(found),)
    if found.reserved and found.true("Admitted"):
        if what := _trouble(spec, ours):
            failed = Condition(True, "FailedToStart", what, "")
            return (WriteWorkload(found.name, found.version, {"Finished": failed}),)
        return reads(view) or ()
    return ()


def running(view: View) -> tuple[Action, ...]:
    """Keep the Workload of a gang that has its quota up to date."""
    found, seats = claim(view).workload, view.seats
    if found is not None and not (view.job.queue or found.reserved):
        gone = found.deleting  # else it was admitted as its label went
        return () if gone else (actions.DeleteWorkload(found.name, found.uid),)
    if found is None or not found.reserved or not found.true("Admitted"):
        return ()
    said, runs = found.said("PodsReady"), view.status.phase == "Running"
    reported = {}
    if runs and not said.true:
        reason = "Recovered" if said.reason in ("WaitForRecovery", "Recovered") else "Started"
        reported["PodsReady"] = Condition(True, reason, "All pods run", "")
    if not runs and said.true:
        reported["PodsReady"] = Condition(False, "WaitForRecovery", _UNREADY, "")
    # Where a sidecar still runs its pod needs the quota.
    on = {seats.served(pod) for pod in seats.members.values() if not pod.ended}
    done = len(view.status.succeeded - on) if view.clock.reached(seats.lingering_at) else 0
    reclaimed = done if done > found.reclaimed else None
    if not reported and reclaimed is None:
        return ()
    return (WriteWorkload(found.name, found.version, reported, reclaimed),)


def finish(view: View) -> tuple[Action, ...]:
    """Give the quota of a job that has ended back once its last pod has."""
    found, status = claim(view).workload, view.status
    if found is None or found.true("Finished") or found.deleting:
        return ()
    if needs_proof(view):
        return (ConfirmGone(status.attempt),)
    if not _proven(view.seats):
        return ()
    end = status.condition("Complete" if status.phase == "Succeeded" else "Failed")
    reported = Condition(True, str(status.phase), end.message if end else "", "")
    return (WriteWorkload(found.name, found.version, {"Finished": reported}),)


def _proven(seats: Seats) -> bool:
    """Tell whether a quorum read made since then has shown that no pod is left."""
    proof = seats.read is not None and seats.read.over
    return not seats.pods_left and (seats.status.attempt == 0 or proof)


def _made_of(job: Job, spec: Spec) -> str:
    counts = f"{spec.replicas}+{spec.standby}"
    return f"{spec.template_hash} {counts} {job.queue} {job.queue_priority}".strip()


def _is_of_another(job: Job, spec: Spec, found: Workload) -> bool:
    """Tell whether it is of another template, or admitted for fewer pods."""
    return found.made_of != _made_of(job, spec) or 0 < found.count < spec.seats


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
