"""The hub without sockets: admission, the barrier, and the ends of an attempt."""

from __future__ import annotations

import dataclasses

import pytest

from ddpjob_trainer.launcher.hub import messages
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
from ddpjob_trainer.launcher.hub.root_cause import CAUSE_WAIT_SECONDS, Exit
from ddpjob_trainer.launcher.hub.rounds import Limits

GANG = Hello(
    "uid", "pod-0", seat=0, birth=4, replicas=3, nproc=2, holds=False, running=True
)  # fmt: skip


class Scene:
    """A hub of three launchers with two processes each, and what it posted."""

    def __init__(self, budget: int = 3, here: tuple[int, ...] = (0, 1, 2)) -> None:
        self.posted: list[tuple[int, Message]] = []
        self.modified = -1
        self.newest: str | None = ""
        self.asked = 0  # for it
        self.hub = Hub(
            GANG,
            Limits(budget, heal_after=60),
            lambda replica, message: self.posted.append((replica, message)),
            lambda: self.modified,
            newest=self.look,
        )
        for replica in here:
            assert self.comes(replica) is None
        self.told()

    def look(self, *, failed: bool) -> str | None:
        self.asked += 1
        self.failed = failed
        return self.newest

    def comes(self, replica: int, **changes: object) -> Refused | None:
        """A launcher's Hello."""
        hello = dataclasses.replace(
            GANG, **{"seat": replica, "pod": f"pod-{replica}", **changes}
        )  # fmt: skip
        refused = self.hub.refuses(hello)
        if refused is None:
            self.hub.admit(hello, 0.0)
        return refused

    def told(self) -> dict[int, list[Message]]:
        """What each launcher was told since the last call."""
        found: dict[int, list[Message]] = {}
        for replica, message in self.posted:
            found.setdefault(replica, []).append(message)
        self.posted.clear()
        return found

    def fails(self, replica: int, status: int, now: float = 0.0, round_: int = 0) -> None:
        exit_ = Exit(replica * 2, 0, status, 0.0)
        self.hub.receive(replica, Failed(round_, (exit_,), 1), now)

    def stops(self, *replicas: int, now: float = 0.1, round_: int = 0, step: int = -1) -> None:
        for replica in replicas:
            ours = tuple(Exit(replica * 2 + i, i, -9, 0.0, ours=True) for i in range(2))
            self.hub.receive(replica, Stopped(round_, ours, step), now)

    def watch(self, begin: float, end: float) -> None:
        """Seconds that the launcher of the hub spends awake, after the first."""
        now = begin
        while now < end:
            now = min(now + 1, end)
            self.hub.tick(now)

    def everyone(self, message: Message) -> dict[int, list[Message]]:
        return {replica: [message] for replica in range(3)}


def test_a_death_stops_all_and_the_next_round_waits_for_all() -> None:
    scene = Scene()
    scene.fails(1, -9)
    assert scene.told() == scene.everyone(Stop(0))
    scene.stops(0, 1, step=7)
    assert scene.told() == {}
    scene.stops(2)
    told = scene.told()
    go = told[0][0]
    assert isinstance(go, Go)
    assert told == {replica: [dataclasses.replace(go, replica=replica)] for replica in range(3)}
    assert (go.round, go.records[0]["rank"], go.records[0]["snapshotStep"]) == (1, 2, 7)
    scene.fails(0, -9, round_=0)  # too late: of the round before
    assert scene.told() == {}
    scene.fails(0, -9, round_=1)
    assert scene.told() == scene.everyone(Stop(1))


@pytest.mark.parametrize(
    ("lasted", "modified", "end"),
    [(1.0, -1, End), (60.0, -1, Go), (1.0, 7, Go)],
)
def test_how_long_a_round_lasted_and_a_newer_file_count_as_progress(
    lasted: float, modified: int, end: type[Message]
) -> None:
    scene = Scene(budget=1)
    scene.hub.tick(100.0)
    scene.fails(1, -9, now=101.0)
    scene.stops(0, 1, 2, now=101.0)
    assert isinstance(scene.told()[2][-1], Go)
    scene.hub.tick(200.0)
    scene.modified = modified
    scene.fails(1, -9, now=200.0 + lasted, round_=1)
    scene.stops(0, 1, 2, now=200.0 + lasted, round_=1)
    assert isinstance(scene.told()[2][-1], end)


def test_all_go_on_from_the_checkpoint_that_the_hub_found_when_all_stopped() -> None:
    scene = Scene()
    scene.fails(1, -9)
    scene.stops(0, 1)
    assert scene.asked == 0, "another may still write one"
    scene.told()
    scene.newest = None
    scene.stops(2)
    assert (scene.told(), scene.asked) == ({}, 1), "the file server has not answered"
    scene.newest = "ck/7.pt"
    scene.hub.tick(0.5)
    gos = [told[-1] for told in scene.told().values()]
    assert [go.newest for go in gos if isinstance(go, Go)] == ["ck/7.pt"] * 3
    assert not scene.failed, "it was killed"
    scene.fails(1, 1, round_=1)
    scene.stops(0, 1, 2, round_=1)
    assert scene.failed


def test_without_rounds_a_launcher_is_alone_with_the_gangs_ranks() -> None:
    """As membership.join has it for replica 2 of 3: a hub of its own, and no round follows."""
    posted: list[Message] = []
    alone = dataclasses.replace(GANG, replicas=1, nproc=1)
    hub = Hub(alone, Limits(0), lambda _, message: posted.append(message))
    hub.admit(alone, 0.0)
    hub.receive(0, Failed(0, (Exit(2, 0, -9, 0.0),), 0), 0.0)
    hub.receive(0, Stopped(0, (), -1), 0.1)
    assert [type(message) for message in posted] == [Welcome, Stop, End]
    assert isinstance(posted[-1], End)
    assert posted[-1].rank == 2


def test_collateral_waits_a_moment_for_its_cause() -> None:
    scene = Scene()
    scene.fails(0, 75, now=10.0)
    assert scene.told() == {}
    assert scene.hub.tick(10.1) == 10.0 + CAUSE_WAIT_SECONDS
    scene.fails(2, -11, now=10.2)
    assert scene.told() == scene.everyone(Stop(0))
    scene = Scene()
    scene.fails(0, 75, now=10.0)
    scene.hub.tick(10.0 + CAUSE_WAIT_SECONDS)
    assert scene.told() == scene.everyone(Stop(0))


RESET = "RuntimeError: [../third_party/gloo] Connection reset by peer"


def test_a_victim_that_says_so_in_words_waits_for_one_that_cleans_up_first() -> None:
    scene = Scene()

    def fails(replica: int, exception: str, now: float) -> None:
        exit_ = Exit(replica * 2, 0, 1, 0.0, exception=exception, foreign=True)
        scene.hub.receive(replica, Failed(0, (exit_,), 1), now)

    fails(0, RESET, 10.0)
    scene.hub.tick(14.0)
    assert scene.told() == {}
    fails(1, "ValueError: boom at step 3", 14.5)
    assert scene.told() == scene.everyone(Stop(0))
    scene.stops(0, 1, 2)
    go = scene.told()[0][0]
    assert isinstance(go, Go)
    assert (go.records[0]["rank"], go.records[0]["exception"]) == (2, "ValueError: boom at step 3")


def test_a_script_that_fails_at_once_on_all_ranks_ends_with_64() -> None:
    scene = Scene()
    for round_, following in ((0, Go), (1, End)):
        ends = [
            Exit(rank, rank % 2, 1, 0.0, exception="KeyError: 'lr'", foreign=True, in_script=True)
            for rank in range(6)
        ]
        now = 10.0 * (round_ + 1)
        scene.hub.tick(now)
        scene.hub.receive(0, Failed(round_, tuple(ends[:2]), 0), now)
        scene.hub.receive(1, Failed(round_, tuple(ends[2:3]), 1), now)
        assert scene.told() == {}, "the others have not ended"
        for replica in (1, 2):
            mine = tuple(ends[2 * replica : 2 * replica + 2])
            scene.hub.receive(replica, Failed(round_, mine, 0), now + 1)
        assert scene.told() == scene.everyone(Stop(round_))
        for replica in range(3):
            mine = tuple(ends[2 * replica : 2 * replica + 2])
            scene.hub.receive(replica, Stopped(round_, mine, -1), now + 2)
        (last,) = scene.told()[0]
        assert isinstance(last, following)
    assert isinstance(last, End)
    assert (last.rank, last.code) == (0, 64)


def test_who_does_not_stop_ends_the_attempt() -> None:
    scene = Scene()
    scene.fails(1, -9, now=1.0)
    scene.stops(0, 1, now=2.0)
    assert scene.hub.tick(3.0) == 1.0 + BARRIER_SECONDS
    scene.told()
    scene.watch(3.0, 0.9 + BARRIER_SECONDS)
    assert scene.told() == {}
    scene.hub.tick(1.0 + BARRIER_SECONDS)
    end = End(2, "replica 2 did not stop within 5 s", graceful=False)
    assert scene.told() == scene.everyone(end)


def test_who_never_came_is_told_from_who_does_not_stop() -> None:
    scene = Scene(here=(0, 2))
    scene.fails(0, 5, now=1.0)
    scene.stops(0, now=2.0)
    scene.told()
    scene.watch(2.0, 1.0 + BARRIER_SECONDS)
    end = End(0, "replica 1 has not come to the hub within 5 s", graceful=False)
    assert scene.told() == {0: [end], 2: [end]}


@pytest.mark.parametrize("silent", [False, True])
def test_who_says_that_its_processes_still_end_is_waited_for(silent: bool) -> None:
    """A GPU's memory is given back for seconds after a kill."""
    scene = Scene()
    scene.hub.receive(2, Exiting(0), 0.5)  # nothing has been stopped yet
    scene.fails(1, -9, now=1.0)
    scene.stops(0, 1, now=2.0)
    for second in range(3, 60):
        scene.hub.receive(2, Exiting(0), float(second))
        assert scene.hub.tick(second + 0.5) == second + BARRIER_SECONDS
    scene.hub.receive(2, Exiting(7), 60.0)  # of another round
    assert scene.hub.tick(60.5) == 59.0 + BARRIER_SECONDS
    scene.told()
    if silent:
        scene.watch(60.5, 59.0 + BARRIER_SECONDS)
        end = End(2, "replica 2 did not stop within 63 s", graceful=False)
        assert scene.told() == scene.everyone(end)
    else:
        scene.stops(2, now=61.0)
        assert isinstance(scene.told()[2][0], Go)


def test_a_hub_that_stood_still_itself_hears_who_stopped_meanwhile() -> None:
    """Its own workers' ends and the others' words wait until its launcher is awake again."""
    scene = Scene()
    scene.fails(1, -9, now=1.0)
    scene.told()
    scene.stops(1, now=600.0)
    scene.stops(2, now=600.0)
    due = scene.hub.tick(600.0)
    assert due is not None
    assert due > 602.0
    assert scene.told() == {}
    scene.stops(0, now=600.1)
    assert isinstance(scene.told()[0][0], Go)


@pytest.mark.parametrize("exiting", [False, True])
def test_a_hub_that_stood_still_waits_no_longer_than_for_anybody(exiting: bool) -> None:
    scene = Scene()
    scene.fails(1, -9, now=1.0)
    scene.stops(0, 1, now=600.0)
    scene.told()
    if exiting:
        scene.hub.receive(2, Exiting(0), 600.0)
    due = scene.hub.tick(600.0)
    assert due is not None
    assert due <= 600.0 + BARRIER_SECONDS
    scene.watch(600.0, due - 0.1)
    assert scene.told() == {}
    scene.hub.tick(due)
    assert isinstance(scene.told()[2][0], End)


def test_who_comes_late_learns_where_things_stand() -> None:
    scene = Scene(here=(0, 1))
    scene.fails(1, -9)
    scene.told()
    assert scene.comes(2) is None
    assert scene.told() == {2: [Welcome(4, "pod-0"), Stop(0)]}
    scene.stops(0, 1, 2)
    assert isinstance(scene.told()[2][0], Go)
    scene = Scene(here=(0, 1))
    scene.fails(1, 64)
    scene.watch(0.0, BARRIER_SECONDS)
    scene.told()
    assert scene.comes(2) is None
    told = scene.told()[2]
    assert told[0] == Welcome(4, "pod-0")
    assert isinstance(told[1], End)


@pytest.mark.parametrize(
    ("change", "words", "final"),
    [
        ({"uid": "other"}, "another job", False),
        ({"birth": 3}, "attempt 4", True),  # that launcher is out of date
        ({"birth": 5}, "attempt 4", False),  # this hub is: the right one will come
        ({"nproc": 1}, "3 replicas of 2", True),
        ({"replicas": 4}, "3 replicas of 2", True),
        ({"seat": 3}, "replica 3 is not one of 3", True),
        ({"seat": -1}, "replica -1 is not one of 3", True),
        ({"seat": 1}, "admitted before", False),
    ],
)
def test_only_this_gang_is_admitted_and_each_once(change, words, final):  # type: ignore[no-untyped-def]
    scene = Scene()
    refused = scene.comes(2, **change)
    assert isinstance(refused, Refused)
    assert words in refused.reason
    assert refused.final == final
    assert scene.told() == {}


def test_a_lost_launcher_ends_the_attempt_whatever_it_was_doing() -> None:
    scene = Scene()
    scene.hub.lost(2, 0.0)
    assert scene.told() == {
        r: [End(-1, "the launcher of replica 2 was lost", graceful=False)] for r in (0, 1)
    }
    scene = Scene()
    scene.fails(1, -9)
    scene.told()
    scene.hub.lost(0, 0.0)
    assert scene.told()[1] == [End(2, "the launcher of replica 0 was lost", graceful=False)]


def test_one_that_is_told_to_end_lets_the_others_save() -> None:
    scene = Scene()
    scene.hub.receive(1, Leaving(15), 0.0)
    end = scene.told()[0][0]
    assert isinstance(end, End)
    assert end.graceful
    scene.fails(1, 143)
    scene.fails(0, 75)
    scene.hub.lost(1, 1.0)
    assert scene.told() == {}


@pytest.mark.parametrize("lost", [False, True])  # the launcher takes a moment to end
def test_who_is_done_and_told_to_end_ends_nobodys_training(lost: bool) -> None:
    scene = Scene()
    scene.hub.receive(1, Done(0), 0.0)
    scene.hub.receive(1, Leaving(15), 1.0)
    if lost:
        scene.hub.lost(1, 1.1)
    assert scene.told() == {}
    scene.fails(0, -9, now=2.0)  # a round would need it
    told = scene.told()
    end = End(0, "a launcher whose workers had succeeded is gone", graceful=False)
    assert told == {0: [end], 2: [end]}


def test_the_others_of_one_that_was_done_and_told_to_end_can_finish() -> None:
    scene = Scene()
    scene.hub.receive(1, Done(0), 0.0)
    scene.hub.receive(1, Leaving(15), 1.0)
    scene.hub.receive(0, Done(0), 2.0)
    assert scene.hub.needed, "for replica 2"
    scene.hub.receive(2, Done(0), 3.0)
    assert scene.told() == {0: [Finished()], 2: [Finished()]}


def test_who_is_done_and_has_to_leave_ends_the_gang_gracefully() -> None:
    for leaving in (0, 1):
        scene = Scene()
        scene.hub.receive(leaving, Done(0), 0.0)
        if leaving:
            scene.fails(0, -9)
            assert scene.told() == scene.everyone(Stop(0))
        scene.hub.receive(leaving, Leaving(15), 1.0)
        end = scene.told()[2][0]
        assert isinstance(end, End)
        assert end.graceful


def test_success_is_everybodys_or_a_round_takes_it_back() -> None:
    scene = Scene()
    for replica in range(3):
        assert scene.told() == {}
        scene.hub.receive(replica, Done(0), 0.0)
    assert scene.told() == scene.everyone(Finished())
    scene = Scene()
    scene.hub.receive(0, Done(0), 0.0)
    scene.fails(1, -9)
    assert scene.told() == scene.everyone(Stop(0))
    scene = Scene()
    scene.hub.receive(0, Done(0), 0.0)
    scene.hub.lost(0, 0.0)  # it waited long enough
    assert scene.told() == {}
    scene.fails(1, -9)
    assert scene.told()[1] == [
        End(2, "a launcher whose workers had succeeded is gone", graceful=False)
    ]


@pytest.mark.fault("T13")
@pytest.mark.parametrize("waited", [False, True])  # for others; it is gone after a minute
def test_who_ended_early_at_another_launcher_is_told_to_its_victim(waited: bool) -> None:
    scene = Scene(budget=1)
    ends = tuple(Exit(2 + i, i, 0, 0.0, step=12) for i in range(2))
    scene.hub.receive(1, Done(0, ends), 0.0)
    assert ([one.rank for one in scene.hub.others[0]], scene.hub.others[1]) == ([2, 3], 2)
    if waited:
        scene.hub.lost(1, 60.0)
    else:
        scene.hub.history = dataclasses.replace(scene.hub.history, failures=1)
    scene.fails(0, 75, now=61.0)
    scene.hub.tick(61.0 + CAUSE_WAIT_SECONDS)
    scene.stops(0, 1, 2, now=64.0)
    end = scene.told()[0][-1]
    assert isinstance(end, End)
    assert end.rank == 0
    assert end.early.startswith("rank 2, 3 after step 12 ended with exit code 0 while others")


def test_the_hub_is_needed_as_long_as_another_launcher_is_at_work() -> None:
    scene = Scene(here=(0, 1))  # replica 2 never came, so it does not depend on the hub
    scene.hub.receive(0, Done(0), 0.0)
    assert scene.hub.needed
    scene.hub.receive(1, Done(0), 0.0)
    assert not scene.hub.needed
    scene = Scene()
    scene.hub.receive(0, Done(0), 0.0)
    scene.fails(1, 64)
    scene.watch(0.0, BARRIER_SECONDS)
    assert not scene.hub.needed  # it has said that the attempt ends


def test_nobody_speaks_for_another() -> None:
    scene = Scene()
    with pytest.raises(ValueError, match="rank 0 is not of replica 1"):
        scene.hub.receive(1, Failed(0, (Exit(0, 0, -9, 0.0),), 1), 0.0)
    with pytest.raises(ValueError, match="must not say Go"):
        scene.hub.receive(1, Go(4, 3, 1, ()), 0.0)


@pytest.mark.parametrize(
    "line",
    [
        b"", b"GET / HTTP/1.1", b"[]", b"{}", b'{"type":["Done"]}', b'{"type":"Done"}',
        b'{"type":"Done","round":"0"}', b'{"type":"Done","round":true}',
        b'{"type":"Done","round":0,"exits":{}}', b'{"type":"Done","round":0,"exits":null}',
        b'{"type":"Stopped","round":0,"exits":[7],"snapshot_step":0}',
        b'{"type":"Stopped","round":0,"exits":[{"rank":"1"}],"snapshot_step":0}',
        b'{"type":"Go","number":1,"round":1,"replica":0,"records":["x"]}',
        b"\xff", b"[" * 5000,
    ],
)  # fmt: skip
def test_what_is_no_message_is_refused(line):  # type: ignore[no-untyped-def]
    with pytest.raises((ValueError, TypeError, RecursionError)):
        messages.decode(line)
