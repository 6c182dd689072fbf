"""Serve the hub's TCP port: a wire speaks for the launcher whose Hello came over it."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable

from ddpjob_trainer.launcher.hub.hub import Hub
from ddpjob_trainer.launcher.hub.listener import Listener
from ddpjob_trainer.launcher.hub.messages import Beat, Hello, Message, Refused, Unknown
from ddpjob_trainer.launcher.hub.wire import BEAT_SECONDS, Wire


class HubServer:
    """Owns the wires of launchers 1, 2, ..., and the port that they come to."""

    def __init__(
        self,
        listening: socket.socket,
        selector: selectors.BaseSelector,
        hub: Hub,
        tell: Callable[[str], None],
    ) -> None:
        self._hub = hub
        self._tell = tell
        self._passed_over = False  # a message, and said so
        self._wires: dict[int, Wire] = {}  # by seat
        self._beat_at = 0.0
        self._listener = Listener(listening, selector, self._admit)
        self.answered = self._listener.take  # over a connection that the hub has made

    def post(self, seat: int, message: Message) -> None:
        """Send to an admitted launcher; one that is gone gets nothing."""
        wire = self._wires.get(seat)
        if wire is not None:
            wire.send(message)

    def drop(self, seat: int) -> None:
        """Close a launcher's link; the hub knows."""
        wire = self._wires.pop(seat, None)
        if wire is not None:
            wire.close()

    def tick(self, now: float) -> float | None:
        """Drop who is silent, link or stranger; return when to call again at the latest."""
        if now >= self._beat_at:
            self._beat_at = now + BEAT_SECONDS
            for wire in list(self._wires.values()):
                wire.count_silence(now)
                wire.send(Beat())
        dues = (self._listener.tick(now), self._beat_at if self._wires else None)
        return min((due for due in dues if due is not None), default=None)

    def close(self) -> None:
        """Close every connection: the other launchers see that this one is gone."""
        self._listener.close()
        for wire in self._wires.values():
            wire.close()

    def _admit(self, wire: Wire, message: Message, now: float) -> Refused | None:
        if not isinstance(message, Hello):
            raise ValueError("the first message must be Hello")
        refused = self._hub.refuses(message)
        if refused is not None:
            return refused
        seat = message.seat
        older = self._wires.pop(seat, None)
        if older is not None:
            self._listener.refuse(older, Refused("a newer pod has its place", final=True), now)
        self._wires[seat] = wire
        wire.received = lambda message, now: self._received(seat, message, now)
        wire.closed = lambda reason, now: self._closed(seat, now)
        self._hub.admit(message, now)
        return None

    def _received(self, seat: int, message: Message, now: float) -> None:
        if isinstance(message, Unknown):
            if not self._passed_over:
                self._tell(str(message))
            self._passed_over = True
        elif not isinstance(message, Beat):
            self._hub.receive(seat, message, now)

    def _closed(self, seat: int, now: float) -> None:
        del self._wires[seat]
        self._hub.lost(seat, now)
