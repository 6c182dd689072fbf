"""One event loop for all stories; how many examples hypothesis tries.

DDPJOB_SOAK=1/1 (`make soak`) plays whole what `make test` only samples, with new random examples
each time; 2/8 is the second of eight shares. Without it every run of the tests is the same.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator

import hypothesis
import pytest

SOAK = os.environ.get("DDPJOB_SOAK", "")

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
hypothesis.settings.load_profile("soak" if SOAK else "test")


@pytest.fixture(scope="session")
def soak() -> tuple[int, int] | None:
    """Which share of how many; None in `make test`."""
    if not SOAK:
        return None
    share, of = map(int, SOAK.split("/"))
    return share, of


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    log = logging.getLogger("ddpjob_operator")
    level = log.level
    log.setLevel(logging.CRITICAL)  # thousands of stories of trouble
    yield made
    log.setLevel(level)
    made.close()
