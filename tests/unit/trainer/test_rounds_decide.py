"""Where a round is decided: the table of what follows when every process has ended."""

from __future__ import annotations

import pytest

from ddpjob_trainer.launcher.hub.root_cause import Exit, in_words
from ddpjob_trainer.launcher.hub.rounds import History, Limits, decide, drills_left

KILLED, LOST = -9, 75


def exits(*statuses: int, ours: tuple[int, ...] = ()) -> list[Exit]:
    return [
        Exit(rank, rank % 2, status, float(rank), rank in ours)
        for rank, status in enumerate(statuses)
    ]


def verdict_of(  # type: ignore[no-untyped-def]
    history: History, found: list[Exit], snapshot_step: int = -1, budget: int = 3, **more
):
    limits = Limits(budget, heal_after=60)
    return decide(history, found, snapshot_step, limits, nproc=2, at="2026-01-01T00:00:00Z", **more)


@pytest.mark.parametrize(
    ("statuses", "ours", "cause"),
    [
        ((0, KILLED, LOST), (), 1),
        ((LOST, LOST, 1), (), 2),  # collateral is never the cause while another exists
        ((LOST, LOST, LOST), (), 0),
        ((KILLED, KILLED, 1), (0, 1), 2),  # what the launchers killed is no cause
        ((KILLED, KILLED, KILLED), (0, 1, 2), None),  # a lost launcher, say
        ((76, LOST, LOST), (), 0),  # a hang ends a round like a death
        ((143, LOST, LOST), (), 0),  # somebody ended one process, not the job
    ],
)
def test_another_round_follows(statuses, ours, cause):  # type: ignore[no-untyped-def]
    verdict = verdict_of(History(), exits(*statuses, ours=ours))
    assert (verdict.cause.rank if verdict.cause else None) == cause
    assert verdict.next is not None
    assert (verdict.next.round, verdict.next.failures) == (1, 1)
    assert verdict.next.records[0].get("rank") == cause


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
def test_how_a_round_ended_is_said_in_words(status: int, exception: str, words: str):
    following = verdict_of(History(), [Exit(0, 0, status, 1.0, False, exception)]).next
    assert following is not None
    assert in_words(following.records[0]) == words
    assert in_words({"round": 0}) == "peerLost"  # without a process to blame


@pytest.mark.parametrize("code", [2, 64, 70, 78, 126, 127])
def test_what_a_restart_cannot_cure_ends_the_attempt(code):  # type: ignore[no-untyped-def]
    verdict = verdict_of(History(), exits(LOST, code, LOST), snapshot_step=50)
    assert (verdict.next, verdict.cause.code) == (None, code)
    # ... unless it came after another process had ended the round already.
    assert verdict_of(History(), exits(KILLED, code)).next is not None


def test_a_gpu_that_failed_is_not_tried_again_and_explains_the_others():
    verdict = verdict_of(History(), exits(KILLED, 1, 74), snapshot_step=50)
    assert (verdict.next, verdict.cause.rank) == (None, 2)
    assert "a GPU failed" in verdict.why


@pytest.mark.parametrize(("code", "another"), [(3, False), (42, False), (4, True), (LOST, True)])
def test_an_exit_code_that_the_users_rules_fail_ends_the_attempt(code: int, another: bool) -> None:
    limits = Limits(3, final=frozenset({3, 42, LOST}))
    ends = drilled(LOST) if code == LOST else exits(LOST, code)  # a rule does not mean a drill
    verdict = decide(History(), ends, 9, limits, nproc=2, at="2026-01-01")
    assert (verdict.next is not None) is another


@pytest.mark.parametrize(
    ("budget", "what", "values", "rounds"),
    [
        (0, "snapshot_step", (5,), 0),
        (1, "snapshot_step", (-1, -1), 1),
        (3, "snapshot_step", (-1, -1, -1, -1), 3),  # the N+1st without progress
        (3, "snapshot_step", (0, 0, 0, 0), 3),
        (1, "snapshot_step", (10, 20, 30, 30), 3),  # each newer snapshot heals
        (2, "snapshot_step", (10, 10, 20, 20, 20), 4),
        (2, "snapshot_step", (10, -1, -1), 2),  # nobody came as far as to know: no progress
        (1, "modified", (-1, 5, 6, 6), 3),  # each newer file heals
        (1, "modified", (9, 5), 1),  # an older one does not
        (1, "lasted", (1, 60, 61, 59), 3),  # and so does time
    ],
)
def test_the_budget_counts_failures_without_progress(budget, what, values, rounds):  # type: ignore[no-untyped-def]
    history = History()
    for number, value in enumerate(values):
        verdict = verdict_of(history, exits(KILLED), budget=budget, **{what: value})
        assert (verdict.next is not None) is (number < rounds), number
        history = verdict.next or history


def test_time_is_no_progress_where_that_is_off():
    history = History(failures=1)
    found = decide(history, exits(KILLED), -1, Limits(1), nproc=2, at="2026-01-01", lasted=1e9)
    assert found.next is None
    assert found.why == "failed 2 times without progress in between"


def test_the_record_of_a_round():  # type: ignore[no-untyped-def]
    first = verdict_of(History(), [Exit(3, 1, KILLED, 0.0, step=17)], snapshot_step=10).next
    assert first is not None
    assert first.records == (
        {
            "round": 0, "replica": 1, "rank": 3, "code": 137, "signal": 9, "kind": "signal",
            "step": 17, "snapshotStep": 10, "at": "2026-01-01T00:00:00Z",
        },
    )  # fmt: skip
    second = verdict_of(first, [Exit(0, 0, 1, 0.0, exception="ValueError: x")]).next
    assert second is not None
    assert second.records[1] == {
        "round": 1, "replica": 0, "rank": 0, "code": 1, "kind": "exception",
        "exception": "ValueError: x", "snapshotStep": 10, "at": "2026-01-01T00:00:00Z",
    }  # fmt: skip


def test_only_the_newest_records_are_kept():  # type: ignore[no-untyped-def]
    history = History()
    for step in range(15):
        following = verdict_of(history, exits(KILLED), step).next
        assert following is not None
        history = following
    assert [record["round"] for record in history.records] == list(range(5, 15))


def raised(step: int = 40, exception: str = "ValueError: x", code: int = 1) -> list[Exit]:
    return [Exit(0, 0, code, 0.0, exception=exception, step=step), Exit(1, 1, LOST, 0.0)]


@pytest.mark.fault("U15")
def test_one_exception_three_times_at_one_step_ends_the_attempt():  # type: ignore[no-untyped-def]
    history = History()
    for _ in range(2):  # each round lasts for hours, which is progress, and would go on for ever
        following = verdict_of(history, raised(), 25, lasted=9999.0).next
        assert following is not None
        history = following
    verdict = verdict_of(history, raised(), 25, lasted=9999.0)
    assert (verdict.next, verdict.cause) == (None, raised()[0])
    assert "the same exception 3 times in a row at step 40" in verdict.why


def test_numbers_that_differ_by_round_do_not_hide_the_same_exception():  # type: ignore[no-untyped-def]
    said = "RuntimeError: loss {} of <Batch at 0x7f{:x}> after {:g} s in pid {}"
    history = History()
    for one in (1.5, 2e-07):
        ends = raised(exception=said.format(one, int(one * 1e9), one * 7, int(one) + 9))
        following = verdict_of(history, ends, 25, lasted=9999.0).next
        assert following is not None
        history = following
    assert verdict_of(history, raised(exception=said.format("-3", 1, 10, 99)), 25).next is None
    assert verdict_of(history, raised(exception="RuntimeError: loss 3"), 25).next is not None


# --- Before the first step -------------------------------------------------------------------


def at_start(*exceptions: str, foreign: bool = True, status: int = 1) -> list[Exit]:
    """Of scripts that raise; "" for a process that the launcher has killed."""
    return [
        Exit(rank, 0, status, 0.0, exception=said, foreign=foreign, in_script=True)
        if said
        else Exit(rank, 0, KILLED, 0.0, ours=True)
        for rank, said in enumerate(exceptions)
    ]


MISSING = "FileNotFoundError: [Errno 2] No such file or directory: 'base.yaml'"


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
def test_a_script_that_fails_twice_before_its_first_step_ends(  # type: ignore[no-untyped-def]
    first, second, lasted, another
):
    limits = Limits(3)
    one, two = (
        decide(history, ends, -1, limits, nproc=1, at="2026-01-01", lasted=lasted)
        for history, ends in ((History(), first), (None, second))
        for history in [history or decide(History(), first, -1, limits, nproc=1, at="2026-01-01",
                                          lasted=lasted).next]
    )  # fmt: skip
    assert one.next is not None
    assert (two.next is not None) is another
    assert two.code == (0 if another else 64)
    # Progress in between, as a newer file of the program's, shows that it does more.
    again = decide(one.next, second, 5, limits, nproc=1, at="2026-01-01", lasted=lasted)
    assert again.next is not None


@pytest.mark.parametrize(
    ("second", "third", "snapshot_step"),
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
def test_what_differs_or_may_be_the_start_has_another_round(  # type: ignore[no-untyped-def]
    second, third, snapshot_step
):
    history = verdict_of(History(), third, snapshot_step).next
    assert history is not None
    history = verdict_of(history, second, snapshot_step, lasted=99.0).next
    assert history is not None
    assert verdict_of(history, third, snapshot_step, lasted=99.0).next is not None


# --- A drill ---------------------------------------------------------------------------------


def drilled(*statuses: int, step: int = 12) -> list[Exit]:
    """Of these those with 75 have said that they end for a drill."""
    return [
        Exit(rank, 0, status, 0.0, step=step, drill=status == LOST)
        for rank, status in enumerate(statuses)
    ]


def test_a_drill_is_a_round_and_no_failure() -> None:
    before = History(failures=1, snapshot_step=5, modified=7)
    verdict = verdict_of(before, drilled(LOST, LOST, LOST), 10, budget=1, modified=9)
    assert verdict.next == History(
        1, 5, 7, 1,
        ({"round": 0, "at": "2026-01-01T00:00:00Z", "kind": "drill", "step": 12,
          "snapshotStep": 10},),
    )  # fmt: skip
    # The snapshot that it resumes counts as progress of the next failure still.
    after = verdict_of(verdict.next, exits(KILLED), 10, budget=1).next
    assert after is not None
    assert after.failures == 1
    assert verdict_of(after, exits(KILLED), 10, budget=1).next is None


def test_who_was_stopped_or_lost_its_peers_to_a_drill_is_part_of_it() -> None:
    stopped = Exit(1, 1, KILLED, 0.0, ours=True)
    silent = Exit(2, 0, LOST, 0.0, exception="PeerLostError: closed")
    verdict = verdict_of(History(failures=2), [*drilled(LOST), stopped, silent])
    assert verdict.next is not None
    assert (verdict.next.failures, verdict.next.records[0]["kind"]) == (2, "drill")


@pytest.mark.fault("T2")
@pytest.mark.parametrize("status", [KILLED, 1, 76, 143])
def test_a_death_during_a_drill_is_a_failure(status: int) -> None:
    verdict = verdict_of(History(), drilled(LOST, status, LOST))
    assert verdict.cause.rank == 1
    assert (verdict.next.failures, verdict.next.records[0]["rank"]) == (1, 1)


def test_a_drill_is_bounded_and_needs_rounds() -> None:
    ends = drilled(LOST, LOST)
    history: History | None = History()
    for left in (True, True, False):
        assert history is not None
        assert drills_left(history.records) is left
        history = verdict_of(history, ends).next
    assert history is not None
    assert [record["kind"] for record in history.records] == ["drill", "drill", "peerLost"]
    assert history.failures == 1
    assert verdict_of(History(), ends, budget=0).next is None
