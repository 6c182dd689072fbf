"""Read what launchers kept beside the snapshots: in a pod of the job, or one made for it.

commands/why.py and commands/logs.py call it. The text comes from a volume that others may write:
what does not parse counts as absent.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, get_args, get_origin, get_type_hints, is_typeddict

import ddpjob_contract as contract
from ddpjob_contract.evidence import EVIDENCE_TIME, Incident
from kubectl_ddp import reader
from kubectl_ddp.gang import Job, Member
from kubectl_ddp.kubectl import Failure, Kubectl
from kubectl_ddp.reader import Consent

_NEEDED: Final = frozenset({"uid", "attempt", "round", "began", "at"})
_GREATEST: Final = 1e300  # no NaN, and no number of 400 digits, is drawn
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
    if not alive and allowed is None:
        offer = f"kubectl ddp why {job.name} --reader starts one for some seconds"
        raise Failure(f"no pod of {job.name} runs; {offer}")
    try:
        if allowed and (allowed.node or not alive):
            return reader.read(kubectl, job, [*command, reader.place(job)], allowed)
        directory = alive[0].environment(contract.SNAPSHOT_DIR)
        where = ("-n", job.namespace, alive[0].name, "-c", alive[0].container)
        return kubectl.read("exec", *where, "--", *command, directory)
    except Failure as failure:
        if _NO_COMMAND.search(str(failure)):
            why = "the job's image has no ddpjob-trainer, or one that keeps no evidence yet"
            raise Failure(why) from None
        raise Failure(str(failure).removeprefix("kubectl: ddpjob-trainer: ")) from None


def parsed(text: str) -> list[Incident]:
    """Parse what `evidence ls --json` prints: the rounds, newest first."""
    try:
        found = json.loads(text)["incidents"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Failure("the evidence could not be read: it is no JSON") from None
    if not isinstance(found, list):
        return []
    checked: list[Incident] = [_checked(one, Incident) for one in found if isinstance(one, dict)]
    return [
        one
        for one in checked
        if one.keys() >= _NEEDED and all(map(_is_time, (one["began"], one["at"])))
    ]


def _is_time(text: str) -> bool:
    with contextlib.suppress(ValueError):  # of the form, but month 13
        return bool(EVIDENCE_TIME.fullmatch(text) and datetime.fromisoformat(text))
    return False


def _checked(value: Any, kind: Any) -> Any:
    """Return what of a value is of a type of the contract, None if nothing is."""
    if is_typeddict(kind):
        given, kinds = value if isinstance(value, dict) else {}, get_type_hints(kind)
        found = {name: _checked(given.get(name), each) for name, each in kinds.items()}
        return {name: one for name, one in found.items() if one is not None}
    origin = get_origin(kind)
    if origin not in (list, dict):
        if kind is float:
            return value if type(value) in (int, float) and abs(value) < _GREATEST else None
        # A Literal is any string: a newer launcher may know more of them.
        return value if type(value) is (int if kind is int else str) else None
    if type(value) is not origin:
        return None
    *_, inner = get_args(kind)
    if origin is list:
        return [kept for one in value if (kept := _checked(one, inner)) is not None]
    return {key: kept for key, one in value.items() if (kept := _checked(one, inner)) is not None}
