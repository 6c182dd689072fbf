"""Reads a ResourceQuota's refusal of a gang: no room now, or never.

startup.py asks. Only the API server's sentence has the figures; without them, or in another form,
the gang waits like any other.
"""

from __future__ import annotations

import re
from typing import Final

from ddpjob_operator.core.actions import Refusal
from ddpjob_operator.core.objects import quantity

#: Such a gang gets no turn (quota_fairness.py): it would keep all others off for nothing.
TOO_SMALL: Final = "QuotaTooSmall"
#: "exceeded quota: q, requested: cpu=1,pods=1, used: cpu=3,pods=3, limited: cpu=4,pods=3"
_FIGURES: Final = re.compile(r"requested: (\S+), used: \S+, limited: (\S+)")


def exceeded(refusal: Refusal) -> bool:
    """Tell a ResourceQuota's 403 Forbidden from that of RBAC, by its words."""
    return refusal.code == 403 and "exceeded quota" in refusal.message


def too_small(refusal: Refusal, pods: int) -> str:
    """Say what so many pods need beyond the whole quota; "" if they fit."""
    found = _FIGURES.search(refusal.message)
    if found is None:
        return ""
    one, limits = (_amounts(part) for part in found.groups())
    for name, limit in limits.items():
        each, most = quantity.number(one.get(name, "")), quantity.number(limit)
        if each is not None and most is not None and each * pods > most:
            needs = f"{pods} times {name}={one[name]}"
            return f"all pods at once need {needs}, its limit is {limit}"
    return ""


def _amounts(part: str) -> dict[str, str]:
    pairs = (item.partition("=") for item in part.rstrip(",").split(","))
    return {name: amount for name, _, amount in pairs}
