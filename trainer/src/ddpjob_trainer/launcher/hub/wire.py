"""Exchange lines over a TCP connection between launchers, without blocking, in bounded memory.

Owners of wires are client.py, server.py, and before an admission listener.py and calls.py; the
supervisor's selector drives them.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Callable

from ddpjob_trainer.launcher.hub.messages import MAX_LINE, Message, decode, encode

_MAX_PENDING = 1024 * 1024
_READ = 64 * 1024
#: Bytes of a stranger's line; a Hello has a few hundred.
FIRST_LINE = 4 * 1024
#: A hub speaks to each launcher so often, and looks whether it has answered.
BEAT_SECONDS = 1.0
#: Seconds of silence after which a link between launcher and hub is lost (L3).
_SILENT_SECONDS = 5
#: Before there is a link, a peer whose machine is gone is lost after half a minute.
_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),  # ms; it also ends keepalive's probes
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)


class Wire:
    """One connection, registered with the supervisor's selector.

    ``received`` gets each message, ``closed`` the reason, once, when the connection ends. The
    wire's owner sets them.
    """

    def __init__(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        self.received: Callable[[Message, float], None] = lambda message, now: None
        self.closed: Callable[[str, float], None] = lambda reason, now: None
        self._socket = connection
        self._selector = selector
        self._in = b""
        self._out = b""
        self._open = True
        self.longest = MAX_LINE  # what a line may have
        self._silent = 0  # calls of count_silence since the last input
        connection.setblocking(False)
        for option in _OPTIONS:
            connection.setsockopt(*option)
        selector.register(connection, selectors.EVENT_READ, self._ready)

    def send(self, message: Message) -> None:
        """Send, or keep it until the connection takes it."""
        if not self._open:
            return
        self._out += encode(message)
        self._flush()

    def count_silence(self, now: float) -> None:
        """Count a second; fail when too many have passed without input.

        The owner's loop calls it once a second while it runs, after reading: its own pauses, in
        which nobody could hear the peer, do not count.
        """
        self._silent += 1
        if self._silent > _SILENT_SECONDS:
            self._fail(f"it was silent for {_SILENT_SECONDS} s", now)

    def close(self) -> None:
        """Close without a call of ``closed``; drop unsent messages."""
        if self._open:
            self._open = False
            self._selector.unregister(self._socket)
            self._socket.close()

    def _ready(self, now: float) -> None:
        if not self._open:
            return
        self._flush()
        try:
            data = self._socket.recv(_READ)
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(error.strerror or str(error), now)
            return
        if not data:
            self._fail("it closed the connection", now)
            return
        self._silent = 0
        *lines, self._in = (self._in + data).split(b"\n")
        for line in lines:
            try:
                if len(line) > self.longest:
                    raise ValueError(f"a line of {len(line)} bytes")
                self.received(decode(line), now)
            except (ValueError, TypeError, RecursionError) as error:
                self._fail(f"it sent what is no message: {error}", now)
            if self._socket.fileno() < 0:  # closed while handling the message
                return
        if len(self._in) > self.longest:
            self._fail("it sent an endless line", now)

    def _flush(self) -> None:
        if self._open and self._out:
            # A broken connection is noticed when reading.
            with contextlib.suppress(OSError):
                self._out = self._out[self._socket.send(self._out) :]
            if len(self._out) > _MAX_PENDING:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)
            self._selector.modify(self._socket, events, self._ready)

    def _fail(self, reason: str, now: float) -> None:
        if self._open:
            self.close()
            self.closed(reason, now)
