"""Say what a failure was, what it cost, what was done about it and what a person can do.

The rows of `why`. The cures are the short form of reasons.md: a test compares their reasons.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ddpjob_contract import ExitCode, exits
from ddpjob_contract.evidence import Incident
from ddpjob_contract.exits import FREE
from kubectl_ddp.gang import Job
from kubectl_ddp.kubectl import Object

#: What to do where the reason tells it.
_OF_REASON: Final[Mapping[str, str]] = {
    "StorageLimitExceeded": "raise the limit of ephemeral storage, or write to a volume",
    "ProbeFailed": "see kubectl ddp events {job}; give the probe more time (failureThreshold,"
    " timeoutSeconds), or take it out: spec.hang ends a hung program",
    "DeadlineExceeded": "take activeDeadlineSeconds out of the template: spec has one for the job",
    "ContainerRestarted": "find out what restarts containers in the pod: the trainer's state is"
    " lost with it",
    "InitContainerFailed": "fix the init container; its last lines are above",
    "StartError": "check the command and the paths of the template, and the runtime, which the"
    " message quotes",
    "NodeLost": "nothing, it was not the program; if the machine comes back look at its log",
    "NodeSilent": "nothing, it was not the program; look at the machine's network",
    "Evicted": "nothing, if it was a drain; else the node lacked memory or disk: set requests",
    "NamesNotResolved": "check the cluster's DNS, and dnsPolicy and dnsConfig of the template",
    "SIGTERM": "find out who sent SIGTERM: a script in the pod, an admin",
    "DeletionByTaintManager": "nothing, it was not the program; look at the node",
    "PodDeleted": "nothing, if you did it: else find out who deletes pods (audit log)",
}
#: Of a pod that its node did not take.
_REFUSED: Final = (
    "read what its node says: request less, repair the node, or let the scheduler choose one"
)
_OF_CLASS: Final[Mapping[str, str]] = {
    "User": "read the exception and the log lines above: the program exited on its own",
    "Killed": "find out who sent SIGKILL: an admin, a script; or the kernel, short of memory on"
    " the node (kubectl describe node)",
    "OOM": "raise the container's memory limit, or use less: smaller batches, fewer workers",
    "Hang": "see where it was: kubectl ddp stacks {job} --hung; if it was at work, raise spec.hang",
    "Startup": "see why it did not come up: kubectl ddp events {job}; or raise"
    " startupDeadlineSeconds",
    "Diverged": "ranks disagree, or the loss is no number: docs/guides/determinism.md",
    "Permanent": "correct the command, its options or the image: trying again cannot help",
    "Hardware": "nothing: new pods keep off the node; have its GPU looked at",
    "Infrastructure": "nothing, it was not the program; if it comes again look at the node",
    "Disruption": "nothing, it was not the program",
}
_OF_CONDITION: Final[Mapping[str, str]] = {
    "QuotaExceeded": "raise the quota, or ask for less; else wait: it is tried again",
    "Unschedulable": "add nodes or ask for less; a claim that is missing has to be created",
    "ContainerCreating": "see the pod's Events: images, volumes, ConfigMaps and Secrets",
    "InitContainerPending": "see its log: kubectl logs POD -c NAME; if it is at work, raise"
    " startupDeadlineSeconds",
    "ImagePullBackOff": "correct the image's name, the pull secret or the registry",
    "ErrImageNeverPull": "correct the image's name, or its imagePullPolicy",
    "InvalidImageName": "correct the image's name",
    "CreateContainerConfigError": "create the Secret or ConfigMap that is missing",
    "CreateContainerError": "correct the template: the message has the runtime's words",
    "RunContainerError": "correct the template: the message has the runtime's words",
    "WaitingForDeletion": "wait; if its node is dead see docs/guides/nodes.md",
    "DeletionRefused": "ask those who run what refuses it; it is tried again",
    "NameConflict": "delete or rename the object that is in the way",
    "NodeNotReady": "docs/guides/nodes.md: the message has the command",
    "NodesNotReady": "check the control plane and its network",
    "WaitingForCause": "wait a minute",
    "NamesNotResolved": "check the cluster's DNS",
    "WaitingForReplicas": "look at those that run: kubectl ddp status {job}",
    "CrashLooping": "fix the cause of the failures below; until then it restarts again and again",
    "NoOutput": "see its last lines: kubectl ddp logs {job}; spec.hang.outputSeconds would end it",
    "NotConnected": "call init_process_group() without an address: MASTER_ADDR and MASTER_PORT are"
    " set; or ask for 1 replica",
    "CreationFailed": "see the message; it is tried again",
    "SpecInvalid": "correct the field that the message names",
    "TemplateChanged": "change it back, or suspend and resume",
    "SnapshotChanged": "change it back; snapshots elsewhere need a new DDPJob",
    "PodRefused": "suspend, correct the template, resume",
    "MaxRestartsExceeded": "fix the cause of the failures below, then delete the job and apply it"
    " again: it goes on from the newest snapshot",
    "SameFailure": "correct the program or its data: it would fail at this step again",
    "MaxDisruptionsExceeded": "look at the nodes, then apply it again",
    "PermanentFailure": "correct what the failure below names, then apply it again",
}


def of_failure(failure: Mapping[str, Any], job: str) -> str:
    """Return what to do about a failure."""
    cls, reason = str(failure.get("class", "")), str(failure.get("reason", ""))
    refused = _REFUSED if exits.unstarted(cls, reason, failure.get("exitCode")) else ""
    found = _OF_REASON.get(reason) or refused or _OF_CLASS.get(cls) or "docs/reference/reasons.md"
    return found.format(job=job)


def of_condition(reason: str, job: str) -> str:
    """Return what to do about a condition, "" where its message is all there is."""
    return _OF_CONDITION.get(reason, "").format(job=job)


BUDGETS = {"maxRestarts": "restart", "maxDisruptions": "disruption"}
_WORDS = {
    "User": "the program ended",
    "Killed": "killed from outside the program",
    "OOM": "out of memory",
    "Hang": "no sign of life",
    "Startup": "not all replicas ran in time",
    "Diverged": "the ranks disagree, or the NaN policy said stop",
    "Permanent": "an end that no restart can cure",
    "Hardware": "a GPU failed, not the program",
    "Infrastructure": "lost, not by the program",
    "Disruption": "its pod was removed",
    "Collateral": "a peer was gone first",
}


def charged_to(job: Job, failure: Object) -> str:
    """Return what a failure was charged to; by its class where an older operator wrote it."""
    if failure.get("inPlace"):
        return "nothing: it was restarted in place"
    charged = str(failure.get("chargedTo", ""))
    if charged in BUDGETS and "charge" in failure:
        most = job.spec["restart"][charged]
        return f"{BUDGETS[charged]} {failure['charge']} of at most {most} ({charged})"
    if job.phase == "Failed" and failure == job.failures[-1]:
        return "nothing: it ended the job"
    free = str(failure.get("class", "")) in FREE
    return f"to {'maxDisruptions' if free else 'maxRestarts'}, by its class; see Spent"


def spent(job: Job) -> str:
    """Word the budgets as they are now."""
    restarts, limits = job.status.get("restarts") or {}, job.spec["restart"]
    return (
        f"{restarts.get('charged', 0)} of {limits['maxRestarts']} restarts,"
        f" {restarts.get('disruptions', 0)} of {limits['maxDisruptions']} disruptions;"
        f" {restarts.get('inPlace', 0)} restarts in place, which are free"
    )


def how(failure: Object) -> str:
    """Word an end: no sign of life (Hang, exit code 76)."""
    cls, reason = str(failure.get("class", "")), str(failure.get("reason", ""))
    words = _WORDS.get(cls, "it ended")
    if exits.unstarted(cls, reason, failure.get("exitCode")):
        words = "its node would not start it"
    elif cls == "Infrastructure" and failure.get("exitCode") == ExitCode.PEER_LOST:
        words = "its peers were gone first"
    if cls == "Disruption" and reason == "SIGTERM":
        words = "SIGTERM came from somewhere, and nobody removed its pod"
    if cls == "User" and failure.get("signal"):
        words = "the program was ended by a signal"
    code = failure.get("exitCode")
    shown = [cls, *([reason] if reason != cls and reason != f"ExitCode{code}" else [])]
    shown += [] if code is None else [f"exit code {code}"]
    return f"{words} ({', '.join(filter(None, shown))})"


def did(job: Job, failure: Object) -> str:
    """Word what the operator, or the launchers, did about it."""
    if failure.get("inPlace"):
        return "the processes of all pods were restarted in place"
    if failure.get("replaced"):
        return "only the lost pod was made again; the others waited"
    if job.failures and failure == job.failures[-1]:
        if job.phase == "Failed":
            return "the job was ended"
        if job.phase == "Suspended":
            return "nothing: the job is suspended"
    return "all pods were made again"


def forgotten(incident: Incident) -> Object:
    """Make a failure's record from evidence, where the status has none any more."""
    first = incident["first"]
    code, number = first.get("code"), first.get("signal")
    found: Object = {
        "attempt": incident["attempt"],
        "round": incident["round"],
        "rank": first.get("rank"),
        "replica": incident.get("firstReplica"),
        "pod": incident.get("firstPod", ""),
        "class": exits.class_of(code, number),
        "reason": exits.reason_of(code, number),
        "exitCode": code,
        "signal": number,
        "exception": first.get("exception", ""),
        "step": first.get("step"),
        "detectedAt": incident["at"],
        "inPlace": True,
    }
    return {name: value for name, value in found.items() if value not in (None, "")}
