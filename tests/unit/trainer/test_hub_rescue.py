"""How the hub has the newest step saved by a survivor before it stops the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddpjob_trainer.launcher.hub import hub
from ddpjob_trainer.launcher.hub.hub import RESCUE_SECONDS
from ddpjob_trainer.launcher.hub.messages import End, Message, Rescuing, Stop, decode, encode
from support.hub_gang import Gang

STOP = Stop(0)
WRITE, VOUCH = Stop(0, rescue="write"), Stop(0, rescue="vouch")
ALL = {0: [STOP], 1: [STOP], 2: [STOP]}


def rescuing(*seats: int, **more: Any) -> Gang:
    """A gang in which these launchers may save a step."""
    gang = Gang(**more)
    for seat, hello in gang.hub.seats.members.items():
        gang.hub.seats.members[seat] = replace(hello, rescues=seat in seats)
    gang.hub.seats.own = gang.hub.seats.members[0]
    return gang


def test_what_rank_0_has_ended_goes_with_the_word():
    """Its launcher knows more, if it passes the word on."""
    gang = rescuing(0, 1, 2)
    gang.fails(0, -9, step=23)
    assert gang.said() == {0: [replace(WRITE, word="23")]}
    gang.says(0, Rescuing(0, "next", "24"))
    assert gang.said() == {1: [replace(WRITE, word="24")]}


def asked(*seats: int) -> Gang:
    """A process of seat 1 was killed, and seat 0 is asked to save the newest step."""
    gang = rescuing(*(seats or (0, 1, 2)))
    gang.fails(1, -9)
    assert gang.said() == {0: [WRITE]}
    return gang


def test_another_launcher_vouches_before_the_snapshot_counts():
    gang = asked()
    gang.says(0, Rescuing(0, "yes"))
    assert gang.said() == {0: [STOP], 1: [VOUCH, STOP], 2: [STOP]}
    gang.says(1, Rescuing(0, "word", "24 ab"))
    assert gang.said() == {0: [Stop(0, rescue="word", word="24 ab")]}
    gang.says(0, Rescuing(0, "done", "0 24"))
    gang.stop(0, 1, 2)
    gang.goes(1)
    assert [(one["savedBy"], one["savedStep"]) for one in gang.hub.history.records] == [(0, 24)]


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([(0, "yes", "own")], ALL),  # two of its own workers
        ([(0, "no", "")], ALL),  # it does not pay
        ([(0, "next", "")], {1: [WRITE]}),
        ([(0, "next", ""), (1, "next", "")], {1: [WRITE], 2: [Stop(0, rescue="alone")]}),
        (
            [(0, "next", ""), (1, "next", ""), (2, "next", "")],
            {0: [STOP], 1: [WRITE, STOP], 2: [Stop(0, rescue="alone"), STOP]},
        ),
    ],
)
def test_what_a_survivor_answers(answers, said):
    gang = asked()
    for seat, answer, word in answers:
        gang.says(seat, Rescuing(0, answer, word))
    assert gang.said() == said


def test_a_gang_where_nobody_can_is_not_asked_one_by_one(monkeypatch):
    monkeypatch.setattr(hub, "_MOST_ASKED", 2)
    gang = asked()
    for seat in (0, 1):
        gang.says(seat, Rescuing(0, "next"))
    assert gang.said() == {0: [STOP], 1: [Stop(0, rescue="alone"), STOP], 2: [STOP]}


def test_where_who_was_asked_cannot_vouch_nobody_else_does():
    gang = asked()
    gang.says(0, Rescuing(0, "yes"))
    gang.says(1, Rescuing(0, "next"))
    gang.says(0, Rescuing(0, "next"))  # it has given up: too late to ask another
    none = Stop(0, rescue="word", word="none")
    assert gang.said() == {0: [STOP, none], 1: [VOUCH, STOP], 2: [STOP]}


def test_a_writer_that_answers_after_the_stop_waits_for_no_word():
    for word, more in (("", [Stop(0, rescue="word", word="none")]), ("own", [])):
        gang = asked()
        gang.hub.tick(RESCUE_SECONDS)
        gang.said()
        gang.says(0, Rescuing(0, "yes", word))
        assert gang.said().get(0, []) == more


def test_stop_always_follows():
    for gang in (asked(), asked(), asked()):
        assert gang.hub.tick(0.1) == RESCUE_SECONDS
        assert gang.said() == {}
        gang.hub.tick(RESCUE_SECONDS)
        assert gang.said() == ALL
    gang = asked()
    gang.stop(0)  # its workers were gone already
    assert gang.said() == ALL


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (lambda g: g.fails(1, 75), {}),  # of whom its cause is not known yet
        (lambda g: g.fails(1, 64), dict.fromkeys((0, 1, 2), "Stop")),  # no round follows
        (lambda g: g.fails(1, 75, drill=True), {}),
    ],
)
def test_nobody_saves_where_the_cause_is_unknown_or_final(event, words):
    gang = rescuing(0, 1, 2)
    event(gang)
    found = gang.said()
    assert all(message == STOP for said in found.values() for message in said)
    assert dict.fromkeys(found, "Stop") == words


def test_a_lost_pod_is_a_failure_too():
    gang = rescuing(0, 1, 2)
    gang.loses(1)
    assert gang.said() == {0: [WRITE]}


def test_the_survivors_of_an_attempt_that_ends_save_first():
    gang = rescuing(0, 1, 2, waits=False)
    gang.loses(1)
    assert gang.said() == {0: [WRITE]}
    gang.says(0, Rescuing(0, "yes", "own"))
    assert gang.said() == {0: [STOP], 2: [STOP]}
    gang.stop(0)
    assert gang.said() == {}
    gang.stop(2)
    end = End(-1, "the launcher of replica 1 was lost", graceful=False)
    assert gang.said() == {0: [end], 2: [end]}
    alone = rescuing(waits=False)
    alone.loses(1)
    assert alone.said() == {0: [end], 2: [end]}
    without = rescuing(0, 1, 2, budget=0)
    without.fails(1, -9)
    assert without.said() == {0: [WRITE]}


def test_older_launchers_are_not_asked_and_hear_nothing_new():
    gang = asked(0, 2)
    gang.says(0, Rescuing(0, "yes"))
    assert gang.said() == {0: [STOP], 1: [STOP], 2: [VOUCH, STOP]}
    without = rescuing()
    without.fails(1, -9)
    assert without.said() == ALL
    for message in (STOP, WRITE, Rescuing(0, "yes", "own")):
        line: Message = decode(encode(message))
        assert line == message
    assert encode(STOP) == b'{"type":"Stop","round":0,"graceful":false}\n'
