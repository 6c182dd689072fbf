"""What rounds.decide answers when every process of a round has ended."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from ddpjob_trainer.launcher.hub.root_cause import Exit, in_words
from ddpjob_trainer.launcher.hub.rounds import (
    History,
    Limits,
    Outcome,
    Verdict,
    decide,
    drills_left,
)

KILLED, LOST = -9, 75
AT = "2026-01-01T00:00:00Z"
MISSING = "FileNotFoundError: [Errno 2] No such file or directory: 'base.yaml'"


def exits(*statuses: int, ours: tuple[int, ...] = ()) -> list[Exit]:
    """The ends of ranks 0, 1, ... in this order; the launchers killed ``ours``."""
    return [
        Exit(rank, rank % 2, status, float(rank), rank in ours)
        for rank, status in enumerate(statuses)
    ]


def raised(step: int = 40, exception: str = "ValueError: x", code: int = 1) -> list[Exit]:
    return [Exit(0, 0, code, 0.0, exception=exception, step=step), Exit(1, 1, LOST, 0.0)]


def at_start(*exceptions: str, foreign: bool = True) -> list[Exit]:
    """Of scripts that raise before their first step; "" for one that the launcher has killed."""
    return [
        Exit(rank, 0, 1, 0.0, exception=said, foreign=foreign, in_script=True)
        if said
        else Exit(rank, 0, KILLED, 0.0, ours=True)
        for rank, said in enumerate(exceptions)
    ]


def drilled(*statuses: int) -> list[Exit]:
    """Of these those with 75 have said that they end for a drill, after step 12."""
    return [
        Exit(rank, 0, status, 0.0, step=12, drill=status == LOST)
        for rank, status in enumerate(statuses)
    ]


def verdict_of(
    found: Iterable[Exit],
    history: History | None = None,
    step: int = -1,
    *,
    lasted: float = 0.0,
    modified: int = -1,
    **limits: Any,
) -> Verdict:
    """Of a gang with two processes a launcher."""
    outcome = Outcome(2, 2, {one.rank: one for one in found}, snapshot_step=step, lasted=lasted)
    limits = {"budget": 3, "heal_after": 60.0} | limits
    return decide(history or History(), outcome, Limits(**limits), at=AT, modified=modified)


def next_of(found: Iterable[Exit], *more: Any, **and_more: Any) -> History:
    """The history after a round that another follows."""
    following = verdict_of(found, *more, **and_more).next
    assert following is not None
    return following


@pytest.mark.parametrize(
    ("found", "cause"),
    [
        (exits(0, KILLED, LOST), 1),
        (exits(LOST, LOST, 1), 2),  # collateral is never the cause while another exists
        (exits(LOST, LOST, LOST), 0),
        (exits(KILLED, KILLED, 1, ours=(0, 1)), 2),  # what the launchers killed is no cause
        (exits(KILLED, KILLED, KILLED, ours=(0, 1, 2)), None),  # a lost launcher, say
        (exits(76, LOST, LOST), 0),  # a hang ends a round like a death
        (exits(143, LOST, LOST), 0),  # somebody ended one process, not the job
        (exits(KILLED, 64), 0),  # what no restart cures came after another end
    ],
)
def test_another_round_follows(found, cause):
    verdict = verdict_of(found)
    assert (verdict.cause.rank if verdict.cause else None) == cause
    assert (verdict.next.round, verdict.next.failures) == (1, 1)
    assert verdict.next.records[0].get("rank") == cause


@pytest.mark.parametrize(
    ("found", "final", "why"),
    [
        *((exits(LOST, code, LOST), (), "cannot be cured") for code in (2, 64, 70, 78, 126, 127)),
        # Whichever failed first: a GPU explains the others.
        (exits(KILLED, 74), (), "a GPU failed"),
        (exits(LOST, 3), (3, 42, LOST), "a rule of the job"),
        (exits(LOST, 42), (3, 42, LOST), "a rule of the job"),
    ],
)
def test_no_round_follows(found, final, why):
    verdict = verdict_of(found, step=50, final=frozenset(final))
    assert (verdict.next, verdict.cause) == (None, found[1])
    assert why in verdict.why


@pytest.mark.parametrize("found", [exits(LOST, 4), drilled(LOST)])
def test_a_rule_of_the_job_means_its_exit_codes_and_no_drill(found):
    assert verdict_of(found, final=frozenset({3, LOST})).next is not None


@pytest.mark.parametrize(
    ("status", "exception", "words"),
    [
        (KILLED, "", "SIGKILL"),
        (-45, "", "signal 45"),
        (-11, "Fatal Python error:\n  a.py:3", "SIGSEGV: Fatal Python error: a.py:3"),
        (143, "", "sigterm"),
        (1, "ValueError: no", "exit code 1: ValueError: no"),
        (3, "", "exit code 3"),
        (LOST, "", "peerLost"),
        (76, "rank 0 hung", "hang: rank 0 hung"),
    ],
)
def test_a_record_says_in_words_how_a_round_ended(status, exception, words):
    following = next_of([Exit(0, 0, status, 1.0, exception=exception)])
    assert in_words(following.records[0]) == words
    assert in_words({"round": 0}) == "peerLost"  # without a process to blame


def test_the_records_of_two_rounds():
    first = next_of([Exit(3, 1, KILLED, 0.0, step=17)], step=10)
    second = next_of([Exit(0, 0, 1, 0.0, exception="ValueError: x")], first)
    assert second.records == (
        {
            "round": 0, "replica": 1, "rank": 3, "code": 137, "signal": 9, "kind": "signal",
            "step": 17, "snapshotStep": 10, "at": AT,
        },
        {
            "round": 1, "replica": 0, "rank": 0, "code": 1, "kind": "exception",
            "exception": "ValueError: x", "snapshotStep": 10, "at": AT,
        },
    )  # fmt: skip


def test_only_the_newest_records_are_kept():
    history = History()
    for step in range(15):
        history = next_of(exits(KILLED), history, step)
    assert [record["round"] for record in history.records] == list(range(5, 15))


@pytest.mark.parametrize(
    ("limits", "what", "values", "rounds"),
    [
        ({"budget": 0}, "step", (5,), 0),
        ({"budget": 1}, "step", (-1, -1), 1),
        ({"budget": 3}, "step", (-1, -1, -1, -1), 3),  # the N+1st without progress
        ({"budget": 3}, "step", (0, 0, 0, 0), 3),
        ({"budget": 1}, "step", (10, 20, 30, 30), 3),  # each newer snapshot heals
        ({"budget": 2}, "step", (10, 10, 20, 20, 20), 4),
        ({"budget": 2}, "step", (10, -1, -1), 2),  # nobody came as far as to know: no progress
        ({"budget": 1}, "modified", (-1, 5, 6, 6), 3),  # each newer file heals
        ({"budget": 1}, "modified", (9, 5), 1),  # an older one does not
        ({"budget": 1}, "lasted", (1, 60, 61, 59), 3),  # and so does time
        ({"budget": 1, "heal_after": 0.0}, "lasted", (1e9, 1e9), 1),  # unless that is off
    ],
)
def test_the_budget_counts_failures_without_progress(limits, what, values, rounds):
    history = History()
    for number, value in enumerate(values):
        verdict = verdict_of(exits(KILLED), history, **limits, **{what: value})
        assert (verdict.next is not None) is (number < rounds), number
        history = verdict.next or history
    if verdict.next is None and limits["budget"]:
        failures = limits["budget"] + 1
        assert verdict.why == f"failed {failures} times without progress in between"


# --- The same failure again ------------------------------------------------------------------


@pytest.mark.fault("U15")
def test_one_exception_three_times_at_one_step_ends_the_attempt():
    """Each round lasts for hours, which is progress, and would go on for ever."""
    history = next_of(raised(), None, 25, lasted=9999.0)
    history = next_of(raised(), history, 25, lasted=9999.0)
    verdict = verdict_of(raised(), history, 25, lasted=9999.0)
    assert (verdict.next, verdict.cause) == (None, raised()[0])
    assert "the same exception 3 times in a row at step 40" in verdict.why


def test_numbers_that_differ_do_not_hide_the_same_exception():
    said = "RuntimeError: loss {} of <Batch at 0x7f{:x}> after {:g} s in pid {}"
    history = History()
    for one in (1.5, 2e-07):
        ends = raised(exception=said.format(one, int(one * 1e9), one * 7, int(one) + 9))
        history = next_of(ends, history, 25, lasted=9999.0)
    assert verdict_of(raised(exception=said.format("-3", 1, 10, 99)), history, 25).next is None
    assert verdict_of(raised(exception="RuntimeError: loss 3"), history, 25).next is not None


@pytest.mark.parametrize(
    ("second", "third", "step"),
    [
        (raised(41), raised(), 25),
        (raised(exception="ValueError: y"), raised(), 25),
        (exits(KILLED), raised(), 25),
        (raised(), raised(41), 25),
        (raised(code=LOST), raised(code=LOST), 25),  # the loss of a peer says where it was met
        (raised(), raised(), 40),  # nothing was trained in between: it may be the start
        (raised(0), raised(0), -1),
    ],
)
def test_what_differs_or_may_be_the_start_has_another_round(second, third, step):
    history = next_of(second, next_of(third, None, step), step, lasted=99.0)
    assert verdict_of(third, history, step, lasted=99.0).next is not None


@pytest.mark.parametrize(
    ("first", "second", "lasted", "another"),
    [
        (at_start(MISSING, MISSING), at_start(MISSING, MISSING), 9.0, False),
        (at_start("KeyError: 3"), at_start("KeyError: 4"), 9.0, True),  # at another sample?
        (at_start(MISSING, "KeyError: 'a'"), at_start(MISSING, "KeyError: 'a'"), 9.0, True),
        (at_start(MISSING, ""), at_start(MISSING, ""), 9.0, True),  # the other may be well
        (at_start(MISSING), at_start("KeyError: 'a'"), 9.0, True),
        (exits(KILLED), at_start(MISSING), 9.0, True),
        ([Exit(0, 0, 1, 0.0, exception=MISSING)], at_start(MISSING), 9.0, True),  # elsewhere
        (at_start("KeyError: 3"), at_start("KeyError: 3"), 301.0, True),  # it may have trained
        (at_start("KeyError: 3", foreign=False), at_start("KeyError: 3", foreign=False), 301.0,
         False),
    ],
)  # fmt: skip
def test_a_script_that_fails_twice_before_its_first_step_ends(first, second, lasted, another):
    history = next_of(first, lasted=lasted, heal_after=0.0)
    verdict = verdict_of(second, history, lasted=lasted, heal_after=0.0)
    assert (verdict.next is not None, verdict.code) == ((True, 0) if another else (False, 64))
    # Progress in between, as a newer file of the program's, shows that it does more.
    assert verdict_of(second, history, 5, lasted=lasted, heal_after=0.0).next is not None


# --- A drill ---------------------------------------------------------------------------------


def test_a_drill_is_a_round_and_no_failure():
    before = History(failures=1, snapshot_step=5, modified=7)
    after = next_of(drilled(LOST, LOST, LOST), before, 10, budget=1, modified=9)
    record = {"round": 0, "at": AT, "kind": "drill", "step": 12, "snapshotStep": 10}
    assert after == replace(before, round=1, records=(record,))
    # The snapshot that it resumes counts as progress of the next failure still.
    failed = next_of(exits(KILLED), after, 10, budget=1)
    assert failed.failures == 1
    assert verdict_of(exits(KILLED), failed, 10, budget=1).next is None


def test_who_was_stopped_or_lost_its_peers_to_a_drill_is_part_of_it():
    stopped = Exit(1, 1, KILLED, 0.0, ours=True)
    silent = Exit(2, 0, LOST, 0.0, exception="PeerLostError: closed")
    following = next_of([*drilled(LOST), stopped, silent], History(failures=2))
    assert (following.failures, following.records[0]["kind"]) == (2, "drill")


@pytest.mark.fault("T2")
@pytest.mark.parametrize("status", [KILLED, 1, 76, 143])
def test_a_death_during_a_drill_is_a_failure(status):
    following = next_of(drilled(LOST, status, LOST))
    assert (following.failures, following.records[0]["rank"]) == (1, 1)


def test_a_drill_is_bounded_and_needs_rounds():
    ends, history = drilled(LOST, LOST), History()
    for left in (True, True, False):
        assert drills_left(history.records) is left
        history = next_of(ends, history)
    assert [record["kind"] for record in history.records] == ["drill", "drill", "peerLost"]
    assert history.failures == 1
    assert verdict_of(ends, budget=0).next is None
