"""Drills: the gang restarts as planned, proves that it resumes, and is charged nothing for it."""

import re
from pathlib import Path

import pytest

from support.launching import NO_ROUNDS, run
from support.rounds import Outcome, Training, kill
from support.snapshots import await_snapshot

EPOCH = 8  # steps, of Training's script


@pytest.fixture
def undisturbed(tmp_path: Path) -> Outcome:
    training = Training(tmp_path / "undisturbed")
    training.launch("--spares", "0")
    assert training.codes() == [0], training.errors
    return training.outcome()


def release(training: Training, life: str, snapshot: int) -> None:
    """Let a life go on from the two steps after a snapshot once that is durable, and heard of."""
    for index in (snapshot, snapshot + 1):
        training.at(f"{life}-step-{index}")
        await_snapshot(max((training.directory / "snapshots").glob("0*")), snapshot)
        (training.directory / f"hold-{life}-step-{index}").unlink()


@pytest.mark.fault("T1")
@pytest.mark.fault("T2")
def test_two_drills_and_a_kill_amid_one_end_in_the_bits_of_a_run_without(training, undisturbed):
    training.hold("1-0-step-4", "1-0-step-5", "1-1-import", "1-2-step-8", "1-2-step-9")
    training.launch("--max-rounds-without-progress", "1", DDPJOB_DRILL="Always")
    release(training, "1-0", 4)
    kill(training.at("1-1-import")[1])  # the processes that were to do the drill's steps
    release(training, "1-2", EPOCH)
    assert training.codes() == [0], training.errors
    assert training.outcome() == undisturbed
    first, killed, second = training.report()["rounds"]
    assert (first["kind"], first["snapshotStep"]) == ("drill", 4)
    assert (killed["rank"], killed["signal"]) == (1, 9)
    assert (second["kind"], second["snapshotStep"]) == ("drill", EPOCH)
    (told,) = training.errors
    proven = re.findall(r"restart proven: steps (\d+) to (\d+) again, bit for bit", told)
    assert proven == [("5", str(first["step"])), ("9", str(second["step"]))]
    assert "round 1: a drill after step" in told


@pytest.mark.parametrize(
    ("options", "given", "mode"),
    [((), "Always", "Always"), ((), "", "Auto"), ((), "Never", "Never"),
     (NO_ROUNDS, "Always", "Never")],
)  # fmt: skip
def test_without_rounds_there_is_no_drill(script, options, given, mode):
    program = script("print(os.environ['DDPJOB_TRAINER_DRILL'].split()[:2], os.getppid())")
    code, out, err = run(*options, program, env={"DDPJOB_DRILL": given})
    assert code == 0, err
    found = re.search(r"\['(\w+)', '(\d+)'\] (\d+)", out)
    assert found
    assert (found[1], found[2]) == (mode, found[3])
