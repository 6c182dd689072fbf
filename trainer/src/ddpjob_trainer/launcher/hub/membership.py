"""Connect a launcher to the hub, which launcher 0 also holds.

The supervisor calls it: exits flow to the hub, Stop, Go and End come back.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable

from ddpjob_trainer.launcher import sockets
from ddpjob_trainer.launcher.hub.client import HubClient, Link, LocalLink
from ddpjob_trainer.launcher.hub.hub import Hub
from ddpjob_trainer.launcher.hub.messages import Hello, Message
from ddpjob_trainer.launcher.hub.root_cause import Exit
from ddpjob_trainer.launcher.hub.rounds import Limits
from ddpjob_trainer.launcher.hub.server import HubServer
from ddpjob_trainer.launcher.launch_config import LaunchConfig


class Membership:
    """A launcher's place in the gang. ``rounds``: a round may follow a failure."""

    def __init__(self, link: Link, hub: Hub | None, server: HubServer | None, rounds: bool) -> None:
        self.link = link
        self.rounds = rounds
        self._hub = hub
        self._server = server

    def tick(self, now: float) -> float | None:
        """Run the hub's due actions; return when to call next at the latest."""
        dues = [
            self._hub.tick(now) if self._hub is not None else None,
            self._server.tick(now) if self._server is not None else None,
        ]
        return min((due for due in dues if due is not None), default=None)

    @property
    def needed(self) -> bool:
        """Return whether other launchers depend on the hub here."""
        return self._server is not None and self._hub is not None and self._hub.needed

    @property
    def others(self) -> tuple[list[Exit], int]:
        """Return the hub's count of other launchers' ranks: ends with 0, and how many run."""
        return self._hub.others if self._hub is not None else ([], 0)

    def close(self) -> None:
        """Close the link and the hub's server; connected launchers notice."""
        self.link.close()
        if self._server is not None:
            self._server.close()


def join(
    config: LaunchConfig,
    selector: selectors.BaseSelector,
    tell: Callable[[str], None],
    modified: Callable[[], int],
) -> Membership:
    """Serve the hub, or connect to it. Alone, or without rounds, no socket is opened.

    ``modified``: newest mtime at the progress path, for the hub.
    """
    listener: socket.socket | None = None
    if config.hub_port is not None:
        hello = Hello(config.uid, config.attempt, config.replicas, config.nproc, config.replica)
        if config.replica > 0:
            client = HubClient((config.master[0], config.hub_port), hello, selector, tell)
            return Membership(client, None, None, rounds=True)
        try:
            listener = sockets.bind(config.hub_port)
        except OSError as error:
            tell(f"no restart in place: port {config.hub_port} of the hub: {error.strerror}")
    # Without its port the hub is unreachable: this launcher waits for no other.
    budget = (
        0 if config.hub_port is not None and listener is None else config.rounds_without_progress
    )
    replicas = config.replicas if listener is not None else 1
    link = LocalLink()
    server: HubServer | None = None

    def post(replica: int, message: Message) -> None:
        """Deliver the hub's answer; the supervisor reads link.inbox."""
        if replica == 0:
            link.inbox.append(message)
        elif server is not None:
            server.post(replica, message)

    limits = Limits(budget, config.heal_after, config.env.final_exit_codes)
    hello = Hello(config.uid, config.attempt, replicas, config.nproc, 0)
    hub = link.hub = Hub(hello, limits, post, modified)
    if listener is not None:
        server = HubServer(listener, selector, hub)
    hub.admit(hello)
    return Membership(link, hub, server, rounds=budget > 0)
