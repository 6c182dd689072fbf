"""What is kept of a pod that the API server shows: its slim record, if it can be read at all."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddpjob_operator.core import observe

log = logging.getLogger(__name__)

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SlimPod:
    """What is kept of a pod; ``pod`` None: it cannot be read."""

    uid: str
    version: int | None
    pod: observe.Pod | None


def slim_pod(obj: Object) -> SlimPod:
    """A Pod object -> what is kept of it. One odd pod must not blind us to all the others."""
    pod: observe.Pod | None = None
    try:
        pod = observe.pod(obj)
    except Exception:
        log.exception("a pod that cannot be read is ignored")
    return SlimPod(obj["metadata"]["uid"], _version(obj), pod)


def _version(obj: Object) -> int | None:
    return number(obj["metadata"].get("resourceVersion"))


def number(version: object) -> int | None:
    """A resourceVersion as a number, to be compared; None if it is none."""
    return int(version) if isinstance(version, str) and version.isdecimal() else None
