"""A survivor of a kill saves the newest step first, so that no finished step is done again."""

from __future__ import annotations

import signal

import pytest

from support.patience import PATIENCE
from support.rounds import COLD, STEPS, UNHURRIED, Outcome, Training, kill, patched
from support.snapshots import await_snapshot

KILLED = 11  # steps before it; the newest snapshot is that after 8, amid the second epoch
#: However slow the machine is, and however quick the steps are.
PATIENT = {
    "launcher.rescue._SHARE": 1e9,
    "launcher.rescue.MOST_SECONDS": PATIENCE,
    "launcher.rescue._FIRST_WORD_SECONDS": PATIENCE,
    "launcher.hub.hub.RESCUE_SECONDS": PATIENCE,
    "liveness.marks.HOLD_SECONDS": PATIENCE,
}
ON = {"DDPJOB_DRILL": "Never"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """With the switch off: the buffers' other way changes no bit."""
    training = Training(tmp_path_factory.mktemp("undisturbed"))
    training.launch(*COLD, DDPJOB_DRILL="Never", DDPJOB_TRAINER_RESCUE="0")
    assert training.codes() == [0], training.errors
    return training.outcome()


def repeats_nothing(training: Training, undisturbed: Outcome) -> None:
    """Check the end of a training in which a survivor has saved step KILLED."""
    assert training.codes() == [0] * len(training.launchers), training.errors
    errors = "\n".join(training.errors)
    assert f"saved step {KILLED} before it was ended" in errors, errors
    assert training.outcome() == undisturbed
    for one in range(3):
        lines = (training.directory / f"losses-{one}").read_text().splitlines()
        assert [int(line.split()[0]) for line in lines] == list(range(STEPS))


def start_three(training, launchers: int, tmp_path):  # type: ignore[no-untyped-def]
    env = {**patched(tmp_path, PATIENT), **ON}
    if launchers == 1:
        training.launch(*COLD, **env)
    else:
        training.attempt(1, *COLD, **env)


@pytest.mark.parametrize(("launchers", "rank"), [(1, 0), (3, 0), (3, 2)])
def test_no_finished_step_is_done_again(training, tmp_path, undisturbed, launchers, rank):  # type: ignore[no-untyped-def]
    training.hold(f"1-0-step-{KILLED}-{rank}")
    start_three(training, launchers, tmp_path)
    (pid,) = training.at(f"1-0-step-{KILLED}", [rank])
    await_snapshot(training.directory / "snapshots" / "00000001", KILLED // 4 * 4)
    kill(pid)
    repeats_nothing(training, undisturbed)
    (record,) = training.report()["rounds"]
    # A rescue is no progress. The newest snapshot is known once the ranks have met after it was
    # durable, and here they are held.
    assert (record["signal"], record["snapshotStep"] in (4, 8)) == (9, True), record


@pytest.mark.tier("gate")
@pytest.mark.parametrize("launchers", [1, 3])
def test_rank_0_does_what_it_had_to_do_after_commit(training, tmp_path, undisturbed, launchers):  # type: ignore[no-untyped-def]
    """The others hold the step after it: with that, rank 0's line of it would be missing."""
    training.hold(f"1-0-committed-{KILLED}-0")
    start_three(training, launchers, tmp_path)
    (pid,) = training.at(f"1-0-committed-{KILLED}", [0])
    await_snapshot(training.directory / "snapshots" / "00000001", KILLED // 4 * 4)
    kill(pid)
    assert training.codes() == [0] * launchers, training.errors
    assert training.outcome() == undisturbed


@pytest.mark.tier("gate")
def test_survivors_stay_for_a_launcher_that_is_late(training, tmp_path, undisturbed):  # type: ignore[no-untyped-def]
    """It is stopped while its worker is killed, and goes on once the others have lost that one."""
    late = {**PATIENT, **UNHURRIED, "launcher.hub.messages._SILENT_SECONDS": PATIENCE}
    training.hold(f"1-0-step-{KILLED}-2")
    training.attempt(1, *COLD, **patched(tmp_path, late), **ON)
    (pid,) = training.at(f"1-0-step-{KILLED}", [2])
    await_snapshot(training.directory / "snapshots" / "00000001", KILLED // 4 * 4)
    training.launchers[2].send_signal(signal.SIGSTOP)
    kill(pid)
    training.until(lambda: len(training.marks("held")) == 2, "both survivors have lost their peer")
    training.launchers[2].send_signal(signal.SIGCONT)
    repeats_nothing(training, undisturbed)
