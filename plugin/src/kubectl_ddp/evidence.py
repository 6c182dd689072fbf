"""Read what launchers kept beside the snapshots: in a pod of the job, or one made for it.

commands/why.py and commands/logs.py call it. The text comes from a volume that others may write:
what does not parse counts as absent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final, cast

import ddpjob_contract as contract
from ddpjob_contract.evidence import EVIDENCE_TIME, Incident
from kubectl_ddp import reader
from kubectl_ddp.gang import Job, Member
from kubectl_ddp.kubectl import Failure, Kubectl
from kubectl_ddp.reader import Consent

#: What an Incident has, by type.
_KINDS: Final[Mapping[str, type]] = {
    "uid": str, "attempt": int, "round": int, "began": str, "at": str, "cause": dict, "why": str,
    "lost": dict, "signal": int, "first": dict, "firstReplica": int, "firstPod": str,
    "failed": list, "followed": list, "stopped": list, "succeeded": list, "running": list,
    "silent": dict, "tails": dict, "step": int, "snapshotStep": int, "nproc": int, "pods": dict,
    "stacks": list,
    "flight": list,
}  # fmt: skip
_OF_FIRST: Final[Mapping[str, type]] = {
    "rank": int, "end": str, "code": int, "signal": int, "exception": str, "step": int,
    "snapshotStep": int, "log": list,
}  # fmt: skip
_OF_CAUSE: Final[Mapping[str, type]] = {
    "rank": int, "replica": int, "kind": str, "snapshotStep": int, "step": int
}  # fmt: skip
_NEEDED: Final = frozenset({"uid", "attempt", "round", "began", "at"})
_RANKS: Final = frozenset({"failed", "followed", "stopped", "succeeded", "running", "stacks"})
_NO_COMMAND = re.compile("invalid choice: 'evidence'|executable file not found")


def read(
    kubectl: Kubectl,
    job: Job,
    members: Mapping[int, Member],
    *words: str,
    seat: int = -1,
    allowed: Consent | None,
) -> str:
    """Run `ddpjob-trainer evidence WORDS DIR`; return its output. Raises Failure.

    ``seat``: ask its pod first, for volumes that pods do not share. ``allowed``: start a pod where
    none of the job runs, None: do not.
    """
    if not job.spec.get("snapshot"):
        raise Failure(
            f"{job.name} has no spec.snapshot, so there is no volume where last lines are kept"
        )
    command = ["ddpjob-trainer", "evidence", words[0], "--uid", job.uid, *words[1:]]
    ends = "Terminating"  # on a lost node it may stay so for minutes, and nobody answers there
    alive = [one for _, one in sorted(members.items()) if one.running and one.state != ends]
    alive.sort(key=lambda member: member.replica != seat)
    if alive and not (allowed and allowed.node):
        directory = alive[0].environment(contract.SNAPSHOT_DIR)
        where = ("-n", job.namespace, alive[0].name, "-c", alive[0].container)
        try:
            return kubectl.read("exec", *where, "--", *command, directory)
        except Failure as failure:
            raise _worded(failure) from None
    if allowed is None:
        offer = f"kubectl ddp why {job.name} --reader starts one for some seconds"
        raise Failure(f"no pod of {job.name} runs; {offer}")
    try:
        return reader.read(kubectl, job, [*command, reader.place(job)], allowed)
    except Failure as failure:
        raise _worded(failure) from None


def _worded(failure: Failure) -> Failure:
    if _NO_COMMAND.search(str(failure)):
        return Failure("the job's image has no ddpjob-trainer, or one that keeps no evidence yet")
    return Failure(str(failure).removeprefix("kubectl: ddpjob-trainer: "))


def parsed(text: str) -> list[Incident]:
    """Parse what `evidence ls --json` prints: the rounds, newest first."""
    try:
        found = json.loads(text)["incidents"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Failure("the evidence could not be read: it is no JSON") from None
    if not isinstance(found, list):
        return []
    checked = [_checked(one, _KINDS) for one in found if isinstance(one, dict)]
    return [cast("Incident", one) for one in checked if one.keys() >= _NEEDED]


def _checked(one: Mapping[str, Any], kinds: Mapping[str, type]) -> dict[str, Any]:
    """Keep the fields of the right type, and in lists and maps the values of theirs."""
    kept = {name: one[name] for name, kind in kinds.items() if type(one.get(name)) is kind}
    for name in _RANKS & kept.keys():
        kept[name] = [rank for rank in kept[name] if type(rank) is int]
    for name in {"began", "at"} & kept.keys():
        if not EVIDENCE_TIME.fullmatch(kept[name]):
            del kept[name]
    if "first" in kept:
        kept["first"] = _checked(kept["first"], _OF_FIRST)
    if "log" in kept:
        kept["log"] = list(map(str, kept["log"]))
    if "cause" in kept:
        kept["cause"] = _checked(kept["cause"], _OF_CAUSE)
    for name in {"lost", "silent"} & kept.keys():
        kept[name] = {str(key): str(value) for key, value in kept[name].items()}
    if "tails" in kept:
        tails = kept["tails"].items()
        kept["tails"] = {pod: list(map(str, log)) for pod, log in tails if isinstance(log, list)}
    return kept
