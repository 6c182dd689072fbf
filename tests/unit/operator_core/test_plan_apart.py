"""Replicas without a connection with one another are no gang: it is said, and decides nothing."""

import json
from typing import Any

import pytest

from support.world import World, running


def ends(world: World, **said: Any) -> str:
    """What Complete says once all replicas have succeeded."""
    for replica in range(world.job["spec"]["replicas"]):
        world.end(replica, 0, message=json.dumps({"version": 1, "kind": "success", **said}))
    assert world.phase == "Succeeded"
    return str(world.condition("Complete")["message"])


def test_it_is_shown_once_and_at_the_end():
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
def test_where_nobody_can_know_nothing_is_said(spec, said):
    world = running(**spec).poll(connected=said).wait(300).poll(connected=said)
    assert world.condition("Apart") == {}
    assert "no connection" not in ends(world, connected=said)
