"""When a test gives up on what it waits for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")

#: Seconds. Longer than anything takes on a machine that others use too: it ends a test that would
#: never end, and says nothing of how long is right.
PATIENCE: Final = 300
#: The same of a program that does much, one thing after the other: a chaos run, an example.
WHOLE: Final = 3 * PATIENCE
#: The same for kubectl and helm.
WITHIN: Final = f"--timeout={PATIENCE}s"


def wait_for(
    probe: Callable[[], T | None], what: str, timeout: float = PATIENCE, every: float = 0.1
) -> T:
    """Call ``probe`` until it returns something true; give up after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not (value := probe()):
        assert time.monotonic() < deadline, f"waited {timeout:g} s for {what}"
        time.sleep(every)
    return value
