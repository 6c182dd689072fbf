"""Options of every level, and how `make test` shares the levels out."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

import hypothesis
import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from support.busy import busy_machine
from support.faults import Recorder

LINES_AT_ONCE = 40  # of a failure that is told before the summary, which has it whole

# `make soak` tries new random examples each time; else every run of the tests is the same.
hypothesis.settings.register_profile(
    "test", derandomize=True, deadline=None, max_examples=120, stateful_step_count=30
)
hypothesis.settings.register_profile(
    "soak",
    deadline=None,
    max_examples=20_000,
    stateful_step_count=60,
    print_blob=True,
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.load_profile("soak" if os.environ.get("DDPJOB_SOAK") else "test")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--busy", action="store_true", help="run two endless loops beside the tests")
    parser.addoption(
        "--fault-matrix", action="store_true", help="write docs/fault-matrix.md from what is run"
    )


def pytest_configure(config: pytest.Config) -> None:
    # A shell that starts us in the background ignores Ctrl-C for us, and so would all we start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "fault(*rows): shows these rows of docs/fault-matrix.md")
    if hasattr(config, "workerinput"):  # of xdist: what is for the machine is its parent's
        return
    config.pluginmanager.register(_AtOnce(config))
    if config.getoption("--fault-matrix"):
        config.pluginmanager.register(Recorder())
    if config.getoption("--busy"):
        # No test has the machine to itself, as on any shared one.
        config.add_cleanup(_begin(busy_machine()))


class _AtOnce:
    """Tells each failure when it happens: a run of an hour may be stopped before its summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.failed:
            return
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        terminal.line("")  # the row of dots ends here
        terminal.section(f"{report.nodeid} ({report.when})", sep="-", red=True)
        terminal.write_line("\n".join(report.longreprtext.splitlines()[-LINES_AT_ONCE:]))


def _begin(context: AbstractContextManager[None]) -> Callable[[], None]:
    stack = ExitStack()
    stack.enter_context(context)
    return stack.close


class _ByLevel(LoadScopeScheduling):
    """Each process takes a whole level: its tests share an API server or a cluster.

    Many of them wait for the operator's or torch's deadlines; another level runs meanwhile.
    """

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.split("/")[1]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    return _ByLevel(config, log)
