"""Hand over before the failure: replace pods on nodes that are about to go.

plan() calls begin() in each planning round without a loss. What says that a node is about to go
(a condition, a taint, a cordon) is listed in the chart and looked for in objects/nodes.py. The pods
there are replaced as lost ones are (replacement.py): one intent raises their least attempt: one
disruption. Only their deletion differs, as it leaves them their grace period: all ranks save at one
step, their launchers leave, and the others hold, so no step is lost. A node and a signal bring that
about once (status.handedOver, until a resume), so that a pod which finds no other node stays in
peace, and only after progress since the last restart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Final

from ddpjob_operator.core import evidence
from ddpjob_operator.core.actions import ReadNodes
from ddpjob_operator.core.capacity import template_guard
from ddpjob_operator.core.change import Change
from ddpjob_operator.core.failure_text import replicas, shorten
from ddpjob_operator.core.gang import replacement, restart
from ddpjob_operator.core.loss import verdict
from ddpjob_operator.core.nodes import fence
from ddpjob_operator.core.objects.nodes import Node
from ddpjob_operator.core.objects.observe import Pod
from ddpjob_operator.core.objects.status import MAX_AVOIDED, MAX_HANDED_OVER, Status
from ddpjob_operator.core.view import View

HANDED_OVER: Final = "HandedOver"
#: Launchers that can hold have said so by then: /state is read every 15 s.
_PATIENCE: Final = timedelta(seconds=60)


def begin(view: View, change: Change) -> Change | None:
    """Replace the members on nodes about to go; None: there are none, or it is too early."""
    going = _going(view)
    if not going or _read_too_long_ago(going) or view.seats.need_read:
        return None
    planned, nodes = frozenset(going), {node.name: node for node in going.values()}
    words = ", ".join(f"{node.name} is about to go ({node.signal})" for node in nodes.values())
    loss = replace(
        evidence.removed(view.seats.members[min(planned)], view.now),
        reason=HANDED_OVER,
        message=f"{words}: all ranks save at one step, then a new pod takes its place",
        exception=shorten(words),
    )
    news = map(_entry, nodes.values())
    acted = change.with_status(handed_over=(*view.status.handed_over, *news))
    able = replacement.to_replace(view, loss, 0.0, planned)
    if not able or verdict.ends(view, view.status, loss):
        what = f"{words}: cannot replace {replicas(planned, 40)} in advance"
        why = "the other replicas must be able to wait, and maxDisruptions must allow one more"
        return acted.event("Warning", "NotHandedOver", f"{what}: {why}")
    avoided = tuple(dict.fromkeys((*view.status.avoided_nodes, *nodes)))[-MAX_AVOIDED:]
    return restart.after(view, acted.with_status(avoided_nodes=avoided), loss, planned)


def reads(view: View) -> tuple[ReadNodes, ...]:
    """Read the nodes before pods there are replaced: a watch may be behind."""
    old = _read_too_long_ago(_going(view))
    return (ReadNodes(tuple(sorted(old))),) if old else ()


def saves(status: Status, pod: Pod) -> bool:
    """Tell whether a pod that is no member any more hands over, and needs its grace period."""
    last = status.last_loss
    return last is not None and last.reason == HANDED_OVER and evidence.running(pod)


def _going(view: View) -> Mapping[int, Node]:
    """Return the nodes about to go by replica, if now is the time to leave them.

    On one that is not ready nothing would be ended before it answers again.
    """
    status, seats, pods = view.status, view.seats, view.seats.members
    known = view.nodes.known if view.nodes else {}
    if status.phase != "Running" or not seats.all_running or seats.succeeded or not known:
        return {}
    listed = (known.get(name) for name in sorted({pod.node for pod in pods.values()}))
    signalled = [node for node in listed if node and node.signal and node.ready]
    news = [node for node in signalled if _entry(node) not in status.handed_over]
    left = {node.name: node for node in news[: MAX_HANDED_OVER - len(status.handed_over)]}
    since, signal = status.timings.running_at, any(node.signal for node in known.values())
    early = False
    if since and signal and not status.can_wait_for_replacement:
        early = not view.clock.reached(since + _PATIENCE)
    early = early or verdict.in_a_row(view, status.restarts) > 0
    sent, stored = view.feedback.pruned or ({}, {})
    # An older CRD would have it done again and again.
    forgets = any(name in sent and name not in stored for name in ("births", "holds", "handedOver"))
    if not left or early or evidence.leaving(pods.values()) or template_guard.why(view) or forgets:
        return {}
    return {replica: left[pod.node] for replica, pod in pods.items() if pod.node in left}


def _read_too_long_ago(going: Mapping[int, Node]) -> set[str]:
    """Return the nodes that no quorum read has reported lately."""
    ages = {node.name: node.read_seconds for node in going.values()}
    return {name for name, age in ages.items() if age is None or age > fence.READ_HOLDS}


def _entry(node: Node) -> str:
    return f"{node.name}: {node.signal}"
