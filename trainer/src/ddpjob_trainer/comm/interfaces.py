"""Choose gloo's interface where this host's own name leads it to the loopback.

rendezvous.py calls choose(). gloo listens at the address of the host's name: in a pod the pod's; on
the host's network that in the node's /etc/hosts, on Debian and Ubuntu 127.0.1.1, which no other
node reaches.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct

NAME = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915


def choose(master: str) -> None:
    """Have gloo listen on the address by which this process reaches ``master``, rank 0.

    Does nothing where gloo finds a usable address, or all ranks are on this machine.
    """
    if NAME in os.environ or not _loopback(_first(socket.gethostname())):
        return
    own = _towards(master)
    for _, name in socket.if_nameindex() if not _loopback(own) else ():
        if own == _address(name):
            os.environ[NAME] = name


def _first(host: str) -> str | None:
    """Return a name's first address, as gloo takes it; None if it does not resolve."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None


def _loopback(address: str | None) -> bool:
    """Return whether gloo would listen on the loopback, as it also does without an address."""
    return address is None or ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _towards(host: str) -> str | None:
    """Return this host's IPv4 address on the way to another host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _address(interface: str) -> str | None:
    """Return an interface's IPv4 address."""
    request = struct.pack("256s", interface.encode()[:15])  # a struct ifreq, and more
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:  # it has none
            return None
    return socket.inet_ntoa(answer[20:24])
