"""Hubs, launchers and planners with one rule of the replacement protocol broken.

Each is a row of the table of wrong variants in the protocol, as the product's code would have it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ddpjob_contract as contract
from ddpjob_operator.core.actions import Plan, WriteStatus
from ddpjob_trainer.launcher.hub import hub as hub_
from ddpjob_trainer.launcher.hub.hub import Hub
from ddpjob_trainer.launcher.hub.messages import Hello, Key, Message, Stop
from ddpjob_trainer.launcher.hub.rounds import History
from ddpjob_trainer.launcher.hub.seats import Seats
from ddpjob_trainer.launcher.local_round import Parked, Stopping
from model.cluster import Object
from model.gang import GangWorld
from model.launchers import Launcher
from model.network import ModelClient
from model.wrong import Question


def _seated(seats: type[Seats]) -> type[Hub]:
    """A hub that seats its launchers otherwise."""

    class _Hub(Hub):
        def __init__(self, own: Hello, *more: Any) -> None:
            super().__init__(own, *more)
            self.seats = seats(own, rounds=self.limits.budget > 0)

    return _Hub


class TakesTheNewcomersNumber(Launcher):
    """Its hub has the attempt of the newest pod in the gang, and counts rounds from 0."""

    class _Hub(Hub):
        def admit(self, hello: Hello, now: float) -> None:
            own = self.seats.own
            if hello.birth > own.birth:
                self.seats.own = replace(own, birth=hello.birth)
                self.history = History(round=-1)
            super().admit(hello, now)

    hub_class = _Hub


class GoesBeforeAllHaveStopped(Launcher):
    """Its hub takes Stop for the end of what runs."""

    class _Seats(Seats):
        def running(self) -> set[int]:
            self.stopped |= self.present
            return super().running()

    hub_class = _seated(_Seats)


class FillsPlacesOfThoseThatLeave(Launcher):
    """Its hub lets one that stood by begin while the workers of a pod that is deleted still run."""

    class _Seats(Seats):
        def fill(self) -> dict[int, int]:
            leaving, self.leaving = self.leaving, set()
            filled = super().fill()
            self.leaving = leaving
            return filled

    hub_class = _seated(_Seats)


class EndsAllWithAFailedGpu(Launcher):
    """Its hub ends the attempt where a GPU failed, as versions before did."""

    class _Hub(Hub):
        def dismiss(self, now: float) -> bool:
            return False

    hub_class = _Hub


class _FollowsAny(ModelClient):
    def _may_follow(self, hub: tuple[int, str]) -> bool:
        return hub[0] >= self._followed[0]


class KeepsTheNumber(Launcher):
    """A new hub goes on with the number of the lost one; the others follow it."""

    client_class = _FollowsAny

    def environment(self, pod: Object) -> dict[str, str]:
        env = super().environment(pod)
        if env.get(contract.REPLICA) == "0" and env.get(contract.REPLACEMENT) == "1":
            env[contract.ATTEMPT] = "1"
        return env | {contract.HUB: "1"}


class SucceedsTheHub(Launcher):
    """Who loses the hub goes on in the next round of its number."""

    def _report_stopped(self, now: float) -> None:
        stopping = isinstance(self._phase, Stopping)
        super()._report_stopped(now)
        if stopping and isinstance(self._phase, Parked) and self.hub_of is None:
            number, round_ = self.workers.key
            self._begin(Key(number, round_ + 1), now)


class SaysHelloBeforeWorkersAreGone(Launcher):
    """It looks for the next hub at once."""

    def _take_messages(self, now: float) -> None:
        super()._take_messages(now)
        if self._phase.round.hub_lost:
            self._member.link.join()


def records_no_seat(*args: Any) -> Plan:
    """Raises the attempt of a replacement, and not the floor of the seats that were lost."""
    found = Question(*args).answer()

    def other(births: object) -> str:
        numbers = [one.partition(":")[2] for one in str(births).split(",")]
        return ",".join(f"{9000 + i}:{number}" for i, number in enumerate(numbers))

    changed = (
        replace(a, status={**a.status, "births": other(a.status["births"])})
        if isinstance(a, WriteStatus) and a.status.get("births")
        else a
        for a in found.actions
    )
    return replace(found, actions=tuple(changed))


class ActsOnLostLinks:
    """A planner that gives up whom a hub calls away. ``old``: also a hub that is no more."""

    def __init__(self, *, old: bool) -> None:
        self.world: GangWorld | None = None
        self._old, self._heard = old, frozenset[int]()

    def __call__(self, *args: Any) -> Plan:
        asked = Question(*args)
        away = self._away(asked)
        if asked.job.status.get("phase") != "Running" or not away:
            return asked.answer()
        left = [pod for pod in asked.pods if pod.replica not in away]
        return replace(asked, pods=left).sure().answer()

    def _away(self, asked: Question) -> frozenset[int]:
        there = self.world.launchers.values() if self.world is not None else ()
        hubs = [one.hub for one in there if one.alive and one.hub is not None]
        for hub in hubs:
            now = frozenset(hub.seats.members) - hub.seats.present
            if not self._old:
                return now
            self._heard = self._heard or now
        return self._heard if self._old and self._is_new(asked) else frozenset()

    def _is_new(self, asked: Question) -> bool:
        return str(asked.job.status.get("births", "")).startswith("0:")


# --- Rescues --------------------------------------------------------------------------------------


def _in_phase(phase: type[Any]) -> type[Hub]:
    """A hub in one of whose phases other things are done."""

    class _Hub(Hub):
        @property
        def phase(self) -> Any:
            return self._now_in

        @phase.setter
        def phase(self, begun: Any) -> None:
            self._now_in: Any = begun
            if type(begun) is phase.__base__:
                begun.__class__ = phase

    return _Hub


class LeavesTheOthersRunning(Launcher):
    """Its hub sends no Stop after a rescue's."""

    class _Stops(hub_._GangStops):
        def _stop_rest(self, now: float) -> None:
            self._answer_by = 0.0

    hub_class = _in_phase(_Stops)


class AsksAnotherWriterTooSoon(Launcher):
    """Its hub asks the next survivor where the first has not answered, and may write."""

    class _Stops(hub_._GangStops):
        def tick(self, now: float) -> Any:
            if self._answer_by and now >= self._answer_by and self._survivors:
                self._ask_to_write(now)
            return super().tick(now)

    hub_class = _in_phase(_Stops)


class AsksBeforeTheCauseIsKnown(Launcher):
    """Its hub has the step saved at the first failure that it hears of."""

    class _Runs(hub_._GangRuns):
        def tick(self, now: float) -> Any:
            return self._stop(now) if self._left else super().tick(now)

    hub_class = _in_phase(_Runs)


class ForgetsRank0(Launcher):
    """Its hub lets a survivor save a step in whose body rank 0 has died."""

    def _post(self, post: Callable[[int, Message], None], seat: int, message: Message) -> None:
        asks = isinstance(message, Stop) and message.rescue == "write"
        super()._post(post, seat, replace(message, word="") if asks else message)


class BelievesTheWriter(Launcher):
    """Its hub says to who writes that another has the same bits, having asked nobody."""

    class _Stops(hub_._GangStops):
        def _ask_to_vouch(self) -> None:
            self._rescue(self._writer, "word", "sound")

    hub_class = _in_phase(_Stops)
