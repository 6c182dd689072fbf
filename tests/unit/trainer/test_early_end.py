"""A rank that ends with 0 while others train is named before the one that failed by it."""

import pytest

from ddpjob_contract.exits import kind_of
from ddpjob_trainer.launcher.hub import rounds
from ddpjob_trainer.launcher.hub.root_cause import Exit, ended_early, ended_long_ago
from ddpjob_trainer.launcher.hub.rounds import History, Limits, Outcome

GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4"


@pytest.mark.fault("T13")
@pytest.mark.parametrize(
    ("code", "exception"), [(1, GLOO), (75, ""), (76, "Hang: rank 0 stands still")]
)
def test_who_ended_early_is_named_before_its_victim(code, exception):
    exits = [Exit(1, 0, 0, 5.0, step=12), Exit(0, 0, code, 6.0, exception=exception)]
    outcome = Outcome(2, 1, {one.rank: one for one in exits})
    verdict = rounds.decide(History(), outcome, Limits(3), at="now")
    record = verdict.next.records[-1]
    assert record["exception"].startswith("rank 1 after step 12 ended with exit code 0 while")
    assert f"then rank 0: {exception or code}" in record["exception"]
    assert kind_of("hang", record["exception"]) == "leftEarly"
    assert kind_of("hang", exception) == "hang"
    last = rounds.decide(History(failures=3), outcome, Limits(3), at="now")
    assert (last.next, "progress in between" in last.why) == (None, True)
    assert "rank 1 after step 12 ended with exit code 0 while" in last.why
    own = Exit(0, 0, 1, 6.0, exception="OSError: disk full")
    assert ended_early([Exit(1, 0, 0, 5.0), own], own) == ""
    lost = Exit(0, 0, 75, 4.9)
    assert "rank 1" in ended_early([Exit(1, 0, 0, 5.0), lost], lost), "its sockets went first"
    for later in (Exit(0, 0, 75, 2.9), Exit(0, 0, 76, 4.9)):
        assert ended_early([Exit(1, 0, 0, 5.0), later], later) == "", "it ended after the failure"


@pytest.mark.fault("T13")
def test_who_ended_with_0_long_before_ranks_that_do_not_talk_is_told():
    done = [Exit(1, 1, 0, 5.0, step=7)]
    words = ended_long_ago(done, 1, 300.0, 305.0)
    assert words.startswith("rank 1 after step 7 ended with exit code 0 more than 300 s ago, and 1")
    trained = [Exit(1, 1, 0, 5.0, step=7, done=True)]
    assert ended_long_ago(trained, 1, 300.0, 305.0) == "", "after the loop nobody waits for it"
    assert ended_long_ago(done, 1, 300.0, 304.0) == "", "others may end as well"
    assert ended_long_ago(done, 0, 300.0, 305.0) == "", "all have"
    failed = [Exit(1, 1, 3, 5.0)]
    assert ended_long_ago(failed, 1, 300.0, 305.0) == "", "a failure is told elsewhere"
