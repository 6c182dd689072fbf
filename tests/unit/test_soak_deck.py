"""The soak's deck of faults: chance leaves no kind out, and a seed plays the same ones again."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from soak.disturbances import FAULTS, Deck, Draws

KINDS = tuple(FAULTS.entries)
SEEDS = range(20)


@pytest.mark.parametrize("seed", SEEDS)
def test_each_kind_comes_once_before_any_comes_twice(seed: int) -> None:
    drawn = [draw.kind for draw in islice(Draws(seed, 3), 3 * len(KINDS))]
    for begin in range(0, len(drawn), len(KINDS)):
        assert sorted(drawn[begin : begin + len(KINDS)]) == sorted(KINDS)


def test_a_seed_plays_the_same_faults_again_and_another_seed_others() -> None:
    first, again, other = (list(islice(Draws(seed, 3), 50)) for seed in (7, 7, 8))
    assert first == again
    assert [draw.kind for draw in first] != [draw.kind for draw in other]


def test_only_some_kinds_are_drawn_where_only_some_are_asked_for() -> None:
    drawn = [draw.kind for draw in islice(Draws(7, 3, ("etcd-kill", "pod-evict")), 4)]
    assert sorted(drawn[:2]) == sorted(drawn[2:]) == ["etcd-kill", "pod-evict"]


@pytest.mark.parametrize("seed", SEEDS)
def test_what_could_not_be_done_comes_again_after_the_rest_and_before_a_new_round(
    seed: int,
) -> None:
    draws = Draws(seed, 3)
    missed = next(draws)
    draws.missed(missed)
    drawn = [draw.kind for draw in islice(draws, 2 * len(KINDS))]
    assert drawn[len(KINDS) - 1] == missed.kind
    assert sorted(drawn[: len(KINDS)]) == sorted(KINDS)
    assert sorted(drawn[len(KINDS) :]) == sorted(KINDS)


def test_what_can_never_be_done_does_not_keep_the_others_from_their_turn() -> None:
    deck, drawn = Deck(("never", "a", "b"), random.Random(1)), list[str]()
    for _ in range(40):
        drawn.append(deck.draw())
        if drawn[-1] == "never":
            deck.put_back("never")
    assert drawn.count("never") == 20
    assert drawn.count("a") == drawn.count("b") == 10
