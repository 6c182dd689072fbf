"""Define what a policy answers: a Change of the status, Stalls, and when to ask it again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal

from ddpjob_operator.core.actions import Event, Measurement
from ddpjob_operator.core.objects import status as st
from ddpjob_operator.core.objects.observe import clean
from ddpjob_operator.core.objects.status import Status


@dataclass(frozen=True, slots=True)
class Clock:
    """The time of a planning round, and when time alone may change what is decided.

    Every decision by time asks here, so that none is forgotten when the next is due.
    """

    now: datetime
    #: Seconds to the times that policies have asked for: plan() runs again at the first.
    wakes: list[float] = field(default_factory=list, compare=False)

    def reached(self, at: datetime | None) -> bool:
        """Return True from that time on, and have plan() run again then. None: never."""
        return at is not None and self.waited((at - self.now).total_seconds())

    def waited(self, seconds: float) -> bool:
        """Return True if no seconds are left, and have plan() run again once none are."""
        if 0 < seconds < math.inf:
            self.wakes.append(seconds)
        return seconds <= 0


@dataclass(frozen=True, slots=True)
class Stall:
    """Why a wanted gang does not run: its fields are read on, its message is for people.

    ``known``, ``until``: see status.Stalled. ``brief``: for the column of `kubectl get`, where the
    message begins with what matters less.
    """

    reason: str
    message: str
    known: st.Known = "Cause"
    until: datetime | None = None
    brief: str = ""


@dataclass(frozen=True, slots=True)
class Change:
    """The status to be stored, and the events and measurements to send once it is.

    ``briefs``: what conditions set now say in few words, by their type.
    """

    status: Status
    events: tuple[Event, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    briefs: Mapping[str, str] = field(default_factory=dict)

    def event(self, type_: Literal["Normal", "Warning"], reason: str, message: str) -> Change:
        """Add an Event."""
        event = Event(type_, reason, message)
        return replace(self, events=(*self.events, event))

    def measure(self, *measurements: Measurement) -> Change:
        """Add observations for /metrics."""
        return replace(self, measurements=(*self.measurements, *measurements))

    def with_status(self, **fields: Any) -> Change:
        """Replace fields of the status."""
        return replace(self, status=replace(self.status, **fields))

    def condition(
        self, type_: str, value: bool, reason: str, message: str, now: datetime
    ) -> Change:
        """Set a condition; leave out a false one that never was true.

        Its message is bounded: the CRD would refuse a longer one for ever.
        """
        if not value and self.status.condition(type_) is None:
            return self
        message = clean(message)
        found = st.with_condition(self.status.conditions, type_, value, reason, message, now)
        data = {"stalled": st.Stalled()} if type_ == "Stalled" else {}
        return self.with_status(conditions=found, **data)

    def stall(self, found: Stall, now: datetime, condition: str = "Stalled") -> Change:
        """Set Stalled, or another condition, and what it says as data."""
        words = found.message
        if found.until is not None:
            words += f"; the other pods wait until {found.until:%H:%M:%S} UTC, then all restart"
        change = self.condition(condition, True, found.reason, words, now)
        change = replace(change, briefs={**self.briefs, condition: found.brief})
        change = change.event("Warning", found.reason, words)
        if condition != "Stalled":
            return change
        return change.with_status(stalled=st.Stalled(found.known, found.until))
