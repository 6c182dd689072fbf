"""Link a launcher to the hub: in memory in launcher 0, over TCP elsewhere.

membership.py makes the link, the supervisor's loop sends through it and empties its inbox. L1 and
L2 are rules of the protocol by which launchers follow a hub that replaces another.
"""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from ddpjob_trainer import trace
from ddpjob_trainer.launcher.hub import messages
from ddpjob_trainer.launcher.hub.hub import Hub
from ddpjob_trainer.launcher.hub.messages import Hello, Message, Refused, is_of_the_job
from ddpjob_trainer.launcher.hub.wire import BEAT_SECONDS, Wire

_CONNECT_SECONDS = 3.0
_PAUSE_SECONDS = 0.5


class Link:
    """Links launcher 0 to its own ``hub``, which is never lost without it.

    ``inbox``: the hub's messages. ``lost``: why no more can come, "" while they may. ``unmet``:
    evidence that no hub is where it should be, "" while it may only be late. ``met``: a hub has
    admitted or called this launcher, and may admit it again.
    """

    def __init__(self, hub: Hub | None = None) -> None:
        self.hub = hub
        self.inbox: deque[Message] = deque()
        self.lost = self.unmet = ""
        self.met = False

    @property
    def linked(self) -> bool:
        """Return whether a hub has admitted this launcher and hears it."""
        return True

    def send(self, message: Message, now: float) -> None:
        """Send a message to the hub."""
        if self.hub is not None:
            self.hub.receive(0, message, now)

    def tick(self, now: float) -> float | None:
        """Watch for a silent hub; return when to call again."""

    def leave(self) -> None:
        """Close the link, to no other yet: workers still run."""

    def join(self) -> None:
        """Look for a hub again, unless linked, once nothing runs here (L2)."""

    def close(self) -> None:
        """Close the link."""


class HubClient(Link):
    """Connects until admitted; keeps messages until then, and drops them when the link is lost.

    ``least``: the number of the oldest hub that it follows; it rises with each that it follows.
    """

    def __init__(
        self,
        address: tuple[str, int],
        hello: Hello,
        selector: selectors.BaseSelector,
        tell: Callable[[str], None],
        least: int = 0,
    ) -> None:
        super().__init__()
        self._tell = tell
        self._refusal = ""  # the last reason for not being admitted yet
        self._passed_over = False  # a message, and said so
        self._address = address
        self._where = f"{address[0]} port {address[1]}"
        self._hello = hello
        self._least = least
        self._selector = selector
        self._followed = (0, "")  # number and pod of the last hub that has admitted it
        self._wire: Wire | None = None  # to that hub
        self._asked: set[Wire] = set()  # Hello was sent, and not answered yet
        self._callers: set[Wire] = set()  # Hello follows once nothing runs here
        self._waiting: list[Message] = []
        self._count_at = 0.0  # when the hub's silence grows by a second
        self._search = 0  # the newest search for the hub; 0: none yet
        self._searching = False
        self._connected: queue.SimpleQueue[tuple[int, socket.socket]] = queue.SimpleQueue()
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        selector.register(self._wake_r, selectors.EVENT_READ, self._take)
        self._seek(0.0)

    @property
    def linked(self) -> bool:
        """See Link."""
        return self._wire is not None

    def send(self, message: Message, now: float) -> None:
        """See Link."""
        if self._wire is not None:
            self._wire.send(message)
        elif self._searching:
            self._waiting.append(message)

    def tick(self, now: float) -> float | None:
        """See Link."""
        if self._wire is None:
            return None
        if now >= self._count_at:
            self._count_at = now + BEAT_SECONDS
            self._wire.count_silence(now)
        return self._count_at

    def leave(self) -> None:
        """See Link."""
        self._stop_seeking()
        if self._wire is not None:
            self._wire.close()
            self._wire = None
        self._waiting.clear()
        self.inbox.clear()
        self.lost = self.unmet = ""

    def join(self) -> None:
        """See Link."""
        if self._wire is None and not self._searching:
            self._hello = replace(self._hello, running=False)
            for wire in self._callers:
                self._ask(wire)
            self._callers.clear()
            self._seek(0.0)

    def close(self) -> None:
        """See Link."""
        self.leave()
        for wire in self._callers:
            wire.close()

    # --- The hub's name -------------------------------------------------------------------

    def _seek(self, pause: float) -> None:
        """Connect in a thread, since the resolver may block for long."""
        self._search += 1
        self._searching = True
        mine = (self._search, pause)
        threading.Thread(target=self._dial, args=mine, name="hub", daemon=True).start()

    def _stop_seeking(self) -> None:
        self._search += 1
        self._searching = False
        for wire in self._asked:
            wire.close()
        self._asked.clear()

    def _dial(self, mine: int, pause: float) -> None:
        time.sleep(pause)
        while mine == self._search:
            try:
                connection = socket.create_connection(self._address, _CONNECT_SECONDS)
            except OSError as error:
                # A timeout, or an unknown name, proves nothing.
                refused = isinstance(error, ConnectionRefusedError)
                if mine == self._search:
                    self.unmet = f"nobody listens at {self._where}" if refused else ""
                time.sleep(_PAUSE_SECONDS)
                continue
            self._connected.put((mine, connection))
            with contextlib.suppress(OSError):
                os.write(self._wake_w, b"x")
            return

    def _take(self, now: float) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_r, 64)
        with contextlib.suppress(queue.Empty):
            while True:
                search, connection = self._connected.get_nowait()
                if search == self._search:
                    self._ask(Wire(connection, self._selector))
                else:
                    connection.close()

    # --- What hubs say --------------------------------------------------------------------

    def called(self, wire: Wire, message: Message, now: float) -> Refused | None:
        """Take the first message over a connection that somebody has made to this launcher."""
        if not isinstance(message, messages.Call):
            raise ValueError("the first message must be Call")
        hub = (message.number, message.pod)
        if message.uid != self._hello.uid:
            return Refused("this launcher belongs to another job", final=True)
        if not is_of_the_job(message, self._hello.token):
            return Refused("this hub does not know the secret of the launcher's job", final=False)
        if self._wire is not None and hub == self._followed:
            return Refused("this launcher is linked", final=False)
        if not self._may_follow(hub):
            return Refused(f"this launcher waits for hub {self._least} or a later one", final=True)
        self.met = True
        self._least = message.number  # so the old one, which may answer still, is left for good
        if self._searching and not self._hello.running:
            self._ask(wire)
            return None
        wire.received = lambda message, now: None
        wire.closed = lambda reason, now: self._callers.discard(wire)
        self._callers.add(wire)
        self.lost = self.lost or f"hub {message.number} has taken its place"
        return None

    def _may_follow(self, hub: tuple[int, str]) -> bool:
        """Return whether a hub is newer than the one followed last, or the same (L1)."""
        number, _ = hub
        return number >= self._least and (number > self._followed[0] or hub == self._followed)

    def _ask(self, wire: Wire) -> None:
        wire.received = lambda message, now: self._received(wire, message, now)
        wire.closed = lambda reason, now: self._closed(wire, reason)
        self._asked.add(wire)
        wire.send(self._hello)

    def _received(self, wire: Wire, message: Message, now: float) -> None:
        if isinstance(message, Refused):
            self._refused(wire, message)
        elif wire is self._wire and isinstance(message, messages.Beat):
            wire.send(message)
        elif wire is self._wire and isinstance(message, messages.Unknown):
            if not self._passed_over:
                self._tell(str(message))
            self._passed_over = True
        elif wire is self._wire:
            if isinstance(message, messages.Go):
                self._hello = replace(self._hello, held=message.replica)
            self.inbox.append(message)
        elif isinstance(message, messages.Welcome):
            self._welcomed(wire, message)
        else:
            raise ValueError(f"a hub must not say {type(message).__name__} before Welcome")

    def _welcomed(self, wire: Wire, message: messages.Welcome) -> None:
        hub = (message.number, message.pod)
        if not self._may_follow(hub):
            why = f"hub {message.number} at {self._where} is older than this launcher's"
            self._refused(wire, Refused(why, final=False))
            return
        self._followed = hub
        self._least = message.number
        self._asked.discard(wire)
        self._stop_seeking()
        self._wire = wire
        self.met = True
        trace.mark("admitted")
        self.unmet = self._refusal = ""
        for waiting in self._waiting:
            wire.send(waiting)
        self._waiting.clear()

    def _refused(self, wire: Wire, message: Refused) -> None:
        if message.reason != self._refusal and not message.final:  # else twice a second
            self._tell(f"the hub does not admit this launcher yet: {message.reason[:200]}")
        self._refusal = self.unmet = message.reason
        if message.final:
            self.lost, self.met = message.reason, False
        else:
            wire.close()
            self._ask_no_more(wire)

    def _closed(self, wire: Wire, reason: str) -> None:
        if wire is self._wire:
            self._wire = None
            self.lost = self.lost or reason
        else:
            self.unmet = f"what listens at {self._where} is no hub of this job: {reason}"
            self._ask_no_more(wire)

    def _ask_no_more(self, wire: Wire) -> None:
        self._asked.discard(wire)
        if not self._asked:
            self._seek(_PAUSE_SECONDS)
