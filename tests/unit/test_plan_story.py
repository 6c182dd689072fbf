"""What the planner says of scripted failures, pod-second by pod-second."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from kubectl_ddp.planning.cycle import Cycle
from kubectl_ddp.planning.parts import KINDS, STATES, Case, Parts
from kubectl_ddp.planning.story import Account, Fault, expected

NOTICED = {"process": 0.0, "hang": 8.0, "gpu": 1.0, "pod": 2.0, "node": 25.0, "hub": 80.0}
#: Three pods, steps of 1 s, a snapshot every 10 that stalls 0.5 s and is durable 3 s later.
PARTS = Parts(
    pods=3, gpus_per_pod=1, detection=NOTICED, teardown=1.0, wait=0.0,
    start=4.0, start_per_pod=1.0, warmup=5.0, warmup_spare=0.5,
    step=1.0, data=0.25, every_steps=10, stall=0.5, write=3.0,
)  # fmt: skip
BEGUN = 12.0  # all three pods start in 4 + 3 s, and warm up


def story(*faults: tuple[float, Case], parts: Parts = PARTS, seconds: float = 100.0) -> Account:
    account = expected(parts, [Fault(case, at) for at, case in faults], seconds=seconds)
    assert sum(account.book.values()) == pytest.approx(account.total)
    assert {state for state, _ in account.book} <= set(STATES)
    return account


def test_one_loss_in_as_many_as_there_are_pods_is_replica_0s() -> None:
    parts = replace(PARTS, shares={"process": 1.0, "pod": 1.0, "node": 2.0}, announced=0.25)
    found = dict(parts.cases())
    assert sum(found.values()) == pytest.approx(1.0)
    assert found[Case("process")] == 0.25
    assert found[Case("pod", hub=True)] == pytest.approx(0.25 / 3)
    assert found[Case("node", hub=True)] == pytest.approx(0.5 * 0.75 / 3)
    assert found[Case("node", announced=True)] == pytest.approx(0.5 * 0.25 * 2 / 3)
    assert parts.recovery(Case("node", hub=True)).detection == 80.0
    assert parts.recovery(Case("node")).detection == 25.0


def test_without_failures() -> None:
    account = expected(PARTS, [], steps=25)
    assert account.book == pytest.approx(
        {
            ("starting", ""): 3 * 7.0,
            ("warmup", ""): 3 * 5.0,
            ("productive", ""): 3 * 25 * 0.75,
            ("data", ""): 3 * 25 * 0.25,
            ("snapshot", ""): 3 * (2 * 0.5 + 3.5),  # the last one is waited for
        }
    )
    assert (account.seconds, account.steps, account.repeated) == (12 + 25 + 4.5, 25, 0)
    assert expected(PARTS, [Fault(Case("node"), 1000.0)], steps=25) == account


def test_a_process_that_dies_restarts_in_place() -> None:
    """At 24.2 12 s of training are over: 11 steps, of which 10 have a durable snapshot."""
    account = story((BEGUN + 14.2, Case("process")))
    book = account.book
    assert book["repeated", "process"] == 3 * 3 * 1.0  # steps 11 to 13
    assert book["recovering", "process"] == pytest.approx(3 * 0.7)  # of step 14
    assert book["warmup", "process"] == pytest.approx(3 * 0.5)
    assert account.repeated == 3
    early = story((BEGUN + 13.2, Case("process")))
    assert early.repeated == 12, "the snapshot was not durable yet"


def test_a_lost_pod_is_replaced_while_the_others_hold() -> None:
    book = story((BEGUN + 20.0, Case("pod"))).book
    assert book["recovering", "pod"] == pytest.approx(3 * (0.5 + 2.0 + 1.0))
    assert book["held", "pod"] == pytest.approx(2 * 4.0)
    assert book["starting", "pod"] == pytest.approx(4.0)
    assert book["warmup", "pod"] == pytest.approx(3 * 5.0)
    whole = story((BEGUN + 20.0, Case("pod")), parts=replace(PARTS, alone=False)).book
    assert ("held", "pod") not in whole
    assert whole["starting", "pod"] == pytest.approx(3 * 7.0)
    failed = story((BEGUN + 20.0, Case("gpu"))).book
    assert failed["starting", "gpu"] == pytest.approx(3 * 7.0), "nobody holds for a failed GPU"


def test_room_is_waited_for_before_a_pod_starts() -> None:
    parts = replace(PARTS, wait=10.0)
    book = story((BEGUN + 20.0, Case("node")), parts=parts).book
    assert book["waiting", "node"] == pytest.approx(10.0)
    assert book["held", "node"] == pytest.approx(2 * 14.0)
    assert book["recovering", "node"] == pytest.approx(3 * (0.5 + 25 + 1))
    dies = (30.0, Case("process"))
    assert ("waiting", "process") not in story(dies, parts=parts).book
    again = story(dies, parts=replace(parts, alone=False, in_place=False)).book
    assert again["starting", "process"] == pytest.approx(3 * 7.0)
    assert ("waiting", "process") not in again, "its own room is still there"


def test_a_standby_takes_over_and_idles_at_other_times() -> None:
    parts = replace(PARTS, standby=1)
    book = story((BEGUN + 20.0, Case("pod")), parts=parts).book
    assert ("held", "pod") not in book
    assert book["warmup", "pod"] == pytest.approx(3 * 0.5)
    assert book["recovering", "pod"] == pytest.approx(3 * 2.5)
    assert book["starting", "pod"] == pytest.approx(4.0), "the next one, beside training"
    assert book["idle", ""] == pytest.approx(100.0 - 4.0)
    ended = story((97.0, Case("pod")), parts=parts).book
    assert ("starting", "pod") not in ended, "it would have begun at the end"
    assert ended["idle", ""] == pytest.approx(100.0)
    assert ("held", "pod") in story((32.0, Case("pod", hub=True)), parts=parts).book
    two = story((32.0, Case("pod")), (32.1, Case("pod")), parts=parts).book
    assert ("held", "pod") in two, "there was only one"


def test_a_hand_over_repeats_nothing() -> None:
    account = story((BEGUN + 14.2, Case("node", announced=True)))
    assert account.repeated == 0
    assert account.book["snapshot", "node"] == pytest.approx(3 * 3.5)
    assert account.book["recovering", "node"] == pytest.approx(3 * (0.7 + 1.0)), "not detected"
    lost = story((BEGUN + 14.2, Case("node", announced=True)), (BEGUN + 15.0, Case("process")))
    assert lost.repeated == 3, "the save was cut short"


def test_a_script_may_name_the_step_after_which_something_fails() -> None:
    """Steps 17 and 28 are done 0.5 s and 1 s later than that many seconds of training."""
    by_step = [Fault(Case("process"), step=17), Fault(Case("pod"), step=28)]
    account = expected(PARTS, by_step, steps=40)
    first = BEGUN + 17.5
    second = first + 0.5 + 18.5
    by_time = [Fault(Case("process"), first), Fault(Case("pod"), second)]
    assert account.book == pytest.approx(expected(PARTS, by_time, steps=40).book)
    assert (account.steps, account.repeated) == (40, 7 + 8)
    saved = [Fault(Case("node", announced=True), step=17), Fault(Case("process"), step=18)]
    assert expected(PARTS, saved, steps=40).repeated == 1, "from the save after step 17"


def test_a_step_that_ends_at_that_moment_is_done() -> None:
    parts = replace(PARTS, step=0.1, data=0.0, stall=0.7, every_steps=1000)
    for step in range(1, 400):
        account = expected(parts, [Fault(Case("process"), step=step)], steps=400)
        assert account.repeated == step


def test_a_failure_in_a_recovery_begins_another_one_which_has_to_wait_for_the_first() -> None:
    """The pod is there 7 s after it was lost, whatever dies at 4 s; a new pod warms up in 5 s."""
    book = story((BEGUN + 20.0, Case("pod")), (BEGUN + 24.0, Case("process"))).book
    assert book["held", "pod"] == pytest.approx(2 * 1.0)
    assert book["held", "process"] == pytest.approx(2 * 3.0)
    assert book["warmup", "process"] == pytest.approx(3 * 5.0)
    assert ("warmup", "pod") not in book
    both = story((BEGUN + 20.0, Case("pod")), (BEGUN + 20.0, Case("pod"))).book
    assert both["starting", "pod"] == pytest.approx(2 * 4.0), "two pods are new"


def test_a_failure_at_the_very_end_of_a_warm_up_loses_nothing_twice() -> None:
    """The first comes in the middle of step 15; it is over 0.5 s later."""
    first, at_once = (26.5 + 0.5, Case("process")), (27.5, Case("node", announced=True))
    account = story(first, at_once)
    assert account.book["recovering", "process"] == pytest.approx(3 * 0.5)
    assert account.book["recovering", "node"] == pytest.approx(3 * 1.0)
    assert account.repeated == 4


def test_a_run_that_fails_all_the_time_ends_and_is_no_good() -> None:
    faults = [Fault(Case("node"), float(at)) for at in range(1, 10_000)]
    account = expected(PARTS, faults, seconds=9_999.5)
    assert (account.goodput, account.steps) == (0.0, 0)
    with pytest.raises(ValueError, match="when the run ends"):
        expected(PARTS, faults)


def test_whatever_fails_when_every_pod_second_is_booked_once() -> None:
    random = Random(1)
    for _ in range(300):
        parts = replace(
            PARTS, pods=random.choice([1, 2, 5]), standby=random.choice([0, 0, 1, 7]),
            wait=random.choice([0.0, 0.1]), start=random.choice([0.0, 4.0]),
            write=random.choice([0.0, 3.0, 25.0]),
            stall=random.choice([0.0, 0.5]), every_steps=random.choice([1, 4, 10]),
            in_place=random.random() < 0.7, alone=random.random() < 0.7,
        )  # fmt: skip
        faults = [
            (random.uniform(0, 400), Case(random.choice(KINDS), *random.choices((0, 1), k=2)))
            for _ in range(random.randrange(12))
        ]
        faults.sort(key=lambda fault: fault[0])  # fmt: skip
        ends = random.uniform(1, 400)
        account = story(*faults, parts=parts, seconds=ends)
        assert account.seconds == ends
        assert all(spent >= 0 for spent in account.book.values()), account.book
        done = expected(parts, [Fault(case, at) for at, case in faults], steps=30)
        assert done.steps == 30
        productive = done.book["productive", ""] + done.book["data", ""]
        assert productive == pytest.approx(30 * parts.pods), "each step is productive once"


@pytest.mark.parametrize("write", [0.0, 3.0, 7.5, 40.0])
@pytest.mark.parametrize("every", [1, 3, 10])
def test_the_cycle_is_what_a_loop_does(every: int, write: float) -> None:
    """Step by step, with a snapshot where one is due and none is being written."""
    parts = replace(PARTS, every_steps=every, write=write)
    cycle, now, busy, durable = Cycle(parts), 0.0, 0.0, list[tuple[float, int]]()
    stalled = 0.0
    for step in range(1, 80):
        assert cycle.until(step) == pytest.approx(now + 1.0)
        now += 1.0
        found = cycle.after(now + 1e-6)
        newest = max((saved for at, saved in durable if at <= now + 1e-6), default=0)
        assert (found.steps, found.durable) == (step, newest)
        assert found.stalled == pytest.approx(stalled, abs=1e-4)
        if step % every == 0 and busy <= now + 1e-9:
            now += parts.stall
            stalled += parts.stall
            busy = now + write
            durable.append((busy, step))
