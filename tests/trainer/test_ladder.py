"""The ladder of docs/guides/ladder.md, each step as the reader starts it, for a shorter time.

What the page says of a step is what is asserted here: accuracies, losses, and that the GPT that
lost a process writes the same text.
"""

import json
import re
import struct
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from ddpjob_trainer.telemetry.event_log import read_losses
from support.loaded import load
from support.patience import PATIENCE
from support.scripts import EXAMPLES, LAUNCHER, TORCHRUN, finish, kill_rank_1_after, value

pytestmark = pytest.mark.tier("all")

LADDER = EXAMPLES / "ladder"
SINGLE, PROCESSES, FAULTS, GPT = (
    str(LADDER / name)
    for name in ("1_single.py", "2_processes.py", "3_faults.py", "5_gpt/train.py")
)
EPOCHS = ("--epochs", "6")


def gpt_module(name: str) -> ModuleType:
    return load(LADDER / "5_gpt" / f"{name}.py")


# --- Steps 1 to 4 -----------------------------------------------------------------------------


def losses(output: str) -> list[float]:
    """Of the epochs, as steps 1 and 2 print them."""
    found = re.findall(r"epoch \d+/\d+ loss ([\d.]+)$", output, re.MULTILINE)
    return [float(loss) for loss in found]


def test_one_process():
    out = finish(sys.executable, SINGLE, *EPOCHS, OMP_NUM_THREADS="1")
    assert len(losses(out)) == 6
    assert float(value("test_accuracy", out)) > 0.8
    out = finish(sys.executable, FAULTS)
    assert "step 240/240 loss" in out
    assert "Warning" not in out
    assert float(value("test_accuracy", out)) > 0.95


def test_any_number_of_processes_ends_with_the_same_weights():
    """Rows 15 and 18: the losses are equal to rounding; the script itself compares the ranks."""
    one, two = (
        finish(sys.executable, "-m", "ddpjob_trainer", "run", "--nproc", n, PROCESSES, *EPOCHS)
        for n in ("1", "2")
    )
    three = finish(*TORCHRUN, PROCESSES, *EPOCHS)
    assert len(losses(one)) == 6
    assert losses(two) == pytest.approx(losses(one), abs=2e-3)
    assert losses(three) == pytest.approx(losses(one), abs=2e-3)
    assert value("test_accuracy", one) == value("test_accuracy", three)
    assert float(value("test_accuracy", one)) > 0.8
    # Sums in another order: rounding differs, and no bit is promised.
    assert value("weights_sha256", one) != value("weights_sha256", three)


def test_ranks_whose_weights_differ_are_found(tmp_path):
    """Row 18 the other way round: without DDP each rank trains for itself."""
    script = tmp_path / "2_processes.py"
    alone = Path(PROCESSES).read_text().replace(
        "DistributedDataParallel(model)", "nn.DataParallel(model)"
    )  # fmt: skip
    assert alone != Path(PROCESSES).read_text()
    script.write_text(alone)
    with pytest.raises(AssertionError, match="the ranks' weights differ"):
        finish(*TORCHRUN, str(script), "--epochs", "1")


def test_a_checkpoint_by_hand_is_gone_on_from(tmp_path):
    """Row 22, in plain PyTorch: rank 0 saves, all load; what step 3 makes superfluous."""
    command = (sys.executable, "-m", "ddpjob_trainer", "run", "--nproc", "2")
    plain = str(EXAMPLES / "plain_torchrun.py")
    for epochs, told in ((2, ["1/2", "2/2"]), (3, ["3/3"])):
        out = finish(*command, plain, "--epochs", str(epochs), CHECKPOINT_DIR=str(tmp_path))
        assert re.findall(r"epoch (\d/\d) loss", out) == told


def test_whatever_is_killed_the_weights_are_the_same(tmp_path):
    """As ladder.md has the reader do it: chaos kills, and compares with an undisturbed run."""
    report, kept = tmp_path / "report.json", tmp_path / "kept"
    chaos = (sys.executable, "-m", "ddpjob_tools", "chaos", "--nproc", "3", "--kills", "2")
    where = ("--json", str(report), "--keep", str(kept), "--patience", str(PATIENCE))
    out = finish(*chaos, "--every", "10", "--seed", "3", *where, FAULTS, *EPOCHS)
    result = json.loads(report.read_text())
    assert result["identical"]
    assert any(kill["how"] in ("in place", "new launch") for kill in result["kills"])
    for run in ("undisturbed", "disturbed"):  # it names the weights as the script does
        [shown] = re.findall(rf"^{run}: .* weights (\w{{64}})$", out, re.MULTILINE)
        assert f"weights_sha256={shown}\n" in (kept / run / "log").read_text()


# --- Step 5: the GPT --------------------------------------------------------------------------

SHORT = ("--total-steps", "40", "--global-batch", "12", "--context", "32", "--sample", "120")
SNAPSHOTS = {"DDPJOB_SNAPSHOT_EVERY_STEPS": "10"}


def written(output: str) -> str:
    """The text that the GPT wrote: what comes before its loss, from the prompt on."""
    found = re.search(r"(?ms)^\[rank 0\] (def .*?)^\[rank 0\] loss=", output)
    assert found is not None, output[-2000:]
    return found[1]


@pytest.fixture(scope="module")
def undisturbed() -> str:
    return finish(*LAUNCHER, GPT, *SHORT)


def test_a_gpt_that_lost_a_process_writes_the_same_text(tmp_path, undisturbed):
    """At level resume, 3 ranks, 2 buckets (1.9 MB of gradients, the first bucket takes 1)."""
    assert float(value("loss", undisturbed)) < 3.3  # ln 256 = 5.5 is what knowing nothing costs
    assert len(written(undisturbed)) > 100
    where = ("--snapshots", str(tmp_path))
    code, rest = kill_rank_1_after(10, *LAUNCHER, GPT, *SHORT, *where, **SNAPSHOTS)
    assert code == 0, rest[-3000:]
    assert rest.count("restarting in place") == 1
    assert "resuming after step" in rest
    assert written(rest) == written(undisturbed)
    assert value("weights_sha256", rest) == value("weights_sha256", undisturbed)


TINY = (
    *("--layers", "2", "--heads", "2", "--width", "32", "--context", "16", "--sample", "0"),
    *("--global-batch", "24", "--total-steps", "60", "--lr", "0.01"),
)


def test_the_124m_settings_learn_at_a_tiny_size(tmp_path):
    """bf16, weight decay by groups, clipping, a cosine, accumulation; the loss in the forward."""
    events = tmp_path / "events.jsonl"
    words = ("--size", "124m", *TINY, "--vocabulary", "256", "--micro-batches", "2")
    command = (*LAUNCHER, "--events", str(events), GPT, *words)
    first = value("weights_sha256", finish(*command))
    found = read_losses(events)
    assert found[60] < 0.75 * found[1]
    assert value("weights_sha256", finish(*command)) == first


def test_a_file_of_tokens(tmp_path):
    tokens = tmp_path / "tokens.bin"
    tokens.write_bytes(1024 * b"\xff" + struct.pack("<5000H", *(n * 7 % 300 for n in range(5000))))
    words = (*TINY, "--vocabulary", "300", "--total-steps", "3")
    out = finish(sys.executable, GPT, *words, "--data", str(tokens), "--skip", "1024")
    assert re.search(r"^step 3/3 loss", out, re.MULTILINE)
    layers, width, context, words_known = 2, 32, 16, 300
    block = 12 * width * width + 13 * width
    parameters = layers * block + (words_known + context) * width + 2 * width
    assert value("parameters", out) == str(parameters)


def test_mfu_of_gpt2_is_of_the_peak_that_is_told(monkeypatch):
    gpt, mfu = gpt_module("gpt"), gpt_module("mfu")
    with torch.device("meta"):
        model = gpt.GPT(**gpt.GPT2)
    assert sum(p.numel() for p in model.parameters()) == 124_475_904
    flop = mfu.flop_per_token(124_475_904 - 1024 * 768, 12, 768, 1024)
    assert flop == pytest.approx(860e6, rel=0.01)  # as llm.c and nanoGPT count GPT-2 124M
    clock = iter((10.0, 12.0, 20.0, 21.0))
    monkeypatch.setattr(mfu.time, "perf_counter", lambda: next(clock))
    speed = mfu.Speed(512 * 1024, flop, "NVIDIA H200", 8)
    assert speed.after_step(every=1) == "", "the first one compiles"
    assert [speed.after_step(every=20) for _ in range(19)] == [""] * 19
    told = "5,242,880 tokens/s, MFU 56.7% of 989 TFLOPS, 8 x NVIDIA H200"
    assert speed.after_step(every=20) == told
    speed = mfu.Speed(512 * 1024, flop, "Some GPU", 8)
    assert speed.after_step(every=1) == ""
    assert "MFU nan% (peak unknown)" in speed.after_step(every=1)
