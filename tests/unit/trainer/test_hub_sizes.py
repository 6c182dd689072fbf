"""Who serves in a round of an elastic gang, and how many: E1 to E8, rules of the protocol."""

import pytest

from ddpjob_trainer.environment import Elastic
from ddpjob_trainer.launcher.hub.messages import Ask, Done, Finished, Go
from ddpjob_trainer.launcher.hub.root_cause import Exit
from ddpjob_trainer.launcher.hub.sizes import Sizes, in_order, unreached
from support.hub_gang import Gang

ALL = frozenset(range(4))


def sizes(least: int = 2, *served: int, most: int = 4) -> Sizes:
    """Of a gang of four whose round with ``served`` began at second 0."""
    found = Sizes(Elastic(least, 5.0, 30.0, 60.0), most)
    if served:
        found.begins(served, 0.0)
    return found


@pytest.mark.parametrize(
    ("here", "served", "order"),
    [
        ({0, 1, 2, 3}, (), [0, 1, 2, 3]),
        ({0, 1, 2, 3}, (0, 3, 1), [0, 3, 1, 2]),  # who served goes first, then by seat
        ({0, 2, 3}, (0, 1, 2, 3), [0, 2, 3]),
        ({1, 2, 3}, (0, 1, 2, 3), []),  # rank 0 is at the hub's own
    ],
)
def test_the_list_of_a_round(here, served, order):
    assert in_order(here, served) == order


@pytest.mark.parametrize(
    ("least", "served", "here", "knows", "begins"),
    [
        (2, (), ALL, ALL, 10.0),  # the first round: all of spec.replicas at once
        (2, (), {0, 1, 2}, ALL, 40.0),  # or startAfterSeconds
        (2, (), {0}, ALL, None),
        (2, (0, 1, 2, 3), ALL, ALL, 10.0),
        (2, (0, 1, 2, 3), {0, 1, 2}, ALL, 15.0),  # shrinkAfterSeconds
        (2, (0, 1, 2), {0, 1, 3}, ALL, 10.0),  # as many as served
        (2, (0, 1), {0, 1}, ALL, 10.0),  # who was missing before is not waited for
        (3, (0, 1, 2, 3), {0, 1}, ALL, None),
        (2, (0, 1, 2, 3), {0, 1, 2}, {0, 1}, 15.0),  # an old launcher is in full rounds only
        (2, (0, 1, 2, 3), {0, 3}, {0, 1}, None),
        (2, (0, 1, 2, 3), ALL, {0, 1}, 10.0),
    ],
)
def test_when_a_round_begins(least, served, here, knows, begins):
    gang = sizes(least, *served)
    assert bool(gang.ready(here, knows, 10.0)) == (begins == 10.0)
    assert gang.due == begins
    if begins:
        assert gang.ready(here, knows, begins - 0.1) == []
        known = here if here == ALL else here & knows
        assert gang.ready(here, knows, begins) == in_order(known, served)


@pytest.mark.parametrize(
    ("here", "snapshots", "now", "what"),
    [
        (ALL, (4, 8), 70.0, "grow"),
        (ALL, (4, 4), 70.0, ""),  # no snapshot of its own
        (ALL, (4, 8), 59.0, ""),
        ({0, 1, 2}, (4, 8), 70.0, ""),  # nobody is parked
        (ALL, (None, None), 700.0, ""),  # no grown round: it may start for long
    ],
)
def test_when_a_round_ends_for_growth(here, snapshots, now, what):
    gang = sizes(2, 0, 1, 2)
    assert gang.look(here, ALL, snapshots[0], 1.0) == ""
    assert gang.look(here, ALL, snapshots[1], now) == what
    assert gang.look(here, ALL, snapshots[1], now) == "", "it is asked once"


def test_growth_waits_longer_after_grown_rounds_that_ended_soon():
    gang = sizes(2, 0, 1, 2)
    for begin, pause in ((100.0, 120.0), (1000.0, 240.0), (2000.0, 480.0), (4000.0, 480.0)):
        gang.begins((0, 1, 2, 3), begin)
        gang.ended(False, begin + 30)
        gang.begins((0, 1, 2), begin + 40)
        gang.look(ALL, ALL, 4, begin + 41)
        assert gang.look(ALL, ALL, 8, begin + 39 + pause) == ""
        assert gang.look(ALL, ALL, 8, begin + 40 + pause) == "grow"
        gang.ended(False, begin + 41 + pause)
    gang.begins((0, 1, 2, 3), 5000.0)
    gang.ended(False, 5100.0)
    gang.begins((0, 1, 2), 5200.0)
    gang.look(ALL, ALL, 4, 5201.0)
    assert gang.look(ALL, ALL, 8, 5260.0) == "grow"


def test_a_grown_round_has_less_time_for_its_first_step():
    gang = sizes(2, 0, 1, 2)
    gang.look(ALL, ALL, -1, 20.0)
    gang.begins((0, 1, 2, 3), 100.0)
    assert gang.look(ALL, ALL, None, 159.0) == "", "three times what the last start took"
    assert gang.look(ALL, ALL, None, 161.0) == "late"


def ends(*codes: int) -> list[Exit]:
    return [Exit(rank, 0, code, 0.0) for rank, code in enumerate(codes)]


@pytest.mark.parametrize(
    ("codes", "lost", "saved", "found"),
    [
        ((75, 76), (), False, True),
        ((75, 75), (), True, False),
        ((75, 1), (), False, False),
        ((75, 75), (1,), False, False),
        ((0, 0), (), False, False),
    ],
)
def test_a_round_whose_members_do_not_all_reach_one_another(codes, lost, saved, found):
    assert unreached(ends(*codes), lost, saved=saved) == found


def test_who_was_new_in_a_trial_is_left_out_until_the_next_growth():
    gang = sizes(2, 0, 1, 2)
    gang.begins((0, 1, 2, 3), 100.0)
    assert gang.ended(True, 110.0), "it costs nothing"
    assert gang.ready(ALL, ALL, 110.0) == [0, 1, 2]
    gang.begins((0, 1, 2), 110.0)
    gang.look(ALL, ALL, 4, 111.0)
    assert gang.look(ALL, ALL, 8, 300.0) == "grow"
    gang.ended(False, 301.0)
    assert gang.ready(ALL, ALL, 301.0) == [0, 1, 2, 3]


def test_where_nobody_was_new_the_fewest_serve_and_others_in_turn():
    gang, found = sizes(2, 0, 1, 2, 3), []
    for round_ in range(4):
        assert not gang.ended(True, float(round_)), "it is charged"
        found.append(gang.ready(ALL, ALL, float(round_)))
        gang.begins(found[-1], float(round_))
    assert found == [[0, 1], [0, 2], [0, 3], [0, 1]]


# --- The hub -------------------------------------------------------------------------------------


def begun(*, least: int = 2) -> Gang:
    """All three are here, and round 0 trains."""
    gang = Gang((0,), least=least)
    for seat in (1, 2):
        assert gang.comes(seat) is None
    assert gang.goes(0).size == 3
    gang.reached = 4
    gang.hub.tick(1.0)
    return gang


def short() -> Gang:
    """Round 1 trains without launcher 1."""
    gang = begun()
    gang.loses(1, now=2.0)
    gang.stop(0, 2, now=2.0, step=4)
    assert gang.said()[0], "Stop, and no Go yet"
    gang.awake(2.0, 6.9)
    assert gang.said() == {}
    gang.hub.tick(7.0)
    assert gang.goes(1, (0, 2)).size == 2
    gang.hub.tick(8.0)
    return gang


def test_a_gang_trains_on_short_and_grows_when_the_lost_one_is_back():
    """At a snapshot of its own, by its own stop, and after a rest."""
    gang = short()
    facts = gang.hub.facts
    assert (facts["size"], facts["parked"], facts["away"]) == (2, [], [1])
    assert gang.comes(1, 9.0, birth=5) is None
    assert gang.hub.facts["parked"] == [1]
    gang.said()
    gang.reached = 8
    gang.awake(9.0, 68.9)
    assert gang.said() == {}
    gang.hub.tick(69.0)
    assert gang.said() == {0: [Ask(1)]}
    gang.fails(0, 143, 70.0)
    gang.stop(0, 2, now=71.0, step=8)
    go = gang.goes(2, (0, 2, 1))
    assert [one["kind"] for one in go.records] == ["lost", "grown"]
    assert gang.hub.history.failures == 0


def test_a_first_round_begins_with_fewer_after_a_while():
    gang = Gang((0,), least=2)
    assert gang.comes(2, 1.0) is None
    gang.awake(0.0, 29.9)
    assert Go not in {type(one) for said in gang.said().values() for one in said}
    gang.hub.tick(30.0)
    gang.goes(0, (0, 2))


def test_the_attempt_ends_only_while_too_few_are_here():
    gang = begun()
    gang.loses(1, 2, now=2.0)
    gang.stop(0, now=2.0)
    gang.awake(2.0, 331.0)
    assert gang.hub.final is None
    gang.awake(331.0, 333.0)
    assert gang.hub.final is not None


def test_one_lost_after_its_success_is_away_as_any_other():
    gang = begun()
    gang.says(1, Done(0, tuple(Exit(2 + i, i, 0, 0.0) for i in range(2))), 2.0)
    gang.loses(1, now=3.0)
    gang.fails(2, -9, 4.0)
    gang.stop(0, 2, now=5.0)
    gang.awake(5.0, 10.0)
    gang.goes(1, (0, 2))


def test_all_on_the_list_done_is_the_end_for_all_that_are_linked():
    gang = short()
    assert gang.comes(1, 9.0) is None
    gang.said()
    for seat, first in ((0, 0), (2, 2)):
        gang.says(seat, Done(1, tuple(Exit(first + i, i, 0, 0.0) for i in range(2))), 10.0)
    assert gang.said() == {seat: [Finished()] for seat in range(3)}


def test_a_launcher_that_knows_no_sizes_gets_no_size_and_no_short_round():
    gang = Gang((0,), least=2)
    assert gang.comes(1, sizes=False) is None
    assert gang.comes(2) is None
    said = gang.said()
    assert [said[seat][-1].size for seat in range(3)] == [3, 0, 3]
    gang.loses(2)
    gang.stop(0, 1)
    gang.awake(1.0, 20.0)
    assert gang.hub.waits


def test_a_round_that_runs_without_the_hubs_word_is_refused():
    refused = Gang((0,), least=2).comes(1, running=True)
    assert refused is not None
    assert refused.final
