"""`ddpjob-trainer profile`: a rank that trains profiles some steps, and no weight changes."""

import gzip
import json
from pathlib import Path

import torch

from support.launching import finished, free_ports, launched
from support.patience import PATIENCE, wait_for

SCRIPT = """
import torch
from torch import nn
import ddpjob_trainer as ddp
run = ddp.start(total_steps=8, global_batch=8,
                snapshots=ddp.Snapshots(directory=os.environ["HERE"] + "/snapshots"))
model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 1))
model, optimizer = run.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
dataset = [(torch.full((4,), float(n)), torch.tensor([float(n)])) for n in range(16)]
for step in run.steps(dataset):
    for x, y in step.batches:
        step.backward(((model(x) - y) ** 2).mean())
    step.commit()
    while step.index == 3 and rank == 1 and not run._process.profiler._writer.ordered:
        open(os.environ["HERE"] + "/waits", "w").close()
        if "ALONE" in os.environ:
            break
        time.sleep(0.01)
if rank == 0:
    torch.save(model.state_dict(), os.environ["HERE"] + "/weights")
run.finish()
"""


def trained(script: str, here: Path, *, alone: bool = False) -> tuple[int, str]:
    """Train; return how the profile ended and what it said."""
    here.mkdir()
    (port,) = free_ports(1)
    env = {"HERE": str(here), **({"ALONE": "1"} if alone else {})}
    said = 0, ""
    with launched("--nproc", "2", "--metrics-port", str(port), script, env=env) as process:
        if not alone:
            wait_for((here / "waits").exists, "step 3")
            ask = ("-m", "ddpjob_trainer", "profile", "--metrics-port", port, "--steps", 2)
            refused = finished(*ask, "--rank", 2)
            assert refused == (
                1,
                "ddpjob-trainer: rank 2 does not run in this pod; ranks here: 0-1\n",
            )
            said = finished(*ask, "--rank", 1)
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    return said


def test_a_profile_of_two_steps_changes_no_bit(script, tmp_path):
    path = script(SCRIPT)
    code, said = trained(path, tmp_path / "profiled")
    trace = tmp_path / "profiled/snapshots/evidence/profile-rank-1-step-4.json.gz"
    assert (code, said) == (0, f"{trace}\n")
    names = [
        one.get("name") for one in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    ]
    assert names.count("Optimizer.step#Adam.step") == 2
    assert "aten::addmm" in names
    trained(path, tmp_path / "alone", alone=True)
    one, other = (
        torch.load(tmp_path / name / "weights", weights_only=True) for name in ("profiled", "alone")
    )
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_program_without_the_library_is_refused_with_the_cure(script, tmp_path):
    (port,) = free_ports(1)
    program = script(f"open({str(tmp_path / 'runs')!r}, 'w').close()\ntime.sleep(3600)\n")
    with launched("--metrics-port", str(port), program):
        wait_for((tmp_path / "runs").exists, "the program")
        ask = ("-m", "ddpjob_trainer", "profile", "--rank", 0, "--metrics-port", port)
        code, said = finished(*ask)
    assert code == 1
    assert "rank 0 cannot be profiled now" in said
    assert "can use torch.profiler themselves" in said
