"""Read a launcher's report of its resume: the snapshot's owner, the restart's proof.

observe.py passes the reports; progress.py and report/conditions.py make Events and conditions of
them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final, get_args

import ddpjob_contract as contract
from ddpjob_operator.core.objects.json_read import mapping, opt_count, sequence, text

_UID: Final = re.compile("[0-9A-Za-z-]{1,64}")
_CHANGED: Final = {"script": "another script", "arguments": "other arguments"}
_WHAT: Final = get_args(contract.Differs)


@dataclass(frozen=True, slots=True)
class Proof:
    """``message``: for the condition."""

    equal: bool
    message: str


def read(raw: object, done: object = None) -> dict[str, Any]:
    """Describe contract.Resumed, written by a stranger, for ``resumed`` and ``other_job``.

    ``done``: steps at the end, of a report. As many as another job's snapshot had are none.
    """
    body = mapping(raw)
    step, uid = opt_count(body.get("step")), text(body.get("uid"))
    if step is None:
        return {}
    whose = f"another DDPJob (uid {uid})" if _UID.fullmatch(uid) else ""
    changed = [word for key, word in _CHANGED.items() if key in sequence(body.get("changed"))]
    made_by = f"made by {' and '.join(changed)}" if changed else ""
    said = ", ".join(filter(None, [whose, made_by]))
    none = "; 0 steps trained" if whose and done == step else ""
    words = f"{said}: its snapshot of step {step}{none}" if said else ""
    return {"resumed": words, "other_job": bool(whose)}


def proof(raw: object) -> Proof | None:
    """Parse a stranger's contract.Proof into a Proof; None if it says nothing."""
    body = mapping(raw)
    names = ("first", "last", "step", "rank")
    first, last, step, rank = (opt_count(body.get(name)) for name in names)
    equal, what = body.get("equal"), body.get("what")
    if equal is True and first and last and first <= last:
        return Proof(True, f"steps {first} to {last} were done again after a restart: equal")
    if equal is False and step and rank is not None and what in _WHAT:
        return Proof(
            False,
            f"step {step}, done again after a restart, differs on rank {rank} in its {what}:"
            " the script keeps something that no snapshot holds, so its result will not equal"
            " an undisturbed run's. The log of rank 0 tells the usual causes; keep it with"
            " run.state(...) or run.register(name, obj)",
        )
    return None
