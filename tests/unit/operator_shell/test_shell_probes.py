"""The operator's port for probes and metrics."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from ddpjob_operator.settings import Settings
from ddpjob_operator.shell.telemetry import Probes
from support.launching import free_ports, has_address
from support.patience import PATIENCE

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Told(Collector):
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.times = 0

    def collect(self) -> Iterator[Metric]:
        self.times += 1
        yield Metric("told", "how often", "gauge")


@contextlib.asynccontextmanager
async def probing(told: Told, clock: list[float]) -> AsyncIterator[int]:
    """The port of one whose clock stands still."""
    registry = CollectorRegistry()
    registry.register(told)
    probes = Probes("127.0.0.1", 0, registry, dict, list, now=lambda: clock[0])
    await probes.start()
    told.times = 0
    async with asyncio.timeout(PATIENCE):
        yield probes.port
    await probes.stop()


async def ask(port: int, path: str, times: int = 1) -> bytes:
    """All that is answered until the other side closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode() * times)
    reply = await reader.read()
    writer.close()
    return reply


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_kubelet_reaches_it_in_a_cluster_of_ipv6_too(address):
    """Else it would end the operator again and again."""
    if not has_address(address):
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


async def test_metrics_are_rendered_at_most_once_a_second():
    """It takes long where there are many namespaces, and whoever asks on and on costs the lease."""
    told, clock = Told(), [100.0]
    async with probing(told, clock) as port:
        replies = [await ask(port, "/metrics") for _ in range(5)]
        assert told.times == 1
        clock[0] += 1.0
        replies.append(await ask(port, "/metrics"))
        assert told.times == 2
    assert all(b" 200 " in reply and b"# TYPE told gauge" in reply for reply in replies)


@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/readyz", "/elsewhere"])
async def test_a_connection_has_one_answer(path):
    async with probing(Told(), [0.0]) as port:
        assert (await ask(port, path, times=20)).count(b"HTTP/1.1 ") == 1


async def test_strangers_who_connect_and_say_nothing_make_room_for_the_kubelet():
    silent: list[Connection] = []
    async with probing(Told(), [0.0]) as port:
        for _ in range(100):
            silent.append(await asyncio.open_connection("127.0.0.1", port))
            if len(silent) % 20 == 0:
                assert (await ask(port, "/healthz")).endswith(b"ok\n")
        for reader, _ in silent[:30]:
            assert await reader.read() == b"", "the oldest are closed"
        silent[-1][1].write(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert (await silent[-1][0].read()).endswith(b"ok\n"), "the newest are not"
        for _, writer in silent:
            writer.close()
