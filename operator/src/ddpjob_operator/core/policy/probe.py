"""A trainer that its kubelet has ended since a probe of the template failed.

The pod's status has no word of it: it shows SIGTERM, or whatever the program makes of that. The
kubelet's Events of the pod have, and are sent before the container is told to end. cause.py waits
for what they say; they are read where the template has such a probe, of few pods of an attempt.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final

from ddpjob_operator.core import classify, observe
from ddpjob_operator.core.actions import Outcomes, ReadEvents
from ddpjob_operator.core.lenient import parse_time
from ddpjob_operator.core.view import View

#: Pods of an attempt. All of a gang may end at a signal, and a list costs a look at all Events.
_READS: Final = 3
_WORDS: Final = 300
_KILLED: Final = re.compile(r"Container \S+ failed (liveness|startup) probe")
_STOPPED: Final = "Stopping container "
_UNHEALTHY: Final = re.compile("(Liveness|Startup) probe ")
#: From a probe's failure to the end that it brings about, in whole seconds on a busy node.
_AT_ONCE: Final = timedelta(seconds=5)


@dataclass(frozen=True, order=True, slots=True)
class Heard:
    """What an Event says."""

    at: str  # RFC 3339, UTC, of a kubelet's whole seconds
    reason: str
    message: str


def reads(view: View) -> tuple[ReadEvents, ...]:
    """The next pod to be asked about: of those that may have met their probe, the first to end."""
    container, pods = view.spec.template.probed, view.members.values()
    if not container:
        return ()
    known = [pod.probed for pod in pods if pod.probed is not None]
    if any(known) or len(known) >= _READS:
        return ()
    ended = (pod for pod in pods if pod.probed is None and classify.perhaps_probed(pod))
    first = min(ended, key=_order, default=None)
    return (ReadEvents(first.uid, container),) if first else ()


def answered(outcomes: Outcomes, pod_uid: str, words: str) -> Outcomes:
    """Remember it as long as its attempt may be asked about."""
    newest = [*outcomes.probed.items(), (pod_uid, words)][-_READS:]
    return replace(outcomes, probed=dict(newest))


def heard(event: Mapping[str, Any]) -> Heard:
    """An Event object -> what is kept of it."""
    at, reason = str(event.get("lastTimestamp") or ""), str(event.get("reason") or "")
    return Heard(at, reason, " ".join(observe.clean(event.get("message"), _WORDS).split()))


def words(events: Iterable[Heard]) -> str:
    """Which probe failed, and what it said last, of a container that was ended for it; else "".

    A kubelet that ends all of a pod for it names no probe as it does: then one that has failed just
    before is why, or has failed since. Nobody else has the pod ended (classify.perhaps_probed).
    """
    found = sorted(events)
    said = [one for one in found if one.reason == "Unhealthy" and _UNHEALTHY.match(one.message)]
    for end in (one for one in found if one.reason == "Killing"):
        if killed := _KILLED.match(end.message):
            own = [one.message for one in said if one.message.lower().startswith(killed[1])]
            return ": ".join([killed[0], *own[-1:]])
        if end.message.startswith(_STOPPED) and said and _at_once(said[-1], end):
            return said[-1].message
    return ""


def _at_once(failed: Heard, ended: Heard) -> bool:
    before, after = parse_time(failed.at), parse_time(ended.at)
    return before is not None and after is not None and after - before <= _AT_ONCE


def _order(pod: observe.Pod) -> tuple[float, int]:
    at = pod.trainer.finished_at
    return (at.timestamp() if at else 0.0, pod.replica or 0)
