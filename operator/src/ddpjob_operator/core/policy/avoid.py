"""Nodes where a GPU failed: the pods of later attempts go elsewhere, where there is room elsewhere.

Kept in status.avoidedNodes. A doubtful node is better than none: the list is emptied when a gang
has found no room without it, and when somebody suspends the job and resumes it.
"""

from __future__ import annotations

from typing import Final

from ddpjob_operator.core.status import MAX_AVOIDED, Failure
from ddpjob_operator.core.view import Change, View

#: So many failures of GPUs in a row, without progress in between, are nobody's fault.
_FREE: Final = 3


def is_free(view: View, consecutive: int) -> bool:
    """Whether one more failure of a GPU is charged to nobody, after so many restarts in a row.

    A program that breaks one GPU after another is itself the cause.
    """
    losses = [failure for failure in view.status.failures if not failure.in_place]
    row = losses[max(0, len(losses) - consecutive) :]
    return sum(failure.cls == "Hardware" for failure in row) < _FREE


def node_of(view: View, change: Change, loss: Failure) -> Change:
    """Keep the next attempts off the node of a GPU that failed."""
    old = change.status.avoided_nodes
    if loss.cls != "Hardware" or not loss.node or loss.node in old:
        return change
    message = (
        f"a GPU of {loss.node} failed: new pods go to other nodes; when they find no room there "
        f"within {view.spec.startup_deadline:.10g} s, to any"
    )
    change = change.with_status(avoided_nodes=(*old, loss.node)[-MAX_AVOIDED:])
    return change.tell("Warning", "NodeAvoided", message)


def nothing(change: Change, why: str) -> Change:
    """Let pods go to any node again."""
    old = change.status.avoided_nodes
    if not old:
        return change
    message = f"{why}: pods may go to {', '.join(old)} again, where GPUs had failed"
    return change.with_status(avoided_nodes=()).tell("Normal", "NodesTriedAgain", message)


def words(view: View) -> str:
    """For the message of a pod that finds no room."""
    avoided = view.status.avoided_nodes
    return f" (kept off {', '.join(avoided)}, where GPUs had failed)" if avoided else ""
