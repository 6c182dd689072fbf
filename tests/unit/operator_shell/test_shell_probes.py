"""The operator's port for probes and metrics."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry, Gauge

from ddpjob_operator.shell.probes import STUCK_AFTER, Probes
from ddpjob_operator.shell.settings import Settings
from support.launching import free_ports, has_address


async def ask(address: str, port: int, path: str) -> bytes:
    reader, writer = await asyncio.open_connection(address, port)
    writer.write(f"GET {path} HTTP/1.0\r\n\r\n".encode())
    reply = await reader.read()
    writer.close()
    return reply


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
async def test_the_kubelet_reaches_it_in_a_cluster_of_ipv6_too(address: str) -> None:
    if not has_address(address):
        pytest.skip(f"this machine has no {address}")
    [port] = free_ports(1)
    registry, idle, missing = CollectorRegistry(), {"pods": STUCK_AFTER}, ["list of pods"]
    Gauge("told", "once", registry=registry)
    probes = Probes(Settings().probe_host, port, registry, lambda: idle, lambda: missing)
    await probes.start()
    try:
        assert (await ask(address, port, "/healthz")).endswith(b"ok\n")
        idle["pods"] += 1
        assert b" 503 " in (reply := await ask(address, port, "/healthz"))
        assert b"pods has done nothing for 181 s\n" in reply
        assert b"not yet: list of pods\n" in await ask(address, port, "/readyz")
        assert b"# TYPE told gauge" in await ask(address, port, "/metrics")
        assert b" 404 " in await ask(address, port, "/elsewhere")
    finally:
        await probes.stop()
