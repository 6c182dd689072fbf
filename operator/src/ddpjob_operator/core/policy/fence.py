"""Pods on machines that do not answer: when they are lost, and who has to say so.

A pod on a silent node may train on, so its object alone tells when it has ended. Three words
count as that: the Node object is deleted, or an administrator has tainted it out-of-service
(Kubernetes itself then lets go of its pods), or spec.nodeLost says Fence and the node has not been
ready for afterSeconds. Under Fence the pod may be alive: the lineage of the snapshots shuts it out.
Each rests on a quorum read of the Node that was made for it, since a watch may be behind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from ddpjob_operator.core import classify
from ddpjob_operator.core.actions import ReadNodes
from ddpjob_operator.core.nodes import OUT_OF_SERVICE, Node
from ddpjob_operator.core.observe import Pod
from ddpjob_operator.core.status import Failure
from ddpjob_operator.core.view import View

#: A read of a Node is good for the decision and its deletions, not for one much later.
READ_HOLDS: Final = 10.0
#: Kubernetes itself removes the pods of a deleted Node after 40 s. Only what it leaves is ours.
GONE_PATIENCE: Final = 60.0


def losses(view: View) -> list[Failure]:
    """The members that are lost with their node."""
    return [failure(view, pod) for pod in _needed(view) if lost(view, pod)]


def lost(view: View, pod: Pod) -> bool:
    """Whether the pod's object may be deleted by force: nobody will ever tell of its end."""
    node = _node(view, pod)
    return node is not None and _given_up(view, node) and _just_read(node)


def suspect(view: View) -> Pod | None:
    """A member on a node that is not ready: what its peers die of, whatever they say."""
    return next((pod for pod in _needed(view) if _node(view, pod)), None)


def reads(view: View) -> tuple[ReadNodes, ...]:
    """The nodes to be read before their pods may be given up."""
    found = {n.name for _, n in _silent(view) if _given_up(view, n) and not _just_read(n)}
    return (ReadNodes(tuple(sorted(found))),) if found else ()


def waits(view: View) -> list[float]:
    """Seconds until each node that is not ready has been so for afterSeconds."""
    left = [_patience(view, node) - node.down_seconds for _, node in _silent(view)]
    return [seconds for seconds in left if 0 < seconds < math.inf]


def failure(view: View, pod: Pod) -> Failure:
    """The machine's doing, so it is charged to nobody."""
    return replace(
        classify.removed(pod, view.now),
        cls="Infrastructure",
        reason="NodeLost",
        message=f"node {pod.node} {_state(_node(view, pod))}",
    )


def reasons(view: View) -> Iterator[tuple[str, str]]:
    """Why the gang waits for a machine, and what a person can do about it."""
    after = view.spec.fence_after
    for pod, node in _silent(view):
        if _given_up(view, node) or not node.exists:
            then = "its pods are being removed"
        elif after is None:
            then = "waiting until it is ready again; " + cure(node.name)
        elif view.nodes and view.nodes.any_ready:
            then = f"after {after:g} s its pods are deleted by force"
        else:
            then = "no worker node of the cluster is ready, so Fence waits until one is"
        yield "NodeNotReady", f"node {node.name}, with pod {pod.name}, {_state(node)}: {then}"


def cure(node: str) -> str:
    """What ends the wait for a machine that will not come back."""
    taint = f"kubectl taint node {node} {OUT_OF_SERVICE}=nodeshutdown:NoExecute"
    return f"if the machine is off for good: {taint}, or: kubectl delete node {node}"


def _needed(view: View) -> list[Pod]:
    """Members whose trainer has not ended: of those that have, there is nothing to lose."""
    done = view.status.succeeded
    members = view.members.items()
    return [p for r, p in members if r not in done and p.trainer.state != "terminated"]


def _silent(view: View) -> Iterator[tuple[Pod, Node]]:
    """Pods that are not known to have ended, on nodes that are not ready or gone."""
    for pod in (*view.members.values(), *view.others):
        node = _node(view, pod)
        if node is not None:
            yield pod, node


def _node(view: View, pod: Pod) -> Node | None:
    """The silent node of a pod that has not ended and was not deleted by force before."""
    if view.nodes is None or not pod.node or pod.deletion_grace == 0:
        return None
    if pod.stopped or pod.phase in ("Succeeded", "Failed"):
        return None
    node = view.nodes.known.get(pod.node)
    return None if node is None or (node.exists and node.ready) else node


def _given_up(view: View, node: Node) -> bool:
    # All nodes at once: the control plane or its network has failed, and it comes back.
    alone = view.nodes is not None and (view.nodes.any_ready or node.out_of_service)
    return (alone or not node.exists) and node.down_seconds >= _patience(view, node)


def _patience(view: View, node: Node) -> float:
    """Seconds of silence after which the node's pods are given up."""
    after = view.spec.fence_after
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
