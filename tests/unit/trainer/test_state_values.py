"""run.state(): what its values may be, and what comes back."""

import math

import numpy as np
import pytest
import torch

from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.state.codec import flatten, unflatten
from ddpjob_trainer.state.stateful import Values


def test_values_come_back_as_they_were():
    state = Values({"best": math.inf, "bad": 0, "name": None, "seen": (1, ("a", True))})
    state.best, state.name, state.bad = np.float64(0.5), "x", np.int64(3)
    state.bad += 1
    stored = unflatten(flatten(state.state_dict()))
    other = Values({"best": math.inf, "bad": 0, "name": None, "seen": (), "new": 7})
    other.load_state_dict(stored)
    assert (other.best, other.bad, other.name, other.seen) == (0.5, 4, "x", (1, ("a", True)))
    assert {type(other.best), type(other.bad)} == {float, int}
    assert other.new == 7
    assert repr(state) == "state(best=0.5, bad=4, name='x', seen=(1, ('a', True)))"


@pytest.mark.parametrize("value", [torch.tensor(1.0), [1], (1, [2]), {"a": 1}])
def test_what_would_change_by_itself_is_refused(value):
    with pytest.raises(ConfigError, match=r"cannot be a (Tensor|list|dict)"):
        Values({"best": value})
    state = Values({"best": 1})
    with pytest.raises(ConfigError, match="cannot be a"):
        state.best = value
    assert state.best == 1


def test_a_name_that_was_not_given_is_a_slip():
    state = Values({"best": 1, "bad": 0})
    with pytest.raises(ConfigError, match=r"not given 'bset'.*It has best, bad"):
        state.bset = 2
    with pytest.raises(AttributeError, match="bset"):
        _ = state.bset
    with pytest.raises(ConfigError, match="another name"):
        Values({"state_dict": 1})
