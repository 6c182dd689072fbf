"""Metrics, /state and the event log of real training that dies and hangs on its way."""

import ast
import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from ddpjob_trainer.telemetry import metrics
from ddpjob_trainer.telemetry.event_log import read_events, read_losses
from support.launching import free_ports, launch, page
from support.patience import PATIENCE
from support.rounds import patched

SCRIPT = """
import torch
from torch import nn
import ddpjob_trainer as ddp
def log(step, values):
    with open({directory!r} + "/curve", "a") as file:
        file.write(repr((rank, os.getpid(), step, tuple(sorted(values)))) + "\\n")
run = ddp.start(total_steps=12, global_batch=12, logging=ddp.Logging(every=4, log=log),
                snapshots=ddp.Snapshots(directory={directory!r} + "/snapshots", every=2))
class Data:
    asked = 0
    def __len__(self):
        return 96
    def __getitem__(self, index):
        self.asked += 1
        first, round_ = self.asked == 4 * 5, os.environ["DDPJOB_ROUND"]
        if rank == 2 and round_ == "0" and first:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1 and round_ == "1" and first:
            self.never_answers()
        return torch.full((8,), float(index)), torch.tensor([float(index)])
    def never_answers(self):
        time.sleep(3600)
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
model, optimizer = run.prepare(model, optimizer, bucket_cap_mb=0.001, clip_grad_norm=1.0)
for step in run.steps(Data()):
    for x, y in step.batches:
        loss = ((model(x) - y) ** 2).mean()
        step.backward(loss)
    step.commit()
    if rank == 0 or step.index % 2:  # not alike on all ranks: nobody waits for anybody
        run.log({{"half": loss * 0.5}})
run.log({{"final": 1}})
print("trained", flush=True)
while not os.path.exists({directory!r} + "/go"):
    time.sleep(0.05)
run.finish()
"""


def samples(text: str) -> dict[str, float]:
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            assert name not in found, f"twice: {name}"
            found[name] = float(value)
    return found


#: However slowly an answer or a line is written.
PATIENT = {
    "launcher.hangs._STACKS_SECONDS": 8,
    "launcher.output._END_SECONDS": PATIENCE,
}


@pytest.mark.tier("all")
def test_over_rounds(script, tmp_path, wait_until):
    (port,) = free_ports(1)
    events, directory = tmp_path / "events.jsonl", str(tmp_path)
    process = launch(
        "--nproc", "3", "--metrics-port", str(port), "--events", str(events),
        script(SCRIPT.format(directory=directory)),
        env={"DDPJOB_HANG_STEP_SECONDS": "12", **patched(tmp_path, PATIENT)},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        seen = []
        while sum("trained" in line for line in seen) < 3:
            seen.append(process.stdout.readline())
            assert seen[-1], process.communicate(timeout=PATIENCE)[1]
        check_metrics(samples(page(port, "metrics")))
        check_state(json.loads(page(port, "state")))
        assert page(port, "healthz") == "ok\n"
        Path(directory, "go").touch()
        process.communicate(timeout=PATIENCE)
        assert process.returncode == 0
        check_events(events)
        check_curve(tmp_path / "curve")
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=PATIENCE)


def check_metrics(found: dict[str, float]) -> None:
    name = metrics.PREFIX
    assert found[f'{name}rounds_total{{kind="signal"}}'] == 1
    assert found[f'{name}rounds_total{{kind="hang"}}'] == 1
    assert found[f'{name}hangs_total{{phase="step"}}'] == 1
    assert found[f"{name}round"] == 2
    assert found[f"{name}workers"] == 3
    for rank in range(3):
        assert found[f'{name}step{{rank="{rank}"}}'] == 12
        # Every round has finished 4 steps or more; of a killed one only the first is certain.
        assert found[f'{name}samples_total{{rank="{rank}"}}'] >= 4 * (1 + 1 + 4)
        assert found[f'{name}step_seconds_count{{rank="{rank}"}}'] >= 12
        assert found[f'{name}snapshot_step{{rank="{rank}"}}'] == 12
        assert found[f'{name}learning_rate{{rank="{rank}"}}'] == 0.001
        assert found[f'{name}grad_norm{{rank="{rank}"}}'] > 0
        for activity in ("data", "forward", "backward", "update", "agreement"):
            assert found[f'{name}phase_seconds_total{{activity="{activity}",rank="{rank}"}}'] > 0
        for stage in ("rendezvous", "build", "load", "first_step"):
            assert found[f'{name}recovery_seconds{{rank="{rank}",stage="{stage}"}}'] > 0
    known = {spec.exposed for spec in (*metrics.WORKER, *metrics.LAUNCHER)}
    ours = {re.sub(r"(_bucket|_sum|_count)?({.*)?$", "", sample) for sample in found}
    assert {sample for sample in ours if not sample.endswith("_created")} <= known


def check_state(state: dict[str, Any]) -> None:
    assert (state["round"], state["step"], state["totalSteps"]) == (2, 12, 12)
    assert state["snapshotStep"] == 12
    kinds = [(one["rank"], one["kind"]) for one in state["rounds"]]
    assert kinds == [(2, "signal"), (1, "hang")]
    assert "rank 1 hangs" in state["rounds"][1]["exception"]
    assert state["stacks"].startswith("--- rank 1\n")
    assert "in never_answers" in state["stacks"]
    spent = dict(state["spent"])
    up = spent.pop("up")
    assert sum(spent.values()) == pytest.approx(up, abs=0.01), "each second is in one of them"
    assert spent["recovering"] > 11, "a hang is found after 12 s without a step"
    assert min(spent["warmup"], spent["productive"]) > 0


def check_events(path: Path) -> None:
    assert sorted(read_losses(path)) == list(range(1, 13))
    found = list(read_events(path))
    failures = [event for event in found if event["event"] == "failure"]
    assert [(event["rank"], event["kind"]) for event in failures] == [(2, "signal"), (1, "hang")]
    resumes = [event["step"] for event in found if event["event"] == "resume"]
    assert (len(resumes), resumes[0]) == (3, 0)
    assert 12 in [event["step"] for event in found if event["event"] == "snapshot"]
    assert found[-1]["event"] == "end"
    assert found[-1]["code"] == 0


def check_curve(path: Path) -> None:
    """Rank 0's processes wrote it, as one: what came after the step they resume at comes again."""
    rows = [ast.literal_eval(line) for line in path.read_text().splitlines()]
    assert {row[0] for row in rows} == {0}
    assert len(set(rows)) == len(rows)
    curve = sorted({row[2:] for row in rows})
    own = ("grad_norm", "learning_rate", "loss", "samples_per_second")
    assert [step for step, names in curve if names == own] == [4, 8, 12]
    assert [step for step, names in curve if names == ("half",)] == list(range(1, 13))
    assert [step for step, names in curve if names == ("final",)] == [12]
