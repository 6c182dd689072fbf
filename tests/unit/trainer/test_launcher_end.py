"""The launcher's end: nobody is left behind, unless nothing can end it."""

from __future__ import annotations

import pytest

from ddpjob_trainer.launcher import supervisor
from ddpjob_trainer.launcher.processes import children


def test_who_cannot_be_killed_is_not_waited_for(monkeypatch, capsys):  # type: ignore[no-untyped-def]
    """A process in a read from a disk that does not answer."""
    asked = 0

    def living() -> list[int]:
        nonlocal asked
        asked += 1
        if asked > 10_000:
            pytest.fail("waits for ever")
        return [4194303, 4194304]

    monkeypatch.setattr(children, "children", living)
    monkeypatch.setattr(children, "send", lambda pid, signum: None)
    monkeypatch.setattr(children, "reap", list)
    monkeypatch.setattr(supervisor, "_UNKILLABLE_SECONDS", 0.05)
    supervisor.Supervisor._leave_nobody(None)  # type: ignore[arg-type]
    assert "killed, but not gone, and left behind: 4194303, 4194304" in capsys.readouterr().err
