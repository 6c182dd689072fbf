"""Read a job again and again until it ends, for `status -w` and `logs -f`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from kubectl_ddp import gang
from kubectl_ddp.failure import Failure, Missing
from kubectl_ddp.gang import Job
from kubectl_ddp.kubectl import Kubectl
from kubectl_ddp.text import clean

T = TypeVar("T")

_PAUSE = 2.0  # seconds between two looks
#: A replaced API server is back in seconds; an expired login is not.
_GIVE_UP = 300.0


def looks(kubectl: Kubectl, job: Job) -> Iterator[Job]:
    """Yield the job, and each later reading, without end; raise Failure."""
    while True:
        yield job
        time.sleep(_PAUSE)
        job = patiently(partial(gang.look_again, kubectl, job))


def patiently(ask: Callable[[], T]) -> T:
    """Ask until the API server answers; print once why it does not; raise Failure."""
    give_up, told = time.monotonic() + _GIVE_UP, False
    while True:
        try:
            return ask()
        except Missing:
            raise
        except Failure as failure:
            if time.monotonic() > give_up:
                raise
            if not told:
                print(f"kubectl-ddp: {clean(str(failure))}: trying on", file=sys.stderr)
            told = True
        time.sleep(_PAUSE)
