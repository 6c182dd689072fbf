"""Ends that used to be blamed on the wrong one, or on nobody: scripts as people write them."""

import json
import os
import subprocess
import uuid
from pathlib import Path
from typing import Any

import pytest

from support.launching import NO_ROUNDS, PATHS, RUN, run
from support.patience import PATIENCE, WHOLE
from support.rounds import patched

START = """
import ddpjob_trainer as ddp
def prepares():
    time.sleep(3600)
"""
#: A class of the program, so that nothing but the library is imported before the work.
RUNS = "run = ddp.start(total_steps=2, global_batch=4)\n"
TRAINING = """
import torch
model = torch.nn.Linear(2, 1)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in run.steps([(torch.ones(2), torch.ones(1))] * 8):
    for x, y in step.batches:
        step.backward(((model(x) - y) ** 2).mean())
    step.commit()
run.finish()
"""


def ended(*words: str, tmp_path: Path, **env: str) -> tuple[int, dict[str, Any], str]:
    report = tmp_path / "report"
    code, _, err = run("--termination-log", str(report), *words, env=env)
    return code, json.loads(report.read_bytes()), err


# --- Before ddp.start() ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("who", "spares"),
    [
        ("rank == 0", "auto"),
        pytest.param("rank == 1", "0", marks=pytest.mark.tier("all")),
        pytest.param("True", "0", marks=pytest.mark.tier("all")),
    ],
)
@pytest.mark.fault("T3")
def test_who_does_not_come_to_start_is_named_with_its_stack(script, tmp_path, who, spares):
    """It holds up others that wait for it, or a lock of a killed build holds up all."""
    program = script(f"{START}if {who}: prepares()\n{RUNS}")
    limit = "6" if spares == "auto" else "20"  # without a spare the others first import torch
    seconds = {"DDPJOB_HANG_STARTUP_SECONDS": limit}
    # The others have come to start() within these seconds, however busy the machine is.
    patient = patched(tmp_path, {"liveness.hang.MEETING_FACTOR": PATIENCE})
    words = (*NO_ROUNDS, "--spares", spares, "--nproc", "2", program)
    code, found, err = ended(*words, tmp_path=tmp_path, **seconds, **patient)
    assert (code, found["kind"], found["code"]) == (76, "hang", 76), err
    assert found["rank"] == (1 if who == "rank == 1" else 0)
    assert "has not come to ddp.start() within" in found["exception"]
    assert f"DDPJOB_HANG_STARTUP_SECONDS={limit}" in found["exception"]
    assert any(line.startswith("stack: prepares (script.py:") for line in found["log"])


# --- After run.finish() ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("after", "how"),
    [
        ("torch.distributed.destroy_process_group()", "exit code 1: AssertionError"),
        pytest.param("if rank == 1: os.abort()", "SIGABRT", marks=pytest.mark.tier("all")),
        pytest.param("if rank == 1: sys.exit(3)", "exit code 3", marks=pytest.mark.tier("all")),
    ],
)
def test_what_a_finished_run_does_afterwards_fails_nothing(script, tmp_path, after, how):
    program = script(f"{START}{RUNS}{TRAINING}{after}\n")
    code, found, err = ended("--nproc", "2", program, tmp_path=tmp_path)
    assert (code, found["kind"], found["round"]) == (0, "success", 0), err
    assert f"launcher: rank 1 ended with {how}" in err
    assert "after run.finish()" in err


# --- Exit codes and exceptions of programs without our library -------------------------------


@pytest.mark.parametrize("code", [74, 75, 76, 70, 255])
def test_a_code_of_a_program_without_our_library_is_its_own(script, tmp_path, code):
    program = script(f"sys.exit({code})")
    returned, found, err = ended(*NO_ROUNDS, program, tmp_path=tmp_path)
    assert (returned, found["kind"], found["code"]) == (code, "exit", code), err


# --- Processes beside the workers ------------------------------------------------------------


def test_shared_memory_of_killed_processes_goes_with_them(script, tmp_path):
    name = f"ddpjob-test-{uuid.uuid4().hex[:12]}"
    program = script(f"""
from multiprocessing import shared_memory
made = shared_memory.SharedMemory(name=f"{name}-{{rank}}", create=True, size=4096)
made_by = {str(tmp_path)!r} + f"/made-{{os.environ['DDPJOB_ROUND']}}-"
open(made_by + str(rank), "w").close()
while not all(os.path.exists(made_by + one) for one in "01"):
    time.sleep(0.01)
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(3600)
""")
    words = ("--max-rounds-without-progress", "2", "--nproc", "2", program)
    code, found, err = ended(*words, tmp_path=tmp_path)
    assert (code, found["round"], found.get("signal")) == (137, 2, 9), err
    assert not list(Path("/dev/shm").glob(f"{name}*"))


def test_a_shell_that_passes_no_sigterm_on_is_named_at_the_start(script):
    gang = {
        "DDPJOB_REPLICA": "0", "DDPJOB_UID": "u", "PET_NNODES": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
    }  # fmt: skip
    program = script("")
    command = f"{' '.join(RUN)} {program}"
    for line, warned in (
        (f"{command}; code=$?; exit $code", True),
        (f"echo begin && exec {command}", False),
        (f"trap 'kill $!; wait' TERM; {command} & wait $!", False),
    ):
        done = subprocess.run(
            ["bash", "-c", line], env={**os.environ, "PYTHONPATH": PATHS, **gang},
            capture_output=True, text=True, timeout=WHOLE, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert ("warning: bash (pid " in done.stderr) is warned, (line, done.stderr)
