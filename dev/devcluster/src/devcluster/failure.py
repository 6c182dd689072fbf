"""The one exception that reaches the user: one line with problem and cure."""

from __future__ import annotations

from typing import Final

#: Seconds after which a wait ends that never would: a machine with too much to do takes minutes.
PATIENCE: Final = 300.0


class Failure(Exception):  # noqa: N818 - what it is for the user
    """Something the user has to know; printed as one line, exit status 1."""
