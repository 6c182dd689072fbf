"""Count pods on silent nodes as lost, once a fact allows it.

A pod on a silent node may train on, so normally its object alone shows that it has ended. Four
facts replace that: the Node object is deleted; an administrator has tainted it out-of-service
(Kubernetes itself then lets go of its pods); or spec.nodeLost says Fence and this process has seen
for afterSeconds, without a gap, that the node is not ready while most others are; or it says Fence,
the gang's hub has lost the link to the pod, and the node's Lease is not renewed while another one
is. Under Fence the pod may be alive: the lineage of the snapshots shuts it out. Each needs a fresh
quorum read of the Node or the Leases, since a watch may be behind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from ddpjob_operator.core import evidence
from ddpjob_operator.core.actions import ReadLeases, ReadNodes
from ddpjob_operator.core.change import Stall
from ddpjob_operator.core.objects.nodes import OUT_OF_SERVICE, Node
from ddpjob_operator.core.objects.observe import Pod, clean
from ddpjob_operator.core.objects.spec import Spec
from ddpjob_operator.core.objects.status import Failure, Known
from ddpjob_operator.core.view import View

#: A read of a Node serves the decision and its deletions, but none much later.
READ_HOLDS: Final = 10.0
#: Kubernetes itself removes the pods of a deleted Node after 40 s; this is for the rest.
GONE_PATIENCE: Final = 60.0
#: Twice a kubelet's heartbeat, however short afterSeconds is: nodes that were cut off together with
#: the operator, or with other nodes, are back by then.
CONFIRMATION: Final = 20.0
#: A kubelet renews its node's Lease every 10 s. After the control plane was away others may do so
#: first: each gets that time from the first renewal on.
LEASE_PATIENCE: Final = 15.0
LEASE_PERIOD: Final = 10.0
#: Between two lists of all Leases.
LEASES_EVERY: Final = 4.0
_CAUSE: Final[Known] = "Cause"
_CURE: Final[Known] = "Cure"


def losses(view: View) -> list[Failure]:
    """List the members that are lost with their node."""
    return [failure(view, pod) for pod in _needed(view.seats.needed) if lost(view, pod)]


def lost(view: View, pod: Pod) -> bool:
    """Tell whether to delete the pod's object by force: its end cannot be reported."""
    node = _node(view, pod)
    gone = node is not None and _given_up(view, node) and _just_read(node)
    return gone or _deserted(view, pod)


def suspect(view: View, *, late: bool = False) -> Pod | None:
    """Find a member on a silent node, a cause of its peers' end. ``late``: not running yet."""
    found = [pod for pod in _needed(view.seats.needed) if not (late and evidence.running(pod))]
    nodes = ((pod, _node(view, pod)) for pod in found)
    # A new node may be reported later than its pod.
    return next((pod for pod, node in nodes if node and not node.guessed), None)


def guessed(view: View) -> bool:
    """Tell whether a first read of a member's node, due at once, is still open."""
    found = (_node(view, pod) for pod in _needed(view.seats.needed))
    return any(node and node.guessed and not _just_read(node) for node in found)


def reads(view: View) -> tuple[ReadNodes | ReadLeases, ...]:
    """Read the nodes whose pods may be given up, those not reported yet, and Leases."""
    old = view.nodes is not None and view.nodes.leases_seconds > LEASES_EVERY
    if old and any(_is_away(view, pod) for pod in view.seats.pods):
        return (ReadLeases(),)
    due = (node for _, node in _silent(view) if node.guessed or _given_up(view, node))
    found = {node.name for node in due if not _just_read(node)}
    return (ReadNodes(tuple(sorted(found))),) if found else ()


def failure(view: View, pod: Pod) -> Failure:
    """Describe a loss with the machine, which is charged to nobody."""
    reason, state = "NodeLost", _state(_node(view, pod))
    if _deserted(view, pod):
        reason = evidence.NODE_SILENT
        state = "does not renew its Lease, and the pod's launcher is silent"
    return replace(
        evidence.removed(pod, view.now),
        cls="Infrastructure",
        reason=reason,
        message=f"node {pod.node} {state}",
    )


def named(view: View, loss: Failure) -> Failure:
    """Name the node that was silent as the taint manager removed the pod, as under Wait.

    Its word does not say for which taint. The two times are of two clocks: good for a message.
    """
    pod, nodes = view.seats.members.get(loss.replica), view.nodes.known if view.nodes else {}
    node = nodes.get(pod.node) if pod is not None else None
    if pod is None or node is None or pod.disruption != "DeletionByTaintManager":
        return loss
    back = node.ready and node.since and pod.disrupted_at and node.since >= pod.disrupted_at
    if node.ready and not back:
        return loss
    said = f"node {node.name} was not ready, so Kubernetes removed the pod"
    message = clean(f"{said}\n{loss.message}")
    return replace(loss, node=node.name, exception=said, message=message)


def stalls(view: View) -> Iterator[Stall]:
    """Explain why the gang waits for a machine, and how a person can help."""
    after = view.spec.fence_after
    for pod, node in _silent(view):
        if node.guessed:  # nothing wrong so far
            continue
        reason, known = "NodeNotReady", _CAUSE
        if _given_up(view, node) or not node.exists:
            then = "its pods are being removed"
        elif after is None:
            then, known = cure(node.name), _CURE
        elif view.nodes and view.nodes.disrupted:
            reason, known = "NodesNotReady", _CURE
            most = f"{view.nodes.unready} of {view.nodes.workers} worker nodes are not ready"
            then = f"Fence waits, since {most}; {cure(node.name)}"
        else:
            then = f"after {after:g} s its pods are deleted by force"
        what = f"node {node.name} {_state(node)}: {then}; pod {pod.name} waits for it"
        yield Stall(reason, what, known)


def cure(node: str) -> str:
    """Advise how to end the wait for a machine that will not come back."""
    taint = f"kubectl taint node {node} {OUT_OF_SERVICE}=nodeshutdown:NoExecute"
    return f"if it is off for good: kubectl delete node {node}, or: {taint}"


def _needed(needed: Mapping[int, Pod]) -> list[Pod]:
    """List the members whose trainer has not ended: the others have nothing to lose."""
    return [pod for pod in needed.values() if pod.trainer.state != "terminated"]


def _silent(view: View) -> Iterator[tuple[Pod, Node]]:
    """List pods not known to have ended, on nodes that are not ready or gone."""
    for pod in view.seats.pods:
        node = _node(view, pod)
        if node is not None:
            yield pod, node


def _node(view: View, pod: Pod) -> Node | None:
    """Return the silent node that a pod waits for, unless it was force-deleted.

    It waits to end or, once deleted, to be gone: only its kubelet removes the object.
    """
    if view.nodes is None or not pod.node or pod.deletion_grace == 0:
        return None
    if not pod.deleting and pod.ended:
        return None
    node = view.nodes.known.get(pod.node)
    return None if node is None or (node.exists and node.ready) else node


def _is_away(view: View, pod: Pod) -> bool:
    """Return True if the node reports Ready but the hub lost its pod: its Lease must be read."""
    reported = view.feedback.away_at
    if reported is None or pod.uid not in view.feedback.away or view.spec.fence_after is None:
        return False
    node = view.nodes.known.get(pod.node) if view.nodes else None
    lives = pod.deletion_grace != 0 and (pod.deleting or not pod.ended)
    fresh = (view.now - reported).total_seconds() <= READ_HOLDS
    return lives and fresh and node is not None and node.exists and node.ready


def _deserted(view: View, pod: Pod) -> bool:
    """Tell whether hub and Leases agree that the pod's node is silent."""
    if not _is_away(view, pod) or view.nodes is None or view.nodes.leases_seconds > READ_HOLDS:
        return False
    lease = view.nodes.known[pod.node].lease
    return lease.unrenewed >= LEASE_PATIENCE and lease.behind >= LEASE_PERIOD


def _given_up(view: View, node: Node) -> bool:
    # Most nodes silent at once: the control plane or its network failed, and comes back.
    alone = view.nodes is not None and not view.nodes.disrupted
    return view.clock.waited(_left(view, node)) and (alone or _promised(node))


def _promised(node: Node) -> bool:
    """Tell whether the machine is off by the word of an administrator or Kubernetes."""
    return node.out_of_service or not node.exists


def _left(view: View, node: Node) -> float:
    patience = _patience(view.spec, node)
    if _promised(node):
        return patience - node.down_seconds
    watched = view.nodes.calm_seconds if view.nodes else 0.0
    if view.feedback.seen_since is not None:
        watched = min(watched, (view.now - view.feedback.seen_since).total_seconds())
    return max(patience - min(node.down_seconds, watched), CONFIRMATION - watched)


def _patience(spec: Spec, node: Node) -> float:
    after = spec.fence_after
    if node.exists and node.out_of_service:
        return 0.0
    if node.exists:
        return math.inf if after is None else after
    return GONE_PATIENCE if after is None else 0.0


def _just_read(node: Node) -> bool:
    return node.read_seconds is not None and node.read_seconds <= READ_HOLDS


def _state(node: Node | None) -> str:
    if node is None or not node.exists:
        return "does not exist any more"
    return "is not ready and is out of service" if node.out_of_service else "is not ready"
