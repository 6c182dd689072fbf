"""Serve /state, /healthz and /metrics of a launcher, on one port, from a thread.

The supervisor starts it; the operator, probes and Prometheus ask. So may strangers without end:
what they get is made at most once a second. What live.py answers is for clients in the pod.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from pathlib import Path
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ddpjob_contract import State
from ddpjob_trainer.launcher import host
from ddpjob_trainer.launcher.reports.state import answer
from ddpjob_trainer.telemetry import metrics
from ddpjob_trainer.telemetry.metrics import PREFIX

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


# --- Metrics: the ranks' and the launcher's counters ----------------------------------------------

_OF_A_RANK = re.compile(r"_rank\d+\.db$")
_OF_A_PROCESS = re.compile(r"(\d+)\.db$")
_ATTEMPTS = 3
_HELP = {spec.name: spec.help for spec in metrics.WORKER}


@dataclass(slots=True)
class LauncherMetrics:
    """Counted by the supervisor's thread, read by the HTTP threads."""

    round: int = 0
    workers: int = 0
    teardown_seconds: float = 0.0
    silent_seconds: float = 0.0
    rounds: Counter[str] = field(default_factory=Counter)  # by kind
    hangs: Counter[str] = field(default_factory=Counter)  # by phase
    printed: Mapping[str, float] = field(default_factory=dict)  # metrics of rank 0, by name
    value: Callable[[], Mapping[str, float]] = dict  # the program's own, by name


def forget_dead(directory: Path) -> None:
    """Remove the files of processes that are gone; keep the ranks' own.

    Others come from forked children, and from a script with its own metrics: a spare that
    has imported them, a worker by now perhaps, is alive.
    """
    for path in directory.glob("*.db"):
        pid = _OF_A_PROCESS.search(path.name)
        alive = pid is not None and Path("/proc", pid[1]).exists()
        if not alive and not _OF_A_RANK.search(path.name):
            path.unlink(missing_ok=True)


def as_text(directory: Path, counted: LauncherMetrics) -> bytes:
    """Return what the ranks have published and the launcher has counted, as Prometheus text."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(_Metrics(directory, counted))
    for _ in range(_ATTEMPTS - 1):
        # A file may have vanished, or be half written.
        with contextlib.suppress(OSError, ValueError, RuntimeError, struct.error):
            return generate_latest(registry)
    return generate_latest(registry)


@dataclass(eq=False, slots=True)
class _Metrics:
    directory: Path
    counted: LauncherMetrics

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
        from prometheus_client.multiprocess import MultiProcessCollector

        files = [str(path) for path in self.directory.glob("*.db") if path.stat().st_size]
        merged = [*MultiProcessCollector.merge(files)]  # type: ignore[no-untyped-call]
        yield from merged
        reported = {family.name for family in merged}
        for name, value in self.counted.printed.items():
            if PREFIX + name not in reported:  # what the library reports counts
                shown = GaugeMetricFamily(PREFIX + name, _HELP[name], labels=("rank",))
                shown.add_metric(["0"], value)
                yield shown
        for spec in metrics.LAUNCHER:
            value = getattr(self.counted, spec.name)
            if not spec.labels:
                yield GaugeMetricFamily(spec.full_name, spec.help, value=value)
                continue
            kind = GaugeMetricFamily if spec.type == "gauge" else CounterMetricFamily
            family = kind(spec.full_name, spec.help, labels=spec.labels)
            for label, count in sorted((value() if callable(value) else value).items()):
                family.add_metric([label], count)
            yield family


# --- The server -----------------------------------------------------------------------------------

#: A silent connection holds a thread and a descriptor, which rounds need as well.
_MAX_CONNECTIONS = 32
#: Bytes of a request. Python itself takes 6 MiB, with which strangers could fill a pod's memory.
_MAX_HEAD = 16 * 1024
#: A client may send nothing, or read nothing, for so long.
_IDLE_SECONDS = 5.0
_KEPT_SECONDS = 1.0
#: Answers other pages: path, query and whether a client on this machine asks -> status, text.
Look = Callable[[str, str, bool], tuple[int, str]]
NONE = (404, "try /state, /healthz or /metrics\n")
_T = TypeVar("_T")


class Server(ThreadingHTTPServer):
    """Listens on one socket for IPv4 and, where available, IPv6; ends at once."""

    daemon_threads = True
    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET

    def server_bind(self) -> None:
        """Bind without resolving this machine's name, which may take seconds."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "localhost", self.server_address[1]

    def start(self) -> None:
        """Serve from a thread; serve_forever() would look for its end only twice a second."""
        self._lock = threading.Lock()
        self._connections: dict[Any, None] = {}  # oldest first
        self._ended = threading.Event()
        self.thread = threading.Thread(target=self._serve, name="http", daemon=True)
        self.thread.start()

    def end(self) -> None:
        """Stop serving."""
        self._ended.set()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread

    def _serve(self) -> None:
        while not self._ended.is_set():
            self.handle_request()
        self.socket.close()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection; without free descriptors pause first, to spare the processor."""
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in host.FULL:
                self._ended.wait(host.FULL_SECONDS)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a request; when there are too many, drop the oldest connection."""
        with self._lock:
            self._connections[request] = None
            too_many = len(self._connections) > _MAX_CONNECTIONS
            oldest = next(iter(self._connections)) if too_many else None
            self._connections.pop(oldest, None)
            if oldest is not None:
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread sees the end
        super().process_request(request, client_address)

    def close_request(self, request: Any) -> None:
        """Forget the connection, then close it: its descriptor may be reused at once."""
        with self._lock:
            self._connections.pop(request, None)
        super().close_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore the error: the client has gone away, or will ask again."""


class _Head:
    """Reads the lines of a request up to a limit; then its end."""

    def __init__(self, source: BufferedIOBase) -> None:
        self._source = source
        self.left = 0
        self.close = source.close

    def readline(self, limit: int = _MAX_HEAD) -> bytes:
        line = self._source.readline(min(limit, self.left))
        self.left -= len(line)
        return line


class _Kept(Generic[_T]):
    """Keeps an answer for a second, as one takes the launcher's processor from its links."""

    def __init__(self, make: Callable[[], _T]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._found: tuple[float, _T] | None = None  # until when, and what

    def __call__(self) -> _T:
        with self._lock:
            if self._found is None or time.monotonic() >= self._found[0]:
                found = self._make()
                self._found = time.monotonic() + _KEPT_SECONDS, found
            return self._found[1]


def _is_local(host: str) -> bool:
    address = ipaddress.ip_address(host.partition("%")[0])
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def serve(
    port: int,
    metrics_dir: Path,
    counted: LauncherMetrics,
    state: Callable[[], State],
    healthy: Callable[[], bool],
    look: Look = lambda *_: NONE,
) -> Server:
    """Serve until end(). Port 0 takes a free one. Raises OSError when the port is in use."""
    metrics, kept = _Kept(lambda: as_text(metrics_dir, counted)), _Kept(state)

    class Handler(BaseHTTPRequestHandler):
        timeout = _IDLE_SECONDS
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            self.rfile: Any = _Head(self.rfile)

        def handle_one_request(self) -> None:
            self.rfile.left = _MAX_HEAD
            super().handle_one_request()
            if not self.rfile.left:
                self.close_connection = True

        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            if path == "/state":
                shown = answer(kept(), query, local=_is_local(self.client_address[0]))
                if shown is None:
                    self._reply(409, b"this is another job\n", "text/plain")
                else:  # with a uid it is asked for by who may know all, and may know it now
                    body = json.dumps(state() if shown.get("uid") else shown)
                    self._reply(200, body.encode(), "application/json")
            elif path == "/healthz":
                code, said = (200, b"ok\n") if healthy() else (503, b"stuck\n")
                self._reply(code, said, "text/plain")
            elif path == "/metrics":
                self._reply(200, metrics(), "text/plain; version=0.0.4; charset=utf-8")
            else:
                code, text = look(path, query, _is_local(self.client_address[0]))
                self._reply(code, text.encode(errors="replace"), "text/plain")

        def _reply(self, code: int, body: bytes, content: str) -> None:
            self.send_response(code)
            self.send_header("Content-Type", content)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Drop the access log."""

    every_address = "::" if Server.address_family == socket.AF_INET6 else ""
    server = Server((every_address, port), Handler)
    server.start()
    return server
