"""Connect a launcher to the hub, which launcher 0 also holds.

The supervisor calls it: exits flow to the hub, Stop, Go and End come back.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ddpjob_trainer.launcher import sockets
from ddpjob_trainer.launcher.hub.calls import Calls
from ddpjob_trainer.launcher.hub.client import HubClient, Link
from ddpjob_trainer.launcher.hub.hub import Hub
from ddpjob_trainer.launcher.hub.listener import Listener
from ddpjob_trainer.launcher.hub.messages import Call, Hello, Message
from ddpjob_trainer.launcher.hub.rounds import Limits
from ddpjob_trainer.launcher.hub.server import HubServer
from ddpjob_trainer.launcher.launch_config import LaunchConfig


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
) -> Membership:
    """Serve the hub, or connect to it. Alone, or without rounds, no socket is opened.

    ``modified``: newest mtime at the progress path, ``newest``: newest checkpoint, for the hub.
    """
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
        token=config.env.token,
    )
    if config.hub_port is not None and config.replica > 0:
        return _follow(config, hello, selector, tell)
    listening: socket.socket | None = None
    if config.hub_port is not None:
        try:
            listening = sockets.bind(config.hub_port)
        except OSError as error:
            if config.replacement:  # the others wait for this hub
                raise
            tell(f"no restart in place: port {config.hub_port} of the hub: {error.strerror}")
    if listening is None:  # this launcher waits for no other
        hello = replace(hello, seat=0, replicas=1, holds=False)
    # Without its port the hub is unreachable.
    unreachable = config.hub_port is not None and listening is None
    budget = 0 if unreachable else config.rounds_without_progress
    limits = Limits(budget, config.heal_after, config.env.final_exit_codes, config.hold_seconds)
    lead = _lead(config, hello, limits, listening, selector, modified, newest, tell)
    assert lead.hub is not None
    lead.hub.admit(hello, now)
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
            listener = Listener(sockets.bind(config.hub_port), selector, client.called)
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
    tell: Callable[[str], None],
) -> Membership:
    link = Link()
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

    hub = link.hub = Hub(hello, limits, post, modified, drop, newest)
    calls: Calls | None = None
    if listening is not None:
        server = HubServer(listening, selector, hub, tell)
        if config.env.replacement:
            call = Call(config.uid, config.attempt, config.pod, config.env.token)
            calls = Calls(config.others(), call, selector, hub.is_present, server.answered)
    return Membership(link, limits.budget > 0, hub, server, calls)
