"""Fill the status besides decisions: counts, progress, and why a gang stalls.

plan() calls it last, in each planning round. Any stall has a condition with a reason from a closed
list; silence is a defect.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import fields, replace
from datetime import datetime, timedelta
from typing import Any, Final, get_args

from ddpjob_contract import exits
from ddpjob_contract.crd import KIND
from ddpjob_contract.exits import FREE
from ddpjob_operator.core import evidence
from ddpjob_operator.core.actions import Refusal
from ddpjob_operator.core.capacity import pod_group, template_guard
from ddpjob_operator.core.failure_text import after_step, describe, initializing, replicas, shorten
from ddpjob_operator.core.nodes import avoid, fence
from ddpjob_operator.core.objects import status as st
from ddpjob_operator.core.objects.observe import Pod, clean
from ddpjob_operator.core.objects.ranges import format_ranges
from ddpjob_operator.core.objects.status import Failure, Progress, Status
from ddpjob_operator.core.view import Change, Stall, View, recovers_from

#: Shorter than this, creating a container or ending a pod is no stall yet.
PATIENCE = timedelta(seconds=20)
#: A claim may be bound, or a node join, moments after the first scheduling attempt.
SCHEDULING_PATIENCE = timedelta(seconds=5)
#: Ranks end together; a replica that still works so long after another one is reported.
LINGERING = timedelta(minutes=10)
CRASH_LOOPING: Final = "CrashLooping"
INIT_PENDING: Final = "InitContainerPending"
#: A loop is so many failures within so short a time, and ends after so long without one. Both
#: bounds are longer than the longest wait of restart.py between two attempts, or it would flap.
_FAILURES: Final = 3
_RATE: Final = timedelta(minutes=15)
_QUIET: Final = timedelta(minutes=10)
#: Characters of a list of replicas.
_LISTED: Final = 400
#: Words of a refusal, its author, and the cure.
_REFUSERS: Final = (
    (
        "violates PodSecurity",
        "the namespace's Pod Security level",
        "set in the template what it names, or ask for another level of the namespace",
    ),
    (
        "exceeded quota",
        "a ResourceQuota of the namespace",
        "it is tried again by itself, and fits only if the quota has room for all pods at once",
    ),
    (
        "error looking up service account",
        "the API server",
        "create that ServiceAccount, or mend serviceAccountName in the template",
    ),
    (
        " cannot create resource ",
        "the rights of the operator's own account",
        "the operator's chart gives them in the namespaces that its value `namespaces` lists",
    ),
    (
        "no PriorityClass with name ",
        "the API server",
        "create it: it is tried again by itself; or delete the job, and apply it with another",
    ),
    (" usage per ", "a LimitRange of the namespace", "mend requests and limits by it"),
    ("' denied request", "an admission policy of the cluster", "mend what it names"),
    ("admission webhook", "a webhook of the cluster", "ask those who run it"),
)
#: The scheduler's words before and after its reasons.
_SCHEDULER: Final = re.compile(
    r"^\d+/\d+ nodes are available: |[,.]? (no new claims to \w+, )?preemption: .*$"
)
#: The API server's words before those that say what is wrong: the object's name is ours.
_OBJECT: Final = re.compile(
    r'^(\S+ "\S+" is (forbidden|invalid)'
    r'|Pod in version "v1" cannot be handled as a Pod(: strict decoding error)?): '
)
#: Characters of the message that is a column of `kubectl get`.
_BRIEF: Final = 80
#: Fields of Progress that no later one fills in.
_NOT_MERGED: Final = ("proof", "straggler", "other_job", "updated_at")
#: Reasons of a job's end by its newest failure.
_BY_FAILURE: Final = (
    "PermanentFailure", "SameFailure", "MaxRestartsExceeded", "MaxDisruptionsExceeded",
)  # fmt: skip
_KNOWN: Final = get_args(st.Known)
#: The only phase in which each of these conditions is true.
_PHASE_OF: Final = {
    "Running": "Running",
    "Suspended": "Suspended",
    "Complete": "Succeeded",
    "Failed": "Failed",
}


def fill(view: View, change: Change) -> Change:
    """Fill in counts, progress, observedGeneration and the condition Ready."""
    status = replace(change.status, conditions=_by_phase(change.status, view.now))
    parts: dict[str, Any] = {"observed_generation": template_guard.acted_on(view, status.phase)}
    if not status.terminal:  # the end keeps its own last words
        parts |= {"progress": received(status.progress, view.feedback.progress)}
        polled = view.feedback.progress
        other = polled is not None and polled.other_job
        change = began_from(view, change, parts["progress"].resumed, other_job=other)
    if status.terminal:
        parts |= {"replicas": replace(_replicas(view), active=0, ready=0)}
        parts |= {"succeeded": view.succeeded}
    elif status.phase == "Suspended" or status.queued:
        active = len([pod for pod in view.pods if not pod.ended]) + len(view.hidden or ())
        still = replace(_replicas(view, view.pods), active=active, succeeded=0, failed=0)
        parts |= {"replicas": still}
    elif status.members_since == view.status.members_since:
        parts |= {"replicas": _replicas(view), "succeeded": view.succeeded}
    else:
        parts |= {"replicas": st.Replicas(desired=view.spec.replicas)}
    reason, message = _why(view, change)
    parts |= {"reason": reason, "message": message, "conditions": status.conditions}
    change = change.with_status(**parts)
    change = _unsupported(view, change)
    return change if status.terminal else _straggling(view, _proven(view, change))


def _by_phase(status: Status, now: datetime) -> tuple[st.Condition, ...]:
    """Clear conditions of another phase (etcd was restored, a person wrote them) and set Ready.

    kstatus, by which Helm, Flux and others wait, takes a job without Ready for finished; it follows
    the phase alone, so it costs no extra write.
    """
    phase, conditions = status.phase or "Pending", status.conditions
    for type_, only in _PHASE_OF.items():
        told = status.condition(type_)
        if told and told.status == "True" and phase != only:
            conditions = st.with_condition(conditions, type_, False, phase, f"phase {phase}", now)
    ready = phase in ("Running", "Succeeded")
    return st.with_condition(conditions, "Ready", ready, phase, f"phase {phase}", now)


def _why(view: View, change: Change) -> tuple[str, str]:
    """Summarize why the job is not as it should be; "" if all is well.

    Causes for the user come first, then those of the cluster, then the newest failure.
    """
    status, before = change.status, view.status
    if status.phase == "Succeeded":
        return "", ""
    for type_ in ("Failed", "Invalid", "Stalled"):
        found = status.condition(type_)
        if found and found.status == "True":
            # Where a failure is the cause, the reason says the rest already.
            if cause := _cause(status, found.reason):
                return found.reason, shorten(cause.exception or describe(cause), _BRIEF)
            if found == before.condition(type_) and found.reason == before.reason:
                return before.reason, before.message
            return found.reason, clean(change.briefs.get(type_) or found.message, _BRIEF)
    loss = recovers_from(status)
    if loss is None or status.phase != "Restarting":
        return "", ""
    return loss.reason, shorten(loss.exception, _BRIEF)


def _cause(status: Status, reason: str) -> Failure | None:
    """Return the failure that a condition of this reason is about."""
    if reason == CRASH_LOOPING:
        return next(reversed(_of_program(status)), None)
    return status.last_failure if reason in _BY_FAILURE else None


def stall(view: View, change: Change, why: Iterator[Stall]) -> Change:
    """Set or clear Stalled, by the first reason, while a wanted gang does not run."""
    old, said = view.status.condition("Stalled"), view.status.stalled
    found = next(why, None)
    if found is None:
        # Kept over the waits and first moments of retries, or it would flap with each.
        phase, stalled = change.status.phase, old and old.status == "True"
        if not stalled or phase == "Pending" or (phase != "Running" and fresh(view)):
            return change
        return change.condition("Stalled", False, "Progressing", "", view.now)
    more = _KNOWN.index(found.known) > _KNOWN.index(said.known)
    news = more or (found.until is None) != (said.until is None)
    if old and old.status == "True" and old.reason == found.reason and not news:
        return change  # the same trouble in other words
    return change.stall(found, view.now)


def reasons(view: View) -> Iterator[Stall]:
    """List the reasons that hold up this attempt, the most telling first."""
    yield from _refusals(view)
    yield from fence.reasons(view)
    yield from outlived(view)
    yield from _older(view)
    pods = _awaited(view)
    for pod in pods:
        if pod.waiting_reason:
            said = pod.waiting_message
            yield Stall(pod.waiting_reason, f"pod {pod.name}: {said}", brief=said)
    for pod in pod_group.in_order(pods):
        if pod.unschedulable and not pod.node and not fresh(view, SCHEDULING_PATIENCE):
            yield unschedulable(pod, avoid.words(view) + pod_group.words(view))
    for pod in pods:
        started = evidence.running(pod) or pod.trainer.state == "terminated"
        if pod.node and not started and not (fresh(view) or pod_group.just_placed(view, PATIENCE)):
            where = f"pod {pod.name} on {pod.node}"
            if pod.awaits:
                yield Stall(INIT_PENDING, f"{initializing(pod.awaits)}, in {where}")
            # Events outlive the pod, which the end of the wait removes.
            hint = f"kubectl get events -n {pod.namespace}"
            hint += f" --field-selector involvedObject.name={pod.name}"
            yield Stall("ContainerCreating", f"{where} does not start: {hint}")
    for pod in pods:
        # Two clocks: good for a message, never for a decision.
        unseen = not pod.node and not pod.unschedulable and pod.phase == "Pending"
        if unseen and pod.created_at and view.reached(pod.created_at + PATIENCE):
            yield unschedulable(pod)
    yield from _unresolved(view)
    yield from _lingering(view)


def unschedulable(pod: Pod, more: str = "") -> Stall:
    """Report a pod that has no node, in the scheduler's words if it has any."""
    said = pod.unschedulable
    if not said:
        what = f"pod {pod.name}: {pod_group.UNSEEN}: does the one of spec.schedulerName run?"
        return Stall("Unschedulable", what, known="")
    brief = _SCHEDULER.sub("", said) or said
    known: st.Known = "" if pod_group.only_waits(pod) else "Cause"
    return Stall("Unschedulable", f"pod {pod.name}: {said}{more}", known, brief=brief + more)


def _awaited(view: View) -> list[Pod]:
    """List the members that matter: one that has to stand by keeps nobody waiting."""
    whole = view.spec.standby > 0 and view.all_running
    return [pod for pod in view.members.values() if evidence.running(pod) or not whole]


def _unresolved(view: View) -> Iterator[Stall]:
    """Report rounds whose processes do not find one another, until one of them progresses."""
    last, heard = view.status.last_failure, view.status.progress.updated_at
    if last is None or not last.in_place or last.attempt != view.status.hub:
        return
    quiet = heard is None or heard <= last.detected_at
    if last.reason == exits.UNRESOLVED_NAMES and quiet:
        what = f"processes were restarted in place and do not find one another: {last.message}"
        yield Stall(exits.UNRESOLVED_NAMES, what)


def lingers(view: View) -> datetime | None:
    """Return when to report that some replicas are done and others do not end.

    The pod of a finished replica may be gone, as after a drain: then it counts from the start.
    """
    began = view.status.timings.running_at
    pods = (view.members.get(replica) for replica in view.succeeded)
    done = (pod.trainer.finished_at if pod is not None else began for pod in pods)
    first = min((at for at in done if at is not None), default=None)
    return None if first is None else first + LINGERING


def _lingering(view: View) -> Iterator[Stall]:
    if view.reached(lingers(view)):
        # With thousands of replicas each list must leave room for the other.
        left = frozenset(range(view.spec.replicas)) - view.succeeded
        done, which = replicas(view.succeeded, _LISTED), clean(format_ranges(left), _LISTED)
        have, others_have = ("has" if len(some) == 1 else "have" for some in (view.succeeded, left))
        after = after_step(view.succeeded, view.members)
        what = f"{done} {have} succeeded{after}, and {which} {others_have} not ended"
        yield Stall("WaitingForReplicas", what)


def _refusals(view: View) -> Iterator[Stall]:
    for refusal in (view.network_refusal, *view.refusals.values()):
        if refusal and not (ours(view, refusal) and fresh(view)):
            yield refused(view, refusal)


def outlived(view: View) -> Iterator[Stall]:
    """Report pods that cannot be deleted, and those that outlive their grace period."""
    for pod in view.pods:
        refusal = view.feedback.undeleted.get(pod.uid)
        if refusal and not pod.deleting and view.reached(refusal.at + PATIENCE):
            what = f"pod {pod.name} cannot be deleted: {explained(refusal)}"
            yield Stall("DeletionRefused", what)
        if pod.deletion_at and view.reached(pod.deletion_at + PATIENCE):
            if not pod.node or pod.ended:
                cure = "nothing of it runs: see its finalizers, and volumes that stay mounted"
                yield Stall("WaitingForDeletion", f"pod {pod.name} is not gone: {cure}")
            else:
                what = f"pod {pod.name} has not ended: {fence.cure(pod.node)}"
                yield Stall("WaitingForDeletion", what, "Cure")


def _older(view: View) -> Iterator[Stall]:
    """Report old pods that hold up this attempt."""
    for pod in view.others:
        if not fresh(view):
            where = f"pod {pod.name} of attempt {pod.attempt} on {pod.node or 'no node'}"
            yield Stall("WaitingForDeletion", f"{where} is still being deleted")
    if pod_group.removals(view) and not fresh(view):
        what = f"PodGroup {view.status.pod_group} of an earlier attempt cannot be removed"
        yield Stall("WaitingForDeletion", f"{what}: see the operator's log")


def fresh(view: View, patience: timedelta = PATIENCE) -> bool:
    """Tell whether the attempt is too young for a wait to be news."""
    since = view.begun_at
    return since is None or not view.reached(since + patience)


def ours(view: View, refusal: Refusal) -> bool:
    """Tell whether an object of this very job, about to go, has the name."""
    return refusal.existing is not None and refusal.existing.owner_uid == view.job.uid


def passes(view: View, refusal: Refusal) -> bool:
    """Tell whether the name frees by itself: ours, or of a deleted job's object."""
    namesake = f"{KIND} {view.job.name}"
    left = refusal.existing is not None and refusal.existing.owner == namesake
    return left or ours(view, refusal)


def refused(view: View, refusal: Refusal) -> Stall:
    """Report a refusal."""
    found = refusal.existing
    if found and passes(view, refusal):
        what = f"{found.kind} {found.name} of an earlier attempt or job is still there"
        stuck = found.deletion_at and view.reached(found.deletion_at + PATIENCE)
        cure = f" on node {found.node}" if found.node else ""
        cure += f": {fence.cure(found.node)}" if found.node and stuck else ""
        known: st.Known = "Cure" if found.node and stuck else "Cause"
        return Stall("WaitingForDeletion", what + cure, known)
    if found:
        what = f"{found.kind} {found.name} exists and is not ours: delete or rename one of them"
        return Stall("NameConflict", what)
    # A reason that is no word, as of a proxy's error page, would make the status invalid.
    word = refusal.reason.isascii() and refusal.reason.isalnum() and refusal.reason[0].isalpha()
    return Stall(refusal.reason if word else "CreationFailed", explained(refusal))


def explained(refusal: Refusal) -> str:
    """Put after the API server's words, where known, who refused and what helps."""
    said = _OBJECT.sub("", refusal.message)
    for words, who, cure in _REFUSERS:
        if words in refusal.message:
            return f"{said} (refused by {who}): {cure}"
    return said


def _replicas(view: View, members: Collection[Pod] | None = None) -> st.Replicas:
    members = view.members.values() if members is None else members
    most = view.spec.replicas  # others stand by
    alive = [p for p in members if p.phase in ("Pending", "Running") and not p.deleting]
    return st.Replicas(
        desired=most,
        active=min(most, len([p for p in alive if not evidence.succeeded(p)])),
        ready=min(most, len([p for p in alive if p.trainer.ready and evidence.running(p)])),
        succeeded=len(view.succeeded),
        failed=len([p for p in members if evidence.failure(p, 1, view.now)]),
    )


def received(old: Progress, new: Progress | None) -> Progress:
    """Return the newest progress; a poll without news moves no timestamp.

    The first one has its own: budgets.py asks whether anything was heard before.
    """
    if new is None:
        return old
    told = ((f.name, getattr(new, f.name)) for f in fields(Progress) if f.name not in _NOT_MERGED)
    merged = replace(old, **{name: value for name, value in told if value not in (None, "")})
    news = merged != old or old.updated_at is None
    return replace(merged, updated_at=new.updated_at) if news else old


def began_from(view: View, change: Change, said: str, *, other_job: bool) -> Change:
    """Report once that a snapshot is another job's, or was made by another program."""
    if said in ("", view.status.progress.resumed):
        return change
    if not other_job:
        return change.tell("Normal", "ProgramChanged", f"training goes on from a state {said}")
    cure = "to train anew apply it under another name, or with spec.snapshot.resume: Never"
    return change.tell("Warning", "OtherSnapshots", f"training goes on from {said}; {cure}")


def _proven(view: View, change: Change) -> Change:
    """Report whether the newest restart was proven; without news the condition stays."""
    progress = view.feedback.progress
    found = progress.proof if progress is not None else None
    if found is None:
        return change
    reason = "StepsRepeatedEqual" if found.equal else "StepsDiffer"
    old = change.status.condition("ResumeProven")
    conditions = st.with_condition(  # False too where it never was true
        change.status.conditions, "ResumeProven", found.equal, reason, found.message, view.now
    )
    change = change.with_status(conditions=conditions)
    again = old is not None and old.reason == reason and found.equal
    if again or old == change.status.condition("ResumeProven"):
        return change
    return change.tell("Normal" if found.equal else "Warning", reason, found.message)


def _straggling(view: View, change: Change) -> Change:
    """Report the rank that holds up the others; its place tells which pod and node."""
    progress, old = view.feedback.progress, change.status.condition("Straggling")
    found = (
        progress.straggler if progress is not None and change.status.phase == "Running" else None
    )
    if found is None:
        return change.condition("Straggling", False, "Progressing", "", view.now)
    replica = found.rank // view.spec.nproc_per_node
    pod = view.members.get(change.status.serving.get(replica, replica))
    where = f"pod {pod.name} on {pod.node}" if pod else f"replica {replica}"
    does = "waits for its data" if found.fetching else "computes"
    reason = "SlowInput" if found.fetching else "SlowRank"
    # Without figures: the same rank, a little faster or slower, is no news.
    what = f"rank {found.rank} in {where} {does} so much longer than the others that they wait"
    change = change.condition("Straggling", True, reason, what, view.now)
    news = change.status.condition("Straggling") != old
    return change.tell("Warning", reason, what) if news else change


def _unsupported(view: View, change: Change) -> Change:
    if view.spec.fence_after is not None and view.nodes is None:
        return change  # not known yet
    if view.spec.fence_after is None or (view.nodes and view.nodes.readable):
        return change.condition("Unsupported", False, "AllSupported", "", view.now)
    message = (
        "spec.nodeLost.policy Fence behaves as Wait, because the operator cannot read nodes: "
        "install its chart with rbac.nodes=true"
    )
    return change.condition("Unsupported", True, "NodesNotReadable", message, view.now)


def loops(view: View, status: Status) -> Iterator[Stall]:
    """Explain that the program fails again and again, in whatever phase the gang is."""
    until, counted = quiet_at(status), _of_program(status)
    if until is None or view.reached(until):
        return
    newest = counted[-1]
    counted = [one for one in counted if newest.detected_at - one.detected_at <= _RATE]
    took = max(1.0, (newest.detected_at - counted[0].detected_at).total_seconds() / 60)
    rounds = sum(one.in_place for one in counted)
    often = f"{len(counted)} failures within {took:.0f} min, {rounds} of them restarted in place"
    alike = {one.exception for one in counted} == {newest.exception}
    each = ", each so" if newest.exception and alike else ""
    cure = "spec.suspend true stops it and keeps the snapshots"
    yield Stall(CRASH_LOOPING, f"{describe(newest)}: the last of {often}{each}; {cure}")


def quiet_at(status: Status) -> datetime | None:
    """Return when the loop ends if nothing fails any more; None without a loop."""
    counted = _of_program(status)[-_FAILURES:]
    if len(counted) < _FAILURES or counted[-1].detected_at - counted[0].detected_at > _RATE:
        return None
    return counted[-1].detected_at + _QUIET


def _of_program(status: Status) -> list[Failure]:
    """List the program's failures since the start or resume, which may have cured older ones.

    And those of pods that no node would start, until one does.
    """
    since, runs = status.timings.started_at, status.phase == "Running"
    charged = [
        one
        for one in status.failures
        if one.cls not in FREE or (not runs and exits.recurs(one.cls, one.reason, one.exit_code))
    ]
    return [one for one in charged if since is None or one.detected_at >= since]
