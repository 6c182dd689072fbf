"""The keeper: a process beside each rank that writes snapshots while the rank trains on.

It maps the buffers in which the rank stages its part, and does as it is told over a socket (see
``serve``). When the rank is gone it gives up what it is writing, removes it and ends. Started
as a bare interpreter; never imports torch.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import socket
from pathlib import Path
from typing import Any

from ddpjob_trainer import failpoints
from ddpjob_trainer.environment import chaos_directory
from ddpjob_trainer.snapshot.keeper.writer import Writer
from ddpjob_trainer.snapshot.ondisk import disk

_MAX_MESSAGE = 1 << 14
_IDLE_MILLISECONDS = 1000
GONE = "it was removed, or another job has taken over this snapshot directory"


class RankGoneError(Exception):
    """Nobody is left to write for."""


class Keeper:
    """One end of the socket. Requests come in order and each is answered once."""

    def __init__(self, channel: socket.socket, parent: int) -> None:
        self._channel = channel
        self._parent = parent
        self._poll = select.poll()
        self._poll.register(channel, select.POLLIN)
        self._buffers: dict[int, mmap.mmap] = {}
        self._writer: Writer | None = None

    def serve(self) -> None:
        """Answer requests until the rank is gone.

        open: the Writer's fields, and whether to retain at once. buffer: comes with a descriptor
        of shared memory. write, commit (with a descriptor that holds the manifest; retains after
        it), discard: see Writer; the answer names the request, its step, and what came of it.
        """
        while True:
            self.check()
            if not self._poll.poll(_IDLE_MILLISECONDS):
                continue
            data, fds, _, _ = socket.recv_fds(self._channel, _MAX_MESSAGE, 1)
            if not data:
                return
            request = json.loads(data)
            try:
                answer = self._do(request, fds)
            finally:
                for fd in fds:
                    os.close(fd)
            if answer is not None:
                about = {"do": request["do"], "step": request["step"], **answer}
                self._channel.sendall(json.dumps(about).encode())
                if request["do"] == "commit" and "text" not in answer and self._writer is not None:
                    self._writer.retain()

    def check(self) -> None:
        """Raise RankGoneError when the rank has ended, also if a child of its holds our socket."""
        gone = any(event & select.POLLHUP for _, event in self._poll.poll(0))
        if gone or os.getppid() != self._parent:
            raise RankGoneError

    def _do(self, request: dict[str, Any], fds: list[int]) -> dict[str, Any] | None:
        match request["do"]:
            case "open":
                self._writer = Writer(
                    Path(request["root"]), request["sequence"], request["nonce"], request["keep"],
                    self.check,
                )  # fmt: skip
                if request["retain"]:  # what the start of this incarnation freed
                    self._writer.retain()
                return None
            case "buffer":
                self._buffers[request["buffer"]] = mmap.mmap(
                    fds[0], request["bytes"], prot=mmap.PROT_READ
                )
                return None
        assert self._writer is not None, "open comes first"
        try:
            return self._write(self._writer, request, fds)
        except (FileNotFoundError, disk.NotAFileError):
            return {"text": f"{self._writer.directory} is gone: {GONE}"}
        except OSError as error:
            return {"text": error.strerror or str(error)}

    def _write(
        self, writer: Writer, request: dict[str, Any], fds: list[int]
    ) -> dict[str, Any] | None:
        match request["do"]:
            case "write":
                shared = self._buffers[request["buffer"]]
                with memoryview(shared) as whole, whole[: request["bytes"]] as content:
                    crc = writer.write(request["file"], content)
                return {"bytes": request["bytes"], "crc32": crc}
            case "commit":
                writer.commit(request["step"], os.pread(fds[0], os.fstat(fds[0]).st_size, 0))
                return {}
            case "discard":
                writer.discard(request["step"])
        return None


def main(descriptor: int, parent: int) -> None:
    """Run until the rank is gone."""
    # A Ctrl-C or a SIGTERM to the whole group is the rank's business: it saves before it ends.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    failpoints.configure(chaos_directory(os.environ), failpoints.NO_RANK)
    with socket.socket(fileno=descriptor) as channel:
        try:
            Keeper(channel, parent).serve()
        except (RankGoneError, ConnectionError, BrokenPipeError):
            return
