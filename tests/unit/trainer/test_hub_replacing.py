"""The hub of a gang that holds: only the lost launcher is replaced.

H1 to H3 are rules of the protocol; tests/unit/trainer/test_following.py has the launchers' side.
"""

from __future__ import annotations

import dataclasses

import pytest

from ddpjob_trainer.launcher.hub.hub import BARRIER_SECONDS, Hub
from ddpjob_trainer.launcher.hub.messages import (
    Done,
    End,
    Exiting,
    Failed,
    Finished,
    Go,
    Hello,
    Leaving,
    Message,
    Refused,
    Stop,
    Stopped,
    Welcome,
)
from ddpjob_trainer.launcher.hub.root_cause import Exit
from ddpjob_trainer.launcher.hub.rounds import Limits

OWN = Hello("uid", "pod-0", seat=0, birth=4, replicas=3, nproc=2, holds=True, running=True)
HOLD = 330.0
Told = dict[int, list[Message]]


class Gang:
    """A hub of three launchers with two processes each, and what it posted and dropped."""

    def __init__(self, *, whole: bool = True, holds: bool = True, budget: int = 3) -> None:
        self.posted: list[tuple[int, Message]] = []
        self.dropped: list[int] = []
        own = dataclasses.replace(OWN, running=whole)
        self.hub = Hub(
            own,
            Limits(budget, hold=HOLD),
            lambda replica, message: self.posted.append((replica, message)),
            drop=self.dropped.append,
        )
        self.hub.admit(own, 0.0)
        if whole:
            self.comes(1, running=True, holds=holds)
            self.comes(2, running=True)
            self.told()

    def comes(self, replica: int, now: float = 0.0, **changes: object) -> Refused | None:
        """A launcher says Hello: a new pod if it has another ``birth``."""
        birth = changes.get("birth", OWN.birth)
        pod = f"pod-{replica}" if birth == OWN.birth else f"pod-{replica}-{birth}"
        given = {"seat": replica, "pod": pod, "running": False, **changes}
        hello = dataclasses.replace(OWN, **given)  # type: ignore[arg-type]
        refused = self.hub.refuses(hello)
        if refused is None:
            self.hub.admit(hello, now)
        return refused

    def says(self, replica: int, message: Message, now: float = 0.0) -> None:
        self.hub.receive(replica, message, now)

    def fails(self, replica: int, status: int, round_: int = 0) -> None:
        self.says(replica, Failed(round_, (Exit(2 * replica, 0, status, 0.0),), 1))

    def stop(self, *replicas: int, now: float = 1.0, round_: int = 0, step: int = -1) -> None:
        for replica in replicas:
            ours = tuple(Exit(replica * 2 + i, i, -9, 0.0, ours=True) for i in range(2))
            self.says(replica, Stopped(round_, ours, step), now)

    def told(self) -> Told:
        """What each launcher was told since the last call."""
        found: Told = {}
        for replica, message in self.posted:
            found.setdefault(replica, []).append(message)
        self.posted.clear()
        return found

    def goes(self, round_: int, number: int = 4) -> Go:
        """The Go that all three were told, and nothing after it."""
        told = self.told()
        go = told[0][-1]
        assert isinstance(go, Go)
        assert (go.number, go.round) == (number, round_)
        here = [dataclasses.replace(go, replica=replica) for replica in range(3)]
        assert [told[replica][-1] for replica in range(3)] == here
        return go


def ended(told: Told) -> set[int]:
    return {replica for replica, said in told.items() if isinstance(said[-1], End)}


def test_only_the_lost_launcher_is_replaced() -> None:
    gang = Gang()
    assert gang.hub.seats.can_wait
    gang.hub.lost(2, 1.0)
    assert gang.told() == {0: [Stop(0)], 1: [Stop(0)]}
    gang.stop(0, 1, step=7)
    assert gang.told() == {}, "they hold"
    assert gang.comes(2, 9.0, birth=5) is None
    assert gang.posted[0] == (2, Welcome(4, "pod-0"))
    [record] = gang.goes(1).records
    assert (record["kind"], record["replica"], record["snapshotStep"]) == ("lost", 2, 7)


def test_the_hub_tells_whose_link_is_lost() -> None:
    gang = Gang()
    assert gang.hub.away == []
    gang.hub.lost(1, 1.0)
    assert gang.hub.away == [1]
    gang.comes(1, birth=5, pod="new", running=False)
    assert gang.hub.away == []


def test_a_newcomer_may_come_before_all_have_stopped() -> None:
    gang = Gang()
    gang.hub.lost(2, 1.0)
    gang.stop(0)
    gang.comes(2, 1.5, birth=5)
    gang.told()
    gang.stop(1, now=2.0)
    gang.goes(1)


@pytest.mark.fault("T17")
def test_a_broken_link_costs_a_round_of_the_budget_and_a_new_pod_none() -> None:
    gang = Gang(budget=2)
    for round_ in range(9):
        gang.hub.lost(2, 1.0)
        gang.stop(0, 1, round_=round_)
        gang.comes(2, birth=5 + round_)
        gang.goes(round_ + 1)
    for round_ in (9, 10, 11):
        gang.hub.lost(1, 1.0)
        gang.stop(0, 2, round_=round_)
        gang.told()
        assert gang.comes(1) is None
        if round_ < 11:
            gang.goes(round_ + 1)
    assert ended(gang.told()) == {0, 1, 2}


@pytest.mark.parametrize("in_time", [True, False])
def test_more_are_lost_while_they_hold(in_time: bool) -> None:
    """Also newcomers before Go. The deadline is the first loss's."""
    gang = Gang()
    gang.hub.lost(2, 1.0)
    gang.stop(0, 1)
    gang.hub.lost(1, 50.0)
    for birth in (5, 6):
        for replica in (2, 1):
            assert gang.comes(replica, 60.0, birth=birth) is None
            gang.hub.lost(replica, 70.0)
    gang.comes(1, 80.0, birth=7)
    gang.told()
    if in_time:
        gang.comes(2, 90.0, birth=7)
        gang.goes(1)
        return
    assert gang.hub.tick(300.0) == 1.0 + HOLD
    assert gang.told() == {}
    gang.hub.tick(1.0 + HOLD)
    end = End(-1, "replica 2 was not replaced within 330 s", graceful=False)
    assert gang.told() == {0: [end], 1: [end]}


@pytest.mark.parametrize("way", ["holds", "budget", "done"])
def test_a_gang_that_cannot_hold_ends_at_once(way: str) -> None:
    gang = Gang(holds=way != "holds", budget=0 if way == "budget" else 3)
    assert gang.hub.seats.can_wait is (way == "done")
    if way == "done":
        gang.says(1, Done(0))
        gang.hub.lost(1, 0.5)
        assert gang.told() == {}
    gang.hub.lost(2, 1.0)
    assert ended(gang.told()) >= {0}


def test_before_all_have_come_nobody_holds() -> None:
    gang = Gang(whole=True)
    young = Hub(OWN, Limits(3, hold=HOLD), lambda *said: gang.posted.append(said))
    young.admit(OWN, 0.0)
    young.admit(dataclasses.replace(OWN, seat=1, pod="pod-1"), 0.0)
    gang.told()
    assert not young.seats.can_wait
    young.lost(1, 1.0)
    assert ended(gang.told()) == {0}


def test_who_does_not_stop_in_time_loses_its_place_and_may_come_back() -> None:
    gang = Gang()
    gang.fails(1, 75)
    gang.hub.tick(0.5)
    gang.hub.lost(1, 1.0)  # with its pod
    gang.told()
    gang.stop(0, now=2.0)
    gang.says(2, Exiting(0), 4.0)
    for second in range(4, 9):
        gang.hub.tick(float(second))
    assert gang.dropped == []
    gang.hub.tick(4.0 + BARRIER_SECONDS)
    assert gang.dropped == [2]
    assert gang.told() == {}
    gang.comes(1, 10.0, birth=5)
    assert gang.comes(2, 11.0) is None
    assert gang.goes(1).records[0]["kind"] == "lost"


def test_a_failure_of_another_before_the_loss_stays_the_cause() -> None:
    gang = Gang()
    gang.fails(1, -11)
    gang.hub.lost(2, 1.0)
    gang.stop(0, 1)
    gang.comes(2, birth=5)
    [record] = gang.goes(1).records
    assert (record["kind"], record["rank"]) == ("signal", 2)
    gang.fails(1, 64, round_=1)
    gang.told()
    gang.hub.lost(2, 1.0)
    gang.stop(0, 1, round_=1)
    assert ended(gang.told()) == {0, 1}, "nobody waits for a round that cannot be"


def test_the_end_of_a_lost_pods_worker_is_the_pods() -> None:
    gang = Gang()
    gang.fails(2, -9)
    gang.hub.lost(2, 1.0)
    gang.stop(0, 1)
    gang.comes(2, birth=5)
    assert gang.goes(1).records[0]["kind"] == "lost"


@pytest.mark.fault("N4")
def test_one_that_leaves_lets_the_others_save_and_is_replaced() -> None:
    gang = Gang()
    gang.says(1, Leaving(15))
    assert gang.told() == {replica: [Stop(0, graceful=True)] for replica in range(3)}
    gang.fails(1, 143)
    gang.stop(1)  # it need not stop, and has no place any more
    for second in range(1, 25):
        gang.says(0, Exiting(0), float(second))
        gang.hub.tick(float(second))
    gang.says(0, Stopped(0, (Exit(0, 0, 75, 0.0), Exit(1, 1, -9, 0.0)), 12), 25.0)
    gang.says(2, Stopped(0, (Exit(4, 0, 75, 0.0), Exit(5, 1, 75, 0.0)), 12), 25.0)
    assert (gang.told(), gang.dropped) == ({}, [])
    gang.hub.lost(1, 26.0)
    gang.comes(1, 27.0, birth=5)
    [record] = gang.goes(1).records
    assert (record["kind"], record["replica"], record["snapshotStep"]) == ("lost", 1, 12)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("done", [True, False])
def test_one_ended_in_the_last_step_takes_no_success_from_the_others(done, first):  # type: ignore[no-untyped-def]
    """Programs that save and end with 0 at a signal have not come to that step."""
    gang = Gang()
    ends = [
        tuple(Exit(2 * replica + i, i, 0, 0.0, done=done) for i in range(2)) for replica in range(3)
    ]
    gang.says(1, Leaving(15))
    gang.told()
    if first:
        gang.says(1, Done(0, ends[1]))
    for replica in (0, 2):
        gang.says(replica, Stopped(0, ends[replica], 16))
    if not first:
        assert gang.told() == {}
        gang.says(1, Done(0, ends[1]))
    assert gang.told() == ({replica: [Finished()] for replica in range(3)} if done else {})


def test_all_that_are_told_to_end_may_save_where_one_was_done() -> None:
    gang = Gang()
    gang.says(2, Done(0))
    for replica in (2, 1):
        gang.says(replica, Leaving(15))
    told = gang.told()
    assert [message.graceful for message in (*told[0], *told[1]) if isinstance(message, End)] == [
        True, True
    ]  # fmt: skip


def test_who_is_told_to_end_while_it_holds_leaves_a_vacancy() -> None:
    gang = Gang()
    gang.hub.lost(2, 1.0)
    gang.stop(0, 1)
    gang.says(1, Leaving(15), 2.0)
    gang.comes(2, 3.0, birth=5)
    gang.hub.lost(1, 3.0)
    gang.told()
    gang.comes(1, 4.0, birth=6)
    gang.goes(1)


def test_who_is_done_stops_again_when_another_is_lost() -> None:
    gang = Gang()
    gang.says(0, Done(0))
    gang.says(1, Done(0))
    gang.hub.lost(2, 1.0)
    assert gang.told() == {0: [Stop(0)], 1: [Stop(0)]}
    gang.stop(0, 1)
    gang.hub.lost(1, 2.0)
    gang.comes(1, birth=5)
    gang.comes(2, birth=5)
    gang.goes(1)
    for replica in range(3):
        gang.says(replica, Done(1))
    assert gang.told() == {replica: [Finished()] for replica in range(3)}


@pytest.mark.fault("N7")
def test_a_newer_pod_takes_the_place_and_the_older_is_out() -> None:
    """H3, also where the older one is linked as yet."""
    gang = Gang()
    assert gang.comes(2, 1.0, birth=5) is None
    assert gang.told() == {0: [Stop(0)], 1: [Stop(0)], 2: [Welcome(4, "pod-0")]}
    older = gang.comes(2)
    assert older is not None
    assert older.final
    assert older.reason == "this pod has been replaced by another one"
    gang.stop(0, 1)
    gang.goes(1)


@pytest.mark.fault("N7")
def test_a_pod_comes_back_once_its_old_link_is_closed_and_nothing_runs() -> None:
    gang = Gang()
    for running in (False, True):
        refused = gang.comes(2, running=running)
        assert refused is not None
        assert (refused.reason, refused.final) == ("replica 2 has been admitted before", False)
    gang.hub.lost(2, 1.0)
    assert gang.comes(2, running=True) is not None
    assert gang.comes(2, pod="another") is not None, "no two pods have one birth"
    assert gang.comes(0, birth=9) is not None, "that is the hub's own"
    assert gang.comes(2) is None
    gang.stop(0, 1)
    gang.goes(1)


def test_a_newcomer_for_one_that_never_came_stops_the_round() -> None:
    gang = Gang()
    hub = Hub(OWN, Limits(1, hold=HOLD), lambda *said: gang.posted.append(said))
    for replica in range(2):
        hub.admit(dataclasses.replace(OWN, seat=replica, pod=f"pod-{replica}"), 0.0)
    gang.told()
    gang.hub = hub
    assert gang.comes(2, birth=5) is None
    told = gang.told()
    assert (told[0], told[1], told[2][0]) == ([Stop(0)], [Stop(0)], Welcome(4, "pod-0"))
    gang.stop(0, 1)
    gang.goes(1)


def test_a_hub_that_replaces_one_waits_for_all_and_begins_with_round_0() -> None:
    gang = Gang(whole=False)
    assert not gang.hub.seats.can_wait
    assert gang.comes(1, 1.0, birth=1) is None, "a survivor"
    gang.hub.lost(1, 2.0)
    gang.comes(2, 3.0, birth=4)
    gang.hub.tick(4.0)
    assert not any(isinstance(message, Go) for said in gang.told().values() for message in said)
    assert gang.comes(1, 5.0, birth=1, pod="pod-1-1") is None, "it is back"
    assert gang.hub.seats.can_wait
    assert gang.goes(0).records == ()
    gang.hub.lost(2, 6.0)
    gang.stop(0, 1, now=6.0)
    gang.comes(2, birth=5)
    gang.goes(1)


def test_a_hub_that_replaces_one_does_not_wait_for_ever() -> None:
    gang = Gang(whole=False)
    gang.comes(1, 1.0, birth=1)
    gang.hub.tick(HOLD)
    assert ended(gang.told()) == {0, 1}


@pytest.mark.parametrize(
    ("whole", "change", "final"),
    [
        # A whole gang began with the hub: older pods are none of it.
        (True, {"birth": 3}, True),
        (True, {"birth": 3, "running": True}, True),
        (True, {"birth": 5, "running": True}, False),  # this hub is out of date
        # The launcher has to stop a round of the old hub first, and waits for a call.
        (False, {"birth": 3, "running": True}, False),
        (False, {"birth": 3, "running": True, "holds": False}, True),
    ],
)
def test_who_runs_what_is_none_of_the_hubs_is_refused(whole, change, final):  # type: ignore[no-untyped-def]
    gang = Gang(whole=whole)
    refused = gang.comes(1, **change)
    assert refused is not None
    assert (refused.reason, refused.final) == ("this hub belongs to attempt 4", final)


# --- Standbys ------------------------------------------------------------------------------------


class Waited(Gang):
    """Three launchers, and the standbys of seats 3 and 4."""

    def __init__(self, *, whole: bool = True, standby: int = 2) -> None:
        super().__init__(whole=whole)
        self.hub.seats.own = dataclasses.replace(self.hub.seats.own, standby=standby)
        self.standby = standby
        for seat in range(3, 3 + standby) if whole else ():
            assert self.comes(seat) is None
        assert self.told() == {seat: [Welcome(4, "pod-0")] for seat in range(3, 3 + standby)} or (
            not whole
        )

    def comes(self, replica: int, now: float = 0.0, **changes: object) -> Refused | None:
        return super().comes(replica, now, **{"standby": getattr(self, "standby", 0), **changes})

    def serve(self, round_: int, *seats: int) -> None:
        """These, and nobody else, were told to begin."""
        went = {
            seat: said[-1].replica
            for seat, said in self.told().items()
            if isinstance(said[-1], Go) and said[-1].round == round_
        }
        assert went == {seat: replica for replica, seat in enumerate(seats)}
        assert self.hub.runs

    def ends(self, *seats: int, round_: int) -> None:
        """These stop, by the replicas that they serve."""
        for seat in seats:
            replica = self.hub.seats.serving.index(seat)
            ours = tuple(Exit(replica * 2 + i, i, -9, 0.0, ours=True) for i in range(2))
            self.says(seat, Stopped(round_, ours, -1), 1.0)


def test_a_standby_takes_the_place_as_soon_as_all_have_stopped() -> None:
    gang = Waited()
    assert (gang.hub.seats.can_wait, gang.hub.seats.moved) == (True, "")
    gang.hub.lost(2, 1.0)
    gang.ends(0, round_=0)
    assert not any(isinstance(said[-1], Go) for said in gang.told().values())
    gang.ends(1, round_=0)
    gang.serve(1, 0, 1, 3)
    assert gang.hub.seats.moved == "2:3"
    [record] = gang.hub.history.records
    assert (record["kind"], record["replica"]) == ("lost", 2)
    assert gang.hub.history.failures == 0, "the operator counts it"


def test_who_was_replaced_by_a_standby_is_out_and_its_newcomer_stands_by() -> None:
    gang = Waited(standby=1)
    gang.hub.lost(2, 1.0)
    gang.ends(0, 1, round_=0)
    gang.serve(1, 0, 1, 3)
    refused = gang.comes(2)
    assert refused == Refused("this pod has been replaced by another one", final=True)
    assert gang.comes(2, birth=5) is None
    assert gang.told() == {2: [Welcome(4, "pod-0")]}, "nobody stops for it"
    gang.hub.lost(1, 2.0)
    gang.ends(0, 3, round_=1)
    gang.serve(2, 0, 2, 3)
    assert gang.hub.seats.moved == "1:2,2:3"
    gang.says(3, Failed(2, (Exit(4, 0, -11, 0.0),), 1))
    gang.ends(0, 2, 3, round_=2)
    gang.serve(3, 0, 2, 3)
    assert gang.hub.history.records[-1]["replica"] == 2


def test_who_is_back_in_time_keeps_its_place_and_a_standby_takes_another() -> None:
    gang = Waited(standby=1)
    gang.hub.lost(1, 1.0)
    gang.hub.lost(2, 1.0)
    gang.ends(0, round_=0)
    assert gang.hub.waits
    gang.told()
    assert gang.comes(2) is None
    gang.serve(1, 0, 3, 2)


def test_the_place_of_one_that_leaves_is_taken_when_it_has_left() -> None:
    """Till then its workers save, or run on while those of another that failed do not."""
    gang = Waited()
    gang.says(2, Leaving(15), 1.0)
    gang.ends(0, 1, round_=0)
    assert gang.hub.waits
    gang.hub.lost(2, 2.0)
    gang.hub.tick(2.0)
    gang.serve(1, 0, 1, 3)


def test_a_lost_standby_is_nobodys_business() -> None:
    gang = Waited()
    gang.hub.lost(3, 1.0)
    gang.says(4, Leaving(15))
    assert gang.told() == {}
    assert gang.hub.runs
    gang.hub.lost(2, 1.0)
    gang.ends(0, 1, round_=0)
    assert gang.hub.waits, "one that leaves takes no place"
    gang.told()
    assert gang.comes(3, birth=5) is None
    gang.serve(1, 0, 1, 3)


def test_the_hub_never_goes_on_without_its_own_launcher() -> None:
    gang = Waited()
    gang.says(0, Leaving(15))
    gang.ends(1, 2, round_=0)
    assert gang.hub.waits


def test_a_new_hub_begins_with_the_first_to_come_and_asks_who_served_what() -> None:
    gang = Waited(whole=False)
    assert gang.comes(4, birth=1) is None
    assert not gang.hub.complete
    assert gang.comes(3, birth=1, held=2) is None
    gang.serve(0, 0, 4, 3)
    assert gang.comes(2, birth=4) is None
    assert not gang.hub.complete, "one has still to be called"
    assert gang.comes(1, birth=1, held=1) is None
    assert gang.hub.complete
    gang.told()
    gang.hub.lost(4, 1.0)
    gang.ends(0, 3, round_=0)
    gang.serve(1, 0, 1, 3)


def test_a_new_pod_takes_no_place_from_one_that_has_served() -> None:
    gang = Waited(whole=False, standby=1)
    gang.comes(2, birth=4)
    gang.comes(3, birth=1, held=2)
    gang.serve(0, 0, 2, 3)


def test_all_hear_of_the_end_and_nobody_waits_for_a_standby() -> None:
    gang = Waited(standby=1)
    for seat in (1, 2):
        assert gang.hub.needed
        gang.says(seat, Done(0))
    assert not gang.hub.needed
    gang.says(0, Done(0))
    assert gang.told() == {seat: [Finished()] for seat in range(4)}


def test_a_standby_has_no_say_and_none_may_run() -> None:
    gang = Waited(standby=1)
    gang.says(3, Failed(0, (Exit(0, 0, -9, 0.0),), 0))
    gang.says(3, Done(0))
    assert gang.told() == {}
    assert gang.comes(3, birth=5, standby=0) is not None
    gang.hub.lost(3, 1.0)
    refused = gang.comes(3, running=True)
    assert refused == Refused("replica 3 is not one of 3", final=True)
