"""Look at ranks that run: `ddpjob-trainer stacks` in a pod asks the pod's launcher.

``answer`` is the launcher's part, in a thread of endpoints.py; ``ask`` is the command's. It needs
no right but that to run a command in the pod: others on the network get nothing.
"""

from __future__ import annotations

import hmac
import http.client
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import parse_qsl, urlencode

from ddpjob_contract import METRICS_PORT
from ddpjob_trainer import printing
from ddpjob_trainer.launcher.reports import endpoints
from ddpjob_trainer.launcher.worker_group import WorkerGroup

#: For the launcher's answer: native stacks of many processes take seconds.
_SECONDS = 60.0
_OK, _FORBIDDEN, _CONFLICT = 200, 403, 409


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
    if path != "/stacks":
        return endpoints.NONE
    if not hmac.compare_digest(asked.get("uid", "").encode(), uid.encode()):
        return _FORBIDDEN, "it is asked for another job: call it in the job's trainer container"
    pids = workers.pids
    if not pids:
        return _CONFLICT, "no rank runs here now, as between two rounds: try again"
    return _OK, look(workers.state_dir, pids)


def ask(page: str, port: int | None, uid: str, **query: object) -> int:
    """Print the launcher's answer; return the exit code."""
    if port is None:
        return _failed(f"the launcher's port is unknown: set --metrics-port, or {METRICS_PORT}")
    connection = http.client.HTTPConnection("localhost", port, timeout=_SECONDS)
    try:
        connection.request("GET", f"/{page}?{urlencode({'uid': uid, **query})}")
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return _failed(f"no launcher answers at port {port}: {error}; torchrun and python are none")
    if response.status != _OK:
        return _failed(text)
    printing.show(*text.splitlines())
    return 0


def _failed(why: str) -> int:
    printing.warn(f"ddpjob-trainer: {why}")
    return 1
