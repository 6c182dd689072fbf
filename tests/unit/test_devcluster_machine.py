"""A node's first process and the one that made it say two lines: whichever comes first."""

from __future__ import annotations

import pytest

from devcluster.machine import said_pid


@pytest.mark.parametrize(
    ("said", "pid", "with_ready"),
    [
        ("123\nready\n", 123, 123),
        ("ready\n123\n", 123, 123),
        ("123\n", 123, None),
        ("ready\n", None, None),
        ("", None, None),
    ],
)
def test_what_was_said(said: str, pid: int | None, with_ready: int | None) -> None:
    assert (said_pid(said, ready=False), said_pid(said, ready=True)) == (pid, with_ready)
