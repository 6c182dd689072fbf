"""The promise under fire: kills drawn from a seed, at 3, 4 and 5 ranks; equal bits.

And the tool that shows it, as users start it: it must see a difference where there is one, refuse
what it cannot compare, and leave no process behind.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.launching import PATHS, ROOT, finished
from support.patience import PATIENCE, WHOLE

CHAOS = ("-m", "ddpjob_tools", "chaos")

#: Three buckets, dropout, buffers, a scheduler, a registered object. {BEFORE} and {FACTOR} are
#: where a test plants a mistake.
SCRIPT = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import ddpjob_trainer as ddp

{BEFORE}
torch.manual_seed(1)
data = TensorDataset(torch.randn(480, 20), torch.randint(0, 5, (480,)))
run = ddp.start(total_steps={STEPS}, global_batch=60, seed=3)
net = nn.Sequential(
    nn.Linear(20, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Dropout(0.2),
    nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 5),
)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, {STEPS})
model, optimizer = run.prepare(net, optimizer, scheduler=scheduler, bucket_cap_mb=0.02)
for step in run.steps(data):
    for x, y in step.batches:
        step.backward(nn.functional.cross_entropy(model(x), y) {FACTOR})
    step.commit()
run.finish()
"""

# Nothing is to be seen of it before the third epoch has ended.
FORGETFUL = """
seen = []
def grow():
    seen.append(0)
    return 1 if len(seen) <= 24 else 2
"""

#: What early stopping keeps.
KEPT = 'best["loss"] = min(best["loss"], run.evaluate(data, lambda m, b: m(b[0]).sum().item()))'


@pytest.fixture
def training(tmp_path: Path):  # type: ignore[no-untyped-def]
    def write(steps: int = 40, before: str = "", factor: str = "") -> Path:
        path = tmp_path / "train.py"
        text = SCRIPT.replace("{STEPS}", str(steps)).replace("{BEFORE}", before)
        path.write_text(text.replace("{FACTOR}", factor))
        return path

    return write


def chaos(script: Path, *options: object) -> tuple[int, str]:
    return finished(*CHAOS, "--patience", PATIENCE, *options, script)


@pytest.mark.tier("all")
@pytest.mark.fault("T1", "T2", "T3", "T4")
def test_six_kills_leave_every_bit_as_it_was(training, tmp_path):
    """By this seed each signal, each rank and the launcher, and one while it comes back."""
    report = tmp_path / "report.json"
    code, out = chaos(training(), "--nproc", 5, "--kills", 6, "--seed", 2, "--json", report)
    assert code == 0, out
    assert out.rstrip().endswith("identical")
    result = json.loads(report.read_text())
    assert result["identical"]
    assert result["disturbed_sha256"] == result["undisturbed_sha256"]
    assert len(result["kills"]) == 6
    assert {kill["signal"] for kill in result["kills"]} == {"SIGKILL", "SIGTERM", "SIGSTOP"}
    assert -1 in {kill["victim"] for kill in result["kills"]}, "the launcher"
    assert any(kill["restarting"] for kill in result["kills"]), "while it comes back from another"
    assert result["launches"] > 1
    assert any(result["restarts"]), "one went on from a snapshot"


@pytest.mark.tier("all")
@pytest.mark.parametrize(
    ("script", "nproc"),
    [("gan.py", 3), ("muon.py", 4), ("text.py", 3), ("loader.py", 4), ("stream.py", 3)],
)
@pytest.mark.fault("T1", "T4")
def test_an_example_survives_kills_bit_for_bit(tmp_path, script, nproc):
    """Several models or optimizers, accumulation, fp16, an average, workers, a stream's state."""
    report = tmp_path / "report.json"
    options = ("--nproc", nproc, "--kills", 1, "--every", 4, "--seed", nproc, "--json", report)
    example = (ROOT / "examples" / script, "--total-steps", 24)
    code, out = finished(
        *CHAOS, "--patience", PATIENCE, *options, "--signals", "KILL,TERM", *example
    )
    assert code == 0, out
    result = json.loads(report.read_text())
    assert result["identical"]
    assert len(result["kills"]) == 1
    assert any(result["restarts"]), "one went on from a snapshot"


#: Early stopping whose patience is a variable: it ends the run at another step.
PATIENT = ("bad = 0", "bad += step.index > 4\n    if bad == 25:\n        break")


@pytest.mark.tier("all")
@pytest.mark.fault("T14")
def test_the_scripts_own_mistakes_are_differences(training):
    """Nobody registered what it keeps: proves that the comparison can fail."""
    path = training(before=FORGETFUL, factor="* grow()")
    before, after = PATIENT
    text = path.read_text().replace("for step in", f"{before}\nfor step in")
    path.write_text(text.replace("    step.commit()\n", f"    step.commit()\n    {after}\n"))
    code, out = chaos(path, "--nproc", 3, "--kills", 1, "--signals", "KILL")
    assert code == 1, out
    assert "\nDIFFERENT" in out
    assert "losses differ, the first after step" in out
    assert "rank 0: parameters differ" in out
    kept = Path(out.rstrip().rpartition(" ")[2])
    assert (kept / "disturbed/rank-0.jsonl").exists(), "evidence is kept"


@pytest.mark.tier("all")
@pytest.mark.fault("T1")
def test_a_loop_that_is_left_by_break_is_compared_to_its_end(training, tmp_path):
    """Before the commit of a step in the fifth epoch."""
    report, script = tmp_path / "report.json", training(steps=60)
    text = script.read_text()
    text = text.replace("for step in", 'run.register("best", best := {"loss": 1e9})\nfor step in')
    leave = f"    if step.ends_epoch:\n        {KEPT}\n    if step.index == 36:\n        break\n"
    script.write_text(text.replace("    for x, y in", leave + "    for x, y in"))
    options = ("--kills", 2, "--signals", "KILL", "--points", "barrier", "--seed", 11)
    code, out = chaos(script, "--nproc", 3, *options, "--json", report)
    assert code == 0, out
    assert "undisturbed: 36 steps" in out
    result = json.loads(report.read_text())
    assert any(kill["point"] == "barrier" for kill in result["kills"]), "also after its end"
    assert max(step or 0 for step in result["restarts"]) >= 25


@pytest.mark.tier("all")
@pytest.mark.parametrize(
    ("text", "code", "complaint"),
    [
        ("print('no training')", 64, "did not train with ddpjob_trainer.start()"),
        ("import sys; sys.exit(9)", 1, "the undisturbed run failed with exit code 9"),
        (
            "from ddpjob_trainer import *; s = Snapshots(directory='x'); start(epochs=9, global_batch=9, snapshots=s)",  # noqa: E501
            64, "leave it out",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused(tmp_path, text, code, complaint):
    script = tmp_path / "train.py"
    script.write_text(text)
    found, out = chaos(script, "--nproc", 1)
    assert found == code, out
    assert complaint in out
    assert "\nidentical" not in out


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_chaos_leaves_nobody(tmp_path, signum, wait_until):
    script = tmp_path / "script.py"
    pid_file = tmp_path / "pid"
    say = f"open({str(pid_file)!r}, 'w').write(str(os.getpid()))"
    script.write_text(f"import os, time\n{say}\ntime.sleep(3600)")
    with subprocess.Popen(
        [sys.executable, *CHAOS, "--nproc", "1", "--keep", str(tmp_path / "kept"), str(script)],
        env={**os.environ, "PYTHONPATH": PATHS},
        stderr=subprocess.PIPE,
        text=True,
        # Whoever started pytest in the background has it ignore SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509
    ) as process:
        wait_until(lambda: pid_file.exists() and pid_file.read_text(), "the worker runs")
        worker = Path(f"/proc/{pid_file.read_text()}")
        process.send_signal(signum)
        process.wait(timeout=WHOLE)
    assert process.returncode == (-9 if signum == signal.SIGKILL else 128 + signum)
    wait_until(lambda: not worker.exists(), "the worker is gone")
