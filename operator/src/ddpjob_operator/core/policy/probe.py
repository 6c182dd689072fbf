"""A trainer that its kubelet has ended since a probe of the template failed.

The pod's status has no word of it: it shows SIGTERM, or whatever the program makes of that. The
kubelet's Events of the pod have, and are sent before the container is told to end. cause.py waits
for what they say; they are read where the template has such a probe, of few pods of an attempt.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from ddpjob_operator.core import classify, observe
from ddpjob_operator.core.actions import Outcomes, ReadEvents
from ddpjob_operator.core.view import View

#: Pods of an attempt. All of a gang may end at a signal, and a list costs a look at all Events.
_READS: Final = 3
_WORDS: Final = 300
_KILLED: Final = re.compile(r"Container \S+ failed (liveness|startup) probe")


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
    """Which probe failed, and what it said last, of a container that was ended for it; else ""."""
    found = sorted(events)
    ends = (_KILLED.match(one.message) for one in found if one.reason == "Killing")
    killed = next(filter(None, ends), None)
    if killed is None:
        return ""
    said = [one.message for one in found if one.reason == "Unhealthy"]
    own = [text for text in said if text.lower().startswith(f"{killed[1]} probe")]
    return ": ".join([killed[0], *own[-1:]])


def _order(pod: observe.Pod) -> tuple[float, int]:
    at = pod.trainer.finished_at
    return (at.timestamp() if at else 0.0, pod.replica or 0)
