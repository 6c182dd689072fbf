"""A gang of real launchers whose operator the test plays: it starts and replaces pods by hand."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, ClassVar

from support.launching import PATHS, free_ports, launch, page
from support.rounds import COLD, Training, kill

#: On one machine each launcher has an address, to which its name leads, as a pod has.
ADDRESSES = """
import os
import re
import socket
try:
    from ddpjob_trainer.launcher import host
except ImportError:  # the version before
    from ddpjob_trainer.launcher import sockets as host

usual_names, usual_bind = socket.getaddrinfo, host.bind
own = os.environ.get("DDPJOB_REPLICA")

def getaddrinfo(name, *given, **named):
    found = re.fullmatch(r"j-([0-9]+)[.]j[.]ns[.]svc", str(name))
    return usual_names(f"127.0.1.{int(found[1]) + 1}" if found else name, *given, **named)

def bind(port, *, reuse=True):
    if own is None or str(port) != os.environ.get("DDPJOB_HUB_PORT"):
        return usual_bind(port, reuse=reuse)
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((f"127.0.1.{int(own) + 1}", port))
    return bound

socket.getaddrinfo, host.bind = getaddrinfo, bind
"""
HUB = "127.0.1.1"


class Operated(Training):
    """Three pods with a rank each, replica 0 with the hub. ``standby``: so many more wait.

    ``more``: further variables of each pod.
    """

    replicas, standby = 3, 0
    more: ClassVar[dict[str, str]] = {}

    def __post_init__(self) -> None:
        super().__post_init__()
        (self.directory / "site").mkdir()
        (self.directory / "site/sitecustomize.py").write_text(ADDRESSES)
        [self.pages] = free_ports(1)
        self.hub = 1  # its number
        self.attempt_now = 1
        self.paths: dict[int, str] = {}  # by replica, where its next pod has another version
        self.gone: list[Any] = []

    def begin(self, **hub_ports: int) -> None:
        """Start all pods. ``hub_ports``: another way to the hub, by replica, as r2=..."""
        self.launchers = [
            self._pod(one, hub_ports.get(f"r{one}", 0))
            for one in range(self.replicas + self.standby)
        ]

    def replace(self, *replicas: int) -> None:
        """Start successors of pods that have ended, as of one attempt of the operator's."""
        self.attempt_now += 1
        if 0 in replicas:
            self.hub = self.attempt_now
        for replica in replicas:
            old = self.launchers[replica]
            old.communicate()
            self.gone.append(old)
            self._failed_gpu(replica).unlink(missing_ok=True)
            self.launchers[replica] = self._pod(replica)

    def succeed(self, replica: int) -> Any:
        """Start a successor beside a pod that has not ended; return the old launcher."""
        old = self.launchers[replica]
        self.attempt_now += 1
        self.launchers[replica] = self._pod(replica)
        return old

    def release(self, place: str) -> None:
        (self.directory / f"hold-{place}").unlink()

    def lose(self, *replicas: int) -> None:
        kill(*(self.launchers[replica].pid for replica in replicas))

    def break_gpu(self, replica: int) -> None:
        """Its rank fails so at the place where it is held."""
        self._failed_gpu(replica).touch()

    def _failed_gpu(self, replica: int) -> Path:
        return self.directory / f"gpu-failed-{replica}"

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(page(self.pages, "state?uid=uid"))
        return found

    def _pod(self, replica: int, hub_port: int = 0) -> Any:
        env = {
            "PYTHONPATH": f"{self.directory / 'site'}{os.pathsep}{self.paths.get(replica, PATHS)}",
            "DDPJOB_UID": "uid", "DDPJOB_NAME": "j", "DDPJOB_NAMESPACE": "ns",
            "DDPJOB_ATTEMPT": str(self.attempt_now), "DDPJOB_HUB": str(self.hub),
            "DDPJOB_POD_UID": f"pod-{replica}-{self.attempt_now}", "DDPJOB_REPLICA": str(replica),
            "DDPJOB_REPLACE_SECONDS": "600", "DDPJOB_HUB_PORT": str(hub_port or self.hub_port),
            "DDPJOB_IN_PLACE_MAX_WITHOUT_PROGRESS": "3", "DDPJOB_DRILL": "Never",
            "PET_NNODES": str(self.replicas), "PET_NPROC_PER_NODE": "1",
            "PET_NODE_RANK": str(replica), "MASTER_ADDR": HUB, "MASTER_PORT": str(self.port),
            "WORLD_SIZE": str(self.replicas), "RANK": str(replica), "LOCAL_RANK": "0",
            "GLOO_SOCKET_IFNAME": "lo", **self.more,
        }  # fmt: skip
        if self.attempt_now > 1 or replica >= self.replicas:
            env["DDPJOB_REPLACEMENT"] = "1"
        if replica >= self.replicas:
            del env["RANK"]
        if self.standby:
            env["DDPJOB_STANDBY"] = str(self.standby)
        if replica == 0:
            env["DDPJOB_METRICS_PORT"] = str(self.pages)
        report = str(self.directory / f"report-{replica}")
        return launch(
            "--termination-log", report, *(COLD if replica < self.replicas else ()),
            str(self.script), str(self.directory),
            env=self._environment(env),
        )  # fmt: skip
