"""Only the lost pod is replaced, or a standby serves: the test plays real launchers' operator.

It kills one by SIGKILL, as a node's end does, or tells it to end, and starts its successor with a
greater attempt. The others keep their processes' launchers, and all ends in the same bits.
"""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.operated import HUB, Operated
from support.patience import PATIENCE
from support.rounds import Forwarder, alive, children


@pytest.fixture
def gang(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Operated]:
    found: Operated = getattr(request, "param", Operated)(tmp_path)
    yield found
    found.end()


@pytest.mark.fault("N13", "T5")
def test_each_pod_in_turn_is_lost_and_only_it_is_replaced(gang, undisturbed):
    """In the midst of the second epoch; the pod with the hub comes last.

    The first's GPU fails. The others' workers wait as well, or for the lost one, and notice its end
    by themselves.
    """
    gang.hold("1-0-step-11", "1-1-step-12-2", "1-2-step-13-0")
    gang.begin()
    first = gang.launchers[:]
    places = {"1-0-step-11": (1, range(3)), "1-1-step-12": (2, [2]), "1-2-step-13": (0, [0])}
    for place, (replica, ranks) in places.items():
        workers = gang.at(place, ranks)
        assert (gang.state()["attempt"], gang.state()["holds"]) == (1, True)
        gang.break_gpu(1) if replica == 1 else gang.lose(replica)
        gang.until(lambda pids=workers: not any(map(alive, pids)), "all workers have ended")
        survivors = [one for one in range(3) if one != replica]
        assert all(gang.launchers[one].poll() is None for one in survivors), "they hold"
        gang.replace(replica)
    assert gang.codes() == [0, 0, 0], gang.errors
    assert [one.returncode for one in first] == [-9, 74, -9], "each was lost once, and nothing else"
    assert gang.outcome() == undisturbed
    assert gang.report()["round"] == 0, "of hub 4"


@pytest.mark.fault("T16")
def test_one_that_is_stopped_comes_back_or_is_turned_away(gang, undisturbed):
    """Neither closes a connection: only its silence tells."""
    gang.hold("1-0-step-11", "1-1-step-12")
    gang.begin()
    for place, replica in (("1-0-step-11", 1), ("1-1-step-12", 2)):
        gang.at(place)
        old = gang.launchers[replica]
        old.send_signal(signal.SIGSTOP)
        gang.until(lambda one=replica: gang.state().get("away") == [one], "the hub notices")
        if replica == 2:
            gang.succeed(2)
            gang.until(lambda: "away" not in gang.state(), "the new one has its place")
        old.send_signal(signal.SIGCONT)
    _, said = old.communicate(timeout=PATIENCE)
    assert old.returncode == 75, said
    assert "this pod has been replaced by another one" in said
    assert gang.codes() == [0, 0, 0], gang.errors
    assert gang.outcome() == undisturbed
    assert [one["replica"] for one in gang.report()["rounds"]] == [1, 2]


@pytest.mark.tier("all")
@pytest.mark.fault("T5", "T17")
def test_one_that_leaves_costs_no_step_and_a_broken_link_no_pod(gang, undisturbed):
    """Nor ends the job where the others are done when the last is lost."""
    forwarder = Forwarder(gang.hub_port, HUB)
    gang.hold("1-0-step-9", "1-1-step-13", "1-2-end-2")
    gang.begin(r2=forwarder.port)
    gang.at("1-0-step-9")
    gang.launchers[1].send_signal(signal.SIGTERM)
    gang.until(lambda: gang.marks("leaving"), "its worker knows")
    gang.release("1-0-step-9")
    gang.until(lambda: gang.launchers[1].poll() is not None, "it has ended")
    assert gang.launchers[1].returncode == 143
    gang.replace(1)
    gang.at("1-1-step-13")
    [record] = gang.state()["rounds"]
    assert (record["kind"], record["replica"]) == ("lost", 1)
    assert record["snapshotStep"] >= 10, "all saved together"
    forwarder.cut(again=True)
    gang.at("1-2-end", ranks=[2])
    survivors = gang.launchers[:2]
    gang.until(lambda: not any(children(one.pid) for one in survivors), "the others are done")
    gang.lose(2)
    gang.replace(2)
    assert gang.codes() == [0, 0, 0], gang.errors
    assert gang.launchers[:2] == survivors
    assert gang.outcome() == undisturbed
    assert [one["replica"] for one in gang.report()["rounds"]] == [1, 2, 2]


# --- Standbys ------------------------------------------------------------------------------------


class Waited(Operated):
    """A gang of three, and one standby in seat 3."""

    standby = 1

    def linked(self, number: int) -> None:
        """Wait until so many links have been made in all, that of the hub aside."""
        self.until(lambda: len(self.marks("admitted")) == number, f"{number} links")

    def assigned(self) -> list[int]:
        return sorted(self.report(seat)["replica"] for seat in range(4))


@pytest.mark.fault("T5", "N25")
@pytest.mark.parametrize("gang", [Waited], indirect=True)
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
    assert gang.assigned() == [-1, 0, 1, 2]
    assert gang.report()["round"] == 0, "of hub 3"
