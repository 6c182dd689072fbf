"""The examples as users start them: alone, under torchrun, under the launcher."""

import json
import re
import sys

import pytest

from support.scripts import EXAMPLES, LAUNCHER, TORCHRUN, finish, kill_rank_1_after, value

pytestmark = pytest.mark.tier("all")

DIGITS = str(EXAMPLES / "digits.py")
PLAIN = str(EXAMPLES / "plain_torchrun.py")


@pytest.mark.parametrize("launcher", [LAUNCHER, TORCHRUN], ids=["launcher", "torchrun"])
def test_plain_ddp_without_a_line_of_ours(launcher):
    assert float(value("test_accuracy", finish(*launcher, PLAIN, "--epochs", "6"))) > 0.9


def test_digits_reaches_95_percent_alone():
    out = finish(sys.executable, DIGITS, "--total-steps", "120")
    assert float(value("test_accuracy", out)) >= 0.95
    assert re.search(r"^step 120/120 loss [\d.]+ [\d,]+ samples/s$", out, re.MULTILINE)


def test_digits_killed_and_restarted_in_place_equals_torchruns(tmp_path):
    undisturbed = finish(*TORCHRUN, DIGITS, "--total-steps", "60")
    report = tmp_path / "report.json"
    command = (*LAUNCHER, "--termination-log", str(report), DIGITS, "--total-steps", "60")
    env = {"DDPJOB_SNAPSHOT_DIR": str(tmp_path / "s"), "DDPJOB_SNAPSHOT_EVERY_STEPS": "10"}
    code, rest = kill_rank_1_after(20, *command, "--step-seconds", "0.05", **env)
    assert code == 0, rest
    assert rest.count("restarting in place") == 1
    assert value("weights_sha256", rest) == value("weights_sha256", undisturbed)
    content = json.loads(report.read_bytes())
    assert content["kind"] == "success"
    assert [(one["rank"], one["signal"]) for one in content["rounds"]] == [(1, 9)]
