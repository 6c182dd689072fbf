"""A survivor of a kill saves the newest step first, so that no finished step is done again."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.patience import PATIENCE
from support.rounds import COLD, STEPS, Outcome, Training, kill, patched
from support.snapshots import await_snapshot

KILLED = 11  # steps before it; the newest snapshot is that after 8, amid the second epoch
#: However slow the machine is, and however quick the steps are.
PATIENT = {
    "launcher.rescue._SHARE": 1e9,
    "launcher.rescue.MOST_SECONDS": PATIENCE,
    "launcher.rescue._FIRST_WORD_SECONDS": PATIENCE,
    "launcher.hub.hub.RESCUE_SECONDS": PATIENCE,
}


@pytest.fixture
def undisturbed(tmp_path: Path) -> Outcome:
    """With the switch off: the buffers' other way changes no bit."""
    training = Training(tmp_path / "undisturbed")
    training.launch(*COLD, DDPJOB_DRILL="Never")
    assert training.codes() == [0], training.errors
    return training.outcome()


@pytest.mark.tier("all")  # the switch is off; a worker's own second of patience has no patch yet
@pytest.mark.parametrize(("launchers", "rank"), [(1, 0), (3, 0), (3, 2)])
def test_no_finished_step_is_done_again(training, tmp_path, undisturbed, launchers, rank):  # type: ignore[no-untyped-def]
    env = {**patched(tmp_path, PATIENT), "DDPJOB_TRAINER_RESCUE": "1", "DDPJOB_DRILL": "Never"}
    training.hold(f"1-0-step-{KILLED}-{rank}")
    if launchers == 1:
        training.launch(*COLD, **env)
    else:
        training.attempt(1, *COLD, **env)
    (pid,) = training.at(f"1-0-step-{KILLED}", [rank])
    await_snapshot(training.directory / "snapshots" / "00000001", KILLED // 4 * 4)
    kill(pid)
    assert training.codes() == [0] * launchers, training.errors
    errors = "\n".join(training.errors)
    assert f"saved step {KILLED} before it was ended" in errors, errors
    assert training.outcome() == undisturbed
    for one in range(3):
        lines = (training.directory / f"losses-{one}").read_text().splitlines()
        assert [int(line.split()[0]) for line in lines] == list(range(STEPS))
    records = training.report()["rounds"]
    assert [(one["signal"], one["snapshotStep"]) for one in records] == [(9, KILLED // 4 * 4)]
