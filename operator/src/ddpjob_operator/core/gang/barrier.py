"""Delete pods that are no members, pass the barrier, create what is missing.

plan() calls deletions() and creations() once the status that asks for them is stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Final

from ddpjob_contract.exits import DEAD_GANG_SECONDS
from ddpjob_operator.core import actions, render
from ddpjob_operator.core.actions import Action, ConfirmGone, DeletePod
from ddpjob_operator.core.capacity import kueue, pod_group, refusals, template_guard
from ddpjob_operator.core.change import Stall
from ddpjob_operator.core.gang import handover, replacement, restart
from ddpjob_operator.core.nodes import avoid
from ddpjob_operator.core.nodes.fence import Fence, cure
from ddpjob_operator.core.objects.observe import Job
from ddpjob_operator.core.objects.spec import Spec
from ddpjob_operator.core.seats import Seats
from ddpjob_operator.core.view import PATIENCE, View

#: Missing seats whose pods alone are asked for: a label selector names each.
_FEW_SEATS: Final = 20
#: Pods rendered and created in one round, so that a gang of 10,000 leaves time to others.
_BATCH: Final = 500
#: Bytes of templates in one round: as objects they take up to 20 times as much.
_BATCH_BYTES: Final = 1024 * 1024


def deletions(seats: Seats, fence: Fence) -> tuple[Action, ...]:
    """Delete pods that are no members.

    Once a member is dead and the gang was not kept they can save nothing, so a longer grace period
    is cut short, but for those that hand over. Where all has ended there is nothing to wait for.
    """
    status = seats.status
    ends = (loss for loss in status.failures if not (loss.in_place or loss.replaced))
    dead = max((loss.attempt for loss in ends), default=0)
    todo: list[Action] = []
    births = status.min_attempt_by_seat
    for pod in seats.others:
        replaced = 0 if pod.replica is None else births.get(pod.replica, 0)
        late = (pod.attempt or 0) < max(dead + 1, replaced)
        grace = DEAD_GANG_SECONDS if late and not handover.saves(status, pod) else None
        if fence.lost(pod) or (pod.stopped and not pod.deleting):
            grace = 0
        cut = grace is not None and pod.deletion_grace is not None and pod.deletion_grace > grace
        if not pod.deleting or cut:
            todo.append(DeletePod(pod.name, pod.uid, grace))
    return tuple(todo)


def creations(view: View) -> tuple[Action, ...]:
    """Pass the barrier, then ensure network objects, then create pods: one stage a round."""
    job, status, seats, feedback = view.job, view.status, view.seats, view.feedback
    attempt, group = status.attempt, pod_group.of(view)
    waiting = status.phase in ("Pending", "Restarting")
    # start.py and the condition Invalid say why; pods that run go on.
    if template_guard.why(view) or group.refused:
        return ()
    # The barrier: a watch may be behind, so only a quorum read shows that no older pod is left.
    if not _confirmed(seats) and (waiting or seats.missing):
        return (read(seats),) if _delays_over(view) else ()
    # Only the process that has stored phase Starting makes pods, each once (rule O5).
    again = view.clock.reached(pod_group.looks_again(view))
    if waiting or not (seats.not_created or again):
        return ()
    if replacement.maybe_created(seats, feedback.begun):
        return ()
    # In a queue each pod is made as its admission says.
    if (asked := kueue.reads(view)) is not None:
        return asked
    if status.phase == "Running" and not (seats.read and seats.read.begun):
        return ()
    # Pods need the Secret to start and the Service to find rank 0, so these come first.
    if feedback.network_attempt != attempt or again:
        if refusals.resting(view, view.network_refusal):
            return ()
        if feedback.network_attempt == attempt:
            return (actions.EnsureNetwork(attempt, pod_group.bodies(view)),)
        # Where pods did not start somebody may have removed the Secret.
        unstarted = any(loss.cls == "Startup" for loss in status.failures[-1:])
        secret = feedback.network_attempt == 0 or unstarted
        bodies = render.network(job, view.spec, feedback.metrics_from, secret=secret)
        return (actions.EnsureNetwork(attempt, (*bodies, *pod_group.bodies(view))),)
    # After a refusal, create one pod alone to test whether the API accepts it again.
    due_now = refusals.ready(view)[: 1 if refusals.row(feedback) else _batch(view.spec)]
    steps = (status.progress, feedback.progress, *status.failures)
    make = partial(
        render.pod,
        avoided=avoid.kept_off(status, view.now),
        suspected=avoid.suspected(status),
        since=status.members_since,
        hub=status.hub,
        reached=max(one.step or 0 for one in steps if one),
        # On the volume of now: template_guard.py makes no pods for another.
        saved=max(status.progress.snapshot_step or 0, status.restarts.snapshot_step),
        group=group.name,
        placements=kueue.claim(view).placements,
    )
    refused = view.refusals
    pods = ((r, make(job, view.spec, attempt, r)) for r in due_now)
    return (
        *(kueue.confirm(view) if due_now else ()),
        *chain.from_iterable(_unlabelled(job, attempt, refused.get(r)) for r in due_now),
        *(actions.CreatePod(r, attempt, body) for r, body in pods),
    )


def passed(view: View) -> bool:
    """Tell whether a quorum LIST shows no older object and the backoff is over."""
    if view.status.phase not in ("Pending", "Restarting"):
        return False
    passed = _confirmed(view.seats) and not view.seats.others and _delays_over(view)
    if not passed or view.status.replacing:
        return passed
    return pod_group.ready(view) and not any(kueue.stalls(view))


def _confirmed(seats: Seats) -> bool:
    """Tell whether a valid quorum read shows no older pod (actions.QuorumRead)."""
    read = seats.read
    return read is not None and read.alone and all(map(read.asked, seats.missing))


def _delays_over(view: View) -> bool:
    times = (restart.delayed_until(view.status, view.begun_at), refusals.next_try_at(view))
    return all(at is None or view.clock.reached(at) for at in times)


def read(seats: Seats) -> ConfirmGone:
    """Ask for the pods of missing seats alone where the other pods stay."""
    status = seats.status
    stay = status.replacing or status.phase == "Running"
    few = seats.missing if stay and len(seats.missing) <= _FEW_SEATS else ()
    return ConfirmGone(status.attempt, seats=frozenset(few))


def _batch(spec: Spec) -> int:
    volume = spec.snapshot.volume.size if spec.snapshot else 0
    size = spec.template.packed.size + volume
    return max(1, min(_BATCH, _BATCH_BYTES // max(1, size)))


def _unlabelled(job: Job, attempt: int, refusal: actions.Refusal | None) -> tuple[DeletePod, ...]:
    """Delete a pod of ours that lost its labels and keeps the name."""
    found = refusal.existing if refusal else None
    if found is None or found.kind != "Pod" or found.owner_uid != job.uid:
        return ()
    if found.deleting or found.attempt == attempt:
        return ()
    return (DeletePod(found.name, found.uid, DEAD_GANG_SECONDS),)


def undeleted(view: View) -> Iterator[Stall]:
    """Report pods that cannot be deleted, and those that outlive their grace period."""
    for pod in view.seats.pods:
        refusal = view.feedback.undeleted.get(pod.uid)
        if refusal and not pod.deleting and view.clock.reached(refusal.at + PATIENCE):
            what = f"pod {pod.name} cannot be deleted: {refusals.explained(refusal)}"
            yield Stall("DeletionRefused", what)
        if pod.deletion_at and view.clock.reached(pod.deletion_at + PATIENCE):
            if not pod.node or pod.ended:
                why = "nothing in it runs; check its finalizers and mounted volumes"
                yield Stall("WaitingForDeletion", f"pod {pod.name} is not gone: {why}")
            else:
                what = f"pod {pod.name} has not ended: {cure(pod.node)}"
                yield Stall("WaitingForDeletion", what, "Cure")
