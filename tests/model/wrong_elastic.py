"""Hubs with one rule of the protocol for elastic gangs broken, as its table of them says."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from ddpjob_trainer.launcher.hub import sizes
from ddpjob_trainer.launcher.hub.hub import Hub
from ddpjob_trainer.launcher.hub.messages import Go, Message
from ddpjob_trainer.launcher.hub.sizes import Sizes
from model.launchers import Launcher


def _with(wrong: type[Sizes]) -> type[Hub]:
    class _Hub(Hub):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            assert self.sizes is not None
            self.sizes.__class__ = wrong

    return _Hub


class ShrinksBelowTheLeast(Launcher):
    class _Sizes(Sizes):
        def choose(self, here: Collection[int], knows: Collection[int]) -> list[int]:
            return sizes.in_order(here, self._served)

    hub_class = _with(_Sizes)


class GrowsWithoutASnapshot(Launcher):
    class _Sizes(Sizes):
        def look(self, here: Any, knows: Any, snapshot: int | None, now: float) -> Any:
            return super().look(here, knows, None if snapshot is None else int(now * 1e3), now)

    hub_class = _with(_Sizes)


class NeverGrows(Launcher):
    class _Sizes(Sizes):
        def look(self, *given: Any) -> Any:
            return ""

    hub_class = _with(_Sizes)


class NeverLeavesOut(Launcher):
    class _Sizes(Sizes):
        def ended(self, failed: bool, now: float) -> bool:
            return super().ended(False, now)

    hub_class = _with(_Sizes)


class _Speaks(Launcher):
    """Its hub says another Go."""

    def go(self, go: Go, seat: int) -> Go:
        return go

    def _post(self, post: Any, seat: int, message: Message) -> None:
        super()._post(post, seat, self.go(message, seat) if isinstance(message, Go) else message)


class HasSeatsForRanks(_Speaks):
    def go(self, go: Go, seat: int) -> Go:
        return replace(go, replica=seat)


class KeepsTheRound(_Speaks):
    """A shrunken round has the number of the one before; L4 keeps launchers out of it."""

    def go(self, go: Go, seat: int) -> Go:
        return replace(go, round=0)


class SaysAnotherSize(_Speaks):
    """One of the list hears of another list."""

    def go(self, go: Go, seat: int) -> Go:
        return replace(go, size=go.size + (seat == 0))


class GoesBeforeAllHaveStopped(Launcher):
    class _Hub(Hub):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            seats: Any = self.seats
            running = seats.running

            def wrong() -> set[int]:
                seats.stopped |= seats.present
                found: set[int] = running()
                return found

            seats.running = wrong

    hub_class = _Hub
