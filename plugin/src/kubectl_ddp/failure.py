"""Define the error that ends a command, as one line: the trouble and its cure."""

from __future__ import annotations


class Failure(Exception):  # noqa: N818 - the user's word for it
    """Printed on stderr as `kubectl-ddp: LINE`; the exit code is 1."""


class Missing(Failure):
    """The job is not there, which no further look changes."""
