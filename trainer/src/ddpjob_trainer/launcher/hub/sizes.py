"""Decide who serves in a round of an elastic gang, and how many: without I/O, asked by the hub.

E1 to E7 are rules of the protocol for elastic gangs. Without spec.minReplicas nobody asks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from ddpjob_contract import ExitCode
from ddpjob_trainer.environment import Elastic
from ddpjob_trainer.launcher.hub.root_cause import Exit

#: A grown round that ends sooner doubles the pause before the next growth, up to the longest.
_SHORT_SECONDS = 60.0
_LONGEST_SECONDS = 480.0
#: A grown round has so long for its first step, or so many times what the last start took.
_START_SECONDS = 30.0
_STARTS = 3
#: By these alone ranks end that do not reach one another.
_UNREACHED = {ExitCode.PEER_LOST, ExitCode.HANG}


def in_order(here: Collection[int], served: Sequence[int]) -> list[int]:
    """Return who can serve: the hub's own, then who served, then others by seat (E1)."""
    order = [0, *served, *sorted(here)]
    return [seat for seat in dict.fromkeys(order) if seat in here] if 0 in here else []


def unreached(exits: Collection[Exit], lost: Collection[int], *, saved: bool) -> bool:
    """Return whether a round ended since its members do not all reach one another (E6)."""
    codes = {exit_.code for exit_ in exits if exit_.status and not exit_.ours}
    return bool(codes) and codes <= _UNREACHED and not lost and not saved


class Sizes:
    """Remembers who is left out, and when to grow. Launchers are known by their seats.

    ``most``: spec.replicas.
    """

    def __init__(self, elastic: Elastic, most: int) -> None:
        self.elastic = elastic
        self.asked = False  # the round that runs is to end for growth
        self.grown = False  # it has members that the one before had not
        self.due: float | None = None  # when a round may begin; None: too few are here
        self._most = most
        self._served: tuple[int, ...] = ()  # in the newest round
        self._new: frozenset[int] = frozenset()  # of those
        self._left_out: frozenset[int] = frozenset()
        self._turn = 0  # so many rounds of few have failed; 0: all that are here serve
        self._pause = elastic.grow_after
        self._still_since: float | None = None
        self._began = self._arrived = self._start = 0.0
        self._first: int | None = None  # the newest snapshot when the first step had ended
        self._judged: bool | None = None  # what ended() has found

    # --- Before a round --------------------------------------------------------------------

    def choose(self, here: Collection[int], knows: Collection[int]) -> list[int]:
        """Return who serves next of those that stand still, [] for too few.

        ``knows``: whose launchers know sizes; others serve in full rounds only (E7).
        """
        least = self.elastic.least
        found = in_order(set(here) - self._left_out, self._served)
        if len(found) < least:
            found = in_order(here, self._served)
        if len(found) < self._most:
            found = [seat for seat in found if seat in knows]
        if self._turn and len(found) > least:  # the hub's own, and others in turn
            others = sorted(found[1:])
            at = (self._turn - 1) % len(others)
            found = [0, *(others[at:] + others[:at])[: least - 1]]
        return found if len(found) >= least else []

    def ready(self, here: Collection[int], knows: Collection[int], now: float) -> list[int]:
        """Return who serves in the round that begins now, [] while it is awaited (E2).

        The hub asks once all that are linked stand still.
        """
        if self._still_since is None:
            self._still_since = now
        found, elastic = self.choose(here, knows), self.elastic
        wanted, wait = len(set(self._served) - self._left_out), elastic.shrink_after
        if not self._served:
            wanted, wait = self._most, elastic.start_after
        elif self._turn:
            wanted = elastic.least
        self.due = self._still_since + (wait if len(found) < wanted else 0.0) if found else None
        return found if self.due is not None and now >= self.due else []

    def begins(self, chosen: Sequence[int], now: float) -> None:
        """Note that a round begins with these."""
        self._new = frozenset(chosen) - frozenset(self._served)
        self.grown = bool(self._served and self._new)
        self._served, self._began = tuple(chosen), now
        self._first = self._still_since = self._judged = self.due = None
        self.asked = False

    # --- While it runs -----------------------------------------------------------------------

    def arrives(self, now: float) -> None:
        """Note that somebody has come."""
        self._arrived = now

    def look(
        self, here: Collection[int], knows: Collection[int], snapshot: int | None, now: float
    ) -> Literal["", "grow", "late"]:
        """Say whether the round is to end: to grow (E5), or since it does not begin to train (E6).

        ``snapshot``: the step of the newest that the hub's own workers know, None before the end
        of their first step. Who was left out by the round itself waits as who comes in it.
        """
        if self.asked:
            return ""
        if snapshot is None:
            late = now - self._began > max(_START_SECONDS, _STARTS * self._start)
            return "late" if self.grown and late else ""
        if self._first is None:
            self._first, self._start = snapshot, now - self._began
        found = in_order(here, self._served)
        if len(found) < self._most:
            found = [seat for seat in found if seat in knows]
        rested = now >= max(self._arrived, self._began) + self._pause
        self.asked = rested and snapshot > self._first and len(found) > len(self._served)
        return "grow" if self.asked else ""

    # --- After it ------------------------------------------------------------------------------

    def ended(self, failed: bool, now: float) -> bool:
        """Judge a round, once: return whether it was a trial of new members, which costs nothing.

        ``failed``: it is unreached(), or was late.
        """
        if self._judged is not None:
            return self._judged
        left = len(self._served) - len(self._new)
        self._judged = failed and self.grown and left >= self.elastic.least
        if self.grown and not (self.asked or self._turn):
            longer = min(2 * self._pause, _LONGEST_SECONDS)
            short = now - self._began < _SHORT_SECONDS
            self._pause = longer if short else self.elastic.grow_after
        if self.asked:
            self._left_out, self._turn = frozenset(), 0
        elif self._judged:
            self._left_out |= self._new
        elif failed:
            self._turn += 1
        return self._judged
