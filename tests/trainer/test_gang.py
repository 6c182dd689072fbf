"""The gang of these tests itself: a rank dies of its own faults alone."""

from __future__ import annotations

import gc
import threading
from types import SimpleNamespace

import pytest
import torch.distributed as dist


@pytest.fixture
def garbage():  # type: ignore[no-untyped-def]
    """Leave a cycle that owns threads, as a test with a process group in its own process may."""
    gc.disable()
    cycle = SimpleNamespace(group=dist.ProcessGroupGloo(dist.HashStore(), 0, 1))
    cycle.itself = cycle
    del cycle
    yield
    gc.enable()


def test_a_rank_outlives_the_garbage_of_tests_before(garbage, gang):  # type: ignore[no-untyped-def]
    def collects(rank: int) -> None:
        wait = threading.Event().wait
        for _ in range(8):  # these take the places of threads that the fork left behind
            threading.Thread(target=wait, daemon=True).start()
        gc.collect()

    assert gang.run(collects) == {0: 0, 1: 0, 2: 0}, gang.last_words()
