"""A real browser without a window, asked through its pipe: what a page looks like, and loads."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from devcluster import host
from support.patience import PATIENCE


class Browser:
    """One page of Chromium, by the DevTools protocol. ``requested``: URLs that it asked for."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._rest = write, read, b""
        self._numbers = itertools.count(1)
        self._session: dict[str, str] = {}
        self.requested: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        found = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": found["sessionId"]}
        self.ask("Network.enable")
        self.ask("Page.enable")

    def ask(self, method: str, **params: Any) -> Any:
        """Send a command; return its result."""
        number = next(self._numbers)
        body = {"id": number, "method": method, "params": params, **self._session}
        os.write(self._write, json.dumps(body).encode() + b"\0")
        while True:
            said = self._next()
            if said.get("id") == number:
                assert "error" not in said, said
                return said["result"]

    def open(self, path: Path, width: int, scheme: str) -> None:
        """Show a page at a width, light or dark."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.ask("Emulation.setEmulatedMedia", features=features)
        self.ask("Page.navigate", url=path.as_uri())
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def value(self, expression: str) -> Any:
        """Evaluate an expression of JavaScript in the page."""
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        return found["result"].get("value")

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._read, 1 << 20)
            assert data, "the browser has ended"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        said: dict[str, Any] = json.loads(line)
        if said.get("method") == "Network.requestWillBeSent":
            self.requested.append(said["params"]["request"]["url"])
        return said


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start Chromium, or skip the test where it cannot be had."""
    try:
        host.ensure_packages({"chromium": "chromium"}, print)
    except (host.Failure, OSError) as error:
        pytest.skip(f"no browser: {error}")
    to_it, write = os.pipe()
    read, from_it = os.pipe()
    # It reads from descriptor 3 and writes to 4.
    program = f'exec {shutil.which("chromium")} "$@" 3<&{to_it} 4>&{from_it}'
    words = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe")
    with subprocess.Popen(
        ["bash", "-c", program, "chromium", *words, f"--user-data-dir={folder / 'profile'}"],
        pass_fds=(to_it, from_it), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        os.close(to_it)
        os.close(from_it)
        try:
            yield Browser(write, read)
        finally:
            os.close(write)  # the pipe's end is its own
            process.wait(PATIENCE)
            os.close(read)
