"""Usual slips of scripts: told in one sentence with the cure, and no second round."""

import pytest

from support.launching import run
from support.tiers import some_in_gate

IMPORTS = """
import torch, torch.distributed as dist, torch.distributed.optim
import ddpjob_trainer as ddp
from torch.utils.data import DataLoader, TensorDataset
"""
TRAIN = """
run = ddp.start(total_steps=3, global_batch=6)
model = torch.nn.Linear(4, 2)
wrapped, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
data = TensorDataset(torch.ones(12, 4))
for step in run.steps({data}):
    for (x,) in step.batches:
        {skip}step.backward(wrapped(x).sum())
    {commit}
run.finish()
"""
SPAWN = "DataLoader(data, batch_size=3, num_workers=1, multiprocessing_context='spawn')"
PLAIN = {"data": "data", "skip": "", "commit": "step.commit()"}


def slip(**changed: str) -> str:
    return TRAIN.format(**PLAIN | changed)


GUARD = 'put what trains below `if __name__ == "__main__":`'
SLIPS = {
    "group": ("dist.init_process_group('gloo')" + slip(), "leave dist.init_process_group() out"),
    "ZeRO": (
        slip().replace(
            "torch.optim.SGD(model.parameters()",
            "torch.distributed.optim.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD",
        ),
        "use the optimizer that it was given",
    ),
    "DataLoader": (slip(data=SPAWN), GUARD),
    "spawn": (
        "ddp.start(total_steps=3, global_batch=6)\ntorch.multiprocessing.spawn(print, nprocs=1)\n",
        GUARD,
    ),
    "no commit": (slip(commit="pass"), "step 0 was left without step.commit()"),
    "average": (
        slip(commit="\n    with run.evaluating(ema=True): pass"),
        "use prepare(ema=0.999) [",
    ),
    "skipped batch": (slip(skip="if step.index != 1: "), "step.backward(0 * loss, weight=0)"),
}


@pytest.mark.fault("T12")
@pytest.mark.parametrize("name", some_in_gate(list(SLIPS), "group", "DataLoader"))
def test_a_slip_is_refused_once_with_its_cure(script, name):
    text, words = SLIPS[name]
    path = script(IMPORTS + text)
    code, _, err = run("--nproc", "2", path)
    assert code == 64, err
    assert words in err
    assert f" [{path}, line " in err or words == GUARD
    assert "round 1" not in err
    assert "lost a peer" not in err
