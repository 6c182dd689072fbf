"""The keeper as its rank sees it: started once, told what to write, asked what came of it.

Requests are small and never wait; content travels in shared memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from typing import Any

from ddpjob_trainer.environment import source_folders

_MAX_MESSAGE = 1 << 14
END_SECONDS = 5.0
#: Isolated, and without the site's packages: nothing of the user's can be imported, and it
#: starts in the time of a bare interpreter.
_BOOT = (
    "import os, sys; sys.path[:0] = sys.argv[1].split(os.pathsep)\n{prelude}\n"
    "from ddpjob_trainer.snapshot.keeper.process import main\n"
    "main(int(sys.argv[2]), int(sys.argv[3]))"
)
#: Code for the keeper to run first. Tests set it to fail or to kill it at any operation.
prelude = ""


class KeeperProcess:
    """A running keeper. Raises OSError where it cannot be started or reached."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [
                        sys.executable, "-I", "-S", "-c", _BOOT.format(prelude=prelude),
                        source_folders(), str(theirs.fileno()), str(os.getpid()),
                    ],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )  # fmt: skip
            except BaseException:
                ours.close()
                raise
        ours.setblocking(False)
        self.channel = ours

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    def tell(self, request: dict[str, Any], fd: int | None = None) -> None:
        """Send a request; keeper.Keeper.serve says which there are. Raises OSError."""
        data = json.dumps(request).encode()
        socket.send_fds(self.channel, [data], [] if fd is None else [fd])

    def answers(self) -> list[dict[str, Any]] | None:
        """Return what has come since the last call, without waiting; None: the keeper is gone."""
        found: list[dict[str, Any]] = []
        while True:
            try:
                data = self.channel.recv(_MAX_MESSAGE)
            except BlockingIOError:
                return found
            except OSError:
                return None
            if not data:
                return found or None  # the end is seen again next time
            found.append(json.loads(data))

    def end(self, seconds: float = END_SECONDS) -> None:
        """Let it finish the operation it is in, and end; wait so long for it."""
        self.channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
