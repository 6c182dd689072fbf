"""A rank that ends with 0 while others train is named before the one that failed by it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from ddpjob_trainer.launcher.hub import rounds
from ddpjob_trainer.launcher.hub.root_cause import Exit, ended_early
from ddpjob_trainer.launcher.hub.rounds import History, Limits
from ddpjob_trainer.launcher.watch.early_ends import EarlyEnds
from ddpjob_trainer.launcher.worker_group import WorkerGroup

GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4"


@pytest.mark.fault("T13")
@pytest.mark.parametrize(
    ("code", "exception"), [(1, GLOO), (75, ""), (76, "Hang: rank 0 stands still")]
)
def test_who_ended_early_is_named_before_its_victim(code: int, exception: str):
    exits = [Exit(1, 0, 0, 5.0, step=12), Exit(0, 0, code, 6.0, exception=exception)]
    verdict = rounds.decide(History(), exits, -1, Limits(3), nproc=1, at="now")
    assert verdict.next is not None
    record = verdict.next.records[-1]
    assert record["exception"].startswith("rank 1 after step 12 ended with exit code 0 while")
    assert f"then rank 0: {exception or code}" in record["exception"]


def test_an_error_of_its_own_is_its_own():
    cause = Exit(0, 0, 1, 6.0, exception="OSError: disk full")
    assert ended_early([Exit(1, 0, 0, 5.0), cause], cause) == ""
    later = Exit(0, 0, 75, 4.0)
    assert ended_early([Exit(1, 0, 0, 5.0), later], later) == "", "it ended after the failure"


def looked(exits: list[Exit], running: int, others: tuple[list[Exit], int], now: float) -> int:
    """How often it is said, of 20 looks from that moment on."""
    workers = SimpleNamespace(exits=exits, running=running, stopping=False)
    said: list[str] = []
    early = EarlyEnds(300, said.append)
    for second in range(20):
        early.poll(cast("WorkerGroup", workers), others, now + second)
    assert all(
        words.startswith("rank 1 after step 7 ended with exit code 0 more") for words in said
    )
    return len(said)


@pytest.mark.fault("T13")
def test_who_ended_with_0_long_before_ranks_that_do_not_talk_is_told_once():
    done = [Exit(1, 1, 0, 5.0, step=7)]
    assert looked(done, 1, ([], 0), 305.0) == 1
    assert looked([], 1, (done, 2), 305.0) == 1, "at another launcher"
    assert looked([], 0, (done, 2), 305.0) == 1, "and all here have ended"
    trained = [Exit(1, 1, 0, 5.0, step=7, done=True)]
    assert looked(trained, 1, (trained, 2), 305.0) == 0, "after the loop nobody waits for it"
    assert looked(done, 1, ([], 0), 280.0) == 0, "others may end as well"
    assert looked(done, 0, ([], 0), 305.0) == 0, "all have"
    assert looked([Exit(1, 1, 3, 5.0)], 1, ([], 0), 305.0) == 0, "a failure is told elsewhere"
