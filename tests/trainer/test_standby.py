"""Standbys take the places of lost launchers: real ones, of which the test plays the operator.

All ends in the same bits as without a loss, and nobody waits for a new pod unless the hub is lost.
"""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.operated import Operated
from support.patience import PATIENCE
from support.rounds import alive


class Waited(Operated):
    """A gang of three, and one standby in seat 3."""

    standby = 1

    def linked(self, number: int) -> None:
        """Wait until so many links have been made in all, that of the hub aside."""
        self.until(lambda: len(self.marks("admitted")) == number, f"{number} links")

    def replicas(self) -> list[int]:
        return sorted(self.report(seat)["replica"] for seat in range(4))


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[Waited]:
    found = Waited(tmp_path)
    yield found
    found.end()


@pytest.mark.fault("T5", "N25")
def test_a_standby_serves_at_once_and_a_newcomer_when_that_hub_is_lost(gang, undisturbed):
    """In the midst of the second epoch. Who serves other replicas goes on with a new hub."""
    gang.hold("1-0-step-11", "1-1-step-12", "1-2-step-13")
    gang.begin()
    gang.at("1-0-step-11")
    gang.linked(3)
    assert gang.state().get("serving") is None
    gang.lose(2)
    gang.at("1-1-step-12")
    assert gang.state()["serving"] == "2:3"
    gang.replace(2)
    gang.linked(4)
    gang.lose(1)
    gang.at("1-2-step-13")
    assert gang.state()["serving"] == "1:2,2:3"
    assert [one["replica"] for one in gang.state()["rounds"]] == [2, 1]
    gang.lose(0)
    gang.replace(0, 1)
    assert gang.codes() == [0, 0, 0, 0], gang.errors
    assert [one.returncode for one in gang.gone] == [-9] * 3, "each was lost once, and nothing else"
    assert gang.outcome() == undisturbed
    assert gang.replicas() == [-1, 0, 1, 2]
    assert gang.report()["round"] == 0, "of hub 3"


@pytest.mark.tier("all")
@pytest.mark.fault("T16", "N26")
def test_a_lost_standby_stops_nobody_and_a_late_comer_is_turned_away(gang, undisturbed):
    gang.hold("1-0-step-9", "1-1-step-12")
    gang.begin()
    workers = gang.at("1-0-step-9")
    gang.linked(3)
    gang.lose(3)
    gang.until(lambda: gang.state().get("away") == [3], "the hub notices")
    gang.replace(3)
    gang.linked(4)
    assert all(map(alive, workers)), "nobody was restarted"
    late = gang.launchers[2]
    late.send_signal(signal.SIGSTOP)
    gang.at("1-1-step-12")
    assert gang.state()["serving"] == "2:3"
    late.send_signal(signal.SIGCONT)
    _, said = late.communicate(timeout=PATIENCE)
    assert "this pod has been replaced by another one" in said
    gang.release("1-1-step-12")
    assert gang.codes() == [0, 0, 75, 0], gang.errors
    assert gang.outcome() == undisturbed
    assert [one["replica"] for one in gang.report()["rounds"]] == [2]
