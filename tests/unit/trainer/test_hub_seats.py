"""Who is admitted to a gang, and who serves which replica: H1 to H3, rules of the protocol.

test_hub_phases.py has what the hub does then.
"""

import pytest

from ddpjob_trainer.launcher.hub.messages import Done, Exiting, Failed, Finished, Leaving, Refused
from ddpjob_trainer.launcher.hub.root_cause import Exit
from support.hub_gang import WELCOME, Gang

REPLACED = Refused("this pod has been replaced by another one", final=True)
ADMITTED = Refused("replica 2 has been admitted before", final=False)
OTHER_ATTEMPT = "this hub belongs to attempt 4"


@pytest.mark.parametrize(
    ("change", "words", "final"),
    [
        ({"uid": "other"}, "another job", False),
        ({"token": "x"}, "", False),  # a pod made without a secret asks for none
        ({"nproc": 1}, "hub has 3x2", True),
        ({"replicas": 4}, "hub has 3x2", True),
        ({"standby": 1}, "3x2 processes, launcher", True),
        ({"seat": 3}, "replica 3 is not one of 3", True),
        ({"seat": -1}, "replica -1 is not one of 3", True),
        ({"seat": 1}, "admitted before", False),
        # A whole gang began with the hub: older pods are none of it, and it is none of newer ones.
        ({"birth": 3}, OTHER_ATTEMPT, True),
        ({"birth": 3, "running": False}, OTHER_ATTEMPT, True),
        ({"birth": 5}, OTHER_ATTEMPT, False),
    ],
)
def test_only_this_gang_is_admitted_and_each_once(change, words, final):
    gang = Gang((0, 1))
    refused = gang.comes(**{"seat": 2, "running": True, **change})
    if words:
        assert (words in refused.reason, refused.final) == (True, final)
    assert gang.said() == ({} if words else {2: [WELCOME]})


@pytest.mark.parametrize("can_wait", [True, False])
def test_who_runs_a_round_of_the_old_hub_has_to_stop_it_first(can_wait):
    """It waits for a call of the new hub, if it can wait."""
    gang = Gang(replaces=True)
    refused = gang.comes(1, birth=3, running=True, holds=can_wait)
    assert refused == Refused(OTHER_ATTEMPT, final=not can_wait)
    assert gang.comes(1, birth=3) is None


@pytest.mark.fault("N7")
def test_a_newer_pod_takes_the_seat_and_the_older_is_out():
    """H3."""
    gang = Gang()
    assert gang.comes(2, 1.0, birth=5) is None
    assert gang.comes(2) == REPLACED
    gang.stop(0, 1)
    gang.goes(1)


@pytest.mark.fault("N7")
def test_a_pod_comes_back_once_its_link_is_closed_and_nothing_runs():
    gang = Gang()
    for running in (False, True):
        assert gang.comes(2, running=running) == ADMITTED
    gang.loses(2)
    assert gang.comes(2, running=True) == ADMITTED
    assert gang.comes(2, pod="another") == ADMITTED, "no two pods have one birth"
    assert gang.comes(0, birth=9) is not None, "that is the hub's own"
    assert gang.comes(2) is None
    gang.stop(0, 1)
    gang.goes(1)


# --- Standbys: seats 3 and 4 -----------------------------------------------------------------


def test_a_standby_takes_the_place_as_soon_as_all_have_stopped():
    gang = Gang(standby=2)
    assert (gang.hub.seats.can_wait, gang.hub.facts["serving"]) == (True, "")
    gang.loses(2)
    gang.stop(0)
    assert gang.words() == dict.fromkeys((0, 1, 3, 4), "Stop")
    gang.stop(1)
    [record] = gang.goes(1, (0, 1, 3)).records
    assert (record["kind"], record["replica"]) == ("lost", 2)
    assert gang.hub.facts["serving"] == "2:3"


def test_who_was_replaced_by_a_standby_is_out_and_its_newcomer_waits():
    gang = Gang(standby=1)
    gang.loses(2)
    gang.stop(0, 1)
    gang.goes(1, (0, 1, 3))
    assert gang.comes(2) == REPLACED
    assert gang.comes(2, birth=5) is None
    assert gang.said() == {2: [WELCOME]}, "nobody stops for it"
    gang.loses(1)
    gang.stop(0, 3)
    gang.goes(2, (0, 2, 3))
    assert gang.hub.facts["serving"] == "1:2,2:3"
    gang.fails(3, -11)
    gang.stop(0, 2, 3)
    assert gang.goes(3, (0, 2, 3)).records[-1]["replica"] == 2


def test_losses_that_standbys_fill_cost_none_of_the_budget():
    gang = Gang(standby=2, budget=1)
    gang.loses(2)
    gang.stop(0, 1)
    gang.goes(1, (0, 1, 3))
    gang.loses(1)
    gang.stop(0, 3)
    gang.goes(2, (0, 4, 3))


def test_who_is_back_in_time_keeps_its_place():
    """And no more are replaced than stand by."""
    gang = Gang(standby=1)
    gang.loses(1, 2)
    gang.stop(0)
    assert gang.hub.waits
    gang.said()
    assert gang.comes(2) is None
    gang.goes(1, (0, 3, 2))


def test_the_place_of_one_that_leaves_is_taken_when_it_has_left():
    """Till then its workers save, or run on while those of another that failed do not."""
    gang = Gang(standby=2)
    gang.says(2, Leaving(15))
    gang.stop(0, 1)
    assert gang.hub.waits
    gang.loses(2, now=2.0)
    gang.hub.tick(2.0)
    gang.goes(1, (0, 1, 3))


def test_the_loss_of_a_standby_changes_nothing_until_it_is_needed():
    gang = Gang(standby=2)
    gang.loses(3)
    gang.says(4, Leaving(15))
    assert (gang.said(), gang.hub.runs) == ({}, True)
    gang.loses(2)
    gang.stop(0, 1)
    assert gang.hub.waits, "one that leaves takes no place"
    gang.said()
    assert gang.comes(3, birth=5) is None
    gang.goes(1, (0, 1, 3))


def test_no_standby_takes_the_place_of_the_hubs_own_launcher():
    gang = Gang(standby=2)
    gang.says(0, Leaving(15))
    gang.stop(1, 2)
    assert gang.hub.waits


def test_a_new_hub_begins_with_the_first_that_come():
    """And asks them what they served."""
    gang = Gang(standby=2, replaces=True)
    assert gang.comes(4, birth=1) is None
    assert not gang.hub.complete
    assert gang.comes(3, birth=1, held=2) is None
    gang.goes(0, (0, 4, 3))
    assert gang.comes(2, birth=4) is None
    assert not gang.hub.complete, "one has still to be called"
    assert gang.comes(1, birth=1, held=1) is None
    assert gang.hub.complete
    gang.said()
    gang.loses(4)
    gang.stop(0, 3)
    gang.goes(1, (0, 1, 3))


def test_a_new_pod_takes_no_place_from_one_that_has_served():
    gang = Gang(standby=1, replaces=True)
    gang.comes(2, birth=4)
    gang.comes(3, birth=1, held=2)
    gang.goes(0, (0, 2, 3))


def test_standbys_hear_of_the_end_and_nobody_waits_for_them():
    gang = Gang(standby=1)
    for seat in (1, 2):
        assert gang.hub.needed
        gang.says(seat, Done(0))
    assert not gang.hub.needed
    gang.says(0, Done(0))
    assert gang.said() == {seat: [Finished()] for seat in range(4)}


def test_a_standby_has_no_say_and_none_may_run():
    gang = Gang(standby=1)
    for message in (Failed(0, (Exit(0, 0, -9, 0.0),), 0), Done(0), Exiting(0)):
        gang.says(3, message)
    assert gang.said() == {}
    assert gang.comes(3, birth=5, standby=0) is not None
    gang.loses(3)
    assert gang.comes(3, running=True) == Refused("replica 3 is not one of 3", final=True)
