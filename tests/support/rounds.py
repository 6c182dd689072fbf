"""A small real training that waits where a test wants it to, and launchers to run it.

A place of a life (attempt, round) is held by a file; a rank that comes to a held place says so and
waits until the file is gone. So a kill lands where the test says, however slow the machine is.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from support.launching import PATHS, free_ports, launch
from support.patience import PATIENCE

STEPS = 16
EVERY = 4  # steps between snapshots
#: Where spares are not the point: each launcher would import torch once more for them.
COLD = ("--spares", "0")

#: Three ranks, three buckets, dropout, buffers.
SCRIPT = f"""
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpjob_trainer as ddp
from ddpjob_trainer.gradients import determinism

directory = Path(sys.argv[1])
rank = os.environ["RANK"]
life = os.environ.get("DDPJOB_ATTEMPT", "1") + "-" + os.environ["DDPJOB_ROUND"]

def come_to(place):
    held = [directory / f"hold-{{life}}-{{place}}{{whom}}" for whom in ("", "-" + rank)]
    if any(path.exists() for path in held):
        (directory / f"at-{{life}}-{{place}}-{{rank}}").write_text(f"{{os.getpid()}}\\n")
        while any(path.exists() for path in held):
            if (directory / f"gpu-failed-{{rank}}").exists():
                raise RuntimeError("CUDA error: uncorrectable ECC error")
            time.sleep(0.005)

come_to("import")
run = ddp.start(total_steps={STEPS}, global_batch=24, seed=5)
come_to("start")
torch.manual_seed(3)
data = TensorDataset(torch.randn(200, 20), torch.randint(0, 5, (200,)))
net = nn.Sequential(
    nn.Linear(20, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Dropout(0.2),
    nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 5),
)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
model, optimizer = run.prepare(net, optimizer, bucket_cap_mb=0.02)
come_to("build")
for step in run.steps(data):
    for x, y in step.batches:
        loss = nn.functional.cross_entropy(model(x), y)
        step.backward(loss)
    assert len(determinism.buckets(model)) > 1
    come_to(f"step-{{step.index}}")
    step.commit()
    come_to(f"committed-{{step.index}}")
    with (directory / f"losses-{{rank}}").open("a") as losses:
        losses.write(f"{{step.index}} {{loss.item().hex()}}\\n")
for buffer in net.buffers():  # those of rank 0 count; DDP shares them in each forward
    torch.distributed.broadcast(buffer, 0)
result = run.weights_sha256() + " " + run.state_sha256()
run.finish()
(directory / f"result-{{rank}}").write_text(result)
come_to("end")
"""


@dataclass
class Outcome:
    """What must be equal: each rank's hashes, and the loss of each step, also when replayed."""

    hashes: list[str]
    losses: list[dict[int, str]]


@dataclass
class Training:
    """One training in a directory of its own, over all the launchers that it takes."""

    directory: Path
    launchers: list[subprocess.Popen[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.directory.mkdir(exist_ok=True)
        self.script = self.directory / "train.py"
        self.script.write_text(SCRIPT)
        self.trace = self.directory / "trace"
        self.port, self.hub_port = free_ports(2)

    def hold(self, *places: str) -> None:
        """Hold places such as "1-0-step-9": attempt 1, round 0, before the commit of step 9.

        "committed": after it. "1-0-import-1" holds rank 1 only.
        """
        for place in places:
            (self.directory / f"hold-{place}").touch()

    def at(
        self, place: str, ranks: Collection[int] = range(3), seconds: float = PATIENCE
    ) -> list[int]:
        """Wait until these ranks have come to a place; their pids."""
        paths = [self.directory / f"at-{place}-{rank}" for rank in ranks]
        self.until(
            lambda: all(p.exists() and p.read_text().endswith("\n") for p in paths), place, seconds
        )
        return [int(path.read_text()) for path in paths]

    def until(self, condition: Any, what: str, seconds: float = PATIENCE) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                pytest.fail(f"after {seconds} s still not: {what}\n{self._errors()}")
            time.sleep(0.005)

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        return {
            "DDPJOB_SNAPSHOT_DIR": str(self.directory / "snapshots"),
            "DDPJOB_SNAPSHOT_EVERY_STEPS": str(EVERY),
            "DDPJOB_TRAINER_TRACE": str(self.trace),
            **more,
        }

    def launch(self, *options: str, **env: str) -> subprocess.Popen[str]:
        """One launcher alone with three ranks."""
        report = str(self.directory / "report-0")
        words = ("--nproc", "3", "--termination-log", report, *options)
        self.launchers = [
            launch(*words, str(self.script), str(self.directory), env=self._environment(env))
        ]
        return self.launchers[0]

    def attempt(
        self, number: int, *options: str, hub_ports: Mapping[int, int] | None = None,
        apart: Mapping[int, Mapping[str, str]] | None = None, **env: str,
    ) -> list[subprocess.Popen[str]]:  # fmt: skip
        """Three launchers with a rank each, as the operator's pods have them.

        By replica: ``hub_ports``: another way to the hub, ``apart``: another environment.
        """
        port, hub = self.port, self.hub_port
        gang = {
            "DDPJOB_UID": "uid", "DDPJOB_ATTEMPT": str(number), "PET_NNODES": "3",
            "PET_NPROC_PER_NODE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "WORLD_SIZE": "3", "LOCAL_RANK": "0", "GLOO_SOCKET_IFNAME": "lo",
            "DDPJOB_IN_PLACE_MAX_WITHOUT_PROGRESS": "3", **env,
        }  # fmt: skip
        self.launchers = []
        for replica in range(3):
            own = {
                "DDPJOB_REPLICA": str(replica), "PET_NODE_RANK": str(replica),
                "RANK": str(replica), "GROUP_RANK": str(replica),
                "DDPJOB_HUB_PORT": str((hub_ports or {}).get(replica, hub)),
                **(apart or {}).get(replica, {}),
            }  # fmt: skip
            words = ("--termination-log", str(self.directory / f"report-{replica}"), *options)
            self.launchers.append(
                launch(
                    *words, str(self.script), str(self.directory),
                    env=self._environment({**gang, **own}),
                )
            )  # fmt: skip
        return self.launchers

    def codes(self, seconds: float = PATIENCE) -> list[int]:
        """Exit codes of the launchers; the test fails when one does not end."""
        deadline = time.monotonic() + seconds
        self.errors = []
        for launcher in self.launchers:
            try:
                left = max(0.1, deadline - time.monotonic())
                self.errors.append(launcher.communicate(timeout=left)[1])
            except subprocess.TimeoutExpired:
                pytest.fail(f"after {seconds} s a launcher has not ended\n{self._errors()}")
        return [launcher.returncode for launcher in self.launchers]

    def report(self, replica: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / f"report-{replica}").read_bytes())
        return found

    def marks(self, event: str) -> list[dict[str, Any]]:
        """Lines of the trace: launchers tell of each stage of a restart."""
        if not self.trace.exists():
            return []
        lines = self.trace.read_text().splitlines(keepends=True)
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [one for one in found if one["event"] == event]

    def outcome(self) -> Outcome:
        hashes, losses = [], []
        for rank in range(3):
            found: dict[int, str] = {}
            for line in (self.directory / f"losses-{rank}").read_text().splitlines():
                index, value = line.split()
                assert found.setdefault(int(index), value) == value, f"step {index} differs"
            assert sorted(found) == list(range(STEPS))
            losses.append(found)
            hashes.append((self.directory / f"result-{rank}").read_text())
        return Outcome(hashes, losses)

    def end(self) -> None:
        """Leave nobody behind, whatever the test came to."""
        for launcher in self.launchers:
            if launcher.poll() is None:
                launcher.kill()
                launcher.communicate()

    def _errors(self) -> str:
        texts = []
        for number, launcher in enumerate(self.launchers):
            launcher.kill()
            texts.append(f"--- launcher {number}\n{launcher.communicate()[1][-3000:]}")
        return "\n".join(texts)


#: For `patched`: no launcher or spare that stands still is given up for it.
UNHURRIED: Final = {
    "launcher.hub.hub.BARRIER_SECONDS": PATIENCE,
    "launcher.local_round._ANSWER_SECONDS": PATIENCE,
    "launcher.processes.spares._ANSWER_SECONDS": PATIENCE,
}


@contextlib.contextmanager
def two_launchers(
    directory: Path, *words: str, nproc: int = 1, hub: int = 0, apart: bool = False, **env: str
) -> Iterator[list[subprocess.Popen[str]]]:  # fmt: skip
    """Launchers of a gang of two. ``apart``: each in a folder of its own."""
    ports = free_ports(2)
    gang = {
        "DDPJOB_UID": "u", "DDPJOB_ATTEMPT": "1", "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": str(nproc), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0]),
        "DDPJOB_HUB_PORT": str(hub or ports[1]), "DDPJOB_IN_PLACE_MAX_WITHOUT_PROGRESS": "3", **env,
    }  # fmt: skip
    launchers = []
    for replica in (0, 1):
        folder = directory / f"pod-{replica}"
        folder.mkdir(exist_ok=True)
        launchers.append(
            launch(
                "--termination-log", str(directory / f"report-{replica}"), *words,
                env={**gang, "DDPJOB_REPLICA": str(replica)}, cwd=folder if apart else None,
            )
        )  # fmt: skip
    try:
        yield launchers
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.communicate()


def patched(directory: Path, constants: Mapping[str, object], paths: str = PATHS) -> dict[str, str]:
    """Environment in which a launcher has other values for constants of ddpjob_trainer."""
    patch(directory, constants)
    return {"PYTHONPATH": f"{directory}{os.pathsep}{paths}"}


def patch(directory: Path, constants: Mapping[str, object]) -> None:
    """Make a directory that, on PYTHONPATH, gives constants of ddpjob_trainer other values."""
    lines = []
    for constant, value in constants.items():
        module, _, name = constant.rpartition(".")
        lines.append(f"import ddpjob_trainer.{module} as module\nmodule.{name} = {value!r}\n")
    directory.mkdir(exist_ok=True)
    (directory / "sitecustomize.py").write_text("".join(lines))


class Forwarder:
    """A TCP port that leads to another one of the same address until it is cut."""

    def __init__(self, target: int, host: str = "127.0.0.1") -> None:
        self._target = (host, target)
        self._listener = socket.create_server((host, 0))
        self.port = int(self._listener.getsockname()[1])
        self._open: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                with contextlib.suppress(ConnectionRefusedError):
                    far = socket.create_connection(self._target)
                    self._open += [near, far]
                    for ends in ((near, far), (far, near)):
                        threading.Thread(target=self._pass_on, args=ends, daemon=True).start()
                    continue
                near.close()

    @staticmethod
    def _pass_on(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)

    def cut(self, *, again: bool = False) -> None:
        """Break every connection, and let nobody connect again, unless they may."""
        for one in self._open[again:]:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children(pid: int) -> dict[int, str]:
    """Pid and command line of each child of a process; some may end while one looks."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for child in map(int, (task / "children").read_text().split()):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    found[child] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
    return found


def kill(*pids: int, signum: int = signal.SIGKILL) -> None:
    """At once: one that its launcher ends for the loss of another may be gone by its turn."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
