"""Which batch a backward belongs to, and when a step may update and end."""

from typing import Any

import numpy as np
import pytest
import torch

from ddpjob_trainer.errors import ConfigError, NotCommittedError
from ddpjob_trainer.gradients.ddp import Part
from ddpjob_trainer.training.step import Step

LOSS = torch.tensor(1.0)


def step(*samples: int) -> Step:
    parts = [Part(np.arange(n), 0) for n in samples]
    nothing: Any = None
    return Step(nothing, 4, parts, iter(()))


def backward(found: Step) -> int:
    number = found.part()
    found.add(number, LOSS, None)
    return number


def test_batch_by_batch_each_with_as_many_losses_as_it_has():
    assert backward(step(2, 3)) == 0, "a script may have batches of its own"
    found = step(2, 3)
    found.received = 1
    assert [backward(found), backward(found)] == [0, 0]
    with pytest.raises(NotCommittedError, match=r"commit\(\) was called after 1 of 2 batches"):
        found.check_commit()
    found.received = 2
    assert [backward(found), backward(found)] == [1, 1]
    found.check_commit()
    assert [float(loss) for loss in found.losses] == [2.0, 2.0]


def test_collected_batches_have_one_loss_each_between_two_updates():
    found = step(2, 3)
    found.received = 2
    assert [backward(found), backward(found)] == [0, 1]
    found.check_update("update()")
    found.updated()
    words = r"update\(\) was called before.*update\(first, second\).*list\(step\.batches\)"
    with pytest.raises(NotCommittedError, match=words):
        found.check_update("update()")
    assert backward(found) == 0
    with pytest.raises(ConfigError, match="whose gradients nothing would apply"):
        found.check_commit()
    assert backward(found) == 1
    with pytest.raises(ConfigError, match="may have one loss each"):
        backward(found)
    found.updated()
    found.check_commit()
    ahead = step(3, 3, 3)
    ahead.received = 2
    assert backward(ahead) == 0
    ahead.received = 3
    assert [backward(ahead), backward(ahead)] == [1, 2]
    with pytest.raises(ConfigError, match="add several losses of a batch up"):
        backward(ahead)


def test_at_level_elastic_a_batch_has_its_forward_before_the_next_comes():
    found = step(2, 3)
    found.received = 1
    backward(found)
    found.check_forward()
    found.received = 2
    with pytest.raises(ConfigError, match=r"as by list\(step\.batches\)"):
        found.check_forward()


def test_commit_needs_a_backward_and_comes_once():
    found = step(2)
    with pytest.raises(NotCommittedError, match=r"commit\(\) was called before step\.backward"):
        found.check_commit()
    backward(found)
    found.committed = True
    with pytest.raises(NotCommittedError, match="called twice"):
        found.check_commit()
    with pytest.raises(NotCommittedError, match=r"update\(\) was called after step\.commit"):
        found.check_update("update()")


def test_weights_are_those_of_all_batches_or_of_none():
    found = step(2, 3)
    found.received = 1
    found.add(0, LOSS, 7.0)
    found.add(0, LOSS, 7.0)
    with pytest.raises(ConfigError, match=r"an earlier loss of the same batch had 7\.0"):
        found.add(0, LOSS, 8.0)
    found.received = 2
    with pytest.raises(ConfigError, match="for every batch of a step, or for none"):
        found.add(1, LOSS, None)
    found.add(1, LOSS, 0.0)
    assert found.weights == [7.0, 0.0]
    with pytest.raises(ConfigError, match=r"step\.update\(\) does not go with"):
        found.check_weightless()
    found = step(2, 3)
    found.add(0, LOSS, None)
    found.received = 2
    with pytest.raises(ConfigError, match="for every batch of a step, or for none"):
        found.add(1, LOSS, 1.0)
    for weight in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="must be 0 or more, and finite"):
            step(2).add(0, LOSS, weight)
