"""What studies/programs/facts.py counted, read as facts that pages tell and tests hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Found = Mapping[str, Any]


def partitioned(facts: Found) -> bool:
    """Whether some rank holds less than the whole model."""
    whole = facts["replicas"]["parameters of the model"]
    return any(count != whole for count in facts["replicas"]["with DDP"]["parameters per rank"])


def replicas_equal(facts: Found, how: str = "with DDP") -> bool:
    return len(set(facts["replicas"][how]["digests"])) == 1


def traffic(facts: Found, what: str) -> list[tuple[float, float]]:
    """(sent, received) in bytes by each rank."""
    sent = facts["wire"][what]
    columns = zip(*sent, strict=True)
    return [(sum(row), sum(column)) for row, column in zip(sent, columns, strict=True)]


def ring_share(facts: Found) -> float:
    """Bytes that a rank of a ring all-reduce sends, and receives."""
    ranks = facts["ranks"]
    return float(2 * facts["wire"]["bytes of gradients"] * (ranks - 1) / ranks)


def even(facts: Found, tolerance: float = 0.02) -> bool:
    """Whether every rank sends and receives the ring's share, rank 0 as any other."""
    share = ring_share(facts)
    return all(
        abs(count / share - 1) < tolerance for pair in traffic(facts, "DDP step") for count in pair
    )


def parts_of_dp_called(facts: Found) -> list[str]:
    """What DDP calls in torch.nn.parallel outside of DDP's file."""
    return [name for name in facts["calls"]["of DDP"] if not name.startswith("distributed.py:")]


def held(facts: Found, how: str, what: str) -> list[float]:
    """Bytes per rank, as multiples of the model's parameters."""
    whole = facts["wire"]["bytes of gradients"]
    return [one[what] / whole for one in facts["held"][how]]
