"""Which interface gloo is to take where this host's own name leads it to the loopback.

gloo listens where the name points. In a pod that is the pod's address; on the host's network it is
what the node's /etc/hosts says, on Debian and Ubuntu 127.0.1.1, which no other node reaches.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct

NAME = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
_REQUEST = 256  # bytes of a struct ifreq, and more


def choose(master: str) -> None:
    """Have gloo listen where ``master``, rank 0's address, sees this process.

    Does nothing where gloo finds its own way, or all ranks are on this machine.
    """
    if NAME in os.environ or not _loopback(_first(socket.gethostname())):
        return
    own = _towards(master)
    if own is None or _loopback(own):
        return
    for _, name in socket.if_nameindex():
        if _address(name) == own:
            os.environ[NAME] = name


def _first(host: str) -> str | None:
    """The first address of a name, which is what gloo takes; None where nobody knows it."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None


def _loopback(address: str | None) -> bool:
    """Where gloo would end up: it takes the loopback when it knows no address, too."""
    return address is None or ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _towards(host: str) -> str | None:
    """Our own address on the way to a host."""
    address = _first(host)
    if address is None:
        return None
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _address(interface: str) -> str | None:
    """Its IPv4 address."""
    request = struct.pack(f"{_REQUEST}s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:  # it has none
            return None
    return socket.inet_ntoa(answer[20:24])
