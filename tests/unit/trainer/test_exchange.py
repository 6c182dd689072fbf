"""The numbers that the ranks add up at each step: each name gets its own back."""

from __future__ import annotations

import torch

from ddpjob_trainer.comm.exchange import Exchange
from ddpjob_trainer.comm.world import World


def test_each_name_gets_its_own_sums_and_may_ask_twice():
    world = World(0, 1, 0, torch.device("cpu"), None, None, None)  # type: ignore[arg-type]
    exchange = Exchange(world)
    sent = exchange.start({"a": [1.0, 2.0], "none": [], "b": [3.0]}, measured={"b"})
    assert sent.told() == sent.measured() == {"a": [1.0, 2.0], "none": [], "b": [3.0]}
    assert sent.told() == sent.told()
    later = exchange.start({"a": [5.0]})
    assert later.told() == {"a": [5.0]}
    assert sent.told()["a"] == [1.0, 2.0], "a step is heard when the next one is under way"
