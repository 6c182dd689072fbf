"""The examples as users start them: alone, under torchrun, under the launcher."""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from ddpjob_trainer.telemetry.event_log import read_losses
from support.launching import NO_ROUNDS

ROOT = Path(__file__).parents[2]
DIGITS = str(ROOT / "examples/digits.py")
GPT2 = str(ROOT / "examples/gpt2.py")
PLAIN = str(ROOT / "examples/plain_torchrun.py")
LAUNCHER = (sys.executable, "-m", "ddpjob_trainer", "run", "--nproc", "3")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3")


def start(*command: str, **env: str) -> subprocess.Popen[str]:
    sources = os.pathsep.join([str(ROOT / "trainer/src"), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": sources, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(*command: str, **env: str) -> str:
    with start(*command, **env) as process:
        out, _ = process.communicate(timeout=200)
    assert process.returncode == 0, out[-3000:]
    return out


def value(name: str, output: str) -> str:
    found = re.findall(rf"^(?:\[rank 0\] )?{name}=(\S+)$", output, re.MULTILINE)
    assert len(found) == 1, output[-2000:]
    return str(found[0])


def workers(launcher: int) -> dict[int, int]:
    """Rank -> pid of a launcher's children."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            environ = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        ranks = [e for e in environ if e.startswith(b"RANK=")]
        if int(parent) == launcher and ranks:
            found[int(ranks[0][5:])] = int(entry.name)
    return found


@pytest.mark.parametrize("launcher", [LAUNCHER, TORCHRUN], ids=["launcher", "torchrun"])
def test_plain_ddp_without_a_line_of_ours(launcher):  # type: ignore[no-untyped-def]
    assert float(value("test_accuracy", finish(*launcher, PLAIN, "--epochs", "6"))) > 0.9


def test_digits_reaches_95_percent_alone():  # type: ignore[no-untyped-def]
    out = finish(sys.executable, DIGITS, "--total-steps", "120")
    assert float(value("test_accuracy", out)) >= 0.95
    assert re.search(r"^step 120/120 loss [\d.]+ [\d,]+ samples/s$", out, re.MULTILINE)


@pytest.fixture(scope="module")
def undisturbed() -> str:
    return finish(*TORCHRUN, DIGITS, "--total-steps", "60")


def kill_rank_1_after_step_20(*command: str, **env: str) -> tuple[int, str]:
    """Exit code of the launcher, and what it printed after the kill."""
    process = start(*command, "--step-seconds", "0.05", **env)
    assert process.stdout is not None
    for line in process.stdout:
        if re.search(r"step \d+/60 .* snapshot 20$", line):
            os.kill(workers(process.pid)[1], signal.SIGKILL)
            break
    rest = process.stdout.read()
    return process.wait(timeout=60), rest


def snapshots(tmp_path: Path) -> dict[str, str]:
    return {
        "DDPJOB_SNAPSHOT_DIR": str(tmp_path / "s"),
        "DDPJOB_SNAPSHOT_EVERY_STEPS": "10",
    }


def test_digits_killed_and_restarted_in_place_equals_torchruns(tmp_path, undisturbed):  # type: ignore[no-untyped-def]
    report = tmp_path / "report.json"
    command = (*LAUNCHER, "--termination-log", str(report), DIGITS, "--total-steps", "60")
    code, rest = kill_rank_1_after_step_20(*command, **snapshots(tmp_path))
    assert code == 0, rest
    assert rest.count("restarting in place") == 1
    assert value("weights_sha256", rest) == value("weights_sha256", undisturbed)
    content = json.loads(report.read_bytes())
    assert content["kind"] == "success"
    assert [(one["rank"], one["signal"]) for one in content["rounds"]] == [(1, 9)]


def test_digits_killed_and_started_anew_equals_torchruns(tmp_path, undisturbed):  # type: ignore[no-untyped-def]
    """As in a pod without restart in place: exit code and report, then a new gang."""
    report = tmp_path / "report.json"
    command = (
        *LAUNCHER, *NO_ROUNDS, "--termination-log", str(report), DIGITS, "--total-steps", "60",
    )  # fmt: skip
    code, rest = kill_rank_1_after_step_20(*command, **snapshots(tmp_path))
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


TINY = (
    *("--layers", "2", "--heads", "2", "--width", "32", "--context", "16", "--vocabulary", "64"),
    *("--global-batch", "24", "--micro-batches", "2", "--total-steps", "60", "--lr", "0.01"),
)


def test_gpt2_learns_at_a_tiny_size(tmp_path):  # type: ignore[no-untyped-def]
    """bf16, weight decay by groups, clipping, a cosine, accumulation; the loss in the forward."""
    events = tmp_path / "events.jsonl"
    command = (*LAUNCHER, "--events", str(events), GPT2, *TINY)
    first = value("weights_sha256", finish(*command))
    losses = read_losses(events)
    assert losses[60] < 0.75 * losses[1]  # ln 64 is what knowing nothing costs
    assert value("weights_sha256", finish(*command)) == first


def test_gpt2_reads_a_file_of_tokens_and_has_its_124m_parameters(tmp_path):  # type: ignore[no-untyped-def]
    tokens = tmp_path / "tokens.bin"
    tokens.write_bytes(bytes(1024) + struct.pack("<4000H", *(n * 7 % 64 for n in range(4000))))
    out = finish(sys.executable, GPT2, *TINY, "--total-steps", "3", "--data", str(tokens),
                 "--skip", "1024", "--micro-batches", "1")  # fmt: skip
    assert re.search(r"^step 3/3 loss", out, re.MULTILINE)
    layers, width, context, words = 12, 768, 1024, 50304
    block = 12 * width * width + 13 * width
    assert layers * block + (words + context) * width + 2 * width == 124_475_904
    layers, width, context, words = 2, 32, 16, 64
    block = 12 * width * width + 13 * width
    assert value("parameters", out) == str(layers * block + (words + context) * width + 2 * width)
