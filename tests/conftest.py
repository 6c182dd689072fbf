"""Options of every level."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.busy import busy_machine


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--busy", action="store_true", help="run two endless loops beside the tests")


@pytest.fixture(scope="session", autouse=True)
def beside_loops(request: pytest.FixtureRequest) -> Iterator[None]:
    """With --busy no test has the machine to itself, as on any shared one."""
    if not request.config.getoption("--busy"):
        yield
        return
    with busy_machine():
        yield
