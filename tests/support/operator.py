"""The operator as it ships: `python -m ddpjob_operator` in a process of its own."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import yaml

from support.forked import Forked
from support.patience import PATIENCE
from support.rest import eventually

ROOT = Path(__file__).resolve().parents[2]
#: PYTHONPATH of processes that import the operator.
PATHS = f"{ROOT / 'contract/src'}{os.pathsep}{ROOT / 'operator/src'}"


def write_kubeconfig(
    path: Path, server: str, namespace: str, token_file: Path | None = None
) -> Path:
    """A kubeconfig for a plain http server, such as the proxy; a token is asked for anew."""
    user = {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "cat",
                     "args": [str(token_file)], "interactiveMode": "Never"}}  # fmt: skip
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": {"server": server}}],
        "users": [{"name": "test", "user": user if token_file else {}}],
        "contexts": [
            {"name": "test", "context": {"cluster": "test", "user": "test", "namespace": namespace}}
        ],
        "current-context": "test",
    }
    path.write_text(yaml.safe_dump(config))
    return path


class OperatorProcess:
    """One operator for one namespace. ``name`` is its pod name, so its identity in the lease.

    ``forked``: by a fork server, for tests that start hundreds; ``breaks`` then changes it.
    ``paths``: PYTHONPATH, of another version.
    """

    def __init__(
        self,
        kubeconfig: Path,
        namespace: str,
        folder: Path,
        *flags: str,
        name: str = "op-a",
        forked: bool = False,
        breaks: Callable[[], None] | None = None,
        paths: str = PATHS,
    ) -> None:
        self.name, self._forked, self._breaks = name, forked, breaks
        self.log_path = folder / f"operator-{name}.log"
        self._command = [
            *(sys.executable, "-m", "ddpjob_operator"),
            *("--kubeconfig", str(kubeconfig), "--namespaces", namespace),
            *("--lease-namespace", namespace, "--probe-host", "127.0.0.1", "--probe-port", "0"),
            *flags,
        ]
        self._env = {
            **{key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ},
            "PYTHONPATH": paths,
            "POD_NAME": name,
        }
        self._offset = 0
        self.process: subprocess.Popen[bytes] | Forked | None = None

    def start(self) -> OperatorProcess:
        """Start it, or start it again; do not wait."""
        self._offset = self.log_path.stat().st_size if self.log_path.exists() else 0
        if self._forked:
            self.process = Forked(self._command[2:], self._env, self.log_path, self._breaks)
            return self
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, env=self._env, stdout=log, stderr=log, cwd="/"
            )
        return self

    def __enter__(self) -> OperatorProcess:
        self.start()
        self.wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def log(self) -> str:
        """What this incarnation wrote."""
        with contextlib.suppress(FileNotFoundError):
            return self.log_path.read_bytes()[self._offset :].decode(errors="replace")
        return ""

    def kill(self) -> None:
        """SIGKILL, as the kernel does it. Safe to call from another thread and twice."""
        if self.process is not None:
            self.process.kill()

    def wait(self) -> int:
        """Wait for its end; the exit status."""
        return self.process.wait(PATIENCE)

    def terminate(self) -> int:
        """SIGTERM, and wait for its end; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)

    def probe(self, path: str) -> tuple[int, str]:
        """Status and body of /healthz, /readyz or /metrics; 0 if nobody listens."""
        found = re.search(r"probes on port (\d+)", self.log())
        if not found:
            return 0, ""
        url = f"http://127.0.0.1:{found[1]}{path}"
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def wait_ready(self) -> None:
        """Wait until its caches are full."""

        def ready() -> bool:
            assert self.process.poll() is None, f"the operator ended:\n{self.log()}"
            return self.probe("/readyz")[0] == 200

        try:
            eventually("the operator is ready", ready)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log()}") from None

    def wait_leading(self) -> None:
        """Wait until it holds the lease."""
        eventually("the operator leads", lambda: "leading as" in self.log())
