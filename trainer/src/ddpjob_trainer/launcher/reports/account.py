"""Book the seconds of a launcher's life by what its gang did: the ledger's share of it.

The supervisor says which stretch begins; rank 0's record says how its steps were spent. /state and
the termination report carry the sums, and the operator multiplies them by the gang's pods.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple, cast

from ddpjob_contract import Spent
from ddpjob_trainer.liveness.heartbeat import RankState

#: What a launcher does: workers run, those of a round end, it waits for the hub, or has ended.
Stretch = Literal["round", "recovering", "held", "idle"]
_DIGITS: Final = 3


class _Books(NamedTuple):
    """The sums before the present stretch. Replaced whole: threads that serve HTTP read them."""

    sums: Mapping[str, float]
    stretch: Stretch
    since: float
    start: str  # where the time of a round goes before its first step has ended


class Account:
    """Sums in seconds of the monotonic clock.

    ``reached``: the last step that was finished, here or before. ``reports_steps``: rank 0 is
    expected to keep a record; without one nobody knows what a program does.
    """

    def __init__(self, now: float, reached: int = 0, *, reports_steps: bool = True) -> None:
        self._began = now
        self._books = _Books({}, "held", now, "warmup")
        self._reports_steps = reports_steps
        self.reached = reached

    def begin(
        self, stretch: Stretch, now: float, state: RankState | None, rest: str | None = None
    ) -> None:
        """Close the present stretch and begin another. ``state``: rank 0's, of a round.

        ``rest``: where the step goes that was under way, else to ``recovering``.
        """
        books = self._books
        if stretch == books.stretch:
            return
        if books.stretch == "round" and state is not None and state.phase != "startup":
            self.reached = max(self.reached, state.step)
        sums = _plus(books.sums, self._present(now, state, rest or "recovering"))
        start = "recovering" if books.stretch == "round" else books.start
        self._books = _Books(sums, stretch, now, start)

    def read(self, now: float, state: RankState | None) -> Spent:
        """Return the sums up to now; a step under way is in none of them."""
        found = _plus(self._books.sums, self._present(now, state, None))
        rounded = {name: round(seconds, _DIGITS) for name, seconds in found.items()}
        return cast("Spent", {"up": round(now - self._began, _DIGITS), **rounded})

    def _present(self, now: float, state: RankState | None, rest: str | None) -> dict[str, float]:
        """Return the sums of the present stretch. ``rest`` None: its step goes on."""
        books = self._books
        if books.stretch != "round":
            return {books.stretch: now - books.since}
        if state is None:
            return {books.start if self._reports_steps else "unknown": now - books.since}
        spent = state.seconds
        if not spent.last:
            return {books.start: now - books.since}
        found = {
            books.start: spent.last - spent.trained - books.since,
            "repeated": spent.repeated,
            "data": spent.data,
            "snapshot": spent.snapshot,
            "productive": spent.trained - spent.repeated - spent.data - spent.snapshot,
        }
        rest = "idle" if state.phase == "done" else rest
        return found if rest is None else _plus(found, {rest: now - spent.last})


def _plus(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    """Add sums up; leave out what is nothing."""
    names = first.keys() | second.keys()
    both = {name: first.get(name, 0.0) + second.get(name, 0.0) for name in names}
    return {name: seconds for name, seconds in both.items() if seconds > 0}
