"""The launcher on a real terminal, where a person watches, and on a pipe, where nobody does."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import termios

import pytest

from support.launching import NO_ROUNDS, PATHS, RUN
from support.patience import PATIENCE

COLUMNS = 67


@pytest.mark.parametrize(("terminal", "columns"), [(True, COLUMNS), (False, 0)])
def test_a_program_is_told_how_wide_the_terminal_is(script, terminal, columns):  # type: ignore[no-untyped-def]
    read, write = pty.openpty() if terminal else os.pipe()
    if terminal:
        fcntl.ioctl(write, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    program = script("print('columns', os.environ['DDPJOB_TRAINER_TERMINAL'])")
    command = [*RUN, *NO_ROUNDS, program]
    with subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": PATHS}, stdout=write
    ) as process:
        os.close(write)
        with os.fdopen(read, errors="replace") as output:
            assert output.readline() == f"columns {columns}\n"
        assert process.wait(PATIENCE) == 0
