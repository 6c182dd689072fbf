"""Keep later attempts off nodes that failed a pod, while there is room elsewhere.

restart.py records such a node in status.avoidedNodes: its GPU failed, or the runtime could not
start a container for a reason of the node's. A doubtful node is better than none: the list is
emptied when a gang has found no room without it, and when the user suspends and resumes the job.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from ddpjob_operator.core import classify
from ddpjob_operator.core.objects.status import MAX_AVOIDED, Failure
from ddpjob_operator.core.view import Change, View

#: Up to so many of these failures in a row, without progress in between, are free.
_FREE: Final = 3
_NOTICED: Final = timedelta(seconds=60)


def blames(loss: Failure) -> bool:
    """Tell whether another node may do better."""
    unstarted = loss.cls == "Infrastructure" and loss.reason == "StartError"
    return loss.cls == "Hardware" or unstarted


def is_free(view: View, consecutive: int) -> bool:
    """Tell whether one more of these failures, after ``consecutive`` restarts, is free.

    A program that breaks one GPU after another is itself the cause.
    """
    losses = [failure for failure in view.status.failures if not failure.in_place]
    row = losses[max(0, len(losses) - consecutive) :]
    return sum(map(blames, row)) < _FREE


def node_of(view: View, change: Change, loss: Failure) -> Change:
    """Keep the next attempts off the node to blame."""
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


def at_once(view: View) -> tuple[str, ...]:
    """Return the nodes that new pods are kept off now: fallen silent ones for a minute.

    By then Kubernetes itself has noticed, if they are lost.
    """
    silent = [
        loss.node
        for loss in view.status.failures
        if loss.reason == classify.NODE_SILENT and view.now - loss.detected_at < _NOTICED
    ]
    return tuple(dict.fromkeys((*view.status.avoided_nodes, *silent)))


def nothing(change: Change, why: str) -> Change:
    """Let pods go to any node again."""
    old = change.status.avoided_nodes
    if not old:
        return change
    message = f"{why}: pods may go to {', '.join(old)} again, which had failed one"
    return change.with_status(avoided_nodes=()).tell("Normal", "NodesTriedAgain", message)


def words(view: View) -> str:
    """Name the avoided nodes in the message of a pod that finds no room."""
    avoided = view.status.avoided_nodes
    return f" (kept off {', '.join(avoided)}, which had failed a pod)" if avoided else ""
