"""Serve the hub's TCP port: a wire speaks for the launcher whose Hello came over it."""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import socket
import threading
from collections.abc import Callable, Mapping

from ddpjob_trainer.launcher import host
from ddpjob_trainer.launcher.hub import messages
from ddpjob_trainer.launcher.hub.hub import Hub
from ddpjob_trainer.launcher.hub.messages import Hello, LastLine, Message, Refused, Wire

# --- Connections that come ------------------------------------------------------------------------
# The hub's server listens for Hello, a launcher that can hold for Call; the loop drives both.

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
        self._listening, self._selector, self._accept = listening, selector, accept
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
        wire.longest = messages.FIRST_LINE
        wire.received = lambda message, now: self.take(wire, message, now)
        self._keep(wire, now)

    def take(self, wire: Wire, message: Message, now: float) -> None:
        """Have the first message over a connection accepted, or refuse it."""
        self._forget(wire)
        if refused := self._accept(wire, message, now):
            self.refuse(wire, refused, now)
        else:
            wire.longest = messages.MAX_LINE

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
            if error.errno in host.FULL:
                self._selector.unregister(self._listening)
                self._deaf_until = now + host.FULL_SECONDS

    def _forget(self, wire: Wire) -> None:
        self._strangers.pop(wire, None)


def _say_no_more(message: Message, now: float) -> None:
    raise ValueError("it was refused, and may not hold its place")


# --- Connections that the hub makes ---------------------------------------------------------------
# They know the hub's name, but it may lead to the old pod for a while, or the old hub may answer
# them still. membership.py makes the calls and ends them when all are linked in a round.

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
        call: messages.Call,
        selector: selectors.BaseSelector,
        is_linked: Callable[[int], bool],
        answered: Callable[[Wire, Message, float], None],
    ) -> None:
        self._addresses, self._call, self._selector = addresses, call, selector
        self._is_linked, self._answered = is_linked, answered
        self.pause = _PAUSE_SECONDS
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
                self._due[seat] = now + self.pause  # it may be lost again
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
        while not self._dialed.empty():
            seat, connection = self._dialed.get_nowait()
            if connection is None:
                self._due[seat] = now + self.pause
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
            self._due[seat] = now + self.pause

        wire.longest = messages.FIRST_LINE
        wire.received = received
        wire.closed = lambda reason, now: again(now)
        self._wires.add(wire)
        wire.send(self._call)


# --- Links ----------------------------------------------------------------------------------------


class HubServer:
    """Owns the wires of launchers 1, 2, ..., and the port that they come to."""

    def __init__(
        self,
        listening: socket.socket,
        selector: selectors.BaseSelector,
        hub: Hub,
        tell: Callable[[str], None],
        lines: LastLine,
    ) -> None:
        self._hub, self._tell, self._lines = hub, tell, lines
        self._hears: set[int] = set()  # seats whose launchers read Beat.quiet
        self._passed_over = False  # a message, and said so
        self._wires: dict[int, Wire] = {}  # by seat
        self._beat_at = 0.0
        self._listener = Listener(listening, selector, self._admit)
        self.answered = self._listener.take  # over a connection that the hub has made

    def post(self, seat: int, message: Message) -> None:
        """Send to an admitted launcher; one that is gone gets nothing."""
        if wire := self._wires.get(seat):
            wire.send(message)

    def drop(self, seat: int) -> None:
        """Close a launcher's link; the hub knows."""
        if wire := self._wires.pop(seat, None):
            wire.close()

    def tick(self, now: float) -> float | None:
        """Drop who is silent, link or stranger; return when to call again at the latest."""
        if now >= self._beat_at:
            self._beat_at = now + messages.BEAT_SECONDS
            if self._wires.keys() - self._hears:  # one that cannot say may have printed just now
                self._lines.gang = now
            quiet = messages.age(self._lines.gang, now)
            for seat, wire in list(self._wires.items()):
                wire.count_silence(now)
                wire.send(messages.Beat(quiet if seat in self._hears else 0))
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
        if refused := self._hub.refuses(message):
            return refused
        seat = message.seat
        if older := self._wires.pop(seat, None):
            self._listener.refuse(older, Refused("a newer pod has its place", final=True), now)
        self._wires[seat] = wire
        (self._hears.add if message.hears else self._hears.discard)(seat)
        wire.received = lambda message, now: self._received(seat, message, now)
        wire.closed = lambda reason, now: self._closed(seat, now)
        self._hub.admit(message, now)
        return None

    def _received(self, seat: int, message: Message, now: float) -> None:
        if isinstance(message, messages.Unknown):
            if not self._passed_over:
                self._tell(str(message))
            self._passed_over = True
        elif isinstance(message, messages.Beat):
            if message.quiet:
                self._lines.hear(message.quiet, now)
        else:
            self._hub.receive(seat, message, now)

    def _closed(self, seat: int, now: float) -> None:
        del self._wires[seat]
        self._hub.lost(seat, now)
