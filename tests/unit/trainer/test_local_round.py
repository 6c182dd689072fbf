"""What a launcher does in each phase of a round at each word of the hub, and when it loses it.

L2 to L4 are rules of the protocol; test_following.py has which hub it follows.
"""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest

from ddpjob_trainer.environment import Key
from ddpjob_trainer.launcher.hub.messages import Ask, End, Finished, Go, Message, Stop
from ddpjob_trainer.launcher.local_round import (
    LocalRound,
    Parked,
    Phase,
    Running,
    Stopping,
    Succeeded,
)
from ddpjob_trainer.launcher.reports.termination import Ended

GO = Go(5, 3, 1, ())
SAVE = Stop(2, graceful=True)


class Part:
    """A launcher in round 2 of hub 5 since second 100, without processes, and what it did."""

    def __init__(self, phase: type[Phase], *, can_wait: bool = True, met: bool = True) -> None:
        did = self.did = list[str]()
        self.link = SimpleNamespace(
            lost="", unmet="", met=met, linked=False, number=5,
            leave=lambda: did.append("leave"), join=lambda: did.append("join"),
            send=lambda message, now: did.append(type(message).__name__),
        )  # fmt: skip
        self.workers = SimpleNamespace(
            key=Key(5, 2), round=2, exits=[], stopping=False, kill_at=None, failed=False,
            running=0, succeeded=False, is_training=lambda: True,
            signal=lambda signum, now: did.append(f"signal {signum:d}"),
            stop=lambda now, last_words: did.append(f"stop {last_words:g}"),
            kill_by=lambda moment: did.append("grace"),
        )  # fmt: skip
        env = SimpleNamespace(grace_seconds=30.0, standby=0, reseats=False, elastic=None)
        config: Any = SimpleNamespace(
            holds=can_wait, hold_seconds=330.0, exit_seconds=10.0, env=env, replica=1
        )
        member: Any = SimpleNamespace(link=self.link, rounds=True, hub=None)
        workers: Any = self.workers
        self.ended = Ended()
        self.phase = phase(LocalRound(config, workers, member, self.ended, print), 100.0)

    def take(self, *messages: Message, lost: str = "", now: float = 101.0) -> type[Phase]:
        """One turn of the supervisor's loop."""
        for message in messages:
            if not isinstance(message, Go):
                self.phase = self.phase.handle(message, now)
            elif self.phase.begins(message):
                self.did.append(f"round {message.round}")
        self.link.lost = lost
        self.phase = self.phase.check_hub(now)
        return type(self.phase)


@pytest.mark.parametrize(
    ("phase", "messages", "lost", "then", "did"),
    [
        (Running, [Stop(2)], "", Stopping, ["stop 0"]),
        (Running, [SAVE], "", Stopping, ["grace"]),
        (Running, [Stop(1)], "", Running, []),
        (Running, [GO], "", Running, []),
        (Succeeded, [Stop(2)], "", Stopping, ["stop 0"]),
        (Stopping, [GO], "", Stopping, []),
        (Parked, [Stop(2)], "", Parked, []),
        # The workers of a gang that grows stop together (E5).
        (Running, [Ask(2)], "", Running, ["signal 15"]),
        (Running, [Ask(1)], "", Running, []),
        (Stopping, [Ask(2)], "", Stopping, []),
        # Only a newer round begins (L4).
        (Parked, [GO], "", Parked, ["round 3"]),
        (Parked, [Go(6, 0, 1, ())], "", Parked, ["round 0"]),
        (Parked, [Go(5, 2, 1, ())], "", Parked, []),
        (Parked, [Go(4, 9, 1, ())], "", Parked, []),
        # The hub is lost (L3), also while it says Stop. Nothing runs when the next is asked (L2).
        (Running, [], "gone", Stopping, ["leave", "stop 0"]),
        (Running, [Stop(2)], "gone", Stopping, ["stop 0", "leave"]),
        (Running, [SAVE], "gone", Stopping, ["grace", "leave"]),
        (Stopping, [], "gone", Stopping, ["leave"]),
        (Parked, [], "gone", Parked, ["leave", "join"]),
    ],
)
def test_each_word_of_the_hub_in_each_phase(phase, messages, lost, then, did):
    part = Part(phase)
    assert (part.take(*messages, lost=lost), part.did) == (then, did)
    assert not part.ended.lost


@pytest.mark.parametrize(
    ("phase", "made", "ended"),
    [
        (Running, {"can_wait": False}, {}),
        (Running, {"met": False}, {}),
        (Succeeded, {}, {}),
        (Running, {}, {"signal": 15}),
        (Running, {}, {"end": End(-1, "no", graceful=False)}),
    ],
)
def test_some_end_when_the_hub_is_lost(phase, made, ended):
    part = Part(phase, **made)
    for name, value in ended.items():
        setattr(part.ended, name, value)
    part.take(lost="gone")
    assert part.ended.lost == "gone"
    assert "leave" not in part.did


@pytest.mark.parametrize(
    ("phase", "kill_at", "until"),
    [
        (Stopping, None, 120.0),  # processes that nothing can end
        (Stopping, 130.0, 150.0),  # until then workers may save
        (Parked, None, 430.0),
    ],
)
def test_nobody_waits_for_ever(phase, kill_at, until):
    part = Part(phase)
    part.workers.kill_at = kill_at
    part.take(now=until)
    assert not part.ended.lost
    part.take(now=until + 0.1)
    assert (part.ended.lost, part.did) == ("it does not answer", ["stop 1"])


@pytest.mark.parametrize(("replica", "able"), [(1, True), (1, False), (2, True)])
def test_replica_1_saves_the_newest_step_of_a_gang_whose_hub_is_lost(replica, able):
    part = Part(Running)
    part.phase.round.config.replica = replica
    part.phase.round.rescuer = Mock(begin=Mock(return_value=able))
    assert part.take(lost="gone") is Stopping
    assert part.phase.round.rescuer.begin.mock_calls == [call("alone", 101.0)] * (replica == 1)
    saves = replica == 1 and able
    assert part.did == ["leave", *([] if saves else ["stop 0"])]


def test_who_saves_as_the_attempt_ends_is_left_to_it():
    part = Part(Running, can_wait=False)

    def begin(what: str, now: float) -> bool:
        part.workers.stopping = True  # but for who saves all are ended
        return True

    part.phase.round.rescuer = Mock(begin=begin)
    part.take(lost="gone")
    assert (part.ended.lost, part.did) == ("gone", [])


@pytest.mark.parametrize(("rescues", "until"), [(False, 120.0), (True, 150.0)])
def test_a_parked_launcher_waits_while_a_survivor_elsewhere_saves(rescues, until):
    part = Part(Parked, can_wait=False)
    part.phase.round.rescuer = Mock() if rescues else None
    part.take(now=until)
    assert not part.ended.lost
    part.take(now=until + 0.1)
    assert part.ended.lost == "it does not answer"


def test_a_parked_launcher_waits_as_long_as_there_is_a_hub():
    part = Part(Parked)
    part.link.linked = True
    part.take(now=5000.0)
    part.link.linked = False
    assert part.take(lost="gone", now=5001.0) is Parked
    assert part.did == ["leave", "join"]
    part.take(now=5330.0)
    assert not part.ended.lost
    part.take(now=5340.0)
    assert part.ended.lost == "it does not answer"


def test_a_parked_launcher_may_look_for_a_hub_where_nobody_listens_yet():
    part = Part(Running)
    part.workers.exits, part.workers.failed = [None], True
    assert isinstance(part.phase, Running)
    part.phase.report(99.0)
    part.link.unmet = "nobody listens at job-0 port 2"
    part.take(Stop(2), now=101.0)
    assert isinstance(part.phase, Stopping)
    part.phase = part.phase.report_stopped(7, 101.0)
    part.take(now=200.0)
    assert (part.did, part.ended.lost) == (["Failed", "stop 0", "Stopped", "join"], "")


def test_a_parked_launcher_ends_at_a_signal():
    part = Part(Parked)
    part.phase.forward(15, 101.0)
    part.take(GO)
    assert part.did == ["signal 15", "Leaving", "grace"]
    assert part.ended.between_rounds
    assert part.phase.is_over(101.0)


@pytest.mark.parametrize("succeeded", [True, False])
def test_a_parked_launcher_ends_when_all_have_succeeded(succeeded):
    """Also its replica, before it was stopped; else it stood by."""
    part = Part(Parked)
    part.workers.succeeded = succeeded
    assert not part.phase.is_over(101.0)
    part.take(Finished(), lost="the hub has ended, too")
    assert part.phase.is_over(101.0)
    assert (part.did, part.ended.stood_by, part.ended.lost) == ([], not succeeded, "")
