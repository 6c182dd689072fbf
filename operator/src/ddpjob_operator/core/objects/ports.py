"""Choose a gang's ports; on the host's network each attempt draws its own.

render.py asks. Two gangs on one node would collide on fixed ports. A hash draws them, so that each
caller gets the same; if a stranger has the port, the next attempt draws another. A port that the
user has chosen is kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Final

from ddpjob_contract import crd
from ddpjob_operator.core.objects.compact_spec import Template

MASTER: Final[int] = crd.DEFAULTS["port"]
METRICS: Final[int] = crd.DEFAULTS["metrics.port"]
#: Those that a process without rights may open.
_OPEN: Final = range(1024, 65536)
#: Below the node ports of Services (30000) and the kernel's ephemeral ports (32768). The gang has
#: two side by side, and each replica one, next to those of its neighbours on the node.
_PAIRS: Final = range(20000, 25000, 2)
_METRICS: Final = range(25000, 30000)


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports of torch's store and the hub on replica 0, and of pages."""

    master: int
    hub: int
    metrics: int


def of(
    template: Template, master: int, metrics: int, uid: str, attempt: int, replica: int
) -> Ports:
    """Choose the ports; ``master`` and ``metrics`` are those of the spec."""
    if not template.host_network:
        return Ports(master, hub(template, master, metrics), metrics)
    draw = int.from_bytes(hashlib.sha256(f"{uid}/{attempt}".encode()).digest()[:8])
    pairs, pages = _free(frozenset({master, metrics, *template.ports}))
    first = pairs[draw % len(pairs)]
    shown = pages[(draw // len(pairs) + replica) % len(pages)]
    return Ports(
        master=first if master == MASTER else master,
        hub=first + 1,
        metrics=shown if metrics == METRICS else metrics,
    )


@lru_cache(maxsize=64)  # the same for all pods of a gang
def _free(taken: frozenset[int]) -> tuple[Sequence[int], Sequence[int]]:
    """List the ports to draw from, without those that the user has chosen or declared."""
    pairs = [port for port in _PAIRS if not taken & {port, port + 1}]
    return pairs or _PAIRS, [port for port in _METRICS if port not in taken] or _METRICS


def hub(template: Template, master: int, metrics: int) -> int:
    """Choose launcher 0's hub port: the first free one after the master's.

    The metrics port and the ports that the template declares are not free.
    """
    taken = {metrics, *template.ports}
    ports = chain(range(master + 1, _OPEN.stop), range(master - 1, _OPEN.start - 1, -1))
    return next(port for port in ports if port not in taken)
