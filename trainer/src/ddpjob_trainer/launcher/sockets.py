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
#: Below net.ipv4.ip_local_port_range as Linux has it, and what the operator draws for gangs on the
#: host's network.
_QUIET: Final = range(10000, 20000)


def free_ports(count: int) -> list[int]:
    """Ports for others to bind later. Each another one: all are held until all are known.

    Not of those that the kernel hands out for 0 or to connections: until it is bound, another
    program would be given it. Raises OSError where there are not so many.
    """
    chance, found = random.SystemRandom(), list[int]()  # whatever seed is set
    why = OSError(errno.EADDRINUSE, "no port is free")
    with contextlib.ExitStack() as held:
        for _ in range(count + len(_QUIET)):
            port = chance.choice(_QUIET)
            try:
                # What another holds and does not listen on yet is taken.
                held.enter_context(bind(port, reuse=False))
            except OSError as error:
                why = error
                continue
            found.append(port)
            if len(found) == count:
                return found
    raise OSError(why.errno, f"fewer than {count} free ports in {_QUIET}: {why.strerror}")


def bind(port: int, *, host: str = "", reuse: bool = True) -> socket.socket:
    """Bind a TCP socket to a port of every address, or of one. 0: any. Raises OSError.

    ``reuse``: also where connections of one before it are left, or another holds it unused.
    """
    dual = not host and socket.has_dualstack_ipv6()
    bound = socket.socket(socket.AF_INET6 if dual else socket.AF_INET)
    try:
        if reuse:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if dual:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind((host, port))
    except BaseException:
        with contextlib.suppress(OSError):
            bound.close()
        raise
    return bound
