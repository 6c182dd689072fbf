"""Listening sockets: IPv4 and IPv6 on one where the machine has both."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
from typing import Final

#: Why a connection cannot be taken in though it is there: select() would return at once, again and
#: again.
FULL: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
#: Until the next try.
FULL_SECONDS: Final = 0.2
#: Below Linux' default net.ipv4.ip_local_port_range, and Kubernetes' ports of nodes.
_QUIET: Final = range(20000, 30000)


def free_ports(count: int) -> list[int]:
    """Ports for others to bind later. Each another one: all are held until all are known.

    Not of those that the kernel hands out for 0 or to connections: until it is bound, another
    program would be given it. Raises OSError where there are not so many.
    """
    found: list[int] = []
    with contextlib.ExitStack() as held:
        for port in random.SystemRandom().sample(_QUIET, k=len(_QUIET)):
            # Without SO_REUSEADDR: what another holds and does not listen on yet is taken.
            probe = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("", port))
                found.append(port)
            if len(found) == count:
                return found
    raise OSError(errno.EADDRINUSE, f"fewer than {count} free ports in {_QUIET}")


def bind(port: int, *, host: str = "") -> socket.socket:
    """Bind a TCP socket to a port of every address, or of one. 0: any. Raises OSError."""
    dual = not host and socket.has_dualstack_ipv6()
    bound = socket.socket(socket.AF_INET6 if dual else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if dual:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind((host, port))
    except BaseException:
        with contextlib.suppress(OSError):
            bound.close()
        raise
    return bound
