"""Serve the hub's TCP port; a connection is a stranger until its Hello is admitted."""

from __future__ import annotations

import selectors
import socket

from ddpjob_trainer.launcher import sockets
from ddpjob_trainer.launcher.hub.hub import Hub
from ddpjob_trainer.launcher.hub.messages import Hello, Message, Refused
from ddpjob_trainer.launcher.hub.wire import Wire

_HELLO_SECONDS = 5.0
_BATCH = 64  # connections taken at once, then the other sockets get their turn


class HubServer:
    """Owns the listening socket and the wires of launchers 1, 2, ..."""

    def __init__(self, listener: socket.socket, selector: selectors.BaseSelector, hub: Hub) -> None:
        self._listener = listener
        self._selector = selector
        self._hub = hub
        self._strangers: dict[Wire, float] = {}  # when they are dropped if still silent
        self._wires: dict[int, Wire] = {}
        self._deaf_until = 0.0  # when it listens again after a lack of descriptors; 0: it does
        listener.listen(1024)
        listener.setblocking(False)
        self._listen()

    def _listen(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def post(self, replica: int, message: Message) -> None:
        """Send to an admitted launcher; one that is gone gets nothing."""
        wire = self._wires.get(replica)
        if wire is not None:
            wire.send(message)

    def tick(self, now: float) -> float | None:
        """Drop silent strangers; return when to call again at the latest."""
        for wire, until in list(self._strangers.items()):
            if now >= until:
                del self._strangers[wire]
                wire.close()
        if self._deaf_until and now >= self._deaf_until:
            self._deaf_until = 0.0
            self._listen()
        dues = [*self._strangers.values(), self._deaf_until]
        return min((due for due in dues if due), default=None)

    def close(self) -> None:
        """Close every connection: the other launchers see that this one is gone."""
        if not self._deaf_until:
            self._selector.unregister(self._listener)
        self._listener.close()
        for wire in (*self._strangers, *self._wires.values()):
            wire.close()

    def _accept(self, now: float) -> None:
        try:
            for _ in range(_BATCH):
                connection, _ = self._listener.accept()
                self._meet(connection, now)
        except OSError as error:
            if error.errno in sockets.FULL:
                self._selector.unregister(self._listener)
                self._deaf_until = now + sockets.FULL_SECONDS

    def _meet(self, connection: socket.socket, now: float) -> None:
        replica: int | None = None
        spoke = False

        def received(message: Message, now: float) -> None:
            nonlocal replica, spoke
            if replica is not None:
                self._hub.receive(replica, message, now)
                return
            if spoke or not isinstance(message, Hello):  # a refused stranger may not hold its place
                raise ValueError("the first message must be Hello, and the only one of a stranger")
            spoke = True
            self._strangers.pop(wire, None)
            self._wires.setdefault(message.replica, wire)
            refused = self._hub.admit(message)
            if refused is None:
                replica = message.replica
                return
            if self._wires[message.replica] is wire:
                del self._wires[message.replica]
            self._refuse(wire, refused, now)

        def closed(reason: str, now: float) -> None:
            self._strangers.pop(wire, None)
            if replica is not None:
                del self._wires[replica]
                self._hub.lost(replica, now)

        wire = Wire(connection, self._selector, received, closed)
        self._strangers[wire] = now + _HELLO_SECONDS

    def _refuse(self, wire: Wire, refused: Refused, now: float) -> None:
        """Send a refusal; the stranger closes once it has read this, else at its deadline."""
        self._strangers[wire] = now + _HELLO_SECONDS
        wire.send(refused)
