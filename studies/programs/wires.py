"""Bytes on the wire between ranks, from the kernel: TCP_INFO of this process's own sockets.

Linux only. Every rank tells what its sockets have received and which ports they join; together
that says which rank sent how much to which. Headers of gloo's messages count, those of TCP do not.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

#: Where struct tcp_info has tcpi_bytes_received (include/uapi/linux/tcp.h).
_RECEIVED = 128

Received = dict[str, int]  # "my port:the peer's port" -> bytes


def received() -> Received:
    """Bytes that each connection of this process has received so far."""
    found = {}
    for file in Path("/proc/self/fd").iterdir():
        try:
            if not str(file.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(file.name))) as connection:
                if connection.type != socket.SOCK_STREAM:
                    continue
                ports = f"{connection.getsockname()[1]}:{connection.getpeername()[1]}"
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except (OSError, IndexError, TypeError):
            continue  # gone meanwhile, listening, or no TCP
        found[ports] = struct.unpack_from("=Q", info, _RECEIVED)[0]
    return found


def since(before: Received) -> Received:
    return {ports: count - before.get(ports, 0) for ports, count in received().items()}


def matrix(ranks: list[Received]) -> list[list[int]]:
    """[from][to] in bytes; connections to anybody else, as the store, are left out."""
    owner = {ports: rank for rank, found in enumerate(ranks) for ports in found}
    sent = [[0] * len(ranks) for _ in ranks]
    for to, found in enumerate(ranks):
        for ports, count in found.items():
            here, there = ports.split(":")
            peer = owner.get(f"{there}:{here}")
            if peer is not None and peer != to:
                sent[peer][to] += count
    return sent
