"""Take a gang's parts from what its job has measured: `kubectl ddp account` asks plan() with them.

From the ledger, the failures in the status and the spec; what a job does not tell (how long a
snapshot is written, how a node is noticed) keeps its default.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from ddpjob_contract.crd import DEFAULTS
from kubectl_ddp.planning.parts import DETECTION, Parts

#: Classes of failures that end a process; others take a pod.
_OF_PROCESSES: Final = ("User", "Killed", "OOM", "Diverged")
_NODE_REASONS: Final = ("NodeLost", "NodeNotReady", "DeletionByTaintManager")
#: Replacement pods are seen to go and to come in about a second.
_LEAST: Final = 0.01


def parts(spec: Mapping[str, Any], status: Mapping[str, Any], gpus: int) -> Parts | None:
    """Return them; None of a job that has not failed yet, or has done no steps."""
    sums = status["ledger"]["podSeconds"]
    restarts, progress = status.get("restarts") or {}, status.get("progress") or {}
    failures = restarts.get("total", 0) + restarts.get("inPlace", 0)
    pods, steps = int(spec["replicas"]), progress.get("step") or 0
    trained = sums.get("productive", 0.0) + sums.get("data", 0.0)
    if not failures or not steps or not trained:
        return None
    had = sum(sums.values()) - sums.get("waiting", 0.0) - sums.get("idle", 0.0)
    every = int(_field(spec, "snapshot.everySteps"))
    in_place = _mapping(_mapping(spec.get("restart")).get("inPlace")).get("enabled", True)
    outage = (sums.get("recovering", 0.0) + sums.get("held", 0.0)) / pods / failures
    warmup = max(_LEAST, sums.get("warmup", 0.0) / pods)
    found = Parts(
        pods=pods,
        gpus_per_pod=gpus or 1,
        standby=int(spec.get("standby", 0)),
        node_mtbf=had / failures,
        shares=_shares(status),
        detection={**DETECTION, "hang": float(_field(spec, "hang.stepSeconds"))},
        in_place=in_place is not False,
        alone=int(_field(spec, "restart.replaceSeconds")) > 0,
        start=max(_LEAST, sums.get("starting", 0.0) / pods),
        start_per_pod=0.0,
        warmup=warmup,
        warmup_spare=min(warmup, outage),
        step=trained / pods / steps,
        data=sums.get("data", 0.0) / pods / steps,
        every_steps=every,
        stall=sums.get("snapshot", 0.0) / pods / max(1, steps // every),
    )
    # Where a step takes milliseconds no snapshot takes seconds.
    return replace(found, write=min(found.write, every * found.step))


def _shares(status: Mapping[str, Any]) -> dict[str, float]:
    """Count the last failures by kind."""
    kinds = Counter(_kind(one) for one in status.get("failures") or ())
    return dict(kinds) or {"process": 1}


def _kind(failure: Mapping[str, Any]) -> str:
    class_, reason = failure.get("class"), failure.get("reason")
    if class_ == "Hang":
        return "hang"
    if class_ == "Hardware":
        return "gpu"
    if failure.get("inPlace") or class_ in _OF_PROCESSES:
        return "process"
    return "node" if reason in _NODE_REASONS else "pod"


def _field(spec: Mapping[str, Any], path: str) -> Any:
    """Read a field of the spec by its path, else its default."""
    found: Any = spec
    for name in path.split("."):
        found = _mapping(found).get(name)
    return DEFAULTS[path] if found is None else found


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
