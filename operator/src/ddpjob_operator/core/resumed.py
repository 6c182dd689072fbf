"""Describes a snapshot of another job or another program that a job resumes from.

observe.py passes what a launcher reports; the words go into status.progress and an Event.
"""

from __future__ import annotations

import re
from typing import Final

from ddpjob_operator.core.lenient import mapping, opt_integer, sequence, text

_UID: Final = re.compile("[0-9A-Za-z-]{1,64}")
_CHANGED: Final = {"script": "another script", "arguments": "other arguments"}
#: The words begin so for a snapshot of another job.
OF_ANOTHER: Final = "another DDPJob"


def words(raw: object, done: object = None) -> str:
    """Describe contract.Resumed, written by a stranger; empty if it says nothing.

    ``done``: steps at the end, of a report. As many as another job's snapshot had are none.
    """
    body = mapping(raw)
    step, uid = opt_integer(body.get("step")), text(body.get("uid"))
    if step is None or not 0 <= step < 2**63:
        return ""
    whose = f"{OF_ANOTHER} (uid {uid})" if _UID.fullmatch(uid) else ""
    changed = [word for key, word in _CHANGED.items() if key in sequence(body.get("changed"))]
    made_by = f"made by {' and '.join(changed)}" if changed else ""
    said = ", ".join(filter(None, [whose, made_by]))
    none = "; 0 steps trained" if whose and done == step else ""
    return f"{said}: its snapshot of step {step}{none}" if said else ""
