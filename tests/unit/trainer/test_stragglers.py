"""One rank holds up the others: it is named when it does so for minutes, and by what it does."""

import pytest

from ddpjob_contract import Straggler
from ddpjob_trainer.liveness.step_times import MOST_RANKS, Stragglers


class Gang:
    """Four ranks that step once a second of this clock."""

    def __init__(self, size: int = 4) -> None:
        self.now = 0.0
        self.spent = [(0.5, 0.1)] * size
        self.ranks = [
            Stragglers(rank, size, lambda rank=rank: self.spent[rank], lambda: self.now)  # type: ignore[misc]
            for rank in range(size)
        ]

    def step(self, times: int) -> list[Straggler]:
        """What rank 0 finds; all ranks find the same."""
        found = []
        for _ in range(times):
            self.now += 1.0
            sums = [sum(column) for column in zip(*(r.report() for r in self.ranks), strict=True)]
            news = [rank.receive(sums) for rank in self.ranks]
            assert news == news[:1] * len(news)
            found += [news[0]] if news[0] is not None else []
        return found


def test_equal_ranks_and_a_short_delay_are_no_news():
    gang = Gang()
    assert gang.step(200) == []
    gang.spent[2] = (1.0, 0.1)
    assert gang.step(50) == []
    gang.spent[2] = (0.5, 0.1)
    assert gang.step(300) == []


@pytest.mark.parametrize(
    ("spent", "by"), [((0.9, 0.1), "compute"), ((0.9, 0.45), "data"), ((0.9, 0.25), "compute")]
)
def test_the_slow_one_is_named_once_and_again_when_it_is_not(spent, by):
    gang = Gang()
    gang.spent[3] = spent
    (found,) = gang.step(400)
    assert found == {"rank": 3, "share": pytest.approx(0.4), "by": by}
    gang.spent[3] = (0.5, 0.1)
    assert gang.step(400) == [{}]
    gang.spent[1] = (0.8, 0.1)
    assert [one.get("rank") for one in gang.step(400)] == [1]


def test_in_turns_nobody_is_slow():
    gang = Gang()
    for turn in range(12):
        gang.spent = [(0.9 if rank == turn % 4 else 0.5, 0.1) for rank in range(4)]
        assert gang.step(60) == []


def test_one_rank_and_very_many_send_nothing():
    for size in (1, MOST_RANKS + 1):
        alone = Stragglers(0, size, lambda: (1.0, 0.0), lambda: 1e6)
        assert alone.report() == []
        assert alone.receive([]) is None
