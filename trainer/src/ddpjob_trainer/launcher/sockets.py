"""Listening sockets: IPv4 and IPv6 on one where the machine has both."""

from __future__ import annotations

import contextlib
import errno
import socket
from typing import Final

#: Why a connection cannot be taken in though it is there: select() would return at once, again and
#: again.
FULL: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
#: Until the next try.
FULL_SECONDS: Final = 0.2


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
