"""Serve the hub's TCP port; a connection is a stranger until its Hello is admitted."""

from __future__ import annotations

import contextlib
import selectors
import socket

from ddpjob_trainer.launcher.hub.hub import Hub
from ddpjob_trainer.launcher.hub.messages import Hello, Message
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
        listener.listen(1024)
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self._accept)

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
        return min(self._strangers.values(), default=None)

    def close(self) -> None:
        """Close every connection: the other launchers see that this one is gone."""
        self._selector.unregister(self._listener)
        self._listener.close()
        for wire in (*self._strangers, *self._wires.values()):
            wire.close()

    def _accept(self, now: float) -> None:
        with contextlib.suppress(OSError):
            for _ in range(_BATCH):
                connection, _ = self._listener.accept()
                self._meet(connection, now)

    def _meet(self, connection: socket.socket, now: float) -> None:
        replica: int | None = None

        def received(message: Message, now: float) -> None:
            nonlocal replica
            if replica is not None:
                self._hub.receive(replica, message, now)
                return
            if not isinstance(message, Hello):
                raise ValueError("the first message must be Hello")
            self._strangers.pop(wire, None)
            self._wires.setdefault(message.replica, wire)
            refused = self._hub.admit(message)
            if refused is None:
                replica = message.replica
                return
            if self._wires[message.replica] is wire:
                del self._wires[message.replica]
            wire.send(refused)
            wire.close()

        def closed(reason: str, now: float) -> None:
            self._strangers.pop(wire, None)
            if replica is not None:
                del self._wires[replica]
                self._hub.lost(replica, now)

        wire = Wire(connection, self._selector, received, closed)
        self._strangers[wire] = now + _HELLO_SECONDS
