"""Check that rank 0's name resolves: without it a round's workers hang in silence.

hangs.py begins it with each round, and reads ``trouble``; worker_group.py reads ``lasting``. A
thread asks the resolver, which may block for long. Pods' names may take half a minute at a job's
first start.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import Final

from ddpjob_contract import UNRESOLVED

_PAUSE_SECONDS: Final = 2.0
_QUIET_TRIES: Final = 10


class Names:
    """The checks of all rounds. ``trouble``: why the name does not resolve, "" if it does.

    ``lasting``: the same once the name has been asked for long enough: one that is new takes time.
    ``address``: None where there is no other pod. ``say`` reports trouble once a round.
    """

    def __init__(self, address: str | None, say: Callable[[str], None]) -> None:
        self.trouble = self.lasting = ""
        self._address, self._say = address, say
        self._rounds = 0

    def begin(self) -> None:
        """Start over with a round."""
        self.trouble = self.lasting = ""
        self._rounds += 1
        if self._address is not None:
            task = (self._address, self._rounds)
            threading.Thread(target=self._ask, args=task, name="names", daemon=True).start()

    def _ask(self, address: str, of_round: int) -> None:
        for tries in count(1):
            trouble = ""
            try:
                socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
            except OSError as error:
                trouble = f"{address} {UNRESOLVED} ({error.strerror}): is the job's Service there?"
            if of_round != self._rounds:  # the next one asks for itself
                return
            self.trouble = trouble
            self.lasting = trouble if tries >= _QUIET_TRIES else ""
            if not trouble:
                return
            if tries == _QUIET_TRIES:
                self._say(f"workers cannot find one another: {trouble}")
            time.sleep(_PAUSE_SECONDS)
