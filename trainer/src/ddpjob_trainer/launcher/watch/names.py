"""Check that rank 0's name resolves: without it a round's workers hang in silence.

hangs.py begins it with each round, and reads ``trouble``. A thread asks the resolver, which may
block for long. Pods' names may take half a minute at a job's first start.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Final

from ddpjob_contract import UNRESOLVED

_PAUSE_SECONDS: Final = 2.0
_NEWS_SECONDS: Final = 20.0


class Names:
    """The checks of all rounds. ``trouble``: why the name does not resolve, "" if it does.

    ``address``: None where there is no other pod. ``say`` reports trouble once a round.
    """

    def __init__(self, address: str | None, say: Callable[[str], None]) -> None:
        self.trouble = ""
        self._address, self._say = address, say
        self._ended = threading.Event()

    def begin(self) -> None:
        """Start over with a round."""
        self.end()
        self.trouble, self._ended = "", threading.Event()
        if self._address is not None:
            task = (self._address, self._ended)
            threading.Thread(target=self._ask, args=task, name="names", daemon=True).start()

    def end(self) -> None:
        """Stop asking."""
        self._ended.set()

    def _ask(self, address: str, ended: threading.Event) -> None:
        tries, told = 0, False
        while not ended.is_set():
            try:
                socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
            except OSError as error:
                why = f"{address} {UNRESOLVED} ({error.strerror})"
            else:
                why = ""
            if ended.is_set():
                return
            self.trouble = f"{why}: is the job's Service there?" if why else ""
            if not why:
                return
            tries += 1
            if not told and tries * _PAUSE_SECONDS >= _NEWS_SECONDS:
                told = True
                self._say(f"workers cannot find one another: {self.trouble}")
            ended.wait(_PAUSE_SECONDS)
