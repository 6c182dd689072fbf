"""Why no new pods are made for the time being, though the job is neither suspended nor at its end.

Pods that run are looked after as ever: losses are counted, successes honoured, deadlines kept. Only
what a new pod would be made of is not to be trusted. A job may be refused, never frozen.
"""

from __future__ import annotations

from typing import Final

from ddpjob_operator.core.view import Change, View

SPEC_INVALID: Final = "SpecInvalid"
TEMPLATE_CHANGED: Final = "TemplateChanged"
#: Told by startup.py, taken back here.
POD_REFUSED: Final = "PodRefused"


def why(view: View) -> tuple[str, str] | None:
    """Reason and message of the condition Invalid; None if pods may be made."""
    if view.spec.flaw:
        return SPEC_INVALID, view.spec.flaw
    may_change = view.spec.suspend or view.status.phase in (None, "Suspended")
    if may_change or view.status.template_hash in ("", view.spec.template_hash):
        return None
    return TEMPLATE_CHANGED, (
        "spec.template changed while the job was not suspended: pods that run go on, new ones are "
        "not made; change it back, or set spec.suspend to true and to false again to take it"
    )


def tell(view: View, change: Change) -> Change:
    """Set the condition Invalid, once with an Event, or take it back."""
    found, old = why(view), view.status.condition("Invalid")
    said = old.reason if old and old.status == "True" else ""
    if found is None:
        taken = view.status.phase in ("Starting", "Running") and not view.missing
        over = taken if said == POD_REFUSED else bool(said)
        return change.condition("Invalid", False, "Valid", "", view.now) if over else change
    reason, message = found
    change = change.condition("Invalid", True, reason, message, view.now)
    return change if said == reason else change.tell("Warning", reason, message)
