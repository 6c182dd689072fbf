"""Call all launchers of the gang, so that they follow a hub that replaces a lost one (H4).

They know the hub's name, but it may lead to the old pod for a while, or the old hub may answer them
still. membership.py makes the calls and ends them when all are linked in a round.
"""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import socket
import threading
from collections.abc import Callable, Mapping

from ddpjob_trainer.launcher.hub.messages import Call, Message, Refused
from ddpjob_trainer.launcher.hub.wire import FIRST_LINE, Wire

_CONNECT_SECONDS = 3.0
_PAUSE_SECONDS = 0.5
_THREADS = 16


class Calls:
    """``addresses``: by seat. ``is_linked``: tells whether a seat needs no call.

    ``answered``: gets the first message of a launcher that was called, and the wire with it.
    """

    def __init__(
        self,
        addresses: Mapping[int, tuple[str, int]],
        call: Call,
        selector: selectors.BaseSelector,
        is_linked: Callable[[int], bool],
        answered: Callable[[Wire, Message, float], None],
    ) -> None:
        self._addresses = addresses
        self._call = call
        self._selector = selector
        self._is_linked = is_linked
        self._answered = answered
        self._due = dict.fromkeys(addresses, 0.0)  # seat -> when to call it
        self._wires: set[Wire] = set()  # of launchers that have not answered yet
        self._to_dial: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._dialed: queue.SimpleQueue[tuple[int, socket.socket | None]] = queue.SimpleQueue()
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        selector.register(self._wake_r, selectors.EVENT_READ, self._take)
        self._threads = min(_THREADS, len(addresses))
        for _ in range(self._threads):  # the resolver may block for long
            threading.Thread(target=self._dial, name="calls", daemon=True).start()

    def tick(self, now: float) -> float | None:
        """Dial the launchers that are due; return when to call again."""
        for seat, due in list(self._due.items()):
            if now >= due and self._is_linked(seat):
                self._due[seat] = now + _PAUSE_SECONDS  # it may be lost again
            elif now >= due:
                del self._due[seat]
                self._to_dial.put(seat)
        return min(self._due.values(), default=None)

    def close(self) -> None:
        """End all calls that have not been answered."""
        for _ in range(self._threads):
            self._to_dial.put(None)
        self._addresses = {}
        for wire in self._wires:
            wire.close()
        self._wires.clear()
        self._selector.unregister(self._wake_r)

    def _dial(self) -> None:
        while (seat := self._to_dial.get()) is not None:
            connection = None
            with contextlib.suppress(OSError, KeyError):  # KeyError: closed meanwhile
                connection = socket.create_connection(self._addresses[seat], _CONNECT_SECONDS)
            self._dialed.put((seat, connection))
            with contextlib.suppress(OSError):
                os.write(self._wake_w, b"x")

    def _take(self, now: float) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_r, 64)
        with contextlib.suppress(queue.Empty):
            while True:
                seat, connection = self._dialed.get_nowait()
                if connection is None:
                    self._due[seat] = now + _PAUSE_SECONDS
                else:
                    self._say(seat, Wire(connection, self._selector))

    def _say(self, seat: int, wire: Wire) -> None:
        def received(message: Message, now: float) -> None:
            again(now)
            if isinstance(message, Refused):
                wire.close()
            else:
                self._answered(wire, message, now)

        def again(now: float) -> None:
            self._wires.discard(wire)
            self._due[seat] = now + _PAUSE_SECONDS

        wire.longest = FIRST_LINE
        wire.received = received
        wire.closed = lambda reason, now: again(now)
        self._wires.add(wire)
        wire.send(self._call)
