"""The network objects of a gang that runs, looked at now and then.

Somebody may have changed or deleted them, or another version of the operator makes others. No watch
tells: a look costs two reads, and at most one write each, every half an hour or so, and when
processes were restarted in place.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from ddpjob_operator.core import observe, render
from ddpjob_operator.core.actions import EnsureNetwork, Event
from ddpjob_operator.core.view import View

_EVERY: Final = timedelta(minutes=30)
#: After a look at which the API server refused the write.
_AGAIN: Final = timedelta(minutes=5)
#: After a round: its processes meet by name, and without the Service they never do. But a gang that
#: fails again and again does not look each time.
_AFTER_ROUND: Final = timedelta(minutes=1)


def due(view: View) -> datetime | None:
    """When to look next; after a restart of the operator not at all jobs at once."""
    since = view.outcomes.network_at or view.outcomes.seen_since
    if view.status.phase != "Running" or since is None or view.spec.flaw:
        return None
    every = _AGAIN if view.network_refusal else _EVERY
    at, round_at = since + every * (0.5 + view.chance(1)), view.status.timings.last_round_at
    if round_at is not None and since < round_at:
        return min(at, max(round_at, since + _AFTER_ROUND))
    return at


def looks(view: View) -> tuple[EnsureNetwork, ...]:
    """One look, if it is time."""
    at = due(view)
    if at is None or view.now < at:
        return ()
    bodies = render.network(view.job, view.spec, view.outcomes.metrics_from)
    return (EnsureNetwork(view.status.attempt, bodies),)


def told(what: str, trouble: str = "", *, gone: bool = False) -> Event:
    """What is said once such an object was put right, or could not be."""
    if gone:
        return Event("Warning", "NetworkRepaired", f"{what} was gone: pods could not meet by name")
    if trouble:
        message = f"{what} has been changed and cannot be put right: {trouble}"
        return Event("Warning", "NetworkNotRepaired", observe.clean(message))
    return Event("Normal", "NetworkRepaired", f"{what} had been changed")
