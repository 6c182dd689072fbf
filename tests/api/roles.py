"""Names for the operator's writes that are the same in every run of the story.

`create-pod-1-of-2` is the creation of replica 1 for attempt 2, whenever it happens and however
often it is tried; so a fault can be put at it, and what a run did can be compared with another.
"""

from __future__ import annotations

from collections.abc import Iterable

from ddpjob_contract import crd
from support.proxy import Call
from support.rest import Object


def role(call: Call, made: Iterable[Call]) -> str:
    """The name of a write, "" for any other call. ``made``: the writes so far that were taken."""
    if not call.is_write:
        return ""
    kind, body = call.path.rpartition("/namespaces/")[2].split("/")[1:], call.body or {}
    match call.method, kind:
        case "PUT" | "PATCH", [crd.PLURAL, _, "status"]:
            found = body["status"]
            return f"status-{found['phase'].lower()}-{found.get('attempt', 0)}"
        case "POST", ["pods"]:
            return f"create-pod-{_member(body)}"
        case "POST", [plural]:
            return f"create-{plural.rstrip('s')}".replace("policie", "policy")
        case "DELETE", ["pods", name]:
            uid = body.get("preconditions", {}).get("uid")
            pods = [one for one in made if one.method == "POST" and one.found["name"] == name]
            meant = [one for one in pods if uid in (None, one.found["uid"])]
            return f"delete-pod-{_member(meant[-1].body or {})}" if meant else ""
        case "DELETE", [crd.PLURAL, _]:
            return "delete-job"
    return f"{call.method.lower()}-{'-'.join(kind)}"


def happening(kind: str, obj: Object) -> str:
    """The name of an event of a watch: `pod-1-of-1-failed`, `job-running-2`; "" for any other."""
    meta = obj.get("metadata", {})
    if obj.get("kind") == crd.KIND:
        found = obj.get("status") or {}
        return f"job-{found.get('phase', 'new').lower()}-{found.get('attempt', 0)}"
    if obj.get("kind") != "Pod" or crd.LABEL_ATTEMPT not in meta.get("labels", {}):
        return ""
    if kind == "DELETED":
        state = "deleted"
    elif "deletionTimestamp" in meta:
        state = "leaving"
    else:
        bound = obj["spec"].get("nodeName")
        state = obj["status"]["phase"].lower() if bound else "created"
    return f"pod-{_member(obj)}-{state}"


def _member(pod: Object) -> str:
    labels = pod["metadata"]["labels"]
    return f"{labels[crd.LABEL_REPLICA]}-of-{labels[crd.LABEL_ATTEMPT]}"
