"""The world of little room is tested itself: planners that are wrong on purpose are found out."""

import pytest

from model import wrong_scheduling as wrong
from support.invariants import Violation
from support.objects import status


def test_the_day_ends_well_for_all_gangs(loop):
    world = wrong.day(loop)
    ends = {job["metadata"]["name"]: status(job) for job in world.cluster.jobs()}
    assert {end["phase"] for end in ends.values()} == {"Succeeded"}
    assert {end["restarts"]["charged"] for end in ends.values()} == {0}
    assert ends["a"]["restarts"]["replaced"] == 1
    assert ends["b"]["restarts"]["disruptions"] == 1, "for c"
    assert world.cluster.groups() == []


@pytest.mark.parametrize(
    ("planner", "name"),
    [
        (wrong.gives_a_waiting_group_back, "g4_waits_in_peace"),
        (wrong.waits_for_the_rest_for_ever, "g3_half"),
        (wrong.replaces_outside_of_the_group, "g1_one_group"),
        (wrong.keeps_the_group_of_an_ended_attempt, "g6_group_goes"),
        (wrong.counts_who_stands_by, "i8_ends"),
        (wrong.wants_one_too_few, "g5_placed_whole"),
        (wrong.comes_back_at_once, "g7_leaves_room"),
        (wrong.makes_no_group, "i8_ends"),
    ],
)
def test_the_day_finds_it(loop, planner, name):
    with pytest.raises(Violation) as found:
        wrong.day(loop, planner)
    assert found.value.name == name
