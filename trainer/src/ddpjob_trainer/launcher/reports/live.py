"""Look at ranks that run: `ddpjob-trainer stacks` and `profile` ask the pod's launcher.

``answer`` is the launcher's part, in a thread of endpoints.py; ``ask`` is the command's. It needs
no right but that to run a command in the pod: others on the network get nothing.
"""

from __future__ import annotations

import hmac
import http.client
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import parse_qsl, urlencode

from ddpjob_contract import METRICS_PORT
from ddpjob_trainer import printing
from ddpjob_trainer.launcher.reports import endpoints
from ddpjob_trainer.launcher.worker_group import WorkerGroup
from ddpjob_trainer.liveness.heartbeat import order, profile_path

#: For the launcher's answer: native stacks of many processes take seconds, steps much longer.
_SECONDS = {"stacks": 60.0, "profile": 3600.0}
_LOOK_SECONDS = 0.1
_MOST_STEPS = 1000
_OK, _BAD, _FORBIDDEN, _CONFLICT = 200, 400, 403, 409


def answer(
    workers: WorkerGroup,
    uid: str,
    path: str,
    query: str,
    look: Callable[[Path, Mapping[int, int]], str],
) -> tuple[int, str]:
    """Return HTTP status and text. ``uid``: of the job; on the host's network others ask, too.

    ``look`` returns the stacks of workers, by their records' directory and their pids.
    """
    asked = dict(parse_qsl(query))
    if path not in ("/stacks", "/profile"):
        return endpoints.NONE
    if not hmac.compare_digest(asked.get("uid", "").encode(), uid.encode()):
        return (
            _FORBIDDEN,
            "this launcher belongs to another job: call it in the job's trainer container",
        )
    pids = workers.pids
    if not pids:
        return _CONFLICT, "no rank runs here now, as between two rounds: try again"
    if path == "/stacks":
        return _OK, look(workers.state_dir, pids)
    try:
        return _profile(workers, int(asked["rank"]), int(asked["steps"]))
    except (KeyError, ValueError):
        return _BAD, "name rank=N and steps=N"


def _profile(workers: WorkerGroup, rank: int, steps: int) -> tuple[int, str]:
    """Order a profile and wait for it, or for the rank's end."""
    pids, directory = workers.pids, workers.state_dir
    if rank not in pids:
        return _BAD, f"rank {rank} does not run in this pod; ranks here: {min(pids)}-{max(pids)}"
    if not 0 < steps <= _MOST_STEPS:
        return _BAD, f"--steps {steps}: 1 to {_MOST_STEPS}"
    answered = profile_path(directory, rank)
    answered.unlink(missing_ok=True)
    if not order(directory, rank, steps):
        return _CONFLICT, (
            f"rank {rank} cannot be profiled now: another profile runs, or it does not train in"
            " run.steps() of the library; other programs can use torch.profiler themselves"
        )
    while not answered.exists():
        if workers.pids.get(rank) != pids[rank]:
            return _CONFLICT, f"rank {rank} ended before its profile was complete"
        time.sleep(_LOOK_SECONDS)
    how = json.loads(answered.read_text())
    return (_OK, how["path"]) if "path" in how else (_CONFLICT, how["error"])


def ask(page: str, port: int | None, uid: str, **query: object) -> int:
    """Print the launcher's answer; return the exit code."""
    if port is None:
        return _failed(f"the launcher's port is unknown: set --metrics-port, or {METRICS_PORT}")
    connection = http.client.HTTPConnection("localhost", port, timeout=_SECONDS[page])
    try:
        connection.request("GET", f"/{page}?{urlencode({'uid': uid, **query})}")
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return _failed(
            f"no launcher answers at port {port}: {error} (torchrun and python have none)"
        )
    if response.status != _OK:
        return _failed(text)
    printing.show(*text.splitlines())
    return 0


def _failed(why: str) -> int:
    printing.warn(f"ddpjob-trainer: {why}")
    return 1
