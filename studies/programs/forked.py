"""Starts programs one after the other, each as so many ranks.

`forked.py RANKS PROGRAM ARGUMENT... -- RANKS PROGRAM ARGUMENT...` does as torchrun does on one
machine, but torch is imported once and the ranks are forked from there: seconds of processor time
that a benchmark with many short launches would only wait for. The first rank that fails ends all.
Nothing here starts threads or touches a GPU before the fork.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import socket
import sys

import torch._dynamo  # the first step of an optimizer would import it, in each rank
import torch.distributed.fsdp
import torch.distributed.optim
import torch.nn.parallel  # noqa: F401

_PR_SET_PDEATHSIG = 1


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    gang: list[str] = []
    for word in [*sys.argv[1:], "--"]:
        if word != "--":
            gang.append(word)
        elif not run(int(gang[0]), gang[1:]):
            return 1
        else:
            gang = []
    return 0


def run(world: int, words: list[str]) -> bool:
    """Whether all ranks ended well."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    parent, pids = os.getpid(), set()
    for rank in range(world):
        pid = os.fork()
        if pid:
            pids.add(pid)
            continue
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        os.environ |= {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
        sys.exit(0)
    while pids:
        pid, status = os.wait()
        pids.discard(pid)
        if status:
            for other in pids:
                os.kill(other, signal.SIGKILL)
            return False
    return True


if __name__ == "__main__":
    sys.exit(main())
