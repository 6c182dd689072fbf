"""The examples as users start them: alone, under torchrun, under the launcher."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from support.launching import NO_ROUNDS
from support.scripts import EXAMPLES, LAUNCHER, TORCHRUN, finish, kill_rank_1_after, value

DIGITS = str(EXAMPLES / "digits.py")
PLAIN = str(EXAMPLES / "plain_torchrun.py")
SLOWLY = ("--step-seconds", "0.05")


@pytest.mark.tier("all")
@pytest.mark.parametrize("launcher", [LAUNCHER, TORCHRUN], ids=["launcher", "torchrun"])
def test_plain_ddp_without_a_line_of_ours(launcher):  # type: ignore[no-untyped-def]
    assert float(value("test_accuracy", finish(*launcher, PLAIN, "--epochs", "6"))) > 0.9


@pytest.mark.tier("all")
def test_digits_reaches_95_percent_alone():  # type: ignore[no-untyped-def]
    out = finish(sys.executable, DIGITS, "--total-steps", "120")
    assert float(value("test_accuracy", out)) >= 0.95
    assert re.search(r"^step 120/120 loss [\d.]+ [\d,]+ samples/s$", out, re.MULTILINE)


@pytest.fixture(scope="module")
def undisturbed() -> str:
    return finish(*TORCHRUN, DIGITS, "--total-steps", "60")


def snapshots(tmp_path: Path) -> dict[str, str]:
    return {
        "DDPJOB_SNAPSHOT_DIR": str(tmp_path / "s"),
        "DDPJOB_SNAPSHOT_EVERY_STEPS": "10",
    }


@pytest.mark.tier("all")
def test_digits_killed_and_restarted_in_place_equals_torchruns(tmp_path, undisturbed):  # type: ignore[no-untyped-def]
    report = tmp_path / "report.json"
    command = (*LAUNCHER, "--termination-log", str(report), DIGITS, "--total-steps", "60")
    code, rest = kill_rank_1_after(20, *command, *SLOWLY, **snapshots(tmp_path))
    assert code == 0, rest
    assert rest.count("restarting in place") == 1
    assert value("weights_sha256", rest) == value("weights_sha256", undisturbed)
    content = json.loads(report.read_bytes())
    assert content["kind"] == "success"
    assert [(one["rank"], one["signal"]) for one in content["rounds"]] == [(1, 9)]


@pytest.mark.tier("all")
def test_digits_with_its_drills_equals_torchruns(tmp_path, undisturbed):  # type: ignore[no-untyped-def]
    env = snapshots(tmp_path) | {"DDPJOB_DRILL": "Auto"}
    out = finish(*LAUNCHER, DIGITS, "--total-steps", "60", *SLOWLY, **env)
    assert 1 <= out.count(": a drill after step") <= 2
    assert out.count("restart proven: steps") == out.count("restarting in place")
    assert value("weights_sha256", out) == value("weights_sha256", undisturbed)


@pytest.mark.tier("all")
def test_digits_killed_and_started_anew_equals_torchruns(tmp_path, undisturbed):  # type: ignore[no-untyped-def]
    """As in a pod without restart in place: exit code and report, then a new gang."""
    report = tmp_path / "report.json"
    command = (
        *LAUNCHER, *NO_ROUNDS, "--termination-log", str(report), DIGITS, "--total-steps", "60",
    )  # fmt: skip
    code, rest = kill_rank_1_after(20, *command, *SLOWLY, **snapshots(tmp_path))
    assert code == 137, rest
    content = json.loads(report.read_bytes())
    assert (content["kind"], content["rank"], content["signal"]) == ("signal", 1, 9)
    assert content["step"] >= content["snapshotStep"] >= 20
    resumed = finish(*command, **snapshots(tmp_path))
    # One that became durable while the gang died is not in the report.
    found = re.search(r"resuming after step (\d+)", resumed)
    assert found is not None
    assert int(found[1]) >= content["snapshotStep"]
    assert value("weights_sha256", resumed) == value("weights_sha256", undisturbed)
    assert value("test_accuracy", resumed) == value("test_accuracy", undisturbed)
    assert json.loads(report.read_bytes())["kind"] == "success"
