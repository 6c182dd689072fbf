"""Nodes that failed a pod: those of later attempts go elsewhere, where there is room elsewhere.

A GPU failed there, or the runtime could not start a container for a reason of the node's.

Kept in status.avoidedNodes. A doubtful node is better than none: the list is emptied when a gang
has found no room without it, and when somebody suspends the job and resumes it.
"""

from __future__ import annotations

from typing import Final

from ddpjob_operator.core.status import MAX_AVOIDED, Failure
from ddpjob_operator.core.view import Change, View

#: So many of these failures in a row, without progress in between, are nobody's fault.
_FREE: Final = 3


def blames(loss: Failure) -> bool:
    """Whether another node may do better."""
    unstarted = loss.cls == "Infrastructure" and loss.reason == "StartError"
    return loss.cls == "Hardware" or unstarted


def is_free(view: View, consecutive: int) -> bool:
    """Whether one more of these failures is charged to nobody, after so many restarts in a row.

    A program that breaks one GPU after another is itself the cause.
    """
    losses = [failure for failure in view.status.failures if not failure.in_place]
    row = losses[max(0, len(losses) - consecutive) :]
    return sum(map(blames, row)) < _FREE


def node_of(view: View, change: Change, loss: Failure) -> Change:
    """Keep the next attempts off a node that is to blame."""
    old = change.status.avoided_nodes
    if not blames(loss) or not loss.node or loss.node in old:
        return change
    what = "a GPU of {} failed" if loss.reason != "StartError" else "{} could not start a container"
    message = (
        f"{what.format(loss.node)}: new pods go to other nodes; when they find no room there "
        f"within {view.spec.startup_deadline:.10g} s, to any"
    )
    change = change.with_status(avoided_nodes=(*old, loss.node)[-MAX_AVOIDED:])
    return change.tell("Warning", "NodeAvoided", message)


def nothing(change: Change, why: str) -> Change:
    """Let pods go to any node again."""
    old = change.status.avoided_nodes
    if not old:
        return change
    message = f"{why}: pods may go to {', '.join(old)} again, which had failed one"
    return change.with_status(avoided_nodes=()).tell("Normal", "NodesTriedAgain", message)


def words(view: View) -> str:
    """For the message of a pod that finds no room."""
    avoided = view.status.avoided_nodes
    return f" (kept off {', '.join(avoided)}, which had failed a pod)" if avoided else ""
