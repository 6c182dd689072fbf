"""Listen on the hub's port; a connection is a stranger until its first message is accepted.

The hub's server listens for Hello, a launcher that can hold for Call; the loop drives both.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable

from ddpjob_trainer.launcher import sockets
from ddpjob_trainer.launcher.hub.messages import MAX_LINE, Message, Refused
from ddpjob_trainer.launcher.hub.wire import FIRST_LINE, Wire

_FIRST_SECONDS = 5.0
#: So many at once, far more than come before an honest launcher has said its Hello.
_MOST_STRANGERS = 256
_BATCH = 64  # connections taken at once, then the other sockets get their turn


class Listener:
    """Owns the listening socket and the strangers' wires.

    ``accept`` gets a stranger's first message. It takes the wire over, or returns a refusal.
    """

    def __init__(
        self,
        listening: socket.socket,
        selector: selectors.BaseSelector,
        accept: Callable[[Wire, Message, float], Refused | None],
    ) -> None:
        self._listening = listening
        self._selector = selector
        self._accept = accept
        self._strangers: dict[Wire, float] = {}  # when they are dropped if still silent
        self._deaf_until = 0.0  # when it listens again after a lack of descriptors; 0: it does
        listening.listen(1024)
        listening.setblocking(False)
        self._listen()

    def _listen(self) -> None:
        self._selector.register(self._listening, selectors.EVENT_READ, self._connected)

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
        """Close the socket and the strangers' connections."""
        if not self._deaf_until:
            self._selector.unregister(self._listening)
        self._listening.close()
        for wire in self._strangers:
            wire.close()

    def meet(self, wire: Wire, now: float) -> None:
        """Wait for a stranger's first message."""
        wire.longest = FIRST_LINE
        wire.received = lambda message, now: self.take(wire, message, now)
        self._keep(wire, now)

    def take(self, wire: Wire, message: Message, now: float) -> None:
        """Have the first message over a connection accepted, or refuse it."""
        self._forget(wire)
        refused = self._accept(wire, message, now)
        if refused is None:
            wire.longest = MAX_LINE
        else:
            self.refuse(wire, refused, now)

    def refuse(self, wire: Wire, refused: Refused, now: float) -> None:
        """Send a refusal; the peer closes once it has read this, else at its deadline."""
        wire.received = _say_no_more
        self._keep(wire, now)
        wire.send(refused)

    def _keep(self, wire: Wire, now: float) -> None:
        """Keep a stranger until its deadline; of too many, the oldest goes."""
        wire.closed = lambda reason, now: self._forget(wire)
        self._strangers[wire] = now + _FIRST_SECONDS
        if len(self._strangers) > _MOST_STRANGERS:
            oldest = next(iter(self._strangers))
            self._forget(oldest)
            oldest.close()

    def _connected(self, now: float) -> None:
        try:
            for _ in range(_BATCH):
                connection, _ = self._listening.accept()
                self.meet(Wire(connection, self._selector), now)
        except OSError as error:
            if error.errno in sockets.FULL:
                self._selector.unregister(self._listening)
                self._deaf_until = now + sockets.FULL_SECONDS

    def _forget(self, wire: Wire) -> None:
        self._strangers.pop(wire, None)


def _say_no_more(message: Message, now: float) -> None:
    raise ValueError("it was refused, and may not hold its place")
