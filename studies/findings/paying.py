"""When DDP stops paying: computed from a model's size, its seconds of compute and a network.

Nothing here is measured; the assumptions are the constants.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from findings.ring_model import Ring

RANKS = 8


@dataclass(frozen=True)
class Model:
    """``nbytes`` of float32 gradients; ``seconds``: forward and backward of one batch on a GPU."""

    name: str
    parameters: int
    seconds: float
    batch: str

    @property
    def nbytes(self) -> int:
        return 4 * self.parameters


@dataclass(frozen=True)
class Network:
    """``gigabits`` per second of the line, all of which is taken as usable."""

    name: str
    gigabits: float
    alpha: float

    @property
    def ring(self) -> Ring:
        return Ring(self.alpha, self.gigabits * 1e9 / 8)


NETWORKS = (
    Network("1 GbE", 1, 50e-6),
    Network("10 GbE", 10, 50e-6),
    Network("100 Gb/s", 100, 10e-6),
    Network("400 Gb/s", 400, 10e-6),
)
#: GPT-2: 6 FLOP per parameter and token, 40 % of an H100's 989 TFLOPS. ResNet-50: 2,500 images/s.
MODELS = (
    Model("GPT-2 124M", 124_400_000, 6 * 124.4e6 * 16_384 / (0.4 * 989e12), "16 x 1,024 tokens"),
    Model("GPT-2 124M", 124_400_000, 6 * 124.4e6 * 65_536 / (0.4 * 989e12), "64 x 1,024 tokens"),
    Model("ResNet-50", 25_600_000, 32 / 2500, "32 images"),
    Model("ResNet-50", 25_600_000, 256 / 2500, "256 images"),
)
BACKWARD = 2 / 3  # of forward and backward
HIDDEN = 0.9  # of backward: the last bucket is ready only at its end
BUCKET = 25 * 2**20  # bytes: each pays for its messages


@dataclass(frozen=True)
class Case:
    """Seconds of one step of ``RANKS`` GPUs, each with its own batch."""

    model: Model
    network: Network

    @property
    def communication(self) -> float:
        buckets = math.ceil(self.model.nbytes / BUCKET)
        return buckets * self.network.ring.seconds(self.model.nbytes / buckets, RANKS)

    @property
    def exposed(self) -> float:
        return max(0.0, self.communication - HIDDEN * BACKWARD * self.model.seconds)

    @property
    def efficiency(self) -> float:
        """Of as many GPUs without communication."""
        return self.model.seconds / (self.model.seconds + self.exposed)

    @property
    def compute_needed(self) -> float:
        """Seconds of forward and backward from which on all communication is hidden."""
        return self.communication / (HIDDEN * BACKWARD)


def cases() -> Iterator[Case]:
    return (Case(model, network) for model in MODELS for network in NETWORKS)
