"""One event loop for all stories.

DDPJOB_SOAK=1/1 (`make soak`) plays whole what `make check` only samples; 2/8 is the second of eight
shares.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def soak() -> tuple[int, int] | None:
    """Which share of how many; None else."""
    asked = os.environ.get("DDPJOB_SOAK", "")
    if not asked:
        return None
    share, of = map(int, asked.split("/"))
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
