"""Options of every level."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.busy import busy_machine
from support.faults import Recorder


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--busy", action="store_true", help="run two endless loops beside the tests")
    parser.addoption(
        "--fault-matrix", action="store_true", help="write docs/fault-matrix.md from what is run"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fault(*rows): shows these rows of docs/fault-matrix.md")
    if config.getoption("--fault-matrix"):
        config.pluginmanager.register(Recorder())


@pytest.fixture(scope="session", autouse=True)
def beside_loops(request: pytest.FixtureRequest) -> Iterator[None]:
    """With --busy no test has the machine to itself, as on any shared one."""
    if not request.config.getoption("--busy"):
        yield
        return
    with busy_machine():
        yield
