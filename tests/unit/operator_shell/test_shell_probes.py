"""The operator's port for probes and metrics."""

from __future__ import annotations

import asyncio
import socket

import pytest
from prometheus_client import CollectorRegistry

from ddpjob_operator.shell.probes import Probes
from ddpjob_operator.shell.settings import Settings
from support.launching import free_ports


def has(address: str) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
        return True


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_kubelet_reaches_it_in_a_cluster_of_ipv6_too(address: str) -> None:
    """Else it would end the operator again and again."""
    if not has(address):
        pytest.skip(f"this machine has no {address}")
    [port] = free_ports(1)

    async def ask() -> bytes:
        registry = CollectorRegistry()
        probes = Probes(Settings().probe_host, port, registry, dict, list)
        await probes.start()
        try:
            reader, writer = await asyncio.open_connection(address, port)
            writer.write(b"GET /healthz HTTP/1.0\r\n\r\n")
            reply = await reader.read()
            writer.close()
            return reply
        finally:
            await probes.stop()

    assert asyncio.run(ask()).endswith(b"ok\n")
