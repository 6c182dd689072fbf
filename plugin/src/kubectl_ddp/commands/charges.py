"""Word what a failure was, what it cost, and what the operator did: the rows of `why`."""

from __future__ import annotations

from ddpjob_contract import ExitCode, exits
from ddpjob_contract.evidence import Incident
from kubectl_ddp import cures
from kubectl_ddp.gang import Job
from kubectl_ddp.kubectl import Object

_BUDGETS = {"maxRestarts": "restart", "maxDisruptions": "disruption"}
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


def of(job: Job, failure: Object) -> str:
    """Return what a failure was charged to; by its class where an older operator wrote it."""
    if failure.get("inPlace"):
        return "nothing: it was restarted in place"
    budget = str(failure.get("chargedTo", ""))
    if budget in _BUDGETS and "charge" in failure:
        most = job.spec["restart"][budget]
        return f"{_BUDGETS[budget]} {failure['charge']} of at most {most} ({budget})"
    if job.phase == "Failed" and failure == job.failures[-1]:
        return "nothing: it ended the job"
    return f"to {cures.budget(str(failure.get('class', '')))}, by its class; see Spent"


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
    code = first.get("code")
    number = first.get("signal")
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
