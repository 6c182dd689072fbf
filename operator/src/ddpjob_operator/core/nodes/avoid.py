"""Keep later pods off nodes that failed one or are about to go, while there is room elsewhere.

gang/restart.py records such a node in status.avoidedNodes: its GPU failed, or the runtime could not
start a container for a reason of the node's; handover.py one that is about to go. A doubtful node
is better than none: the list is emptied when a gang has found no room without it, and when the user
suspends and resumes the job. A node that is only suspected is avoided where there is a choice.
"""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta
from typing import Final

from ddpjob_contract import exits
from ddpjob_operator.core import evidence
from ddpjob_operator.core.change import Change
from ddpjob_operator.core.objects.spec import Spec
from ddpjob_operator.core.objects.status import MAX_AVOIDED, Failure, Status

#: Up to so many of these failures in a row, without progress in between, are free.
_FREE: Final = 3
#: A node is suspected once so many of so many failures in a row were first seen there.
_SUSPECT: Final = 2
_OF_LAST: Final = 5
_NOTICED: Final = timedelta(seconds=60)


def repeats(loss: Failure) -> bool:
    """Tell whether the job itself is the cause if such failures come again and again."""
    return loss.cls == "Hardware" or exits.recurs(loss.cls, loss.reason, loss.exit_code)


def is_free(status: Status, consecutive: int) -> bool:
    """Tell whether one more of these failures, after ``consecutive`` restarts, is free.

    So does a program that breaks one GPU after another, or a pod that fits on none of its nodes.
    """
    losses = [failure for failure in status.failures if not failure.in_place]
    row = losses[max(0, len(losses) - consecutive) :]
    return sum(map(repeats, row)) < _FREE


def node_of(spec: Spec, change: Change, loss: Failure) -> Change:
    """Keep the next attempts off the node to blame, where another one may do better."""
    old, unstarted = change.status.avoided_nodes, loss.reason == "StartError"
    blamed = loss.cls == "Hardware" or (loss.cls == "Infrastructure" and unstarted)
    if not blamed or not loss.node or loss.node in old:
        return change
    what = f"a GPU of {loss.node} failed"
    what = f"{loss.node} could not start a container" if unstarted else what
    message = (
        f"{what}: new pods go to other nodes; when they find no room there "
        f"within {spec.startup_deadline:.10g} s, to any"
    )
    change = change.with_status(avoided_nodes=(*old, loss.node)[-MAX_AVOIDED:])
    return change.event("Warning", "NodeAvoided", message)


def suspected(status: Status) -> tuple[str, ...]:
    """Return the nodes that pods should rather not go to: failures began there again and again.

    The removal of a pod says nothing of its node; a resume may have cured what was before.
    """
    since = status.timings.started_at
    losses = [one for one in status.failures if since is None or one.detected_at >= since]
    firsts = [one.node for one in losses[-_OF_LAST:] if one.node and one.cls != "Disruption"]
    return tuple(sorted(node for node, times in Counter(firsts).items() if times >= _SUSPECT))


def kept_off(status: Status, at: datetime) -> tuple[str, ...]:
    """Return the nodes that pods made then are kept off: fallen silent ones for a minute.

    By then Kubernetes itself has noticed, if they are lost.
    """
    silent = [
        loss.node
        for loss in status.failures
        if loss.reason == evidence.NODE_SILENT and at - loss.detected_at < _NOTICED
    ]
    return tuple(dict.fromkeys((*status.avoided_nodes, *silent)))


def nothing(change: Change, why: str) -> Change:
    """Let pods go to any node again."""
    old = change.status.avoided_nodes
    if not old:
        return change
    message = f"{why}: pods may go to {', '.join(old)} again, avoided so far"
    return change.with_status(avoided_nodes=()).event("Normal", "NodesTriedAgain", message)


def words(status: Status) -> str:
    """Name the avoided nodes in the message of a pod that finds no room."""
    avoided = status.avoided_nodes
    return f" (kept off {', '.join(avoided)}: status.avoidedNodes)" if avoided else ""
