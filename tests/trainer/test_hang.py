"""Hangs under the launcher: the culprit is named, shows its stacks, and counts as 76.

Most workers keep the library's records without torch: each stands where the test wants it.
"""

import json

import pytest

from support.launching import NO_ROUNDS, finished, free_ports, launched, run
from support.patience import PATIENCE, wait_for
from support.rounds import patched
from support.tiers import some_in_gate

WORKER = """
import ctypes
from pathlib import Path
from ddpjob_trainer.liveness import heartbeat, stacks
directory = Path(os.environ["DDPJOB_TRAINER_STATE_DIR"])
stacks.enable(directory, rank)
writer = heartbeat.RankStateWriter(directory, rank)
def waits_for_its_peers():
    if rank == 0:
        show()
    while True:
        time.sleep(3600)
def asleep():
    time.sleep(3600)
def holds_the_gil():
    while True:
        ctypes.PyDLL(None).sleep(3600)
def stopped():
    os.kill(os.getpid(), signal.SIGSTOP)
def in_a_write_that_never_returns():
    read, write = os.pipe()
    while True:
        os.write(write, bytes(65536))
def show():
    pass
"""
#: Records that the launcher sees all at once, when each rank stands where it is to stand.
HIDDEN = """
shown = os.environ["DDPJOB_TRAINER_STATE_DIR"]
os.environ["DDPJOB_TRAINER_STATE_DIR"] = shown + ".hidden"
os.makedirs(shown + ".hidden", exist_ok=True)
"""
SHOW = """
def state_of(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
def show():
    for other in (1, 2):
        while not (directory / f"at-{other}").exists():
            time.sleep(0.01)
        pid = heartbeat.read_state(directory, other).pid
        while state_of(pid) not in "ST":  # asleep or stopped
            time.sleep(0.01)
    for note in Path(shown).iterdir():  # that the library was imported
        note.unlink()
    directory.rename(shown)
"""


def environment(**seconds: float) -> dict[str, str]:
    limits = {"startup": PATIENCE, "step": PATIENCE, "snapshot": PATIENCE, **seconds}
    return {f"DDPJOB_HANG_{name.upper()}_SECONDS": str(value) for name, value in limits.items()}


CASES = {
    # phase, activity, what rank 1 does, whether it can show its stacks
    "data loading": ("step", "data", "asleep", True),
    "C code that holds the GIL": ("step", "forward", "holds_the_gil", True),
    "SIGSTOP in a collective": ("step", "backward", "stopped", False),
    "start": ("startup", "build", "asleep", True),
    "a disk that does not answer": ("snapshot", "snapshot", "in_a_write_that_never_returns", True),
}


@pytest.mark.parametrize("name", some_in_gate(CASES, "C code that holds the GIL"))
@pytest.mark.fault("T3")
def test_the_culprit_is_named_and_counts_as_76(script, tmp_path, name):
    phase, activity, what, shows = CASES[name]
    report = tmp_path / "report"
    program = script(
        f"""{HIDDEN}{WORKER}{SHOW}
writer.update(phase={phase!r}, step=7)
writer.mark({activity!r} if rank == 1 else "backward")
(directory / f"at-{{rank}}").touch()
if rank != 1:
    waits_for_its_peers()
{what}()
"""
    )
    # However slowly an answer is written.
    patience = patched(tmp_path, {"launcher.hangs._STACKS_SECONDS": 8})
    code, _, err = run(
        *NO_ROUNDS, "--nproc", "3", "--termination-log", str(report), program,
        env={**environment(**{phase: 1.5}), **patience},
    )  # fmt: skip
    assert code == 76, err
    found = json.loads(report.read_bytes())
    assert (found["kind"], found["rank"], found["code"], found["step"]) == ("hang", 1, 76, 7)
    assert f"in phase {phase} ({activity}) after step 7" in found["exception"]
    assert f"DDPJOB_HANG_{phase.upper()}_SECONDS=1.5" in found["exception"]
    assert "launcher: rank 1 " in err
    assert ("--- rank 1\nno answer: it is stopped" in err) == (not shows)
    assert (f"in {what}" in err) == shows
    assert err.count("in waits_for_its_peers") == 2  # those of the others tell what they wait for
    assert any(line.startswith(f"stack: {what} (") for line in found["log"]) == shows
    assert not any("waits_for_its_peers" in line for line in found["log"])


@pytest.mark.parametrize(
    "kind", some_in_gate(["after the loop", "without our library"], "without our library")
)
def test_nothing_is_watched(script, kind):
    keeps_records = f"{WORKER}\nwriter.update(phase='done')\n"
    program = script((keeps_records if kind == "after the loop" else "") + "time.sleep(2)")
    limits = {"step": 0.3, "snapshot": 0.3}
    if kind == "without our library":
        limits["startup"] = 0.3
    code, _, err = run("--spares", "0", "--nproc", "2", program, env=environment(**limits))
    assert (code, err) == (0, "")


@pytest.mark.fault("T3")
def test_a_silent_program_is_ended_with_the_stacks_of_all(script, tmp_path):
    """It has long left the loop, so nothing else watches it."""
    report = tmp_path / "report"
    program = script(f"{WORKER}\nwriter.update(phase='done', step=7)\nprint('done')\nasleep()")
    code, out, err = run(
        *NO_ROUNDS, "--nproc", "2", "--termination-log", str(report), program,
        env=environment(output=2),
    )  # fmt: skip
    found = json.loads(report.read_bytes())
    assert (code, found["kind"], found["step"]) == (76, "hang", 7), err
    assert out.count("done") == 2
    assert "Hang: the gang hangs: no rank has printed a line for" in found["exception"]
    assert ["in asleep" in one for one in err.split("--- rank ")[1:3]] == [True, True]
    assert any(line.startswith("stack: asleep (") for line in found["log"])


# --- BatchNorm's buffers, which rank 0 gives to all ---------------------------------------------

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
BUFFERS = {
    "own evaluation, the others in their next forward": (
        "with run.evaluating(): stands_still()", "pass", "evaluation",
    ),
    "before run.evaluate(), the others in it": (
        "run.alive(); stands_still()", "run.evaluate(data, metric)", "body",
    ),
}  # fmt: skip


@pytest.mark.tier("all")
@pytest.mark.parametrize("name", BUFFERS)
@pytest.mark.fault("T3")
def test_rank_0_hangs_and_not_those_that_wait_for_its_buffers(script, tmp_path, name):
    """They have said later, or earlier, than it what they do: it is not the time that tells."""
    rank_0, all_ranks, activity = BUFFERS[name]
    report = tmp_path / "report"
    program = script(TRAINING.format(rank_0=rank_0, all_ranks=all_ranks))
    words = (*NO_ROUNDS, "--nproc", "3", "--termination-log", str(report), program)
    code, _, err = run(*words, env={"DDPJOB_HANG_STEP_SECONDS": "12"})
    assert code == 76, err
    found = json.loads(report.read_bytes())
    assert (found["kind"], found["rank"]) == ("hang", 0), found
    assert f"({activity})" in found["exception"]


LIVE = """
if rank == 0:
    directory = Path(os.environ["DDPJOB_TRAINER_STATE_DIR"])
    stacks.enable(directory, rank)
    heartbeat.RankStateWriter(directory, rank)
def looked_at():
    open(os.environ["READY"] + str(rank), "w").close()
    while not os.path.exists(os.environ["READY"]):
        time.sleep(0.02)
looked_at()
"""


def test_a_look_at_ranks_that_run_kills_nobody(script, tmp_path):
    """`ddpjob-trainer stacks`: rank 1 has no handler, as a program without the library."""
    (port,) = free_ports(1)
    imports = "from pathlib import Path\nfrom ddpjob_trainer.liveness import heartbeat, stacks\n"
    alone = "import faulthandler\nif rank == 1: faulthandler.unregister(stacks.REQUEST)\n"
    ready = tmp_path / "ready"
    words = ("--nproc", "2", "--metrics-port", str(port), script(imports + alone + LIVE))
    with launched(*words, env={"READY": str(ready)}) as process:
        wait_for(lambda: (tmp_path / "ready0").exists() and (tmp_path / "ready1").exists(), "both")
        look = ("-m", "ddpjob_trainer", "stacks", "--metrics-port")
        code, told = finished(*look, port, DDPJOB_UID="")
        nobody, why = finished(*look, free_ports(1)[0])
        ready.touch()
        process.communicate(timeout=PATIENCE)
    first, second = told.split("--- rank 1\n")
    assert (code, process.returncode) == (0, 0), told
    assert first.startswith("--- rank 0\n")
    assert "in looked_at" in first
    assert second.startswith("no answer: it has not imported ddpjob_trainer")
    assert (nobody, "no launcher answers at port" in why) == (1, True)
