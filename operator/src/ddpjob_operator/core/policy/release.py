"""Giving back what cannot become a whole gang now, and when to try again. Charged to nobody.

Creation is all or nothing: two half gangs must never hold what each other needs. Nor may they meet
again at every try, so each waits a time of its own (View.chance).
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Final, Literal

from ddpjob_operator.core.policy import quota, restart
from ddpjob_operator.core.view import Change, View

#: A gang waits no longer than this between two tries, ...
_LONGEST: Final = 300.0
#: ... and the less the longer it has waited in all, down to this: later gangs yield to it.
_LONGEST_OF_OLD: Final = 30.0
_OLD: Final = timedelta(hours=1)
#: What was held in vain for long is not asked for again at once: others may need less.
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
    """Delete what was created and wait; a new attempt all the same, and no failure."""
    released = view.status.restarts.released + 1
    wait = delay(view, released, yields=reason == quota.TOO_SMALL)
    change = restart.new_attempt(view, change, "Pending", wait)
    change = change.with_status(restarts=replace(change.status.restarts, released=released))
    what = f"released all pods, next try in {wait:.0f} s: {message}"
    change = change.condition(condition, True, reason, what, view.now)
    return change.tell("Warning", reason, what)


def delay(view: View, released: int, *, yields: bool) -> float:
    """Seconds before the next try after so many in a row: doubling, then 0.5 to 1.5 of that.

    A gang that had places for long and was not whole may never be: in the end it rests for as long
    as it held them, so that half of the time is others', and its age does not hurry it.
    """
    timings = view.status.timings
    held = view.now - (timings.attempt_started_at or view.now)
    waited = view.now - (timings.started_at or view.now)
    share = held.total_seconds() * _SHARE_OF_HELD
    first = max(view.spec.restart.initial_seconds, share)
    # However short the backoff: gangs that are longer in the making would meet again for ever.
    longest = min(_LONGEST, max(view.spec.restart.max_seconds, share))
    if held > _IN_VAIN and any(pod.node for pod in view.members.values()):
        longest = max(longest, held.total_seconds())
    elif not yields:
        longest = max(min(_LONGEST_OF_OLD, longest), longest / (1.0 + max(0.0, waited / _OLD)))
    doublings = min(released - 1, 60)  # keeps floats finite
    return round(min(longest, first * 2.0**doublings) * (0.5 + view.chance()), 3)
