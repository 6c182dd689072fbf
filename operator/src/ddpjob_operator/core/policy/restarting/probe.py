"""Find out whether a kubelet ended a trainer for a failed probe of the template.

The pod's status only shows SIGTERM, or what the program makes of it. The kubelet's Events of the
pod have the probe, and are sent before the container is signalled. They are read where the template
has such a probe, for few pods of an attempt; root_cause.py waits for the answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final

from ddpjob_operator.core import classify
from ddpjob_operator.core.actions import ApiFeedback, ReadEvents
from ddpjob_operator.core.objects import observe
from ddpjob_operator.core.objects.json_read import parse_time
from ddpjob_operator.core.view import View

#: Pods of an attempt. A signal may end the whole gang, and each list reads all Events.
_READS: Final = 3
_WORDS: Final = 300
_KILLED: Final = re.compile(r"Container \S+ failed (liveness|startup) probe")
_STOPPED: Final = "Stopping container "
_UNHEALTHY: Final = re.compile("(Liveness|Startup) probe ")
#: From a probe's failure to the end that it causes, in whole seconds on a busy node.
_AT_ONCE: Final = timedelta(seconds=5)


@dataclass(frozen=True, order=True, slots=True)
class KubeletEvent:
    """The kept part of an Event."""

    at: str  # RFC 3339, UTC, of a kubelet's whole seconds
    reason: str
    message: str


def reads(view: View) -> tuple[ReadEvents, ...]:
    """Read the Events of the first pod to end that a probe may have ended."""
    container, pods = view.spec.template.probed, view.members.values()
    if not container:
        return ()
    known = [pod.probed for pod in pods if pod.probed is not None]
    if any(known) or len(known) >= _READS:
        return ()
    ended = (pod for pod in pods if pod.probed is None and classify.perhaps_probed(pod))
    first = min(ended, key=_order, default=None)
    return (ReadEvents(first.uid, container),) if first else ()


def answered(feedback: ApiFeedback, pod_uid: str, words: str) -> ApiFeedback:
    """Remember the answer for as long as its attempt may be asked about."""
    newest = [*feedback.probed.items(), (pod_uid, words)][-_READS:]
    return replace(feedback, probed=dict(newest))


def parse(event: Mapping[str, Any]) -> KubeletEvent:
    """Parse an Event object."""
    at, reason = str(event.get("lastTimestamp") or ""), str(event.get("reason") or "")
    return KubeletEvent(at, reason, " ".join(observe.clean(event.get("message"), _WORDS).split()))


def words(events: Iterable[KubeletEvent]) -> str:
    """Return the failed probe and its last words, if it ended the container; else "".

    A kubelet that ends a whole pod for a probe does not name it: then a probe that failed just
    before, or since, is why. Other ends of a pod are excluded (classify.perhaps_probed).
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


def _at_once(failed: KubeletEvent, ended: KubeletEvent) -> bool:
    before, after = parse_time(failed.at), parse_time(ended.at)
    return before is not None and after is not None and after - before <= _AT_ONCE


def _order(pod: observe.Pod) -> tuple[float, int]:
    at = pod.trainer.finished_at
    return (at.timestamp() if at else 0.0, pod.replica or 0)
