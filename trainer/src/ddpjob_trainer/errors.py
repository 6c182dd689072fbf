"""Errors that decide an exit code.

A ConfigError is the user's to cure and trying again cannot help: exit 64. PeerLostError is
collateral of another rank's death: exit 75, never the root cause.
"""

from __future__ import annotations


class ConfigError(ValueError):
    """Wrong input. The message names the option or variable and the cure."""


class PeerLostError(RuntimeError):
    """Another rank is gone, or never came."""


class NotCommittedError(RuntimeError):
    """The loop left a step without step.commit()."""
