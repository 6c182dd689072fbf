"""When a test gives up on what it waits for."""

from __future__ import annotations

from typing import Final

#: Seconds. Longer than anything takes on a machine that others use too: it ends a test that would
#: never end, and says nothing of how long is right.
PATIENCE: Final = 300
#: The same of a program that does much, one thing after the other: a chaos run, an example.
WHOLE: Final = 3 * PATIENCE
#: The same for kubectl and helm.
WITHIN: Final = f"--timeout={PATIENCE}s"
