"""What a hub does in each phase at each event: from Go to Stop, from Stop to the next Go or End.

test_hub_seats.py has who is admitted and who serves, test_rounds_decide.py whether a round follows.
"""

from dataclasses import replace

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
    Stop,
    Stopped,
    Welcome,
)
from ddpjob_trainer.launcher.hub.root_cause import CAUSE_WAIT_SECONDS, Exit
from ddpjob_trainer.launcher.hub.rounds import Limits
from support.hub_gang import WAIT, WELCOME, Gang

ALL = (0, 1, 2)
NEW = "Welcome Stop"
ENDS = [tuple(Exit(2 * seat + i, i, 0, 0.0) for i in range(2)) for seat in ALL]
#: Ends that say that they came to the last step.
DONE = [tuple(replace(one, done=True) for one in ends) for ends in ENDS]


def everyone(message: Message) -> dict[int, list[Message]]:
    return {seat: [message] for seat in ALL}


def running(*, waits: bool = True) -> Gang:
    return Gang(waits=waits)


def stopping(*, waits: bool = True) -> Gang:
    gang = Gang(waits=waits)
    gang.fails(1, -9)
    assert gang.said() == everyone(Stop(0))
    return gang


def waiting() -> Gang:
    gang = running()
    gang.loses(2)
    gang.stop(0, 1)
    assert gang.hub.waits
    gang.said()
    return gang


def over() -> Gang:
    gang = running()
    gang.fails(1, 64)
    gang.stop(*ALL)
    assert gang.words() == dict.fromkeys(ALL, "Stop End")
    return gang


# --- Each event in each phase --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("begin", "event", "words"),
    [
        (running, lambda g: g.fails(1, -9), {0: "Stop", 1: "Stop", 2: "Stop"}),
        (running, lambda g: g.fails(1, 75), {}),  # of whom its cause is not known yet
        (running, lambda g: g.says(1, Exiting(0)), {}),
        (running, lambda g: g.stop(1), {}),
        (running, lambda g: g.says(1, Done(0)), {}),
        (running, lambda g: g.says(1, Leaving(15)), {0: "Stop", 1: "Stop", 2: "Stop"}),
        (running, lambda g: g.loses(2), {0: "Stop", 1: "Stop"}),
        # A newer pod takes the place of one that is linked as yet (H3).
        (running, lambda g: g.comes(2, birth=5), {0: "Stop", 1: "Stop", 2: "Welcome"}),
        # For one that never came.
        (lambda: Gang((0, 1)), lambda g: g.comes(2, birth=5), {0: "Stop", 1: "Stop", 2: NEW}),
        (stopping, lambda g: g.fails(2, -9), {}),
        (stopping, lambda g: g.stop(0, 1), {}),
        (stopping, lambda g: g.stop(*ALL), {0: "Go", 1: "Go", 2: "Go"}),  # H2
        (stopping, lambda g: g.says(2, Leaving(15)), {}),
        (stopping, lambda g: g.loses(2), {}),
        (stopping, lambda g: g.comes(2, birth=5), {2: "Welcome"}),
        (waiting, lambda g: g.loses(1), {}),
        (waiting, lambda g: g.says(1, Leaving(15)), {}),
        (waiting, lambda g: g.comes(2), {2: "Welcome Go", 0: "Go", 1: "Go"}),
        (waiting, lambda g: g.comes(2, birth=5), {2: "Welcome Go", 0: "Go", 1: "Go"}),
        (over, lambda g: g.fails(2, -9), {}),
        (over, lambda g: g.says(2, Done(0)), {}),
        (over, lambda g: g.loses(2), {}),
        (over, lambda g: g.comes(2, birth=5), {2: "Welcome End"}),
    ],
)
def test_each_event_in_each_phase_of_a_gang_that_waits(begin, event, words):
    gang = begin()
    event(gang)
    assert gang.words() == words


@pytest.mark.parametrize(
    ("begin", "event", "end"),
    [
        (running, lambda g: g.loses(2), End(-1, "replica 2 was lost", graceful=False)),
        # The failure that came first stays the cause.
        (stopping, lambda g: g.loses(0), End(2, "replica 0 was lost", graceful=False)),
        (running, lambda g: g.says(1, Leaving(15)), End(-1, "replica 1 got a signal to end", True)),
        (
            stopping,
            lambda g: g.says(0, Leaving(15)),
            End(-1, "replica 0 got a signal to end", True),
        ),
    ],
)
def test_a_gang_that_cannot_wait_ends_with_any_launcher(begin, event, end):
    gang = begin(waits=False)
    assert not gang.hub.seats.can_wait
    event(gang)
    [message] = gang.said()[1]
    assert message == replace(end, why=f"the launcher of {end.why}")
    for seat, status in ((1, 143), (0, 75)):  # as they end
        gang.fails(seat, status)
    gang.loses(1)
    assert gang.said() == {}


@pytest.mark.parametrize("why", ["one does not wait", "no rounds", "one is done", "one is to come"])
def test_what_keeps_a_gang_from_waiting(why):
    gang = Gang(
        (0, 1) if why == "one is to come" else ALL,
        waits=(0, 2) if why == "one does not wait" else True,
        budget=0 if why == "no rounds" else 3,
    )
    assert gang.hub.seats.can_wait is (why == "one is done")
    if why == "one is done":
        gang.says(1, Done(0))
        gang.loses(1)
        assert gang.said() == {}, "it needs not wait for anybody"
    gang.loses(2 if why != "one is to come" else 1)
    assert gang.words()[0] == "End"


def test_who_comes_late_learns_where_the_gang_is():
    gang = Gang((0, 1), waits=False)
    gang.fails(1, -9)
    gang.said()
    assert gang.comes(2, running=True) is None
    assert gang.said() == {2: [WELCOME, Stop(0)]}
    gang.stop(*ALL)
    gang.goes(1)
    gang.fails(1, 64)
    gang.stop(*ALL)
    [end] = gang.said()[0][1:]
    gang.loses(2)
    assert gang.comes(2, birth=5) is None
    assert gang.said() == {2: [WELCOME, end]}


# --- A round is stopped ------------------------------------------------------------------------


def test_a_round_follows_once_all_have_stopped():
    gang = stopping()
    gang.stop(0, 1, step=7)
    gang.stop(2)
    record = gang.goes(1).records[0]
    assert (record["rank"], record["snapshotStep"]) == (2, 7)
    gang.says(0, Failed(0, (Exit(0, 0, -9, 0.0),), 1))
    assert gang.said() == {}
    gang.fails(0, -9)
    assert gang.said() == everyone(Stop(1))


@pytest.mark.parametrize("cause", [False, True])
def test_a_lost_peer_waits_a_moment_for_its_cause(cause):
    gang = running()
    gang.fails(0, 75, now=10.0)
    assert gang.said() == {}
    assert gang.hub.tick(10.1) == 10.0 + CAUSE_WAIT_SECONDS
    if cause:
        gang.fails(2, -11, now=10.2)
    else:
        gang.hub.tick(10.0 + CAUSE_WAIT_SECONDS)
    assert gang.said() == everyone(Stop(0))


def test_who_says_in_words_that_a_peer_is_gone_waits_longer():
    """For one that cleans up first, as a program without our library may."""
    gang, boom = running(), "ValueError: boom at step 3"
    reset = "RuntimeError: [../third_party/gloo] Connection reset by peer"
    gang.fails(0, 1, now=10.0, exception=reset, foreign=True)
    gang.hub.tick(14.0)
    assert gang.said() == {}
    gang.fails(1, 1, now=14.5, exception=boom, foreign=True)
    assert gang.said() == everyone(Stop(0))
    gang.stop(*ALL)
    record = gang.goes(1).records[0]
    assert (record["rank"], record["exception"]) == (2, boom)


def test_a_script_that_fails_at_once_on_all_ranks_ends_with_64():
    gang = running()
    for round_ in (0, 1):
        ends = [
            Exit(rank, rank % 2, 1, 0.0, exception="KeyError: 'lr'", foreign=True, in_script=True)
            for rank in range(6)
        ]
        now = 10.0 * (round_ + 1)
        gang.hub.tick(now)
        gang.says(0, Failed(round_, tuple(ends[:2]), 0), now)
        gang.says(1, Failed(round_, tuple(ends[2:3]), 1), now)
        assert gang.said() == {}, "the others have not ended"
        for seat in (1, 2):
            gang.says(seat, Failed(round_, tuple(ends[2 * seat : 2 * seat + 2]), 0), now + 1)
        assert gang.said() == everyone(Stop(round_))
        gang.stop(*ALL, now=now + 2)
        last = gang.said()[0][-1]
        assert isinstance(last, (Go, End)[round_])
    assert isinstance(last, End)
    assert (last.rank, last.code) == (0, 64)


@pytest.mark.parametrize(
    ("here", "why"),
    [(ALL, "replica 2 did not stop"), ((0, 1), "replica 2 has not come to the hub")],
)
def test_who_does_not_stop_in_time_ends_the_attempt(here, why):
    gang = Gang(here, waits=False)
    gang.fails(1, -9, now=1.0)
    gang.stop(0, 1, now=2.0)
    assert gang.hub.tick(3.0) == 1.0 + BARRIER_SECONDS
    gang.said()
    gang.awake(3.0, 0.9 + BARRIER_SECONDS)
    assert gang.said() == {}
    gang.hub.tick(1.0 + BARRIER_SECONDS)
    end = End(2, f"{why} within 5 s", graceful=False)
    assert gang.said() == {seat: [end] for seat in here}


@pytest.mark.parametrize("stops", [False, True])
def test_who_says_that_processes_still_end_is_waited_for(stops):
    """A GPU's memory is given back for seconds after a kill."""
    gang = running(waits=False)
    gang.says(2, Exiting(0), 0.5)  # nothing has been stopped yet
    gang.fails(1, -9, now=1.0)
    gang.stop(0, 1, now=2.0)
    for second in range(3, 60):
        gang.says(2, Exiting(0), float(second))
        assert gang.hub.tick(second + 0.5) == second + BARRIER_SECONDS
    gang.says(2, Exiting(7), 60.0)  # of another round
    assert gang.hub.tick(60.5) == 59.0 + BARRIER_SECONDS
    gang.said()
    if stops:
        gang.stop(2, now=61.0)
        gang.goes(1)
    else:
        gang.awake(60.5, 59.0 + BARRIER_SECONDS)
        end = End(2, "replica 2 did not stop within 63 s", graceful=False)
        assert gang.said() == everyone(end)


@pytest.mark.parametrize("words", ["Stopped", "Exiting", ""])
def test_a_hub_that_was_stopped_itself_reads_before_it_judges(words):
    """The others' messages, and its own workers' ends, wait until its launcher is awake again."""
    gang = running(waits=False)
    gang.fails(1, -9, now=1.0)
    gang.stop(0, 1, now=600.0)
    gang.said()
    if words == "Stopped":
        gang.stop(2, now=600.0)
        gang.goes(1)
        return
    if words == "Exiting":
        gang.says(2, Exiting(0), 600.0)
    due = gang.hub.tick(600.0)
    assert due is not None
    assert 602.0 < due <= 600.0 + BARRIER_SECONDS, "no longer than for anybody"
    gang.awake(600.0, due - 0.1)
    assert gang.said() == {}
    gang.hub.tick(due)
    assert gang.words()[2] == "End"


# --- What follows ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lasted", "modified", "word"), [(1.0, -1, "End"), (60.0, -1, "Go"), (1.0, 7, "Go")]
)
def test_a_long_round_and_a_newer_file_are_progress(lasted, modified, word):
    gang = Gang(budget=1)
    gang.hub.tick(100.0)
    gang.fails(1, -9, now=101.0)
    gang.stop(*ALL, now=101.0)
    gang.goes(1)
    gang.hub.tick(200.0)
    gang.modified = modified
    gang.fails(1, -9, now=200.0 + lasted)
    gang.stop(*ALL, now=200.0 + lasted)
    assert gang.words()[2] == f"Stop {word}"


def test_all_go_on_from_the_checkpoint_that_the_hub_has_found():
    """It looks once all have stopped, since others may still write one."""
    gang = stopping()
    gang.stop(0, 1)
    assert gang.asked == []
    gang.newest = None
    gang.stop(2)
    assert (gang.said(), gang.asked) == ({}, [False]), "the file server has not answered"
    gang.newest = "ck/7.pt"
    gang.hub.tick(0.5)
    assert gang.goes(1).newest == "ck/7.pt"
    gang.fails(1, 1)
    gang.stop(*ALL)
    assert gang.asked[-1], "the program failed by itself"


def test_without_rounds_a_launcher_is_alone_with_the_gangs_ranks():
    """As membership.join has it for replica 2 of 3: a hub of its own, and no round follows."""
    posted: list[Message] = []
    alone = Hello("uid", "pod-0", 0, 4, replicas=1, nproc=1, holds=False, running=True)
    hub = Hub(alone, Limits(0), lambda _, message: posted.append(message))
    hub.admit(alone, 0.0)
    hub.receive(0, Failed(0, (Exit(2, 0, -9, 0.0),), 0), 0.0)
    hub.receive(0, Stopped(0, (), -1), 0.1)
    end = End(2, "restart in place is off", graceful=False)
    assert posted == [Welcome(4, "pod-0"), Stop(0), end]


def test_nobody_speaks_for_another():
    gang = running()
    with pytest.raises(ValueError, match="rank 0 is not of replica 1"):
        gang.says(1, Failed(0, (Exit(0, 0, -9, 0.0),), 1))
    with pytest.raises(ValueError, match="must not say Go"):
        gang.says(1, Go(4, 3, 1, ()))


# --- Success -----------------------------------------------------------------------------------


def test_success_is_everybodys():
    gang = running()
    for seat in ALL:
        assert (gang.said(), gang.hub.needed) == ({}, True)
        gang.says(seat, Done(0))
    assert (gang.said(), gang.hub.needed) == (everyone(Finished()), False)


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("gone", ["", "lost", "told to end", "told to end, then lost"])
def test_a_failure_needs_those_who_have_succeeded(gone, waits):
    """Who is done may go without harm to the others, but then no round can follow."""
    gang = running(waits=waits)
    gang.says(1, Done(0))
    if "told" in gone:
        gang.says(1, Leaving(15))
    if "lost" in gone:
        gang.loses(1)
    assert gang.said() == {}
    gang.fails(0, -9)
    end = End(0, "a launcher whose workers had succeeded is gone", graceful=False)
    assert gang.said() == ({0: [end], 2: [end]} if gone else everyone(Stop(0)))


def test_the_others_finish_without_one_that_was_done_and_told_to_end():
    gang = running()
    gang.says(1, Done(0))
    gang.says(1, Leaving(15))
    gang.says(0, Done(0))
    assert gang.hub.needed, "for replica 2"
    gang.says(2, Done(0))
    assert gang.said() == {0: [Finished()], 2: [Finished()]}


@pytest.mark.parametrize("leaves", [0, 1])
def test_who_is_done_and_told_to_end_lets_the_others_save(leaves):
    """Where it is the hub, or a round would need it; or another is told to end, too."""
    gang = running()
    gang.says(leaves, Done(0))
    if leaves:
        gang.fails(0, -9)
        assert gang.said() == everyone(Stop(0))
    gang.says(leaves, Leaving(15))
    end = gang.said()[2][0]
    assert isinstance(end, End)
    assert end.graceful
    gang = running()
    gang.says(2, Done(0))
    for seat in (2, 1):
        gang.says(seat, Leaving(15))
    said = gang.said()
    ends = [message for seat in (0, 1) for message in said[seat] if isinstance(message, End)]
    assert [end.graceful for end in ends] == [True, True]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("done", [True, False])
def test_one_told_to_end_after_the_last_step_takes_no_success(done, first):
    """Programs that save and end with 0 at a signal have not come to that step."""
    gang, ends = running(), DONE if done else ENDS
    gang.says(1, Leaving(15))
    gang.said()
    if first:
        gang.says(1, Done(0, ends[1]))
    for seat in (0, 2):
        gang.says(seat, Stopped(0, ends[seat], 16))
    if not first:
        assert gang.said() == {}
        gang.says(1, Done(0, ends[1]))
    assert gang.said() == (everyone(Finished()) if done else {})


def test_who_is_done_stops_again_when_another_is_lost():
    gang = running()
    gang.says(0, Done(0))
    gang.says(1, Done(0))
    gang.loses(2)
    assert gang.said() == {0: [Stop(0)], 1: [Stop(0)]}
    gang.stop(0, 1)
    gang.loses(1)
    gang.comes(1, birth=5)
    gang.comes(2, birth=5)
    gang.goes(1)
    for seat in ALL:
        gang.says(seat, Done(1))
    assert gang.said() == everyone(Finished())


@pytest.mark.fault("T13")
@pytest.mark.parametrize("waited", [False, True])  # for others; it is gone after a minute
def test_who_ended_early_elsewhere_is_named_to_its_victim(waited):
    gang = Gang(budget=0 if not waited else 1, waits=False)
    gang.says(1, Done(0, tuple(replace(one, step=12) for one in ENDS[1])))
    assert ([one.rank for one in gang.hub.others[0]], gang.hub.others[1]) == ([2, 3], 2)
    if waited:
        gang.loses(1, now=60.0)
    gang.fails(0, 75, now=61.0)
    gang.hub.tick(61.0 + CAUSE_WAIT_SECONDS)
    gang.stop(*ALL, now=64.0)
    end = gang.said()[0][-1]
    assert isinstance(end, End)
    assert end.rank == 0
    assert end.early.startswith("rank 2, 3 after step 12 ended with exit code 0 while others")


def test_a_hub_is_needed_while_another_launcher_is_at_work():
    gang = Gang((0, 1))  # replica 2 never came, so it does not depend on the hub
    gang.says(0, Done(0))
    assert gang.hub.needed
    gang.says(1, Done(0))
    assert not gang.hub.needed
    assert not over().hub.needed, "it has said that the attempt ends"


# --- A launcher is lost ------------------------------------------------------------------------


def test_only_the_lost_launcher_is_replaced():
    gang = running()
    gang.loses(2)
    assert (gang.said(), gang.hub.facts["away"]) == ({0: [Stop(0)], 1: [Stop(0)]}, [2])
    gang.stop(0, 1, step=7)
    assert gang.said() == {}, "they wait"
    assert gang.comes(2, 9.0, birth=5) is None
    assert (gang.posted[0], gang.hub.facts["away"]) == ((2, WELCOME), [])
    [record] = gang.goes(1).records
    assert (record["kind"], record["replica"], record["snapshotStep"]) == ("lost", 2, 7)


@pytest.mark.fault("T17")
def test_a_new_pod_costs_nothing_and_a_broken_link_a_round_of_the_budget():
    gang = Gang(budget=2)
    for round_ in range(1, 10):
        gang.loses(2)
        gang.stop(0, 1)
        gang.comes(2, birth=4 + round_)
        gang.goes(round_)
    for round_ in (10, 11, 12):
        gang.loses(1)
        gang.stop(0, 2)
        gang.said()
        assert gang.comes(1) is None
        if round_ < 12:
            gang.goes(round_)
    assert {word.split()[-1] for word in gang.words().values()} == {"End"}


@pytest.mark.parametrize("in_time", [True, False])
def test_more_may_be_lost_until_the_first_one_should_be_replaced(in_time):
    """Also newcomers before Go."""
    gang = waiting()
    gang.loses(1, now=50.0)
    for birth in (5, 6):
        for seat in (2, 1):
            assert gang.comes(seat, 60.0, birth=birth) is None
            gang.loses(seat, now=70.0)
    gang.comes(1, 80.0, birth=7)
    gang.said()
    if in_time:
        gang.comes(2, 90.0, birth=7)
        gang.goes(1)
        return
    assert gang.hub.tick(300.0) == 1.0 + WAIT
    assert gang.said() == {}
    gang.hub.tick(1.0 + WAIT)
    end = End(-1, "replica 2 was not replaced within 330 s", graceful=False)
    assert gang.said() == {0: [end], 1: [end]}


def test_who_does_not_stop_loses_its_place_and_may_come_back():
    gang = running()
    gang.fails(1, 75)
    gang.hub.tick(0.5)
    gang.loses(1)  # with its pod
    gang.said()
    gang.stop(0, now=2.0)
    gang.says(2, Exiting(0), 4.0)
    gang.awake(3.0, 8.0)
    assert gang.dropped == []
    gang.hub.tick(4.0 + BARRIER_SECONDS)
    assert (gang.dropped, gang.said()) == ([2], {})
    gang.comes(1, 10.0, birth=5)
    assert gang.comes(2, 11.0) is None
    assert gang.goes(1).records[0]["kind"] == "lost"


@pytest.mark.parametrize(
    ("failed", "status", "kind"),
    [
        (1, -11, "signal"),  # another's failure before the loss stays the cause
        (2, -9, "lost"),  # the end of a lost pod's worker is the pod's
    ],
)
def test_the_cause_of_a_round_that_a_loss_has_ended(failed, status, kind):
    gang = running()
    gang.fails(failed, status)
    gang.loses(2)
    gang.stop(0, 1)
    gang.comes(2, birth=5)
    assert gang.goes(1).records[0]["kind"] == kind


def test_nobody_waits_for_a_round_that_cannot_follow():
    gang = running()
    gang.fails(1, 64)
    gang.loses(2)
    gang.stop(0, 1)
    assert gang.words() == {0: "Stop End", 1: "Stop End", 2: "Stop"}


@pytest.mark.fault("N4")
def test_one_that_leaves_lets_the_others_save_and_is_replaced():
    gang = running()
    gang.says(1, Leaving(15))
    assert gang.said() == everyone(Stop(0, graceful=True))
    gang.fails(1, 143)
    gang.stop(1)  # it need not stop, and has no place any more
    for second in range(1, 25):
        gang.says(0, Exiting(0), float(second))
        gang.hub.tick(float(second))
    gang.says(0, Stopped(0, (Exit(0, 0, 75, 0.0), Exit(1, 1, -9, 0.0)), 12), 25.0)
    gang.says(2, Stopped(0, (Exit(4, 0, 75, 0.0), Exit(5, 1, 75, 0.0)), 12), 25.0)
    assert (gang.said(), gang.dropped) == ({}, [])
    gang.loses(1, now=26.0)
    gang.comes(1, 27.0, birth=5)
    [record] = gang.goes(1).records
    assert (record["kind"], record["replica"], record["snapshotStep"]) == ("lost", 1, 12)


HERE = "a GPU failed here; the others wait for a new pod in this one's place"


@pytest.mark.fault("N13")
@pytest.mark.parametrize("late", [False, True])  # heard of once all are being stopped
def test_a_launcher_whose_gpu_failed_ends_and_the_others_hold(late):
    gang = running()
    if late:
        gang.fails(0, -9)
        gang.stop(0, 1)
        gang.said()
        gang.says(2, Stopped(0, (Exit(4, 0, 74, 0.0), Exit(5, 1, -9, 0.0, ours=True)), 7))
        assert gang.said() == {2: [End(4, HERE, graceful=False)]}
    else:
        gang.fails(2, 74)
        assert gang.said() == {**everyone(Stop(0)), 2: [End(4, HERE, graceful=False), Stop(0)]}
        gang.stop(0, 1, 2)
    gang.hub.tick(20.0)
    assert gang.said() == {}, "for its workers may run"
    gang.loses(2, now=21.0)
    gang.comes(2, 22.0, birth=5)
    [record] = gang.goes(1).records
    assert (record["kind"], record["replica"], gang.hub.history.failures) == ("lost", 2, 0)


def test_who_stands_by_takes_the_place_of_a_failed_gpu():
    gang = Gang(standby=1)
    gang.fails(2, 74)
    gang.stop(0, 1)
    assert gang.words()[0] == "Stop"
    gang.loses(2)
    gang.hub.tick(2.0)
    gang.goes(1, (0, 1, 3))


def test_a_hub_whose_own_gpu_failed_leaves_the_others_to_the_next():
    gang = running()
    gang.fails(0, 74)
    gang.fails(1, 75)
    gang.hub.tick(20.0)
    assert gang.said() == {0: [End(0, HERE, graceful=False)]}, "they hold once its link closes"


@pytest.mark.parametrize("final", [False, True])
def test_where_others_cannot_wait_a_failed_gpu_ends_the_attempt(final):
    gang = running(waits=final)
    if final:  # a rule of the job
        gang.hub.limits = replace(gang.hub.limits, final=frozenset({74}))
    gang.fails(2, 74)
    gang.stop(*ALL)
    assert gang.words() == dict.fromkeys(ALL, "Stop End")


@pytest.mark.parametrize("in_time", [True, False])
def test_a_hub_that_replaces_one_waits_for_all_and_not_for_ever(in_time):
    gang = Gang(replaces=True)
    gang.comes(1, 1.0, birth=1)  # a survivor
    gang.loses(1, now=2.0)
    gang.comes(2, 3.0)
    gang.hub.tick(4.0)
    assert gang.words() == {1: "Welcome", 2: "Welcome"}
    if in_time:
        gang.comes(1, 5.0, birth=1)  # it is back
        assert gang.goes(0).records == ()
    else:
        gang.hub.tick(2.0 + WAIT)
        assert gang.words() == {0: "End", 2: "End"}
