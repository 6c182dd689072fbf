"""Rescues in the model: the real Rescuer over a worker whose answers are moves of the world.

Held: R1 (everybody gets the Stop that follows a rescue's), R2 (one writer in a round), R3 (nobody
writes before the cause is known), R4 (what counts another worker of the round has vouched for), R5
(what rank 0 has to do after its commit() is done, also where it died in that step's body).
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

from ddpjob_trainer.environment import Key
from ddpjob_trainer.launcher import rescue
from ddpjob_trainer.launcher.hub.hub import RESCUE_SECONDS
from ddpjob_trainer.launcher.hub.messages import Message, Stop
from ddpjob_trainer.launcher.hub.root_cause import CAUSE_WAIT_SECONDS
from ddpjob_trainer.liveness.marks import HOLD_SECONDS, Marks
from support.invariants import Violation

if TYPE_CHECKING:
    from model.launchers import Launcher, Workers


class Survivor:
    """The rescue's thread in a worker (training/rescue.py), and its end of the socket.

    ``able``: its state can be saved; ``deaf``: it says nothing; ``bits``: of its state; ``late``:
    it is in the body of the newest step, after commit(), where others have ended that.
    """

    def __init__(self) -> None:
        self.able, self.deaf, self.bits, self.late = True, False, "sound", False
        self.order, self.said, self.over = "", 0, False
        self.heard: deque[dict[str, Any]] = deque()
        self.lines: deque[bytes] = deque()  # for its launcher
        self.lost_at: float | None = None  # when it lost its peers

    @property
    def step(self) -> int:
        """After which it is at its newest boundary."""
        return 99 if self.late else 100

    def marks(self) -> Marks:
        return Marks(
            self.step, 90, intact=True, whole=self.able, step_seconds=1.0, write_seconds=0.1
        )

    def holds(self, now: float) -> bool:
        """It has lost its peers: whether it stays for a rescue."""
        self.lost_at = now if self.lost_at is None else self.lost_at
        return not self.over and (bool(self.order) or now < self.lost_at + HOLD_SECONDS)

    @property
    def writes(self) -> bool:
        return self.order == "write" and not self.over

    def move(self, one: Launcher) -> bool:
        """Say the next thing that is due."""
        if self.deaf or self.over:
            return False
        if not self.order:
            if not self.heard:
                return False
            if self.late:  # whoever reads waits for the body's end
                self.late = False
                return True
            order = self.heard.popleft()
            self.order, most = order["do"], order["most"]
            if most is not None and self.step > most:
                self.over = True
                self._say(no="rank 0 had more to do")
                return True
            one.world.rescued.begins(one)
            self._say(step=self.step)
        elif self.order == "vouch":
            self.over = True
            self._say(word=self.bits)
        elif self.heard:
            self.over = True
            word = self.heard.popleft().get("word")
            if word == self.bits:
                one.world.rescued.commits(one, word)
            self._say(**({"done": 100} if word == self.bits else {"no": "other bits"}))
        else:
            return False
        return True

    def _say(self, **facts: Any) -> None:
        self.lines.append(json.dumps(facts).encode() + b"\n")


class _Link:
    """The launcher's end of the socket."""

    def __init__(self, workers: Workers) -> None:
        self._workers, self._survivor = workers, workers.survivor

    def sendall(self, data: bytes) -> None:
        if not self._workers.running:
            raise BrokenPipeError
        self._survivor.heard.append(json.loads(data))

    @property
    def ready(self) -> bool:
        return bool(self._survivor.lines) or not self._workers.running

    def setblocking(self, flag: bool) -> None:
        """Nobody waits."""

    def connect(self, address: str) -> None:
        """A process that dies accepts as well."""

    def recv(self, size: int) -> bytes:
        return self._survivor.lines.popleft() if self._survivor.lines else b""

    def close(self) -> None:
        """The worker's end needs no word."""


class ModelRescuer(rescue.Rescuer):
    """The real one but for files and sockets."""

    def begin(self, what: str, now: float, most: str = "") -> bool:
        workers: Any = self._workers

        def marks(_: object, rank: int) -> Marks:
            return workers.survivor.marks() if rank == workers.rank else Marks()

        with mock.patch.object(rescue, "read_marks", marks):
            return super().begin(what, now, most)

    def _ask(self, rank: int, what: str, seconds: float) -> None:
        link = _Link(self._workers)  # type: ignore[arg-type]
        with mock.patch.object(rescue.socket, "socket", return_value=link):
            super()._ask(rank, what, seconds)

    @property
    def pending(self) -> int:
        """Links with something to read."""
        links: Any = self._links.values()
        return sum(link.ready for link in links)

    def look(self, now: float) -> None:
        """As the supervisor's select()."""
        links: Any = list(self._links.items())
        for rank, link in links:
            if link.ready:
                self._read(rank, now)


@dataclass
class _Asked:
    """A hub's rescue of one round. ``unstopped``: seats that need a Stop yet."""

    until: float
    unstopped: set[int]


@dataclass
class Rescues:
    """Hold all rescues of a world against the invariants. ``saved``: the rounds with a snapshot."""

    asked: dict[tuple[str, Key], _Asked] = field(default_factory=dict)  # by the hub's pod
    writers: dict[tuple[str, Key], list[Launcher]] = field(default_factory=dict)
    words: dict[tuple[str, Key], dict[str, str]] = field(default_factory=dict)  # by pod
    saved: dict[tuple[str, Key], str] = field(default_factory=dict)

    def posted(self, one: Launcher, seat: int, message: Message, now: float) -> None:
        """A hub says something to a launcher."""
        hub = one.hub
        assert hub is not None
        known = self.asked.get((one.uid, _key(one)))
        if isinstance(message, Stop) and message.rescue in ("write", "alone"):
            self._cause_is_known(one, now)
            seats = set(hub.seats.present) if known is None else known.unstopped
            self.asked[one.uid, _key(one)] = _Asked(now + RESCUE_SECONDS, seats)
        elif isinstance(message, Stop) and not message.rescue and known is not None:
            known.unstopped.discard(seat)

    def _cause_is_known(self, one: Launcher, now: float) -> None:
        assert one.hub is not None
        outcome = one.hub.outcome
        failed = [e for e in outcome.exits.values() if e.status and not e.ours]
        first = any(not e.lost_peer for e in failed)
        late = any(now >= e.at + CAUSE_WAIT_SECONDS for e in failed)
        if not (outcome.lost or first or late or len(outcome.exits) == outcome.replicas):
            raise Violation("r3_cause_is_known", f"{one.uid} asks a survivor after {failed}")

    def turned(self, one: Launcher, now: float) -> None:
        """A hub's launcher has had its turn."""
        hub, known = one.hub, self.asked.get((one.uid, _key(one)))
        if hub is None or known is None or hub.final is not None or now < known.until:
            return
        if left := known.unstopped & hub.seats.present - hub.seats.stopped:
            raise Violation("r1_stop_follows", f"{one.uid} lets {left} run after a rescue")

    def begins(self, one: Launcher) -> None:
        """A worker does as its launcher has asked it to."""
        where = one.job, one.workers.key
        if one.workers.survivor.order == "vouch":
            self.words.setdefault(where, {})[one.uid] = one.workers.survivor.bits
            return
        writers = self.writers.setdefault(where, [])
        for other in writers:
            workers = other.workers
            there = other.alive and workers.running and workers.key == one.workers.key
            if there and not workers.killed and workers.survivor.writes:
                raise Violation("r2_one_writer", f"{one.uid} writes {where}, and {other.uid}")
        writers.append(one)

    def commits(self, one: Launcher, word: str) -> None:
        """A worker's snapshot counts from now on."""
        where = one.job, one.workers.key
        if where in self.saved:
            raise Violation("r2_one_writer", f"{one.uid} saves {where}, as {self.saved[where]} did")
        others = {said for uid, said in self.words.get(where, {}).items() if uid != one.uid}
        if word not in others:
            raise Violation("r4_second_opinion", f"nobody has vouched for {one.uid}'s {word}")
        first = one.hub_of  # whose pod is there, else nobody can know
        here = first is not None and first.alive and first.workers.key == one.workers.key
        if first and here and not first.workers.rank and first.workers.survivor.late:
            raise Violation("r5_rank_0_finishes", f"{one.uid} saves what {first.uid} left")
        self.saved[where] = one.uid


def _key(one: Launcher) -> Key:
    hub = one.hub
    return Key(hub.seats.own.birth, hub.history.round) if hub is not None else Key(0, 0)
