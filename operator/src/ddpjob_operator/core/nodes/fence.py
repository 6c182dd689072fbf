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
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from ddpjob_operator.core import evidence
from ddpjob_operator.core.actions import ApiFeedback, ReadLeases, ReadNodes
from ddpjob_operator.core.change import Clock, Stall
from ddpjob_operator.core.objects.nodes import OUT_OF_SERVICE, Node, Nodes
from ddpjob_operator.core.objects.observe import Pod, clean
from ddpjob_operator.core.objects.status import Failure, Known

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


@dataclass(frozen=True, slots=True)
class Fence:
    """What a planning round knows of the machines: which are silent, and whose pods are given up.

    ``nodes``: None: they could not be read yet. ``after``: seconds by spec.nodeLost; None: Wait.
    """

    nodes: Nodes | None
    after: float | None
    feedback: ApiFeedback
    clock: Clock

    def losses(self, needed: Mapping[int, Pod]) -> list[Failure]:
        """List the members that are lost with their node."""
        return [self.failure(pod) for pod in _working(needed) if self.lost(pod)]

    def lost(self, pod: Pod) -> bool:
        """Tell whether to delete the pod's object by force: its end cannot be reported."""
        node = self._silent(pod)
        gone = node is not None and self._given_up(node) and _just_read(node)
        return gone or self._deserted(pod)

    def suspect(self, needed: Mapping[int, Pod], *, late: bool = False) -> Pod | None:
        """Find a member on a silent node, a cause of its peers' end. ``late``: not running yet."""
        found = [pod for pod in _working(needed) if not (late and evidence.running(pod))]
        nodes = ((pod, self._silent(pod)) for pod in found)
        # A new node may be reported later than its pod.
        return next((pod for pod, node in nodes if node and not node.guessed), None)

    def guessed(self, needed: Mapping[int, Pod]) -> bool:
        """Tell whether a first read of a member's node, due at once, is still open."""
        found = (self._silent(pod) for pod in _working(needed))
        return any(node and node.guessed and not _just_read(node) for node in found)

    def reads(self, pods: Collection[Pod]) -> tuple[ReadNodes | ReadLeases, ...]:
        """Read the nodes whose pods may be given up, those not reported yet, and Leases."""
        old = self.nodes is not None and self.nodes.leases_seconds > LEASES_EVERY
        if old and any(map(self._is_away, pods)):
            return (ReadLeases(),)
        silent = (node for node in map(self._silent, pods) if node is not None)
        due = (node for node in silent if node.guessed or self._given_up(node))
        found = {node.name for node in due if not _just_read(node)}
        return (ReadNodes(tuple(sorted(found))),) if found else ()

    def failure(self, pod: Pod) -> Failure:
        """Describe a loss with the machine, which is charged to nobody."""
        reason, state = "NodeLost", _state(self._silent(pod))
        if self._deserted(pod):
            reason = evidence.NODE_SILENT
            state = "does not renew its Lease, and the pod's launcher is silent"
        return replace(
            evidence.removed(pod, self.clock.now),
            cls="Infrastructure",
            reason=reason,
            message=f"node {pod.node} {state}",
        )

    def named(self, loss: Failure, pod: Pod | None) -> Failure:
        """Name the node that was silent as the taint manager removed the pod, as under Wait.

        Its word does not say for which taint. The two times are of two clocks: good for a message.
        """
        node = self.nodes.known.get(pod.node) if self.nodes and pod is not None else None
        if pod is None or node is None or pod.disruption != "DeletionByTaintManager":
            return loss
        back = node.ready and node.since and pod.disrupted_at and node.since >= pod.disrupted_at
        if node.ready and not back:
            return loss
        said = f"node {node.name} was not ready, so Kubernetes removed the pod"
        message = clean(f"{said}\n{loss.message}")
        return replace(loss, node=node.name, exception=said, message=message)

    def stalls(self, pods: Collection[Pod]) -> Iterator[Stall]:
        """Explain why the gang waits for a machine, and how a person can help."""
        for pod in pods:
            node = self._silent(pod)
            if node is None or node.guessed:  # nothing wrong so far
                continue
            reason = "NodeNotReady"
            known: Known = "Cause"
            if self._given_up(node) or not node.exists:
                then = "its pods are being removed"
            elif self.after is None:
                then, known = cure(node.name), "Cure"
            elif self.nodes and self.nodes.disrupted:
                reason, known = "NodesNotReady", "Cure"
                most = f"{self.nodes.unready} of {self.nodes.workers} worker nodes are not ready"
                then = f"Fence waits, since {most}; {cure(node.name)}"
            else:
                then = f"after {self.after:g} s its pods are deleted by force"
            what = f"node {node.name} {_state(node)}: {then}; pod {pod.name} waits for it"
            yield Stall(reason, what, known)

    def _silent(self, pod: Pod) -> Node | None:
        """Return the silent node that a pod waits for, unless it was force-deleted.

        It waits to end or, once deleted, to be gone: only its kubelet removes the object.
        """
        if self.nodes is None or not pod.node or pod.deletion_grace == 0:
            return None
        if not pod.deleting and pod.ended:
            return None
        node = self.nodes.known.get(pod.node)
        return None if node is None or (node.exists and node.ready) else node

    def _is_away(self, pod: Pod) -> bool:
        """Return True if a node reports Ready but the hub lost its pod: its Lease must be read."""
        reported = self.feedback.away_at
        if reported is None or pod.uid not in self.feedback.away or self.after is None:
            return False
        node = self.nodes.known.get(pod.node) if self.nodes else None
        lives = pod.deletion_grace != 0 and (pod.deleting or not pod.ended)
        fresh = (self.clock.now - reported).total_seconds() <= READ_HOLDS
        return lives and fresh and node is not None and node.exists and node.ready

    def _deserted(self, pod: Pod) -> bool:
        """Tell whether hub and Leases agree that the pod's node is silent."""
        if not self._is_away(pod) or self.nodes is None or self.nodes.leases_seconds > READ_HOLDS:
            return False
        lease = self.nodes.known[pod.node].lease
        return lease.unrenewed >= LEASE_PATIENCE and lease.behind >= LEASE_PERIOD

    def _given_up(self, node: Node) -> bool:
        # Most nodes silent at once: the control plane or its network failed, and comes back.
        alone = self.nodes is not None and not self.nodes.disrupted
        return self.clock.waited(self._patience_left(node)) and (alone or _promised(node))

    def _patience_left(self, node: Node) -> float:
        """Return the seconds until the node's silence counts; none, or less: it does."""
        if _promised(node):
            # Kubernetes itself lets go of the pods of a node that is out of service.
            patience = 0.0 if node.exists or self.after is not None else GONE_PATIENCE
            return patience - node.down_seconds
        # Only silence that this process has watched without a gap counts.
        watched = self.nodes.calm_seconds if self.nodes else 0.0
        if self.feedback.seen_since is not None:
            since = (self.clock.now - self.feedback.seen_since).total_seconds()
            watched = min(watched, since)
        patience = math.inf if self.after is None else self.after
        return max(patience - min(node.down_seconds, watched), CONFIRMATION - watched)


def cure(node: str) -> str:
    """Advise how to end the wait for a machine that will not come back."""
    taint = f"kubectl taint node {node} {OUT_OF_SERVICE}=nodeshutdown:NoExecute"
    return f"if it is off for good: kubectl delete node {node}, or: {taint}"


def _working(needed: Mapping[int, Pod]) -> list[Pod]:
    """List the members whose trainer has not ended: the others have nothing to lose."""
    return [pod for pod in needed.values() if pod.trainer.state != "terminated"]


def _promised(node: Node) -> bool:
    """Tell whether the machine is off by the word of an administrator or Kubernetes."""
    return node.out_of_service or not node.exists


def _just_read(node: Node) -> bool:
    return node.read_seconds is not None and node.read_seconds <= READ_HOLDS


def _state(node: Node | None) -> str:
    if node is None or not node.exists:
        return "does not exist any more"
    return "is not ready and is out of service" if node.out_of_service else "is not ready"
