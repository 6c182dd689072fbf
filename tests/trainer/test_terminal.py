"""The launcher on a real terminal, where a person watches, and on a pipe, where nobody does."""

from __future__ import annotations

import os
import pty
import subprocess

import pytest

from support.launching import NO_ROUNDS, PATHS, RUN
from support.patience import PATIENCE

ONE_OF_TWO = {
    "DDPJOB_UID": "u", "DDPJOB_ATTEMPT": "1", "DDPJOB_REPLICA": "1",
    "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
}  # fmt: skip


def output(program: str, *, terminal: bool) -> str:
    """What a launcher with one rank of two writes."""
    read, write = pty.openpty() if terminal else os.pipe()
    with subprocess.Popen(
        [*RUN, *NO_ROUNDS, program],
        env={**os.environ, "PYTHONPATH": PATHS, **ONE_OF_TWO},
        stdout=write,
    ) as process:
        os.close(write)
        found = b""
        while data := _read(read):
            found += data
        os.close(read)
        assert process.wait(PATIENCE) == 0
    return found.decode().replace("\r\n", "\n")


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 4096)
    except OSError:  # what a terminal says when its other side is closed
        return b""


@pytest.mark.parametrize(("terminal", "expected"), [(True, "[rank 1] x\n"), (False, "x\n")])
def test_several_launchers_on_one_terminal_are_told_apart(script, terminal, expected):  # type: ignore[no-untyped-def]
    """Each alone in its pod, where the pod's name tells whose line it is, needs no prefix."""
    assert output(script("print('x')"), terminal=terminal) == expected
