"""A rank that holds up the others is named in the status, with its pod and node."""

import pytest

from support.world import running


@pytest.mark.parametrize(("by", "reason"), [("compute", "SlowRank"), ("data", "SlowInput")])
def test_it_is_told_once_with_its_place_and_taken_back(by, reason):
    world = running()
    slow = {"rank": 2, "share": 0.31, "by": by}
    world.poll(step=5, straggler=slow)
    found = world.condition("Straggling")
    assert (found["status"], found["reason"]) == ("True", reason)
    assert "rank 2 in pod job-2 on node1" in found["message"]
    world.poll(step=6, straggler={**slow, "share": 0.42})
    assert world.condition("Straggling") == found, "a little slower is no news"
    world.poll(step=7)
    assert world.condition("Straggling")["status"] == "False"
    assert len(world.told(reason)) == 1


@pytest.mark.parametrize("said", [{}, {"rank": -1, "share": 0.5}, {"rank": 1, "share": 7}, [], "x"])
def test_what_a_stranger_says_of_it_is_ignored(said):
    world = running().poll(step=5, straggler=said)
    assert world.condition("Straggling") == {}


def test_a_lost_gang_has_no_slow_rank():
    world = running().poll(step=5, straggler={"rank": 2, "share": 0.31, "by": "compute"})
    world.end(1, 1)
    assert world.condition("Straggling")["status"] == "False"
