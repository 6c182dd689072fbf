"""What a test reads off a DDPJob or a Pod, as Kubernetes writes it.

On purpose not by way of the operator's observe.py: who judges it must not see with its eyes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpjob_contract import crd
from ddpjob_operator.core.objects import compact_spec

Object = Mapping[str, Any]
TERMINAL = ("Succeeded", "Failed")


def status(obj: Object) -> Mapping[str, Any]:
    return obj.get("status") or {}


def name(obj: Object) -> str:
    return str(obj["metadata"]["name"])


def uid_of(obj: Object) -> str:
    return str(obj["metadata"]["uid"])


def owner(obj: Object) -> str | None:
    """The uid of the controller."""
    owners = obj["metadata"].get("ownerReferences") or ()
    return next((o["uid"] for o in owners if o.get("controller")), None)


def attempt(pod: Object) -> int | None:
    return _number(pod, crd.LABEL_ATTEMPT)


def replica(pod: Object) -> int | None:
    return _number(pod, crd.LABEL_REPLICA)


def ended(pod: Object) -> bool:
    """No container of it runs, nor ever will."""
    if (pod.get("status") or {}).get("phase") in TERMINAL:
        return True
    states = [c.get("state") or {} for c in (pod.get("status") or {}).get("containerStatuses", ())]
    all_told = len(states) == len(pod["spec"]["containers"])
    return all_told and all("terminated" in state for state in states)


def trains(pod: Object) -> bool:
    """It is on a machine and not all of it has ended: it could write."""
    return bool(pod["spec"].get("nodeName")) and not ended(pod)


def succeeded(pod: Object) -> bool:
    """Its trainer container ended with 0, and nobody had told it to end."""
    end = trainer_state(pod).get("terminated")
    return end is not None and end.get("exitCode") == 0 and not leaving(pod)


def node(pod: Object) -> str:
    """The name of the node that it is on; "" before it is on one."""
    return str(pod["spec"].get("nodeName") or "")


def ready(node: Object) -> bool:
    """Not so if its kubelet, or the node controller in its place, says otherwise."""
    told = {c["type"]: c["status"] for c in status(node).get("conditions") or ()}
    return told.get("Ready", "True") == "True"


def hurt(pod: Object) -> bool:
    """It ended badly, was restarted, or is being removed."""
    known = pod.get("status") or {}
    codes = [(c.get("state") or {}).get("terminated") for c in known.get("containerStatuses", ())]
    bad = any(end is not None and end.get("exitCode") != 0 for end in codes)
    again = any(c.get("restartCount") for c in known.get("containerStatuses", ()))
    told = any(c["type"] == "DisruptionTarget" for c in known.get("conditions", ()))
    return (
        bad or again or told or known.get("phase") == "Failed" or leaving(pod) or not labelled(pod)
    )


def trainer_state(pod: Object) -> Mapping[str, Any]:
    """The state of the container that trains."""
    wanted = compact_spec.trainer_container(pod["spec"]).get("name")
    found = (pod.get("status") or {}).get("containerStatuses", ())
    return next((c.get("state") or {} for c in found if c["name"] == wanted), {})


def labelled(pod: Object) -> bool:
    """Without this label no list shows a pod to the operator."""
    return crd.LABEL_JOB_UID in labels(pod)


def labels(obj: Object) -> Mapping[str, str]:
    return obj["metadata"].get("labels") or {}


def leaving(pod: Object) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def images(pod: Object) -> list[str]:
    return [str(c.get("image")) for c in pod["spec"]["containers"]]


def _number(pod: Object, key: str) -> int | None:
    text = str(labels(pod).get(key, ""))
    return int(text) if text.isdecimal() else None
