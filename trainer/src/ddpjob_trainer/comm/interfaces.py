"""Choose gloo's interface where this host's own name leads it to the loopback.

rendezvous.py calls choose(). gloo listens at the address of the host's name: in a pod the pod's; on
the host's network that in the node's /etc/hosts, on Debian and Ubuntu 127.0.1.1, which no other
node reaches.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct

NAME = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915


def choose(master: str) -> None:
    """Have gloo listen on the address by which this process reaches ``master``, rank 0.

    Does nothing where gloo finds a usable address, or all ranks are on this machine.
    """
    if NAME in os.environ or not _is_loopback(_own()):
        return
    own = _towards(master)
    for _, name in socket.if_nameindex():
        if own == _address(name) and not _is_loopback(own):
            os.environ[NAME] = name


def _own() -> str:
    """Return the address that gloo takes, the loopback where this host's name has none."""
    try:
        return str(socket.getaddrinfo(socket.gethostname(), None)[0][4][0])
    except OSError:
        return "127.0.0.1"


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")


def _towards(host: str) -> str:
    """Return this host's IPv4 address on the way to another host, "" without a way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((host, 9))  # sends nothing
        return str(probe.getsockname()[0])
    return ""


def _address(interface: str) -> str | None:
    """Return an interface's IPv4 address, if it has one."""
    request = struct.pack("256s", interface.encode()[:15])  # a struct ifreq, and more
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    return None
