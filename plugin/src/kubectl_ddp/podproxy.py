"""Read pages of many pods at once, through the API server's pod proxy.

gang.py calls it. One `kubectl proxy` serves all requests of a command, since a process for each of
a thousand pods would cost minutes. It listens on a socket in a directory of this user alone, since
others of the machine could use a port with the user's rights, and passes on nothing but these
pages.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kubectl_ddp.kubectl import Failure, Kubectl, explained, forbidden

_ACCEPTED = r"^/api/v1/namespaces/[^/]+/pods/[^/]+/proxy/(state|metrics)$"
_SECONDS = 3.0  # for one page ...
_SECONDS_ALL = 12.0  # ... and for all of them
_AT_ONCE = 32
_MAX_BYTES = 4 << 20
#: The path of a socket has 104 bytes on macOS, 108 on Linux, the last of them 0.
_SHORT = 104 - len("/ddp-xxxxxxxx/s") - 1


def read(kubectl: Kubectl, pages: Iterable[str]) -> tuple[dict[str, bytes], str]:
    """Ask for all pages at once; return those that came, by their paths, and why none could.

    A proxy that does not start is a refusal, too: pages only add to the status.
    """
    wanted = list(pages)
    if not wanted:
        return {}, ""
    try:
        with _serving(kubectl) as path, ThreadPoolExecutor(_AT_ONCE) as pool:
            give_up = time.monotonic() + _SECONDS_ALL
            found = list(pool.map(lambda page: _fetch(path, page, give_up), wanted))
    except (Failure, OSError) as error:
        return {}, str(error)
    bodies = {page: body for page, (code, body) in zip(wanted, found, strict=True) if code == 200}
    # A pod, too, may answer 403 and name a right: only the API server's own text counts.
    said = [_message(body) for code, body in found if code == 403]
    ours = next((one for one in said if 'cannot get resource "pods/proxy"' in one), "")
    return bodies, "" if bodies else forbidden(ours)


@contextlib.contextmanager
def _serving(kubectl: Kubectl) -> Iterator[str]:
    """Run kubectl proxy; yield the path of its socket."""
    if not hasattr(socket, "AF_UNIX"):
        raise Failure("steps are read through a Unix socket: run this in Linux, macOS or WSL")
    usual = tempfile.gettempdir()
    where = usual if len(os.fsencode(usual)) <= _SHORT else "/tmp"
    with tempfile.TemporaryDirectory(prefix="ddp-", dir=where) as directory:
        path = str(Path(directory, "s"))
        limits = (f"--accept-paths={_ACCEPTED}", "--reject-methods=^(POST|PUT|PATCH|DELETE)$")
        with kubectl.running(
            "proxy", f"--unix-socket={path}", *limits,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            if not process.stdout.readline():  # "Starting to serve on ..."
                raise Failure(explained(process.communicate()[1]))
            yield path


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str, seconds: float) -> None:
        super().__init__("localhost", timeout=seconds)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _fetch(path: str, page: str, give_up: float) -> tuple[int, bytes]:
    """Return status and body; 0 without a whole answer in time."""
    deadline = min(give_up, time.monotonic() + _SECONDS)
    if deadline <= time.monotonic():
        return 0, b""
    connection = _Connection(path, deadline - time.monotonic())
    body = b""
    try:
        connection.request("GET", page)
        response = connection.getresponse()
        while part := response.read1(1 << 16):
            body += part
            if len(body) > _MAX_BYTES or time.monotonic() > deadline:
                return 0, b""
        return response.status, body
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


def _message(body: bytes) -> str:
    """Return the message of a Status object of the API server."""
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return ""
