"""A disk that gives an error now may give the bytes a moment later: try again, for a while.

A storage node that fails over answers EIO, ESTALE or ETIMEDOUT for some seconds. Taking an older
snapshot at once would throw away training that is all there.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

PASSING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
_FIRST_SECONDS = 0.25

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Patience:
    """Retry for ``seconds``, waiting twice as long each time. ``now``: a monotonic clock."""

    seconds: float = 15.0
    now: Callable[[], float] = time.monotonic
    wait: Callable[[float], None] = time.sleep

    def deadline(self) -> float:
        """When attempts that begin now are over."""
        return self.now() + self.seconds

    def call(
        self, action: Callable[[], Result], tell: Callable[[str], None], deadline: float
    ) -> Result:
        """Return what the action does; its last OSError when it fails until the deadline.

        ``tell`` hears why it is tried again, once for each kind of error.
        """
        pause, told = _FIRST_SECONDS, set()
        while True:
            try:
                return action()
            except OSError as error:
                left = deadline - self.now()
                if error.errno not in PASSING or left <= 0:
                    raise
                if error.errno not in told:
                    told.add(error.errno)
                    tell(f"{error}; trying again for {left:.0f} s")
            self.wait(min(pause, left))
            pause *= 2
