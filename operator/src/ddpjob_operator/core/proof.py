"""Read whether a restart did its steps again bit for bit, as a launcher says it, into words.

observe.py calls read() on GET /state; report.py makes the condition ResumeProven of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, get_args

import ddpjob_contract as contract
from ddpjob_operator.core.lenient import mapping, opt_integer

_MOST: Final = 2**63
_WHAT: Final = get_args(contract.Differs)


@dataclass(frozen=True, slots=True)
class Proof:
    """``message``: for the condition."""

    equal: bool
    message: str


def read(raw: object) -> Proof | None:
    """contract.Proof, written by a stranger -> Proof; None if it says nothing."""
    body = mapping(raw)
    first, last, step, rank = (
        opt_integer(body.get(name)) for name in ("first", "last", "step", "rank")
    )
    if body.get("equal") is True and first is not None and last is not None:
        if 0 < first <= last < _MOST:
            return Proof(True, f"steps {first} to {last} were done again after a restart: equal")
    elif body.get("equal") is False and step is not None and rank is not None:
        what = body.get("what")
        if what in _WHAT and 0 < step < _MOST and 0 <= rank < _MOST:
            return Proof(
                False,
                f"step {step}, done again after a restart, differs on rank {rank} in its {what}:"
                " the script keeps something that no snapshot holds, so its result will not equal"
                " an undisturbed run's. The log of rank 0 tells the usual causes; keep it with"
                " run.state(...) or run.register(name, obj)",
            )
    return None
