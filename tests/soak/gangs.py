"""The jobs of the soak: three examples, each run again and again as a DDPJob of its own.

A run is over when the API says so, and then its weights are held against those of a run that
nothing disturbed. How far training is, is read from the launcher itself (GET /state), so that it is
known whatever becomes of the API server and of the operator.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpjob_trainer.snapshot.reader import Snapshot, SnapshotToolError, choose
from support.chronicle import Chronicle
from support.invariants import JOBS, PODS
from support.objects import attempt, status
from support.rest import Rest, RestError, urlopen
from support.site import SLOW, Site, job

CLAIM, SLOWED = "small", "slowed"
_PORT = 9400
_UNREAD_SECONDS = 180.0
#: An order on what a gang has done so far: run, then step.
Position = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Kind:
    """An example and the shape of its gang."""

    name: str
    steps: int
    pause: float
    batch: int
    replicas: int
    processes: int = 1
    slow: bool = False  # its pods take their time to end

    def manifest(self, name: str) -> dict[str, Any]:
        """The DDPJob."""
        command = ["ddpjob-trainer", "run", f"/soak/{SLOW.name}", "/never", str(self.pause)]
        command += [f"/workspace/examples/{self.name}.py", "--total-steps", str(self.steps)]
        command += ["--global-batch", str(self.batch)]
        claim = {"persistentVolumeClaim": {"claimName": CLAIM}}
        body = job(
            name, command,
            replicas=self.replicas, nprocPerNode=self.processes,
            snapshot={"path": "/snapshots", "volume": claim, "everySteps": 5, "keep": 3},
            restart={
                "maxRestarts": 1000, "maxDisruptions": 1000,
                "backoff": {"initialSeconds": 1, "maxSeconds": 5},
            },
            hang={"startupSeconds": 120, "stepSeconds": 45, "snapshotSeconds": 60},
            nodeLost={"policy": "Fence", "afterSeconds": 5},
        )  # fmt: skip
        pod = body["spec"]["template"]["spec"]
        pod["volumes"] = [{"name": SLOWED, "configMap": {"name": SLOWED}}]
        pod["containers"][0]["volumeMounts"] = [{"name": SLOWED, "mountPath": "/soak"}]
        if self.slow:
            pod["containers"][0]["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", "8"]}}}
        return body


KINDS = (
    Kind("digits", steps=90, pause=0.25, batch=24, replicas=3),
    Kind("text", steps=60, pause=0.3, batch=12, replicas=1, processes=3),
    Kind("gan", steps=90, pause=0.25, batch=24, replicas=2, slow=True),
)


@dataclass
class Run:
    """What became of one DDPJob."""

    name: str
    began: float
    phase: str = ""
    seconds: float = 0.0
    attempts: int = 0
    restarts: Mapping[str, int] = field(default_factory=dict)
    weights: str = ""  # equal | differ | unread


@dataclass
class Gang:
    """One kind's runs. ``position``: what it has reached."""

    kind: Kind
    site: Site
    chronicle: Chronicle
    volume: Path
    number: int = 0
    runs: list[Run] = field(default_factory=list)
    reference: str = ""  # the weights of the first run
    position: Position = (0, 0)
    ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._rest = Rest(self.site.cluster.kubeconfig)
        threading.Thread(target=self._probe, daemon=True).start()

    @property
    def name(self) -> str:
        return f"soak-{self.kind.name}-{self.number}"

    def pod(self, replica: int) -> str:
        return f"{self.name}-{replica % self.kind.replicas}"

    # --- one run after the other ----------------------------------------------------------

    def begin(self) -> None:
        """Apply the next DDPJob. Raises OSError, RestError."""
        self.number += 1
        self._rest.post(f"{self._path('ddpjobs')}", self.kind.manifest(self.name))
        self.runs.append(Run(self.name, time.monotonic()))

    def tick(self) -> Run | None:
        """Look at the run; when it has ended, judge it and return it. Raises OSError, RestError."""
        run, found = self.runs[-1], status(self.chronicle.latest(JOBS, self.name))
        phase = found.get("phase", "")
        if run.phase or phase not in ("Succeeded", "Failed"):
            return None
        run.seconds = run.seconds or time.monotonic() - run.began
        run.attempts, run.restarts = found.get("attempt", 0), found.get("restarts") or {}
        if phase == "Succeeded" and not self._judge(run):
            return None
        run.phase = phase
        self.position = (self.number, self.kind.steps + 10)
        return run

    def remove(self) -> None:
        """Delete the DDPJob; and the snapshots of the one before, whose pods are long gone."""
        try:
            self._rest.delete(f"{self._path('ddpjobs')}/{self.name}")
        except RestError as error:
            if error.code != 404:
                raise
        older = self.volume / f"soak-{self.kind.name}-{self.number - 1}"
        shutil.rmtree(older, ignore_errors=True)

    def _judge(self, run: Run) -> bool:
        """Whether its weights could be read, or shall be waited for no longer."""
        found = self.weights()
        self.reference = self.reference or found
        if found:
            same = found == self.reference
            run.weights = "equal" if same else f"differ: {found}, not {self.reference}"
        elif time.monotonic() - run.began - run.seconds > _UNREAD_SECONDS:
            run.weights = "unread"
        return bool(run.weights)

    def weights(self) -> str:
        """The hash of the weights in the last snapshot; "" where it cannot be read."""
        try:
            path, source = choose(self.volume / self.name, self.kind.steps)
        except (SnapshotToolError, OSError):
            return ""  # the disk was full then
        model = Snapshot(path, source).model
        digest = hashlib.sha256()
        for name in sorted(model):
            digest.update(name.encode() + model[name].contiguous().numpy().tobytes())
        return digest.hexdigest()

    def _path(self, plural: str) -> str:
        return f"/apis/ddpjob.dev/v1alpha1/namespaces/{self.site.namespace}/{plural}"

    # --- how far training is --------------------------------------------------------------

    def _probe(self) -> None:
        while not self.ended.wait(0.2):
            pod = self.chronicle.latest(PODS, self.pod(0)) if self.number else {}
            ip = (pod.get("status") or {}).get("podIP")
            found = _state(ip) if ip else {}
            if found.get("attempt") != attempt(pod) if pod else True:
                continue
            self.position = max(self.position, (self.number, int(found.get("step", 0))))


def _state(address: str) -> dict[str, Any]:
    try:
        with urlopen(f"http://{address}:{_PORT}/state", timeout=1) as answer:
            found = json.loads(answer.read())
    except (OSError, ValueError, http.client.HTTPException):
        return {}
    return found if isinstance(found, dict) else {}
