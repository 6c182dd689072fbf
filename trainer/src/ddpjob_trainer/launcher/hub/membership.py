"""Connect a launcher to the hub, which launcher 0 also holds.

The supervisor calls it: exits flow to the hub, Stop, Go and End come back. The link is in memory in
launcher 0, over TCP elsewhere; the supervisor's loop sends through it and empties its inbox. L1 and
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
from dataclasses import dataclass, replace
from typing import Any

from ddpjob_trainer import trace
from ddpjob_trainer.launcher import host
from ddpjob_trainer.launcher.hub import messages
from ddpjob_trainer.launcher.hub.hub import Hub
from ddpjob_trainer.launcher.hub.messages import Hello, LastLine, Message, Refused, Wire
from ddpjob_trainer.launcher.hub.rounds import Limits
from ddpjob_trainer.launcher.hub.server import Calls, HubServer, Listener
from ddpjob_trainer.launcher.launch_config import LaunchConfig

# --- Links ----------------------------------------------------------------------------------------

_CONNECT_SECONDS = 3.0
_PAUSE_SECONDS = 0.5
_SLOW_SECONDS = 5.0


class Link:
    """Links launcher 0 to its own ``hub``, which is never lost without it.

    ``inbox``: the hub's messages. ``lost``: why no more can come, "" while they may. ``unmet``:
    evidence that no hub is where it should be, "" while it may only be late. ``met``: a hub has
    admitted or called this launcher, and may admit it again. ``lines``: the last of the gang.
    ``number``: of the hub that admitted it last.
    """

    def __init__(self) -> None:
        self.hub: Hub | None = None
        self.inbox: deque[Message] = deque()
        self.lost = self.unmet = ""
        self.met = False
        self.number = 0
        self.lines = LastLine(leads=True)

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
        self.lines = LastLine(leads=False)
        self._selector, self._tell = selector, tell
        self._refusal = ""  # the last reason for not being admitted yet
        self._passed_over = False  # a message, and said so
        self._address, self._where = address, f"{address[0]} port {address[1]}"
        self._hello, self._least = hello, least
        self._sizes = hello.sizes
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
            self._count_at = now + messages.BEAT_SECONDS
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
            self._hello = replace(self._hello, running=False, sizes=self._sizes)
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
        while not self._connected.empty():
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
        if not messages.is_of_the_job(message, self._hello.token):
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
            self.lines.hear(message.quiet, now)
            quiet = messages.age(self.lines.here, now) if message.quiet else 0
            wire.send(messages.Beat(quiet))
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
        self._least = self.number = message.number
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
            # The version before closes a link with a field that it does not know. A hub that was
            # lost just then does not do so twice, and without sizes no short round has this one.
            sizes = self._hello.sizes and self._hello.hears
            self._hello = replace(self._hello, rescues=False, hears=False, sizes=sizes)
            self._ask_no_more(wire)

    def _ask_no_more(self, wire: Wire) -> None:
        self._asked.discard(wire)
        if not self._asked:
            self._seek(_PAUSE_SECONDS)


# --- Membership -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Membership:
    """A launcher's place in the gang. ``rounds``: a round may follow a failure.

    The hub, its server and its calls are in launcher 0 only, the listener for calls in the others.
    """

    link: Link
    rounds: bool
    hub: Hub | None = None
    server: HubServer | None = None
    calls: Calls | None = None
    listener: Listener | None = None

    def tick(self, now: float) -> float | None:
        """Run the hub's due actions; return when to call next at the latest."""
        if self.calls is not None and self.hub is not None and self.hub.complete:
            self.calls.close()
            self.calls = None
        elif self.calls is not None and self.hub is not None and self.hub.runs:
            self.calls.pause = _SLOW_SECONDS  # a short round needs nobody else
        parts = (self.link, self.hub, self.server, self.calls, self.listener)
        dues = [part.tick(now) for part in parts if part is not None]
        return min((due for due in dues if due is not None), default=None)

    @property
    def gang(self) -> dict[str, Any]:
        """Return what /state says of the whole gang, beside the hub; from another thread, too."""
        return self.hub.facts if self.hub is not None and self.server is not None else {}

    def close(self) -> None:
        """Close all links; connected launchers notice."""
        self.link.close()
        for part in (self.server, self.calls, self.listener):
            if part is not None:
                part.close()


def join(
    config: LaunchConfig,
    selector: selectors.BaseSelector,
    tell: Callable[[str], None],
    modified: Callable[[], int],
    newest: Callable[..., str | None],
    now: float,
    reached: Callable[[], int | None] = lambda: None,
) -> Membership:
    """Serve the hub, or connect to it. Alone, or without rounds, no socket is opened.

    ``modified``: newest mtime at the progress path, ``newest``: newest checkpoint, ``reached``:
    newest snapshot of a round that trains, for the hub.
    """
    elastic = config.elastic
    hello = Hello(
        config.uid,
        config.pod,
        config.replica,
        config.attempt,
        config.replicas,
        config.nproc,
        config.holds,
        running=not config.replacement,
        standby=config.env.standby,
        held=-1 if config.replacement else config.replica,
        rescues=config.env.rescue,
        hears=True,
        sizes=elastic is not None,
        token=config.env.token,
    )
    if config.hub_port is not None and config.replica > 0:
        return _follow(config, hello, selector, tell)
    listening: socket.socket | None = None
    if config.hub_port is not None:
        try:
            listening = host.bind(config.hub_port)
        except OSError as error:
            if config.replacement:  # the others wait for this hub
                raise
            tell(f"no restart in place: port {config.hub_port} of the hub: {error.strerror}")
    if listening is None:  # this launcher waits for no other, nor hears what rank 0 has done there
        rescues = hello.rescues and config.replicas == 1
        hello = replace(hello, seat=0, replicas=1, holds=False, rescues=rescues)
    # Without its port the hub is unreachable.
    unreachable = config.hub_port is not None and listening is None
    budget = 0 if unreachable else config.rounds_without_progress
    if elastic is not None and config.env.replacement:  # a hub that replaces one waits less (E2)
        elastic = replace(elastic, start_after=elastic.shrink_after)
    final, hold = config.env.final_exit_codes, config.hold_seconds
    limits = Limits(budget, config.heal_after, final, hold, elastic)
    hub, lead = _lead(config, hello, limits, listening, selector, modified, newest, reached, tell)
    hub.admit(hello, now)
    return lead


def _follow(
    config: LaunchConfig,
    hello: Hello,
    selector: selectors.BaseSelector,
    tell: Callable[[str], None],
) -> Membership:
    assert config.hub_port is not None
    address = (config.master[0], config.hub_port)
    client = HubClient(address, hello, selector, tell, config.env.least_hub)
    listener: Listener | None = None
    if config.holds:
        try:
            listener = Listener(host.bind(config.hub_port), selector, client.called)
        except OSError as error:  # a new hub is found by its name only
            tell(f"no calls of a new hub: port {config.hub_port}: {error.strerror}")
    return Membership(client, rounds=True, listener=listener)


def _lead(
    config: LaunchConfig,
    hello: Hello,
    limits: Limits,
    listening: socket.socket | None,
    selector: selectors.BaseSelector,
    modified: Callable[[], int],
    newest: Callable[..., str | None],
    reached: Callable[[], int | None],
    tell: Callable[[str], None],
) -> tuple[Hub, Membership]:
    link = Link()
    link.number = hello.birth
    server: HubServer | None = None

    def post(seat: int, message: Message) -> None:
        """Deliver the hub's answer; the supervisor reads link.inbox."""
        if seat == 0:
            link.inbox.append(message)
        elif server is not None:
            server.post(seat, message)

    def drop(seat: int) -> None:
        if server is not None:
            server.drop(seat)

    hub = link.hub = Hub(hello, limits, post, modified, drop, newest, reached)
    calls: Calls | None = None
    if listening is not None:
        server = HubServer(listening, selector, hub, tell, link.lines)
        if config.env.replacement:
            call = messages.Call(config.uid, config.attempt, config.pod, config.env.token)
            calls = Calls(config.others(), call, selector, hub.is_present, server.answered)
    return hub, Membership(link, limits.budget > 0, hub, server, calls)
