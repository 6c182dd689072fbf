"""`make try` as a newcomer starts it: a process is killed, the weights are those undisturbed."""

from __future__ import annotations

import pytest

from support.launching import ROOT, finished


@pytest.mark.tier("all")
def test_a_killed_process_changes_no_bit_and_the_reader_sees_it() -> None:
    code, out = finished(ROOT / "demo/local.py")
    assert code == 0, out
    assert "--- kill -9 " in out
    assert "restart proven: " in out
    assert "  restarts in place          1 (a process was killed)\n" in out
    assert "  the two are                identical\n" in out


def test_make_try_needs_the_environment_only() -> None:
    """Neither root nor Go: what `programs` and `images` of other targets build."""
    text = (ROOT / "Makefile").read_text()
    assert "\ntry: setup ##" in text
    assert "\n\t@$(BIN)/python demo/local.py" in text
