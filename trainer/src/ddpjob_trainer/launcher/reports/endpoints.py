"""Serve /state, /healthz and /metrics of a launcher, on one port, from a thread.

The supervisor starts it; the operator, probes and Prometheus ask.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import socket
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from pathlib import Path
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qs

from ddpjob_contract import State
from ddpjob_trainer.launcher import sockets
from ddpjob_trainer.launcher.reports.metrics import (
    LauncherMetrics,
    launcher_metrics,
    worker_metrics,
)
from ddpjob_trainer.launcher.reports.progress_path import NEVER, as_text
from ddpjob_trainer.launcher.reports.termination import Results
from ddpjob_trainer.liveness.heartbeat import RankState

STATE_VERSION = 1
#: A silent connection holds a thread and a descriptor, which rounds need as well.
_MAX_CONNECTIONS = 32
#: Bytes of a request. Python itself takes 6 MiB, with which strangers could fill a pod's memory.
_MAX_HEAD = 16 * 1024
#: A client may send nothing, or read nothing, for so long.
_IDLE_SECONDS = 5.0


def state_body(
    state: RankState | None,
    *,
    uid: str = "",
    attempt: int,
    round_: int,
    results: Results | None = None,
    stacks: str = "",
    pace: float | None = None,
) -> State:
    """Return the JSON object of GET /state for one rank's record.

    ``uid``: of the job, if it is one's. ``results``: of earlier rounds, shown while this one starts
    up. ``stacks``: of the last hang. ``pace``: steps per second.
    """
    results = results or Results()
    body: State = {"version": STATE_VERSION, "uid": uid, "attempt": attempt, "round": round_}
    if stacks:
        body["stacks"] = stacks
    body.update(_of_rounds(results))
    snapshot_step = max(results.snapshot_step, state.snapshot_step if state else -1)
    if snapshot_step >= 0:
        body["snapshotStep"] = snapshot_step
    if results.modified != NEVER:
        body["fileModifiedAt"] = as_text(results.modified)
    body["phase"] = state.phase if state else "startup"
    if state is not None and state.phase != "startup":
        body["step"] = state.step
        if state.total_steps:
            body["totalSteps"] = state.total_steps
    elif results.step >= 0:  # else the step is unknown before the resume
        body["step"] = results.step
        if results.total_steps:
            body["totalSteps"] = results.total_steps
    if state is None:
        return body
    if pace is not None:
        body["stepsPerSecond"] = pace
    if state.loss is not None and math.isfinite(state.loss):
        body["loss"] = state.loss
    if state.samples_per_second is not None:
        body["samplesPerSecond"] = state.samples_per_second
    moment = datetime.fromtimestamp(state.updated_at, UTC).replace(microsecond=0)
    body["updatedAt"] = moment.isoformat().replace("+00:00", "Z")
    return body


def _of_rounds(results: Results) -> State:
    body: State = {}
    if results.resumed:
        body["resumed"] = results.resumed
    if results.proof:
        body["proof"] = results.proof
    if results.records:
        body["rounds"] = list(results.records)
    return body


def answer(state: State, query: str) -> State | None:
    """Return the answer to GET /state?``query``, None: it asks for another job.

    A client that names the job's uid may read the job, and gets all. Others are strangers: the uid
    would admit them to the hub, and stacks and exceptions expose the program.
    """
    uid = state.get("uid", "")
    named = parse_qs(query).get("uid", [""])[0]
    if not uid or hmac.compare_digest(named.encode(), uid.encode()):
        return state
    if named:
        return None
    told = state.copy()
    for private in ("uid", "stacks", "rounds", "resumed", "proof"):
        told.pop(private, None)  # type: ignore[misc]
    return told


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
            if error.errno in sockets.FULL:
                self._ended.wait(sockets.FULL_SECONDS)
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


def serve(
    port: int,
    metrics_dir: Callable[[], Path],
    counted: LauncherMetrics,
    state: Callable[[], State],
    healthy: Callable[[], bool],
) -> Server:
    """Serve until end(). Port 0 takes a free one. Raises OSError when the port is in use."""

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
                told = answer(state(), query)
                if told is None:
                    self._reply(409, b"this is another job\n", "text/plain")
                else:
                    self._reply(200, json.dumps(told).encode(), "application/json")
            elif path == "/healthz":
                well = healthy()
                self._reply(200 if well else 503, b"ok\n" if well else b"stuck\n", "text/plain")
            elif path == "/metrics":
                content = "text/plain; version=0.0.4; charset=utf-8"
                body = worker_metrics(metrics_dir()) + launcher_metrics(counted)
                self._reply(200, body, content)
            else:
                self._reply(404, b"try /state, /healthz or /metrics\n", "text/plain")

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
