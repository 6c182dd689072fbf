"""Quotas that are known to count from the first object on.

The API server's admission learns of a namespace's first quota within half a minute, whatever the
quota's status says by then, and what it lets pass meanwhile nobody counts for minutes.
"""

from __future__ import annotations

import contextlib

from support.rest import Object, Rest, RestError, eventually


def set_quota(rest: Rest, namespace: str, quota: Object, tried: tuple[str, Object]) -> str:
    """Make the quota and return its path. ``tried``: where what it is about is made, and such one.

    It lets nothing pass first, until one is seen to be refused.
    """
    path = f"/api/v1/namespaces/{namespace}/resourcequotas"
    own = f"{path}/{quota['metadata']['name']}"
    hard = quota["spec"]["hard"]
    nothing = {**quota, "spec": {"hard": dict.fromkeys(hard, "0")}}

    def counts() -> bool:
        """Made anew each time: of a kind that is new to its controller nothing is counted yet."""
        with contextlib.suppress(RestError):
            rest.delete(own)
        rest.post(path, nothing)
        with contextlib.suppress(AssertionError):
            return bool(eventually("", lambda: rest.get(own).get("status", {}).get("used"), 3))
        return False

    def refusal() -> str:
        try:
            rest.post(f"{tried[0]}?dryRun=All", tried[1])
        except RestError as error:
            return str(error)
        return ""

    eventually("the quota counts", counts)
    eventually("the quota refuses", lambda: "exceeded quota" in refusal())
    rest.merge(own, {"spec": {"hard": hard}})
    eventually("the quota lets pass", lambda: refusal() == "")
    return own
