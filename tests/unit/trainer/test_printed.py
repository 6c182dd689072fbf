"""What the launcher reads from lines of real programs, and what it must not take for a step."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ddpjob_contract.output import flaw
from ddpjob_trainer.launcher.printed import Numbers, Reader

BAR = "|████▌     | "
GUIDE = Path(__file__).parents[3] / "docs/guides/migration.md"
#: What programs printed when they were tried as the guide says, step and loss of it.
PROGRAMS: dict[str, tuple[list[str], int, float | None]] = {
    "pytorch/examples ddp-tutorial": (
        [f"[GPU0] Epoch {epoch} | Batchsize: 32 | Steps: 3125" for epoch in (0, 1)], 3125, None,
    ),
    "pytorch/examples minGPT-ddp": (
        ["[RANK0] Epoch 1 | Iter 100 | Train Loss 3.26367"], 100, 3.26367,
    ),
    "pytorch/examples imagenet": (
        ["Epoch: [0][    13/320292]\tTime  0.139 ( 0.233)\tLoss 6.9118e+00 (6.9345e+00)"],
        13, 6.9118,
    ),
    "pytorch/examples mnist": (["Train Epoch: 1 [512/60000 (1%)]\tLoss: 2.322512"], 512, 2.322512),
    "nanoGPT": (["iter 2: loss 10.8315, time 762.86ms, mfu -100.00%"], 2, 10.8315),
    "build-nanogpt": (
        ["step    32 | loss: 12.473804 | lr 2.7692e-05 | norm: 0.4810"], 32, 12.473804,
    ),
    "MAE": (
        ["[13:50:53.265485] Epoch: [0]  [31/32]  eta: 0:00:00  lr: 0.000001  loss: 0.9202 (0.93)"],
        31, 0.9202,
    ),
    "DINO": (
        ["Epoch: [0/100]  [10/32]  eta: 0:00:07  loss: 4.122020 (4.136202)  lr: 0.000000"],
        10, 4.12202,
    ),
    "timm": (["Train: 0 [  10/32 ( 34%)]  Loss: 0.743 (0.719)  Time: 0.134s"], 10, 0.743),
    "TRL (transformers)": (
        [f"  0%{BAR}10/5000 [00:00<02:09, 38.67it/s]", "{'loss': '3.465', 'grad_norm': '1.391'}"],
        10, 3.465,
    ),
    "Lightning": ([f"Epoch 0:  15%{BAR}126/860 [00:01<00:09, 79.55it/s, v_num=0]"], 126, None),
    "Lightning Fabric": (["Train Epoch: 1 [576/60000 (2%)]\tLoss: 2.321865"], 576, 2.321865),
}  # fmt: skip


def after(*lines: str, output: Mapping[str, Any] = {}) -> Numbers:
    reader = Reader(output)
    for line in lines:
        reader.read(line)
    return reader.numbers


def short(found: Numbers) -> tuple[int | None, int | None, float | None]:
    return found.step, found.total_steps, found.loss


@pytest.mark.parametrize(
    ("lines", "step", "total", "loss"),
    [
        # tqdm, as transformers, accelerate and people use it
        ([f" 45%{BAR}450/1000 [00:12<00:15, 36.50it/s]"], 450, 1000, None),
        ([f" 45%{BAR}450/1000 [00:12<00:15, 36.50it/s, loss=0.123]"], 450, 1000, 0.123),
        ([f"  1%{BAR}3/300 [00:12<20:15,  4.10s/it, lr=1e-4, loss=2.5e-1]"], 3, 300, 0.25),
        ([f"Training:  12%{BAR}12/100 [00:01<00:08, 10.21it/s, loss=2.31]"], 12, 100, 2.31),
        ([f"Steps:   1%{BAR}5/500 [00:01<00:08, 10.21it/s, step_loss=0.2, lr=1e-5]"], 5, 500, None),
        ([f"Epoch 3/10:  50%{BAR}50/100 [00:01<00:08, 10.21it/s]"], 250, 1000, None),
        # a bar of each epoch, without a name: the loop begins again
        (
            [f"{BAR[:0]}{p}%{BAR}{k}/20 [00:01<00:01, 9it/s]" for p, k in ((50, 10), (100, 20))]
            + [f" 25%{BAR}5/20 [00:01<00:01, 9it/s]"],
            25, None, None,
        ),
        # the same with a name, and by batches
        ([f"Training: {k}%{BAR}{k}/99 [00:01<00:08, 9it/s]" for k in (98, 99, 1)], 100, None, None),
        ([f"Batch {k}/500 loss: 0.5" for k in (499, 500, 0)], 500, None, 0.5),
        # of two bars the one that runs for longer is the loop's
        (
            [
                f"100%{BAR}5000/5000 [00:02<00:00, 2000it/s]",
                f" 50%{BAR}50/100 [00:09<00:09, 5it/s]",
            ],
            50, 100, None,
        ),
        (
            [
                f" 45%{BAR}450/1000 [00:12<00:15, 36.5it/s, loss=0.1]",
                f" 10%{BAR}5/50 [00:01<00:15, 36.5it/s, loss=0.9]",  # an evaluation
            ],
            450, 1000, 0.1,
        ),
        ([f"Preparing training data:  50%{BAR}5/10 [00:01<00:01, 9it/s]"], None, None, None),
        ([f" 50%{BAR}5/10 [00:01<00:01, 9it/s, loss=2, 3000 tok/s]"], 5, 10, 2),
        (["Step 1,000 / 10,000 loss 0.5"], 1000, 10000, 0.5),
        (["step: 0.312 loss 0.5"], None, None, 0.5),
        (["ms per step: 312 loss 0.5"], None, None, 0.5),
        (["Epoch(train)  [2][ 10/100]  lr: 1e-3  loss: 0.5"], 110, None, 0.5),
        (["Iter(train) [  50/20000]  loss: 0.5"], 50, 20000, 0.5),
        # Lightning: tqdm, rich
        (
            [
                f"Epoch 0: 100%{BAR}64/64 [00:02<00:00, 8.1it/s, v_num=0, train_loss=0.9]",
                f"Epoch 1:  33%{BAR}21/64 [00:02<00:05, 8.11it/s, v_num=0, train_loss=0.693]",
            ],
            85, None, 0.693,
        ),
        (
            ["Epoch 2/9 ━━━━━━━╸━━━━━━━━━ 21/64 0:00:02 • 0:00:01 23.11it/s v_num: 0.000"],
            149, 640, None,
        ),
        (["Epoch 5/-2 ━━━━━━ 5/5 0:00:00 • 0:00:00 129.67it/s loss: 0.218"], 30, None, 0.218),
        # transformers
        (
            [
                f" 50%{BAR}500/1000 [00:03<00:03, 150.2it/s]",
                "{'loss': 2.3012, 'grad_norm': 1.27, 'learning_rate': 5e-05, 'epoch': 0.5}",
                f"  3%{BAR}3/98 [00:00<00:03, 30.2it/s]",  # its evaluation
                "{'eval_loss': 2.2, 'eval_runtime': 1.4, 'epoch': 0.5}",
            ],
            500, 1000, 2.3012,
        ),
        # timm, pytorch/examples, torchvision's and MAE's MetricLogger
        (
            [
                "Epoch: [0][391/391]\tTime  0.1 ( 0.2)\tLoss 6.9e+00 (6.95e+00)\tAcc@1   0.00",
                "Epoch: [1][ 10/391]\tTime  0.1 ( 0.2)\tLoss 6.5e+00 (6.95e+00)\tAcc@1   0.00",
            ],
            401, None, 6.5,
        ),
        (["Train Epoch: 2 [640/60000 (1%)]\tLoss: 2.1"], 60640, None, 2.1),
        (["[0/5][10/1583]\tLoss_D: 1.2\tLoss_G: 3.4\tD(x): 0.5"], 10, 7915, None),
        (
            ["Epoch: [0/100]  [  10/2502]  eta: 1:00:00  loss: 10.95 (10.9)  lr: 0.0001"],
            10, 250200, 10.95,
        ),
        (["[GPU0] Epoch 0 | Batchsize: 32 | Steps: 64"], 0, None, None),
        ([f"[GPU0] Epoch {n} | Batchsize: 32 | Steps: 64" for n in (0, 3)], 192, None, None),
        # nanoGPT, build-nanogpt, minGPT, torchtitan, megatron, tutorials
        (["step 250: train loss 2.1000, val loss 2.2000"], 250, None, 2.1),
        (["iter_dt 12.34ms; iter 100: train loss 2.10000"], 100, None, 2.1),
        (["[titan] 2026-01-02 - root - INFO - step: 10  loss:  8.1234  memory: 1.2GiB"],
         10, None, 8.1234),
        ([" iteration       10/  100000 | consumed samples: 2560 | lm loss: 9.5E+00 |"],
         10, 100000, 9.5),
        (["step 30 loss 0.2"], 30, None, 0.2),
        (["step=30, loss=tensor(0.25)"], 30, None, 0.25),
        (["Epoch [2/10], Step [100/600], Loss: 0.1234"], 700, 6000, 0.1234),
        (["Epoch [1/10]: [20/391]   5%|█         , batch loss=1.234 [00:10<00:20]"],
         20, 3910, 1.234),
        # of epochs alone there is a loss, and no step
        (["Epoch 1/10 - loss: 0.5234 - acc: 0.81"], None, None, 0.5234),
        (["Epoch 5, Loss: nan"], None, None, None),
        (["step 30 loss 0.2", "step 31 loss nan"], 31, None, None),
        (["\x1b[32mstep 30\x1b[0m loss 0.2\x1b[K"], 30, None, 0.2),
    ],
)  # fmt: skip
def test_lines_of_programs(lines, step, total, loss):
    assert short(after(*lines)) == (step, total, loss)


def test_the_guide_shows_what_is_read_of_programs_that_were_tried():
    for program, (lines, step, loss) in PROGRAMS.items():
        assert short(after(*lines))[::2] == (step, loss), program
    rows = re.findall(r"^\| (.*?) \| yes \| (yes|no) \|", GUIDE.read_text(), re.MULTILINE)
    assert rows == [(name, "yes" if loss else "no") for name, (_, _, loss) in PROGRAMS.items()]


@pytest.mark.parametrize(
    "line",
    [
        f"Validation DataLoader 0:  50%{BAR}5/10 [00:00<00:00, 36.50it/s]",
        f"Sanity Checking DataLoader 0: 100%{BAR}2/2 [00:00<00:00, 36.50it/s]",
        f"Testing DataLoader 0:  50%{BAR}5/10 [00:00<00:00, 36.50it/s, test_loss=0.2]",
        f"Epoch 1 (val):  50%{BAR}5/10 [00:00<00:00, 36.50it/s, loss=0.2]",
        f"Map:  90%{BAR}900/1000 [00:01<00:00, 900.00 examples/s]",
        f"100%{BAR}10/10 [00:01<00:00, 12.3ba/s]",
        f"Generating train split:  90%{BAR}900/1000 [00:01<00:00, 900.00 examples/s]",
        f"Tokenizing train set:  90%{BAR}900/1000 [00:01<00:00, 900.00it/s]",
        f"Loading checkpoint shards:  50%{BAR}1/2 [00:01<00:01,  1.2s/it]",
        f"model.safetensors:  45%{BAR}45/100 [00:01<00:01, 32.1it/s]",
        f"model.safetensors:  45%{BAR}198M/440M [00:01<00:01, 132MB/s]",
        f"100%{BAR}9912422/9912422 [00:00<00:00, 13404214.33it/s]",
        f"Epochs:  30%{BAR}3/10 [01:12<03:00, 24.2s/it]",
        f"Epoch:  30%{BAR}3/10 [01:12<03:00, 24.2s/it]",
        f" 50%{BAR}5/10 [01:12<03:00, 24.2s/epoch]",
        "Test: [ 10/98]\tTime  0.1 ( 0.2)\tLoss 6.9e+00 (6.95e+00)\tAcc@1   0.00",
        "Test: [   0/48]  Time: 0.5 (0.5)  Loss:  0.69 (0.69)  Acc@1: 75.0",
        "Validation step 10: loss 0.3",
        "Test set: Average loss: 0.0481, Accuracy: 9844/10000 (98%)",
        "Step 1/3: downloading the data",
        "step 1: load the data",
        "Total optimization steps = 1,000",
        "  Gradient Accumulation steps = 4",
        "{'eval_loss': 2.2, 'eval_runtime': 1.4, 'epoch': 0.5}",
        "{'train_runtime': 12.1, 'train_steps_per_second': 8.0, 'train_loss': 1.98, 'epoch': 3.0}",
        "2026-11-29 12:00:01,123 INFO listening on 10.0.0.1/24 [1/2]",
        "step 1234567890123456789 loss x",
        "lossless 5",
        "val_loss: 0.3, val loss 0.2",
    ],
)
def test_lines_that_are_no_step_and_no_loss(line):
    assert after(line) == Numbers()


def test_a_surer_form_counts_from_where_it_is_seen():
    bar = f"100%{BAR}50/50 [00:01<00:00, 36.50it/s]"
    assert short(after(bar, "step 3 loss 0.5", bar)) == (3, None, 0.5)


def test_a_program_that_begins_again_begins_at_its_step():
    reader = Reader({})
    reader.read("step 30 loss 0.2")
    reader.begin()
    assert short(reader.numbers) == (None, None, None)


def test_expressions_of_the_user():
    output = {
        "step": r"^update (\d+)", "totalSteps": r"of ([\d,]+)", "loss": r"L=(\S+)",
        "metrics": {"accuracy": r"acc ([\d.]+)", "bad": r"acc (\S)x"},
    }  # fmt: skip
    found = after("update 7 of 1,000 L=0.5 acc 0.75", "step 90/95 loss 3", output=output)
    assert short(found) == (7, 1000, 0.5)
    assert found.metrics == {"accuracy": 0.75}
    odd = after("update 7 L=inf acc nan", "update 9999999999999 L=x", output=output)
    assert (short(odd), odd.metrics) == ((7, None, None), {})
    assert after("step 30 loss 0.2", output={"forms": "Never"}) == Numbers()
    long = "x" * 600 + "update 8"
    assert after(long, output={"step": r"update (\d+)"}).step is None


def test_an_expression_that_is_cut_off_reads_nothing():
    def search(pattern: re.Pattern[str], line: str) -> re.Match[str] | None:
        return None

    reader = Reader({"step": r"(\d+)"}, search)
    reader.read("7")
    assert reader.numbers == Numbers()


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        ({"step": r"it (\d+)", "metrics": {"a/b": r"(\d)"}}, ""),
        ({"step": "("}, "step: '(' is no regular expression"),
        ({"loss": r"\d"}, "loss: 256 characters at most, the number alone"),
        ({"loss": r"(\d)(\d)"}, "the number alone in parentheses"),
        ({"totalSteps": "(x)" * 99}, "totalSteps: 256 characters"),
        ({"step": "(a{99999999999999999999})"}, "is no regular expression"),
        ({"metrics": {"a b": "(x)"}}, "metrics: at most 16, each name of at most 40"),
        ({"metrics": {f"m{i}": "(x)" for i in range(17)}}, "metrics: at most 16"),
        ({"step": 7, "metrics": [1]}, ""),
    ],
)
def test_what_is_wrong_with_expressions_is_named(raw, why):
    assert why in flaw(raw)
    assert bool(flaw(raw)) == bool(why)
