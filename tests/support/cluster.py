"""A devcluster for tests: brought up under a name of its own, taken down at the end.

Only the `devcluster` command and kubectl are used, as a user would use them.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from http.client import HTTPException
from pathlib import Path
from typing import Any

from devcluster import binaries
from support.patience import PATIENCE, wait_for
from support.rest import Rest, RestError
from support.sharing import Shared

ROOT = Path(__file__).resolve().parents[2]
#: In the names of clusters that outlive a process: two checkouts may be tested side by side.
CHECKOUT = hashlib.sha256(str(ROOT).encode()).hexdigest()[:6]
DEVCLUSTER = ROOT / "dev/devcluster/devcluster"
CRD = ROOT / "manifests" / "crd.yaml"

#: kubectl's words where the API server, or a kubelet behind it, gave no answer of its own.
UNANSWERED = re.compile(
    r"Unable to connect to the server|The connection to the server|etcdserver: |http2: "
    r"|TLS handshake timeout|i/o timeout|connection (?:refused|reset)|context deadline exceeded"
    r"|Client\.Timeout|unexpected EOF|: EOF$"
    r"|from server \((?:Timeout|ServerTimeout|ServiceUnavailable|TooManyRequests|InternalError)\)",
    re.MULTILINE,
)

#: Those of them after which nothing can have been done: it may be tried again, whatever it was.
UNREACHED = re.compile(
    r"TLS handshake timeout|connection refused|The connection to the server \S+ was refused"
)


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running devcluster. ``nodes`` 0: etcd, API server, controllers and scheduler only."""

    name: str
    kubeconfig: Path
    kubectl_path: Path

    def kubectl(
        self,
        *args: str,
        input: str | None = None,  # noqa: A002 - as subprocess.run names it
        check: bool = False,
        timeout: float = PATIENCE,
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl as administrator.

        With ``check`` fail with what it said; but while it reaches nobody run it again.
        """
        command = [str(self.kubectl_path), "--kubeconfig", str(self.kubeconfig), *args]

        def ran() -> subprocess.CompletedProcess[str] | None:
            done = subprocess.run(
                command, input=input, capture_output=True, text=True, timeout=timeout, check=False
            )
            # What `exec` shows may be a program's own words.
            again = check and done.returncode and UNREACHED.search(done.stderr)
            if not again or "exec" in args:
                return done
            if "delete" in args and "--ignore-not-found" not in command:  # it may have waited only
                command.append("--ignore-not-found")
            return None

        done = wait_for(ran, f"kubectl {' '.join(args)} to reach the API server")
        if check and done.returncode:
            raise AssertionError(f"kubectl {' '.join(args)}: {done.stderr.strip()}")
        return done

    def read(self, *args: str) -> str:
        """What a kubectl command that only reads prints; asked again while nobody answers."""

        def answered() -> subprocess.CompletedProcess[str] | None:
            done = self.kubectl(*args)
            return None if done.returncode and UNANSWERED.search(done.stderr) else done

        done = wait_for(answered, f"an answer to kubectl {' '.join(args)}")
        assert done.returncode == 0, f"kubectl {' '.join(args)}: {done.stderr.strip()}"
        return done.stdout

    def get(self, path: str) -> dict[str, Any]:
        """What the API server has at a path; asked again while nobody answers.

        For what is looked at ten times a second: a kubectl takes a tenth of a second to start.
        """

        def answered() -> dict[str, Any] | None:
            try:
                return _rest(self.kubeconfig).get(path)
            except (HTTPException, OSError):
                return None
            except RestError as error:
                if error.code == 429 or error.code >= 500:
                    return None
                raise AssertionError(f"GET {path}: {error}") from None

        return wait_for(answered, f"an answer to GET {path}")

    def node(self, verb: str, name: str) -> None:
        """`devcluster node stop|start|partition|heal N`."""
        _devcluster(self.name, "node", verb, name.removeprefix("node"), timeout=PATIENCE)

    def install_kueue(self) -> None:
        """`devcluster kueue`; it builds Kueue first, once."""
        _devcluster(self.name, "kueue", timeout=1800)

    def apply_crd(self) -> None:
        """Install the DDPJob definition and wait until the API server serves it."""
        self.kubectl("apply", "-f", str(CRD), check=True)
        # `kubectl wait` fails on a CRD that has no conditions yet, and Established comes
        # before discovery: only the list itself tells.
        wait_for(
            lambda: self.kubectl("get", "ddpjobs.ddpjob.dev", "-A").returncode == 0,
            "the API server to serve ddpjobs",
        )


@cache
def _rest(kubeconfig: Path) -> Rest:
    return Rest(kubeconfig)


def up(name: str, *args: str, timeout: float = 1800) -> Cluster:
    """Run ``devcluster --name NAME up ARGS``; it builds what is missing, once."""
    _devcluster(name, "up", *args, timeout=timeout)
    kubeconfig = Path(_devcluster(name, "kubeconfig", timeout=PATIENCE).strip())
    kubectl = binaries.ensure(["kubectl"], print)["kubectl"]
    return Cluster(name, kubeconfig, kubectl)


def down(name: str) -> None:
    """Remove the cluster and everything that it made."""
    _devcluster(name, "down", timeout=PATIENCE)


def plane_up(name: str) -> Cluster:
    """Bring up a control plane without nodes and with the DDPJob definition."""
    plane = up(name, "--nodes", "0")
    plane.apply_crd()
    return plane


@contextmanager
def control_plane(purpose: str) -> Iterator[Cluster]:
    """One of this process's own, as `plane_up` makes it."""
    name = f"t-{purpose}-{os.getpid()}"
    try:
        yield plane_up(name)
    finally:
        down(name)


def shared(
    run: Shared, name: str, make: Callable[[str], Cluster], *, keep: bool = False
) -> Cluster:
    """Return the cluster that ``make`` brings up for all workers of a run.

    It ends with the run, unless ``keep``. Whoever asks after it has failed fails with its words.
    """

    def made() -> dict[str, str]:
        if not keep:
            run.at_end(name)
        try:
            found = make(name)
        except AssertionError as error:
            return {"error": str(error)}
        return {"kubeconfig": str(found.kubeconfig), "kubectl_path": str(found.kubectl_path)}

    kept = run.once(name, made)
    assert "error" not in kept, kept["error"]
    return Cluster(name, **{key: Path(path) for key, path in kept.items()})


def _devcluster(name: str, *args: str, timeout: float) -> str:
    done = subprocess.run(
        [sys.executable, DEVCLUSTER, "--name", name, *args],
        capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    if done.returncode:
        raise AssertionError(f"devcluster {' '.join(args)}: {done.stderr.strip()[-2000:]}")
    return done.stdout
