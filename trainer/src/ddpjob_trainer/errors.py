"""Define the errors that decide an exit code.

A ConfigError is the user's to cure, and a restart cannot help: exit 64. PeerLostError is collateral
of another rank's death: exit 75, never the root cause. DivergedError means that training on would
be useless: exit 70. HardwareError: a GPU does not work here, exit 74.
"""

from __future__ import annotations


class ConfigError(ValueError):
    """Wrong input. The message names the option or variable and the cure."""


class PeerLostError(RuntimeError):
    """Another rank is gone, or never came."""


class DivergedError(ArithmeticError):
    """The ranks disagree, or the NaN policy says stop. Raised on every rank."""


class HardwareError(RuntimeError):
    """A GPU or the memory fails here, another machine's may work. The message names the cure."""


def cannot_read(rank: int, text: str) -> HardwareError:
    """Build the error of a rank that alone cannot read what another can."""
    return HardwareError(
        f"rank {rank} cannot read a snapshot: {text}. Either this node's memory fails or its mount"
        " of the volume: look at both. Another node may do better"
    )


class NotCommittedError(ConfigError):
    """The loop left a step without step.commit(), or called that too early."""
