"""Classify the loss of a member, and pick the loss that ended an attempt.

cause.py asks for each pod and gets one Failure with one class. _EVIDENCE holds the
rules in their order (docs/guides/restart-policy.md): facts from before the end come before what the
kubelet calls the end. Two classes are collateral: another member went first, so they explain an
attempt only when no better cause turns up.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Final

from ddpjob_contract import PERMANENT_EXIT_CODES, ExitCode, exits
from ddpjob_operator.core.failure_text import KINDS, ended, shorten
from ddpjob_operator.core.objects.observe import Container, Pod, Round
from ddpjob_operator.core.objects.status import Failure

Verdict = tuple[str, str]  # class and reason
#: A node lost by its Lease and the word of the hub: for a while Kubernetes calls it ready.
NODE_SILENT: Final = "NodeSilent"
INIT_FAILED: Final = "InitContainerFailed"
PROBE_FAILED: Final = "ProbeFailed"
#: These codes mean the same in any container.
_OF_ANY: Final = (ExitCode.SIGTERM, 128 + signal.SIGKILL)
#: Codes with which no program ends for lack of memory, though some child of it may have.
_MEANT: Final = exits.CLASSES.keys() | PERMANENT_EXIT_CODES | {0}
#: Words of runtimes and kubelets for an end that nobody has seen, as on a machine that crashed.
_UNKNOWN: Final = ("Unknown", "ContainerStatusUnknown")
_OOM: Final = "OOMKilled"
#: The kubelet's words for the end of a container that add nothing to its exit code.
_PLAIN: Final = ("", "Error", "Completed", _OOM)
#: The kubelet evicts a pod for its own limits, whatever room the node has.
_OUTGROWN: Final = re.compile(
    r"Usage of EmptyDir volume |Pod ephemeral local storage usage exceeds |"
    r"Container \S+ exceeded its local ephemeral storage limit "
)
#: Words of a runtime that could not start a container; the first match counts, since a hook of the
#: node may miss a file, too. Mounts lie on the node, so only "not a directory" is of the template.
_START: Final = {
    "Hardware": r"error running (\w+ )?hook|nvidia-c(ontainer|tk|di)|\bCDI\b",
    "OOM": r"init was OOM-killed|unable to set memory limit",
    "Permanent": (
        r"executable file .*not found|not a directory|chdir to cwd .*permission denied|"
        r'exec: "[^"]*": .*(no such file|permission denied|is a directory)'
    ),
}


def succeeded(pod: Pod) -> bool:
    """Tell whether a replica's trainer container succeeded, whatever its sidecars do.

    A pod that is being deleted, or that a kubelet ended (an eviction, a limit, the shutdown of its
    node), has not: a program that exits with 0 on SIGTERM may not be finished.
    """
    ended = pod.trainer.state == "terminated" and pod.trainer.exit_code == 0
    cut_short = pod.phase == "Failed" and (pod.disruption or pod.reason) != ""
    return ended and not pod.deleting and not cut_short


def running(pod: Pod) -> bool:
    """Tell whether the trainer container runs, ready or not."""
    return pod.trainer.state == "running"


def decisive(pod: Pod) -> Container:
    """Return the trainer container, or the init container that failed before it could start."""
    return pod.init if pod.init and pod.trainer.state != "terminated" else pod.trainer


def failed(pod: Pod) -> bool:
    """Tell whether this member has ended, but not by success; a restarted container has."""
    dead = decisive(pod).state == "terminated" or pod.phase in ("Failed", "Succeeded")
    return (dead or pod.trainer.restart_count > 0) and not succeeded(pod)


def failure(pod: Pod, nproc_per_node: int, now: datetime) -> Failure | None:
    """Describe this member's loss; None while it may still train or has succeeded."""
    if not failed(pod):
        return None
    report, code = pod.trainer.report, decisive(pod).exit_code
    cls, reason = _verdict(pod)
    probed, oom = reason == PROBE_FAILED, reason == _OOM
    said, message = ended(pod, decisive(pod), oom=oom, probed=probed)
    return Failure(
        attempt=pod.attempt or 0,
        round=report.number if report else None,
        replica=pod.replica or 0,
        rank=_rank(pod, nproc_per_node),
        pod=pod.name,
        node=pod.node,
        cls=cls,
        reason=reason,
        exit_code=code,
        signal=_signal(pod),
        message=message,
        detected_at=now,
        step=report.step if report else None,
        exception=said,
        kind=report.kind if report else "",
    )


def ended_round(
    found: Round, attempt: int, replica: int, nproc_per_node: int, now: datetime
) -> Failure:
    """Describe the end of a round: a process died or hung, its launcher lives on."""
    code, rank = found.code, found.rank
    if rank is None and nproc_per_node == 1:
        rank = replica
    cls = {"hang": "Hang", "oom": "OOM", "lost": "Infrastructure"}.get(found.kind, "User")
    number = found.signal or exits.signal_of(code)
    step = f"after step {found.step}" if found.step is not None else ""
    said = found.exception or KINDS.get(found.kind, "")
    reason = "Unknown" if code is number is None else exits.reason_of(code, number)
    reason = exits.UNRESOLVED_NAMES if found.kind == "unresolved" else reason
    loss = Failure(
        attempt=attempt,
        round=found.number,
        replica=replica,
        rank=rank,
        cls=exits.class_of(code, number, cls, found.kind),
        reason=_OOM if found.kind == "oom" else reason,
        exit_code=code,
        signal=number,
        message="\n".join(filter(None, [said, step])),
        detected_at=now,
        in_place=True,
        step=found.step,
        exception=shorten(said),
        kind=found.kind,
    )
    return without_cause(loss) if loss.cls == "Collateral" else loss


def vanished(replica: int, attempt: int, job_name: str, now: datetime) -> Failure:
    """Describe the loss of a member whose pod object is gone, its exit unseen."""
    return Failure(
        attempt=attempt,
        replica=replica,
        pod=f"{job_name}-{replica}",
        cls="Disruption",
        reason="PodDeleted",
        message="the pod was deleted while the gang needed it",
        detected_at=now,
    )


def removed(pod: Pod, now: datetime) -> Failure:
    """Describe the loss of a member that is being removed, whatever its container has said."""
    return Failure(
        attempt=pod.attempt or 0,
        replica=pod.replica or 0,
        pod=pod.name,
        node=pod.node,
        cls="Disruption",
        reason=pod.reason or pod.disruption or "PodDeleted",
        message="the pod is being removed while the gang needs it",
        detected_at=now,
    )


def cause(failures: Iterable[Failure], finished: Mapping[int, datetime | None]) -> Failure | None:
    """Pick the strongest class, then the earliest end, then the lowest replica.

    A failed probe is a guess: what ends pods from outside explains SIGTERM better.
    """
    found = list(failures)
    if any(one.cls in exits.FREE for one in found):
        found = [one for one in found if one.reason != PROBE_FAILED]

    def order(found: Failure) -> tuple[int, float, int]:
        at = finished.get(found.replica)
        return (exits.SEVERITY.index(found.cls), at.timestamp() if at else 0.0, found.replica)

    return min(found, key=order, default=None)


def without_cause(found: Failure) -> Failure:
    """Give a collateral loss the class of its likely cause when no other explains it.

    Where a rank has ended with 0 while others trained, its program has made it so.
    """
    left = found.exit_code == ExitCode.PEER_LOST and found.kind == "leftEarly"
    return replace(found, cls="User" if left else exits.settled(found.exit_code))


def names(found: Failure, pod: Pod | None) -> tuple[int | None, set[str]]:
    """Return the names that a rule can match: the trainer's exit code, and reasons.

    The record has to do for a pod that is gone.
    """
    if pod is None:
        of_trainer = found.reason != INIT_FAILED
        raw = {"Error"} if found.exit_code is not None else set()
    else:
        of_trainer = decisive(pod) is pod.trainer
        raw = {pod.reason, pod.disruption, decisive(pod).reason} - {""}
        if _OOM in raw and found.cls != "OOM":  # it survived, see _out_of_memory
            raw = raw - {_OOM} | {"Error"}
    raw |= {"NodeLost"} if found.reason == NODE_SILENT else set()
    return found.exit_code if of_trainer else None, raw | {found.reason, found.cls}


def leaving(pods: Iterable[Pod]) -> Pod | None:
    """Return the first pod that is being removed."""
    return next((pod for pod in pods if pod.deleting or pod.disruption), None)


def _taken(pod: Pod) -> Verdict | None:
    """Blame the removal of the pod, whatever its program says then."""
    taken = pod.deleting or pod.disruption or pod.reason in ("Preempting", "NodeShutdown")
    return ("Disruption", pod.reason or pod.disruption or "PodDeleted") if taken else None


def _evicted(pod: Pod) -> Verdict | None:
    """Tell an eviction for the pod's own limit from one for lack of room.

    Kubernetes 1.26 and later marks only the latter as a disruption.
    """
    if pod.reason == "DeadlineExceeded":  # of the template
        return "User", pod.reason
    if pod.reason != "Evicted":
        return None
    own = _OUTGROWN.match(pod.message)
    return ("User", "StorageLimitExceeded") if own else ("Disruption", pod.reason)


def _unseen(pod: Pod) -> Verdict | None:
    """Blame the infrastructure for an unseen end, or one of a later start."""
    ended = decisive(pod)
    if pod.trainer.restart_count:
        return "Infrastructure", "ContainerRestarted"
    if ended.state != "terminated":
        return "Infrastructure", pod.reason or "NeverStarted"
    unknown = ended.exit_code is None or ended.reason in _UNKNOWN
    return ("Infrastructure", _reason(pod)) if unknown else None


def _not_started(pod: Pod) -> Verdict | None:
    ended = decisive(pod)
    if ended.reason != "StartError":
        return None
    said = ended.message
    found = (cls for cls, words in _START.items() if re.search(words, said, re.IGNORECASE))
    return next(found, "Infrastructure"), ended.reason


def _out_of_memory(pod: Pod) -> Verdict | None:
    """Tell whether the container itself ran out of memory.

    The kubelet says OOMKilled once any process in it was killed for memory. A launcher has read the
    kernel's counters, or else only SIGKILL counts; without a launcher a code that has a meaning
    excludes it.
    """
    ended, code = decisive(pod), decisive(pod).exit_code
    if ended.report and ended.report.kind == "oom":
        return "OOM", _OOM
    if ended.reason != _OOM:
        return None
    if ended.report:
        killed = code == ExitCode.SIGKILL or _signal(pod) == signal.SIGKILL
        return ("OOM", ended.reason) if killed and code != ExitCode.SIGTERM else None
    meant = _MEANT if ended is pod.trainer else _OF_ANY[:1]
    return None if code in meant else ("OOM", ended.reason)


def _unresolved(pod: Pod) -> Verdict | None:
    """Blame the cluster's DNS where the launcher could not resolve rank 0's name, either."""
    ended = decisive(pod)
    unknown = ended.report is not None and ended.report.kind == "unresolved"
    unknown = unknown and ended.exit_code not in PERMANENT_EXIT_CODES
    return ("Infrastructure", exits.UNRESOLVED_NAMES) if unknown else None


def _of_init(pod: Pod) -> Verdict | None:
    """Classify a failed init container; the trainer's own exit codes mean nothing there."""
    ended = decisive(pod)
    if ended is pod.trainer:
        return None
    code = ended.exit_code
    cls = exits.class_of(code, _signal(pod)) if code in _OF_ANY else "User"
    return cls, INIT_FAILED if ended.reason in _PLAIN else ended.reason


def _probed(pod: Pod) -> Verdict | None:
    """Guess that a kubelet sent the SIGTERM, for a failed probe: nothing else explains it."""
    ended = pod.trainer
    asked = ended.report.kind == "sigterm" if ended.report else ended.exit_code == ExitCode.SIGTERM
    return ("User", PROBE_FAILED) if asked and ended.probed and not pod.reason else None


#: From facts before the end to what the end itself shows.
_EVIDENCE: Final[tuple[Callable[[Pod], Verdict | None], ...]] = (
    _taken,
    _evicted,
    _unseen,
    _not_started,
    _out_of_memory,
    _unresolved,
    _of_init,
    _probed,
)


def _verdict(pod: Pod) -> Verdict:
    found = (look(pod) for look in _EVIDENCE)
    ended = decisive(pod)
    kind = ended.report.kind if ended.report else ""
    by_code = exits.final_class(ended.exit_code, _signal(pod), kind), _reason(pod)
    return next((one for one in found if one), by_code)


def _reason(pod: Pod) -> str:
    ended = decisive(pod)
    plain = exits.reason_of(ended.exit_code, _signal(pod))
    return pod.reason or (plain if ended.reason in _PLAIN else ended.reason)


def _signal(pod: Pod) -> int | None:
    trainer = decisive(pod)
    if trainer.signal:
        return trainer.signal
    if trainer.report and trainer.report.signal:
        return trainer.report.signal
    return exits.signal_of(trainer.exit_code)


def _rank(pod: Pod, nproc_per_node: int) -> int | None:
    if pod.trainer.report and pod.trainer.report.rank is not None:
        return pod.trainer.report.rank
    return pod.replica if nproc_per_node == 1 else None
