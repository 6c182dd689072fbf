"""A real local Kubernetes: built from its Go modules, run as plain processes on one machine.

The command is `dev/devcluster/devcluster`; `cli` reads it, `lifecycle` carries it out. Standard
library only: it runs before anything is installed.
"""

from __future__ import annotations

from typing import Final

#: Seconds after which a wait ends that never would: a machine with too much to do takes minutes.
PATIENCE: Final = 300.0


class Failure(Exception):  # noqa: N818 - what it is for the user
    """Something the user has to know, with the cure: printed as one line, exit status 1."""
