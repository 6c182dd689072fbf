"""run.log(reduce="mean"): what the ranks tell one another, and what each makes of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.gpu import accelerator
from ddpjob_trainer.training.step_exchange import MOST, LoggedMeans


def world_of(size: int) -> Any:
    return SimpleNamespace(size=size, accelerator=accelerator.of(torch.device("cpu")))


def step(calls: list[list[dict[str, Any]]]) -> list[dict[str, float]]:
    world = world_of(len(calls))
    ranks = [LoggedMeans(world) for _ in calls]
    told: list[dict[str, Any]] = [{} for _ in calls]
    for rank, mine in enumerate(calls):
        for values in mine:
            told[rank] |= ranks[rank].add(values)
    reports = [one.report() for one in ranks]
    sums = [sum(numbers) for numbers in zip(*reports, strict=True)]
    for one in ranks:
        one.learn(0, sums)
    return [{name: float(mean) for name, mean in found.items()} for found in told]


def test_each_call_of_a_step_counts_once():
    """One for each micro batch; level elastic gives ranks more or fewer of them."""
    both = step([[{"a": 1.0}, {"a": 3.0, "b": 5}], [{"a": 8.0}, {"b": 1}]])
    assert both == [{"a": 4.0, "b": 3.0}] * 2
    assert step([[{"a": torch.tensor(2.0)}], [{"a": 1.0}] * 3]) == [{"a": 1.25}] * 2
    full = {f"n{number}": 1.0 for number in range(MOST)}
    assert step([[full] * 3])[0] == full
    with pytest.raises(ConfigError, match=f"{MOST + 1} names; {MOST} at most"):
        step([[full, {"more": 1.0}]])


def test_a_step_may_be_heard_when_the_next_one_is_under_way():
    """As a GPU's is."""
    one = LoggedMeans(world_of(1))
    first = one.add({"a": 1.0})
    reported = one.report()
    with pytest.raises(ConfigError, match=r"came after step\.commit"):
        one.add({"a": 2.0})
    one.step_ended()
    second = one.add({"b": 5.0})
    later = one.report()
    one.step_ended()
    one.learn(0, [float(n) for n in reported])
    one.learn(1, [float(n) for n in later])
    assert (float(first["a"]), float(second["b"])) == (1.0, 5.0)
