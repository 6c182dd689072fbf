"""What becomes of an epoch's incomplete last batch."""

import numpy as np
import pytest

from ddpjob_trainer.data.order import DataOrder, Shuffled
from ddpjob_trainer.errors import ConfigError


def shuffled(length: int, batch: int, tail: str) -> DataOrder:
    return DataOrder(Shuffled(3, length), batch, tail)


def samples(order: DataOrder, step: int) -> list[int]:
    return order.samples(order.batch(step)).tolist()


def epoch_of(number: int, length: int) -> list[int]:
    return Shuffled(3, length).samples(number, np.arange(length)).tolist()


def test_pad_fills_up_from_the_start_of_the_same_epoch():
    order = shuffled(10, 4, "pad")
    assert order.steps_per_epoch == 3
    whole = epoch_of(0, 10)
    assert samples(order, 2) == whole[8:] + whole[:2]
    assert samples(order, 3) == epoch_of(1, 10)[:4]
    few = shuffled(3, 8, "pad")  # fewer samples than one batch
    assert samples(few, 0) == (epoch_of(0, 3) * 3)[:8]


def test_an_exact_epoch_has_no_tail():
    for step in range(7):
        drop, pad = (samples(shuffled(12, 4, tail), step) for tail in ("drop", "pad"))
        assert drop == pad


@pytest.mark.parametrize(
    ("length", "tail", "words"),
    [(0, "pad", "the dataset is empty"), (3, "drop", "lower global_batch, or use tail='pad'")],
)
def test_what_no_tail_can_help(length, tail, words):
    with pytest.raises(ConfigError, match=words):
        shuffled(length, 4, tail)
