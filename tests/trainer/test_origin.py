"""A job that finds the snapshots of another one of its name, which was deleted."""

import pytest

from support.rounds import SCRIPT, STEPS


@pytest.mark.fault("U17")
def test_the_snapshots_of_another_job_and_a_changed_script_are_told(training):
    training.attempt(1)
    assert training.codes() == [0, 0, 0], training.errors
    assert "resuming" not in training.errors[0]
    assert "resumed" not in training.report()

    training.script.write_text(f"{SCRIPT}\n# mended")
    training.attempt(1, DDPJOB_UID="uid-2")
    assert training.codes() == [0, 0, 0], training.errors
    said = training.errors[0]
    assert f"resuming after step {STEPS} of another job (uid uid)" in said
    assert "that was made by another script\n" in said
    assert f"nothing is left to train of {STEPS} steps: 0 steps trained" in said
    report = training.report()
    assert report["resumed"] == {"step": STEPS, "uid": "uid", "changed": ["script"]}
    assert report["step"] == STEPS
