"""Bind listening sockets, for IPv4 and IPv6 at once where the machine has both."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
from typing import Final

#: Errors by which accept() fails though a connection waits: select() would return at once, for
#: ever.
FULL: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
#: Until the next try.
FULL_SECONDS: Final = 0.2
#: Below Linux's net.ipv4.ip_local_port_range, and outside the ports that the operator draws for
#: gangs on the host's network.
_QUIET: Final = range(10000, 20000)


def free_ports(count: int) -> list[int]:
    """Find distinct free ports for others to bind later; hold each until all are found.

    Outside the range that the kernel hands out for 0 or to connections: another program could get
    such a port before it is bound. Raises OSError where too few are free.
    """
    found: list[int] = []
    with contextlib.ExitStack() as held:
        for port in random.SystemRandom().sample(_QUIET, len(_QUIET)):  # independent of any seed
            with contextlib.suppress(OSError):
                # A port that another program holds without listening is taken.
                held.enter_context(bind(port, reuse=False))
                found.append(port)
            if len(found) == count:
                return found
    raise OSError(errno.EADDRINUSE, f"fewer than {count} free ports in {_QUIET}")


def bind(port: int, *, reuse: bool = True) -> socket.socket:
    """Bind a TCP socket to a port of all addresses. 0: any port. Raises OSError.

    ``reuse``: also where connections of an earlier one are left, or another holds it unused.
    """
    dual = socket.has_dualstack_ipv6()
    bound = socket.socket(socket.AF_INET6 if dual else socket.AF_INET)
    try:
        if reuse:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if dual:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind(("", port))
    except BaseException:
        bound.close()
        raise
    return bound
