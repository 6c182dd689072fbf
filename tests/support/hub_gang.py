"""A hub without sockets or processes: its launchers speak when the test says so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ddpjob_trainer.environment import Elastic
from ddpjob_trainer.launcher.hub.hub import Hub
from ddpjob_trainer.launcher.hub.messages import (
    Failed,
    Go,
    Hello,
    Message,
    Refused,
    Stopped,
    Welcome,
)
from ddpjob_trainer.launcher.hub.root_cause import Exit
from ddpjob_trainer.launcher.hub.rounds import Limits

NUMBER = 4  # of the hub: the attempt that it was made in
WAIT = 330.0  # seconds for the replacement of a lost launcher
WELCOME = Welcome(NUMBER, "pod-0")


class Gang:
    """Three replicas with two processes each, and what the hub posted and dropped.

    ``here``: seats that have come. ``waits``: launchers that can wait for a replacement.
    ``replaces``: another hub, so nothing runs yet. ``modified`` and ``newest``: what the hub finds
    when it asks, and in ``asked`` how often, each time with whether the program failed.
    ``least``: of so many an elastic gang is made, whose hub begins; ``reached``: its snapshot.
    """

    def __init__(
        self,
        here: tuple[int, ...] = (0, 1, 2),
        *,
        waits: tuple[int, ...] | bool = True,
        budget: int = 3,
        standby: int = 0,
        replaces: bool = False,
        least: int = 0,
    ) -> None:
        self.posted: list[tuple[int, Message]] = []
        self.dropped: list[int] = []
        self.modified = -1
        self.newest: str | None = ""
        self.asked: list[bool] = []
        self.round = 0
        self.reached: int | None = None
        self._replicas = {replica: replica for replica in range(3)}  # by seat
        self._waits = waits
        self._own = Hello(
            "uid", "pod-0", seat=0, birth=NUMBER, replicas=3, nproc=2, holds=self._can_wait(0),
            running=not (replaces or least), standby=standby, sizes=least > 0,
        )  # fmt: skip
        elastic = Elastic(least, 5.0, 30.0, 60.0) if least else None
        limits = Limits(budget, heal_after=60.0, hold=WAIT, elastic=elastic)
        self.hub = Hub(
            self._own, limits, self._post, lambda: self.modified, self.dropped.append, self._look,
            lambda: self.reached,
        )  # fmt: skip
        if replaces:
            here = (0,)
        for seat in here:
            assert self.comes(seat, running=self._own.running, pod=f"pod-{seat}") is None
        for seat in range(3, 3 + (0 if replaces else standby)):
            assert self.comes(seat) is None
        self.said()

    def _can_wait(self, seat: int) -> bool:
        return self._waits if isinstance(self._waits, bool) else seat in self._waits

    def _post(self, seat: int, message: Message) -> None:
        self.posted.append((seat, message))
        if isinstance(message, Go):
            self.round, self._replicas[seat] = message.round, message.replica

    def _look(self, *, failed: bool) -> str | None:
        self.asked.append(failed)
        return self.newest

    # --- What launchers do -------------------------------------------------------------------

    def comes(self, seat: int, now: float = 0.0, **changes: Any) -> Refused | None:
        """A launcher says Hello: another pod if it has another ``birth``; nothing runs there."""
        birth = changes.get("birth", NUMBER)
        pod = f"pod-{seat}" if birth == NUMBER else f"pod-{seat}-{birth}"
        given = {"seat": seat, "pod": pod, "running": False, "holds": self._can_wait(seat)}
        hello = replace(self._own, **(given | changes))
        refused = self.hub.refuses(hello)
        if refused is None:
            self.hub.admit(hello, now)
        return refused

    def says(self, seat: int, message: Message, now: float = 0.0) -> None:
        self.hub.receive(seat, message, now)

    def loses(self, *seats: int, now: float = 1.0) -> None:
        for seat in seats:
            self.hub.lost(seat, now)

    def fails(self, seat: int, status: int, now: float = 0.0, **more: Any) -> None:
        """The first of its processes does; the other still runs."""
        exit_ = Exit(2 * self._replicas[seat], 0, status, 0.0, **more)
        self.says(seat, Failed(self.round, (exit_,), 1), now)

    def stop(self, *seats: int, now: float = 1.0, step: int = -1) -> None:
        """They have killed their processes."""
        for seat in seats:
            first = 2 * self._replicas[seat]
            ours = tuple(Exit(first + i, i, -9, 0.0, ours=True) for i in range(2))
            self.says(seat, Stopped(self.round, ours, step), now)

    def awake(self, begin: float, end: float) -> None:
        """The hub's own loop runs in these seconds, after the first."""
        while begin < end:
            begin = min(begin + 1, end)
            self.hub.tick(begin)

    # --- What the hub says -------------------------------------------------------------------

    def said(self) -> dict[int, list[Message]]:
        """To each launcher, since the last call."""
        found: dict[int, list[Message]] = {}
        for seat, message in self.posted:
            found.setdefault(seat, []).append(message)
        self.posted.clear()
        return found

    def words(self) -> dict[int, str]:
        """The same by the kinds of messages."""
        found = self.said().items()
        return {seat: " ".join(type(one).__name__ for one in said) for seat, said in found}

    def goes(self, round_: int, seats: tuple[int, ...] = (0, 1, 2)) -> Go:
        """Round ``round_`` begins at these, one for each replica, and nowhere else."""
        last = {seat: said[-1] for seat, said in self.said().items()}
        gos = {seat: one for seat, one in last.items() if isinstance(one, Go)}
        first = gos[seats[0]]
        assert (first.number, first.round) == (NUMBER, round_)
        assert gos == {seat: replace(first, replica=i) for i, seat in enumerate(seats)}
        assert self.hub.runs
        return first
