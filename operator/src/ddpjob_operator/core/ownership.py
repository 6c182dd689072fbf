"""Compare an object under a name that we want: its owner, its fields.

shell/executor.py calls it after a 409 AlreadyExists and for the Service and the NetworkPolicy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ddpjob_contract import crd
from ddpjob_operator.core.actions import Body, Event, Existing
from ddpjob_operator.core.objects.json_read import parse_time
from ddpjob_operator.core.objects.observe import clean

#: Fields where an addition changes the meaning, as another label of a selector does.
_WHOLE: Final = ("selector", "podSelector", "ingress")


def existing(kind: str, obj: Mapping[str, Any]) -> Existing:
    """Describe the object that already has the name."""
    meta = obj["metadata"]
    owners = meta.get("ownerReferences") or ()
    owner: Mapping[str, Any] = next((o for o in owners if o.get("controller")), {})
    attempt = str((meta.get("labels") or {}).get(crd.LABEL_ATTEMPT, ""))
    return Existing(
        kind=kind,
        name=meta["name"],
        owner_uid=owner.get("uid"),
        attempt=int(attempt) if attempt.isdecimal() else None,
        deleting="deletionTimestamp" in meta,
        owner=f"{owner.get('kind')} {owner.get('name')}" if owner else "",
        uid=str(meta.get("uid") or ""),
        node=str((obj.get("spec") or {}).get("nodeName") or ""),
        deletion_at=parse_time(meta.get("deletionTimestamp")),
    )


def hidden(pod: Mapping[str, Any], job_uid: str) -> Existing | None:
    """Describe a pod of that job which lost its label, hidden from watches.

    None for any other pod, and for one that has ended.
    """
    found, labels = existing("Pod", pod), pod["metadata"].get("labels") or {}
    ended = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
    seen = labels.get(crd.LABEL_JOB_UID) == job_uid
    return None if ended or seen or found.owner_uid != job_uid else found


def repaired(found: Mapping[str, Any], wanted: Body) -> Body | None:
    """Return the object as it should be written; None if nothing differs.

    Additions of others stay: the API server's defaults, labels of other tools.
    """
    parts = {"labels": wanted["metadata"]["labels"]}
    body = {**found, "metadata": _with(found["metadata"], parts)}
    body["spec"] = _with(found.get("spec"), wanted["spec"])
    return None if body == found else body


def _with(found: Any, wanted: Any) -> Any:
    if isinstance(wanted, Mapping) and isinstance(found, Mapping):
        repaired = {
            key: value if key in _WHOLE else _with(found.get(key), value)
            for key, value in wanted.items()
        }
        return {**found, **repaired}
    if isinstance(wanted, list) and isinstance(found, list) and len(found) == len(wanted):
        return [_with(old, new) for old, new in zip(found, wanted, strict=True)]
    return wanted


def repair_event(what: str, trouble: str = "") -> Event:
    """Say that such an object was put right, or why it could not be."""
    if trouble:
        message = f"{what} has been changed and cannot be put right: {trouble}"
        return Event("Warning", "NetworkNotRepaired", clean(message))
    return Event("Normal", "NetworkRepaired", f"{what} had been changed")
