"""The ring all-reduce's alpha-beta model, and the steps of DDP that it predicts.

One all-reduce of N bytes among W ranks: T = 2 (W - 1) (alpha + N / (W beta)), alpha the seconds
that a message costs whatever its size, beta bytes per second. A step is then a simulation: buckets
become ready during backward as they were measured, and are reduced one after the other.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ring:
    """``alpha``: seconds per message; ``beta``: bytes per second."""

    alpha: float
    beta: float

    def seconds(self, nbytes: float, ranks: int) -> float:
        return 2 * (ranks - 1) * (self.alpha + nbytes / (ranks * self.beta))


@dataclass(frozen=True)
class Measured:
    """One all-reduce that was timed."""

    ranks: int
    nbytes: int
    seconds: float


def fit(points: Sequence[Measured]) -> Ring:
    """Least squares of the relative error, so that small messages count as much as large ones.

    T is linear in alpha and 1 / beta: two equations with two unknowns.
    """
    aa = ab = bb = a1 = b1 = 0.0
    for p in points:
        a = 2 * (p.ranks - 1) / p.seconds
        b = a * p.nbytes / p.ranks
        aa, ab, bb, a1, b1 = aa + a * a, ab + a * b, bb + b * b, a1 + a, b1 + b
    determinant = aa * bb - ab * ab
    return Ring(
        (a1 * bb - b1 * ab) / determinant,
        determinant / (aa * b1 - ab * a1),
    )


def errors(ring: Ring, points: Sequence[Measured]) -> list[float]:
    """Of each point: model / measured - 1."""
    return [ring.seconds(p.nbytes, p.ranks) / p.seconds - 1 for p in points]


def fitted(points: Sequence[Measured]) -> dict[str, float]:
    ring = fit(points)
    off = [abs(error) for error in errors(ring, points)]
    return {
        "alpha": ring.alpha,
        "beta": ring.beta,
        "points": len(points),
        "median error": statistics.median(off),
        "worst error": max(off),
    }


def overlapped(buckets: Sequence[Mapping[str, float]], ring: Ring, ranks: int) -> list[tuple]:
    """(ready, start, end) of each bucket's all-reduce, one after the other; no core is taken."""
    found, free = [], 0.0
    for bucket in buckets:
        start = max(bucket["ready"], free)
        free = start + ring.seconds(bucket["bytes"], ranks)
        found.append((bucket["ready"], start, free))
    return found


def step(alone: Mapping[str, Any], ring: Ring, ranks: int, slower: float = 1.0) -> dict[str, float]:
    """A step of ``ranks`` processes out of the phases of a step without communication, in seconds.

    ``slower``: processes per core. ``hidden``: communication runs beside backward and costs it
    nothing. ``in turn``: nothing overlaps, as where the same core computes and communicates.
    """
    compute = slower * sum(alone[phase] for phase in ("data", "forward", "backward", "optimizer"))
    copies = slower * alone["exposed"]  # from the buckets back into the gradients
    buckets = [dict(b, ready=slower * b["ready"]) for b in alone["buckets"]]
    if ranks == 1:
        return {"hidden": compute + copies, "in turn": compute + copies, "exposed": 0.0}
    exposed = max(0.0, overlapped(buckets, ring, ranks)[-1][2] - slower * alone["backward"])
    whole = sum(ring.seconds(bucket["bytes"], ranks) for bucket in buckets)
    return {
        "hidden": compute + copies + exposed,
        "in turn": compute + copies + whole,
        "exposed": exposed,
    }
