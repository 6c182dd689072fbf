"""Deletes the pods of a gang that cannot become whole, and times its next try.

startup.py calls it; it charges nobody. Creation is all or nothing: two half gangs must never hold
what each other needs. Each waits a different time (View.chance), or they would meet again at every
try.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Final, Literal

from ddpjob_operator.core.policy.restarting import restart
from ddpjob_operator.core.view import Change, View

#: The longest wait of a gang between two tries, ...
_LONGEST: Final = 300.0
#: ... which shrinks down to this with its total wait: later gangs yield to it.
_LONGEST_OF_OLD: Final = 30.0
_OLD: Final = timedelta(hours=1)
#: Places held in vain for long are not asked for again at once: others may need less.
_SHARE_OF_HELD: Final = 0.1
#: A gang that finds no room at once, as behind a quota, holds places for seconds.
_IN_VAIN: Final = timedelta(minutes=1)


def release(
    view: View,
    change: Change,
    reason: str,
    message: str,
    condition: Literal["Stalled", "Invalid"] = "Stalled",
) -> Change:
    """Delete the pods and wait: a new attempt, but no failure."""
    released = view.status.restarts.released + 1
    wait = delay(view, released)
    change = restart.new_attempt(view, change, "Pending", wait)
    change = change.with_status(restarts=replace(change.status.restarts, released=released))
    what = f"released all pods, next try in {wait:.0f} s: {message}"
    change = change.condition(condition, True, reason, what, view.now)
    return change.tell("Warning", reason, what)


def delay(view: View, released: int) -> float:
    """Return the seconds before the next try: doubling, then 0.5 to 1.5 of that.

    A gang that had places for long without being whole may never be: in the end it rests for as
    long as it held them, so that half of the time is others', and its age does not hurry it.
    """
    timings = view.status.timings
    held = view.now - (timings.attempt_started_at or view.now)
    waited = view.now - (timings.started_at or view.now)
    share = held.total_seconds() * _SHARE_OF_HELD
    first = max(view.spec.restart.initial_seconds, share)
    # However short the backoff: gangs that take longer to start would meet again for ever.
    longest = min(_LONGEST, max(view.spec.restart.max_seconds, share))
    if held > _IN_VAIN and any(pod.node for pod in view.members.values()):
        longest = max(longest, held.total_seconds())
    else:
        longest = max(min(_LONGEST_OF_OLD, longest), longest / (1.0 + max(0.0, waited / _OLD)))
    doublings = min(released - 1, 60)  # keeps floats finite
    return round(min(longest, first * 2.0**doublings) * (0.5 + view.chance()), 3)
