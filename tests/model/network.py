"""The network between launchers, without sockets: what is said waits in queues, and links break.

The launchers' own code is at both ends of a Line: membership.py, server.py. A
process that is killed lets its peers know, a machine that falls silent does not; a name may lead to
an older pod for a while.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from ddpjob_trainer.launcher.hub.membership import HubClient
from ddpjob_trainer.launcher.hub.messages import Beat, Message
from ddpjob_trainer.launcher.hub.server import Calls

#: After so long the kernel, or a heartbeat, gives a silent peer up.
SILENCE_SECONDS = 30.0
_SILENT_TURNS = 5  # as messages.py counts them
_CONNECT_SECONDS = 3.0
_PAUSE_SECONDS = 0.5


class Host(Protocol):
    """A process on a machine. ``door``: takes what connects to its port; None: nobody listens."""

    uid: str
    node: str
    alive: bool

    @property
    def door(self) -> Callable[[Line, float], None] | None:
        """Get the taker of connections."""


class Line:
    """One end of a connection, in the place of hub/messages.py's Wire."""

    def __init__(self, network: Network, host: Host) -> None:
        self.received: Callable[[Message, float], None] = lambda message, now: None
        self.closed: Callable[[str, float], None] = lambda reason, now: None
        self.host = host
        self.peer = self
        self.open = True
        self.inbox: deque[Message | None] = deque()  # None: the peer has closed
        self.cut_since: float | None = None
        self._network = network
        self._silent = 0

    def send(self, message: Message) -> None:
        if self.open and not isinstance(message, Beat):  # see count_silence
            self._network.moves += 1
            self.peer.inbox.append(message)

    def count_silence(self, now: float) -> None:
        """Count as Wire does; who can be heard has sent a beat."""
        heard = self.peer.host.alive and self._network.reaches(self.host, self.peer.host)
        self._silent = 0 if heard else self._silent + 1
        if self._silent > _SILENT_TURNS:
            self.fail("it was silent", now)

    def close(self) -> None:
        if self.open:
            self.open = False
            self._network.moves += 1
            self.peer.inbox.append(None)

    def fail(self, reason: str, now: float) -> None:
        if self.open:
            self.close()
            self.closed(reason, now)


@dataclass
class Network:
    """``names``: where a pod's name leads. ``moves`` grows with all that is said or closed."""

    now: Callable[[], float]
    names: dict[str, str] = field(default_factory=dict)  # -> uid of a pod
    hosts: dict[str, Host] = field(default_factory=dict)  # by uid of the pod, dead ones too
    cuts: set[frozenset[str]] = field(default_factory=set)  # pairs of nodes
    dark: set[str] = field(default_factory=set)  # nodes that are off
    lines: list[Line] = field(default_factory=list)
    backlog: dict[str, list[Line]] = field(default_factory=dict)  # by uid: not accepted yet
    moves: int = 0

    def reaches(self, one: Host, other: Host) -> bool:
        off = not self.dark.isdisjoint((one.node, other.node))
        return not off and frozenset((one.node, other.node)) not in self.cuts

    def connect(self, host: Host, name: str) -> Line | bool:
        """Dial a name: a line, False where nobody listens, True where nothing answers."""
        there = self.hosts.get(self.names.get(name, ""))
        if there is None or not self.reaches(host, there):
            return True
        if not there.alive or there.door is None:
            return False
        near, far = Line(self, host), Line(self, there)
        near.peer, far.peer = far, near
        self.lines += [near, far]
        self.backlog.setdefault(there.uid, []).append(far)
        self.moves += 1
        return near

    def deliver(self, host: Host, now: float) -> None:
        """Let a process read what has come to it."""
        for line in self.backlog.pop(host.uid, ()):
            if host.door is not None:
                host.door(line, now)
        for line in [line for line in self.lines if line.host is host]:
            while line.open and line.inbox and self.reaches(host, line.peer.host):
                message = line.inbox.popleft()
                self.moves += 1
                if message is None:
                    line.fail("it closed the connection", now)
                    continue
                try:
                    line.received(message, now)
                except ValueError as error:
                    line.fail(f"it sent what is no message: {error}", now)

    def tick(self) -> None:
        """Break what has been silent for long; forget what is over."""
        now = self.now()
        for line in self.lines:
            lost = not self.reaches(line.host, line.peer.host)
            line.cut_since = (line.cut_since or now) if lost else None
            deaf = not line.peer.host.alive or (
                line.peer.peer is not line and line.peer is not line
            )
            gone = deaf and not lost and None not in line.inbox
            if gone or (line.cut_since is not None and now - line.cut_since > SILENCE_SECONDS):
                self.break_off(line)
        self.lines = [one for one in self.lines if one.open and one.host.alive]

    def break_off(self, line: Line) -> None:
        """The kernel gives a peer up; the process hears of it when it reads next."""
        if line.open and line.host.alive:
            self.moves += 1
            line.inbox.clear()
            line.peer, line.cut_since = line, None
            line.inbox.append(None)

    def kill(self, host: Host) -> None:
        """The process is gone; its kernel closes what it held."""
        host.alive = False
        self.moves += 1
        for line in [line for line in self.lines if line.host is host]:
            line.close()
        for line in self.backlog.pop(host.uid, ()):
            line.close()


class ModelClient(HubClient):
    """Dials without a thread. ``network`` and ``owner`` are its class's, see launchers.py."""

    network: Network
    owner: Host

    def __init__(self, *args: Any) -> None:
        self.dial_at: float | None = None
        super().__init__(*args)
        os.close(self._wake_r)
        os.close(self._wake_w)

    def _seek(self, pause: float) -> None:
        self._search += 1
        self._searching = True
        self.dial_at = self.network.now() + pause

    def dial(self, now: float) -> None:
        if not self._searching or self.dial_at is None or now < self.dial_at:
            return
        found = self.network.connect(self.owner, self._address[0])
        if isinstance(found, Line):
            self.dial_at = None
            self._ask(found)  # type: ignore[arg-type]
            return
        self.unmet = "" if found else f"nobody listens at {self._where}"
        self.dial_at = now + _PAUSE_SECONDS + (_CONNECT_SECONDS if found else 0.0)


class ModelCalls(Calls):
    """Calls without threads."""

    network: Network
    owner: Host

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        os.close(self._wake_r)
        os.close(self._wake_w)

    def _dial(self) -> None:
        """Its threads end at once."""

    def dial(self, now: float) -> None:
        while not self._to_dial.empty():
            replica = self._to_dial.get()
            if replica is None or replica not in self._addresses:
                continue
            found = self.network.connect(self.owner, self._addresses[replica][0])
            if isinstance(found, Line):
                self._say(replica, found)  # type: ignore[arg-type]
            else:
                self._due[replica] = now + _PAUSE_SECONDS + (_CONNECT_SECONDS if found else 0.0)


class Silent:
    """A listening socket, a selector: nothing comes of either here."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None
