"""A gang that prints nothing shows it, with how long; a step or a line takes it back."""

import pytest

from support.world import running


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


def test_what_matters_more_comes_first_and_the_end_clears_it():
    world = running(restart={"maxRestarts": 0}).poll(silentSeconds=700)
    world.end(1, 1)
    assert (world.phase, world.status["reason"]) == ("Failed", "MaxRestartsExceeded")
    assert world.condition("Silent")["status"] == "False"


def test_a_poll_of_the_attempt_before_says_nothing_of_this_one():
    world = running().poll(silentSeconds=700)
    world.end(1, 1).wait(301).run().wait(5)
    assert (world.phase, world.condition("Silent")["status"]) == ("Running", "False")
    assert world.condition("Silent")["reason"] == "Progressing"


@pytest.mark.parametrize("said", [-1, "9", None, [], True])
def test_what_a_stranger_says_of_it_is_ignored(said):
    assert running().poll(silentSeconds=said).condition("Silent") == {}
