"""A hang of rank 0 while the others wait for its BatchNorm buffers is laid to rank 0.

Those who wait have said later, or earlier, than rank 0 what they do: it is not the time that tells.
"""

from __future__ import annotations

import json

import pytest

from support.launching import NO_ROUNDS, launched
from support.patience import PATIENCE

pytestmark = pytest.mark.tier("all")

TRAINING = """
import torch
from torch import nn
import ddpjob_trainer as ddp
run = ddp.start(total_steps=4, global_batch=12)
data = [(torch.full((8,), float(i)), torch.tensor([float(i)])) for i in range(48)]
model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
model, optimizer = run.prepare(model, optimizer, bucket_cap_mb=0.0001)
def stands_still():
    time.sleep(3600)
def metric(model, batch):
    return model(batch[0]).sum()
for step in run.steps(data):
    for x, y in step.batches:
        step.backward(((model(x) - y) ** 2).mean())
    step.commit()
    if rank == 0 and step.index == 2:
        time.sleep(1.5)  # the others are where they wait by now
        {rank_0}
    {all_ranks}
run.finish()
"""
CASES = {
    "own evaluation, the others in their next forward": (
        "with run.evaluating(): stands_still()", "pass", "evaluation",
    ),
    "before run.evaluate(), the others in it": (
        "run.alive(); stands_still()", "run.evaluate(data, metric)", "body",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.fault("T3")
def test_rank_0_hangs_and_not_those_that_wait_for_its_buffers(script, tmp_path, name):  # type: ignore[no-untyped-def]
    rank_0, all_ranks, activity = CASES[name]
    report = tmp_path / "report"
    with launched(
        "--nproc", "3", *NO_ROUNDS, "--termination-log", str(report),
        script(TRAINING.format(rank_0=rank_0, all_ranks=all_ranks)),
        env={"DDPJOB_HANG_STEP_SECONDS": "12"},
    ) as process:  # fmt: skip
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 76, err
    found = json.loads(report.read_bytes())
    assert (found["kind"], found["rank"]) == ("hang", 0), found
    assert f"({activity})" in found["exception"]
