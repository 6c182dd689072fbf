"""Log lines: none that looks like another, none that says nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from kopf._cogs.clients.errors import APIError
from kopf._cogs.clients.watching import WatchingError

from ddpjob_operator.__main__ import configure_logs


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    logging.captureWarnings(capture=False)
    root.handlers[:], root.level = handlers, level


@pytest.mark.parametrize("error", [WatchingError("429"), APIError({}, status=500, headers={})])
def test_a_watch_that_the_api_server_ended_is_no_traceback(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logs("info", "text")
    log = logging.getLogger("kopf._core.reactor.orchestration")
    log.error("Watcher has failed", exc_info=error)
    assert capsys.readouterr().err == ""
    log.error("Watcher has failed", exc_info=KeyError("a bug"))
    assert "KeyError: 'a bug'" in capsys.readouterr().err
    configure_logs("debug", "text")
    log.error("Watcher has failed", exc_info=error)
    assert type(error).__name__ in capsys.readouterr().err


def test_a_quoted_line_end_makes_no_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("info", "text")
    logging.getLogger("ddpjob_operator").warning("refused: %s", "a\n2026 ERROR b\x1b[31m")
    assert capsys.readouterr().err.count("\n") == 1
