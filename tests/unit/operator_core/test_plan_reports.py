"""What launchers tell of a gang that runs is shown and taken back, and decides nothing.

A gang that prints nothing, a rank that holds up the others, replicas without a connection.
"""

import json
from typing import Any

import pytest

from support.world import World, running

SLOW = {"rank": 2, "share": 0.31, "by": "compute"}


@pytest.mark.fault("T3")
def test_ten_minutes_without_a_line_are_shown_once_with_their_age():
    world = running().poll(silentSeconds=599)
    assert world.condition("Silent") == {}
    world.wait(15).poll(silentSeconds=614)
    what = "no rank has printed a line, or made a step, for 10 min"
    assert world.condition("Silent")["message"] == what
    assert (world.status["reason"], world.status["message"]) == ("NoOutput", what)
    world.log.clear()
    world.wait(15).poll(silentSeconds=629)
    assert world.log == [], "a minute more is no news"
    world.wait(1000).poll(silentSeconds=1629).wait(2)
    assert world.status["message"].endswith("for 20 min")
    world.wait(15).poll(silentSeconds=3).wait(2)
    assert world.condition("Silent")["status"] == "False"
    assert "reason" not in world.status
    assert len(world.told("NoOutput")) == 1


@pytest.mark.parametrize("left", [0, 3])
def test_what_is_said_of_a_gang_that_runs_ends_with_it(left):
    world = running(restart={"maxRestarts": left}).poll(silentSeconds=700, connected=False)
    world.poll(silentSeconds=700, connected=False, straggler=SLOW).wait(60)
    said = ("Silent", "Apart", "Straggling", "Running")
    assert [world.condition(one)["status"] for one in said] == ["True"] * 4
    world.end(1, 1)
    assert world.status.get("reason") == (None if left else "MaxRestartsExceeded")
    assert [world.condition(one)["status"] for one in said] == ["False"] * 4


def test_a_poll_of_the_attempt_before_says_nothing_of_this_one():
    world = running().poll(silentSeconds=700)
    world.end(1, 1).wait(301).run().wait(5)
    assert (world.phase, world.condition("Silent")["status"]) == ("Running", "False")
    assert world.condition("Silent")["reason"] == "Progressing"


@pytest.mark.parametrize(
    ("name", "condition", "said"),
    [
        *(("silentSeconds", "Silent", said) for said in (-1, "9", None, [], True)),
        *(("straggler", "Straggling", said) for said in
          ({}, {"rank": -1, "share": 0.5}, {"rank": 1, "share": 7}, [], "x")),
    ],
)  # fmt: skip
def test_what_a_stranger_says_of_it_is_ignored(name, condition, said):
    assert running().poll(step=5, **{name: said}).condition(condition) == {}


@pytest.mark.parametrize(("by", "reason"), [("compute", "SlowRank"), ("data", "SlowInput")])
def test_a_slow_rank_is_shown_once_with_its_place_and_taken_back(by, reason):
    world = running()
    slow = {**SLOW, "by": by}
    world.poll(step=5, straggler=slow)
    found = world.condition("Straggling")
    assert (found["status"], found["reason"]) == ("True", reason)
    assert "rank 2 in pod job-2 on node1" in found["message"]
    world.poll(step=6, straggler={**slow, "share": 0.42})
    assert world.condition("Straggling") == found, "a little slower is no news"
    world.poll(step=7)
    assert world.condition("Straggling")["status"] == "False"
    assert len(world.told(reason)) == 1


def ends(world: World, **said: Any) -> str:
    """What Complete says once all replicas have succeeded."""
    for replica in range(world.job["spec"]["replicas"]):
        world.end(replica, 0, message=json.dumps({"version": 1, "kind": "success", **said}))
    assert world.phase == "Succeeded"
    return str(world.condition("Complete")["message"])


def test_replicas_apart_are_shown_once_and_at_the_end():
    world = running().poll()
    assert world.wait(300).poll().condition("Apart") == {}, "it may be reading its data"
    assert world.poll(connected=False).wait(3).condition("Apart")["status"] == "True"
    what = "no connection between the 3 replicas was seen: each may train by itself"
    assert (world.status["reason"], world.status["message"]) == ("NotConnected", what)
    world.wait(60).poll(connected=False, printed={"step": 3}).wait(60)
    assert world.told("NotConnected") == [what]
    said = ends(world, connected=False)
    assert said.endswith("; " + what.replace("train", "have trained"))
    assert world.condition("Apart")["status"] == "False"
    assert world.counts[1:] == (0, 0)


def test_each_attempt_says_it_once_and_a_connection_takes_it_back():
    world = running(restart={"maxRestarts": 9})
    for number in (1, 2):
        world.poll(connected=False).wait(121)
        assert len(world.told("NotConnected")) == number
        world.end(1, 1).wait(301).run().wait(5)
        assert world.condition("Apart")["status"] == "False"
    world.poll(connected=False).wait(121).poll(connected=True).wait(5)
    assert world.condition("Apart")["status"] == "False"
    assert "no connection" not in ends(world, connected=True)


HOST = {"spec": {"hostNetwork": True, "containers": [{"name": "trainer", "image": "trainer"}]}}


@pytest.mark.parametrize(
    ("spec", "said"),
    [({"template": HOST}, False), ({"replicas": 1}, False), ({}, None), ({}, "no"), ({}, True)],
)
def test_where_nobody_can_know_of_connections_nothing_is_said(spec, said):
    world = running(**spec).poll(connected=said).wait(300).poll(connected=said)
    assert world.condition("Apart") == {}
    assert "no connection" not in ends(world, connected=said)
