"""The launcher as a program: exit codes, report, signals, orphans, nobody left behind."""

import json
import re
import signal
import sys
from pathlib import Path
from subprocess import Popen

import pytest

from support.launching import (
    HANDLES,
    NO_ROUNDS,
    PATHS,
    SOURCES,
    free_ports,
    launch,
    launched,
    page,
    run,
)
from support.patience import PATIENCE
from support.rounds import alive

#: faulthandler's words count, those of exceptions that were met before do not.
CRASH = """
    import faulthandler, traceback
    faulthandler.enable()
    try: {}['k']
    except KeyError: traceback.print_exc()
    os.kill(os.getpid(), signal.SIGSEGV)"""
SEVEN = "ValueError: seven"
#: Without a record of our library its codes are a program's as any other.
LIBRARY = """
    from pathlib import Path
    from ddpjob_trainer.liveness import heartbeat
    heartbeat.RankStateWriter(Path(os.environ["DDPJOB_TRAINER_STATE_DIR"]), rank)
    """


@pytest.mark.parametrize(
    ("end", "code", "kind", "exception"),
    [
        ("sys.exit(0)", 0, "success", ""),
        ("sys.exit(7)", 7, "exit", ""),
        (f"{LIBRARY}sys.exit(70)", 70, "diverged", ""),
        # Rank 0 may have ended before.
        (
            f"{LIBRARY}sys.exit(76)",
            76,
            "hang",
            "rank 0 ended with exit code 0 while others trained",
        ),
        ("raise ValueError('seven')", 1, "exception", SEVEN),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "signal", ""),
        ("os.kill(os.getpid(), signal.SIGTERM)", 143, "sigterm", ""),
        (CRASH, 139, "signal", "Fatal Python error: Segmentation fault: "),
    ],
)
def test_exit_code_and_report(script, tmp_path, end, code, kind, exception):
    report = tmp_path / "report"
    program = script(f"print('last words of', rank)\nif rank == 1: {end}\n")
    returned, _, err = run(*NO_ROUNDS, "--nproc", "2", "--termination-log", str(report), program)
    assert returned == code, err
    content = json.loads(report.read_bytes())
    assert (content["version"], content["kind"], content["round"]) == (1, kind, 0)
    if code:
        assert (content["rank"], content["localRank"], content["code"]) == (1, 1, code)
        assert "last words of 1" in content["log"]
    assert content.get("signal") == (code - 128 if code > 128 else None)
    said = content.get("exception", "")
    if kind == "hang":
        assert not said or said.startswith(exception)
    else:
        assert said.startswith(exception)
        assert bool(said) == bool(exception)
    how = {1: f"exit code 1 (exception: {SEVEN})", 139: f"signal 11 (SIGSEGV: {exception}"}
    assert f"rank 1 ended first, with {how.get(code, '')}" in err or code == 0


#: As ProcessGroupNCCL's watchdog: to stderr, from C++, then SIGABRT.
ABORT = """
def nccl_aborts(words):
    head = f"[PG ID 0 Rank {rank}] Process group watchdog thread terminated with exception: {words}"
    os.write(2, (head + "\\nframe #0: c10::Error\\n  what():  " + head + "\\n").encode())
    os.abort()
"""


@pytest.mark.fault("N13")
@pytest.mark.parametrize(
    ("end", "found"),
    [
        ("raise RuntimeError('CUDA error: uncorrectable ECC error')", (74, "hardware", None)),
        ("nccl_aborts('CUDA error: uncorrectable ECC error')", (74, "hardware", None)),
        (f"{LIBRARY}sys.exit(74)", (74, "hardware", None)),
        ("nccl_aborts('CUDA error: device-side assert')", (134, "signal", 6)),  # the program's own
    ],
)
def test_a_gpu_that_failed_is_not_met_again_in_place(script, tmp_path, end, found):
    report, own = tmp_path / "report", found[0] == 134
    program = script(f"{ABORT}\nif rank == 1: {end}\ntime.sleep(3600)\n")
    options = NO_ROUNDS if own else ()
    code, _, err = run("--nproc", "2", *options, "--termination-log", str(report), program)
    content = json.loads(report.read_bytes())
    assert (code, content["kind"], content.get("signal")) == found, err
    assert (content["rank"], content["round"]) == (1, 0)
    assert ("no further round: a GPU failed" in err) != own
    assert end.partition("CUDA error: ")[2].partition("'")[0] in content.get("exception", "")


def test_one_failure_ends_the_others_and_all_their_descendants(script, tmp_path):
    """Also a daemon in a session of its own, and a worker that ignores SIGTERM."""
    program = script(
        f"""
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for _ in range(2):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            open({str(tmp_path)!r} + f"/{{os.getpid()}}.pid", "w").close()
            time.sleep(3600)
        os._exit(0)
while len([n for n in os.listdir({str(tmp_path)!r}) if n.endswith(".pid")]) < 6:
    time.sleep(0.01)
if rank == 2:
    sys.exit(5)
open({str(tmp_path)!r} + f"/{{os.getpid()}}.pid", "w").close()
time.sleep(3600)
"""
    )
    code, _, err = run(*NO_ROUNDS, "--nproc", "3", program)
    assert code == 5, err
    pids = [int(p.stem) for p in tmp_path.glob("*.pid")]
    assert len(pids) >= 6
    assert [pid for pid in pids if alive(pid)] == []


def test_orphans_are_reaped_while_training_goes_on(script, wait_until):
    program = script(
        """
if os.fork() == 0:
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        time.sleep(0.1)
    os._exit(0)
os.wait()
time.sleep(3600)
"""
    )
    process = launch(program)
    orphan = Path(f"/proc/{int(process.stdout.readline())}")
    wait_until(lambda: not orphan.exists(), "the orphan has ended and is no zombie")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 143, err  # the launcher was still at work


def test_workers_die_with_a_killed_launcher(script, wait_until):
    process = launch("--nproc", "2", script("print(os.getpid(), flush=True)\ntime.sleep(3600)"))
    pids = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
    process.kill()
    process.communicate(timeout=PATIENCE)
    wait_until(lambda: not any(alive(pid) for pid in pids), "workers are gone")


def ended_by(process: Popen[str], signum: int, *lines: str) -> tuple[str, str]:
    """Send a signal after lines of output, some of which another signal asks for."""
    assert process.stdout is not None
    for line in lines:
        if line == "user\n":
            process.send_signal(signal.SIGUSR1)
        assert process.stdout.readline() == line
    process.send_signal(signum)
    return process.communicate(timeout=PATIENCE)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_are_forwarded(script, signum, code):
    """But for those that nohup has the launcher ignore."""
    program = script(
        """
def handler(signum, frame):
    os.write(1, b"got %d\\n" % signum)  # print is not to be interrupted by itself
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
for s in (signal.SIGTERM, signal.SIGINT):
    signal.signal(s, handler)
signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"user\\n"))
print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, flush=True)
"""
        + HANDLES
    )
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = launch(program)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert process.stdout.readline() == "True\n"
    process.send_signal(signal.SIGHUP)
    out, err = ended_by(process, signum, "user\n")
    assert f"got {int(signum)}\n" in out
    assert process.returncode == code, err


def test_who_ignores_sigterm_is_killed_before_the_grace_period_ends(script, tmp_path):
    report = tmp_path / "report"
    program = script("signal.signal(15, signal.SIG_IGN)\nprint('x', flush=True)\ntime.sleep(3600)")
    process = launch("--termination-log", str(report), program, env={"DDPJOB_GRACE_SECONDS": "2"})
    ended_by(process, signal.SIGTERM, "x\n")
    assert process.returncode == 143
    assert json.loads(report.read_bytes())["kind"] == "sigterm"


@pytest.mark.parametrize("trap", [False, True])
def test_behind_a_shell_the_one_that_trains_is_told_to_end(script, tmp_path, trap):
    """Else the shell ends at once, and the other is killed. One that has a trap is told itself."""
    program = script(
        """
from pathlib import Path
from ddpjob_trainer.liveness.heartbeat import RankStateWriter
writer = RankStateWriter(Path(os.environ["DDPJOB_TRAINER_STATE_DIR"]), rank)
writer.update(phase="step", step=1)
def save(*_):
    print("saved", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
"""
        + HANDLES
    )
    shell = tmp_path / "train.sh"
    trapped = "trap 'echo trapped; kill -TERM $!; wait' TERM\n"
    python = f"{sys.executable} {program}"
    body = f"{trapped}{python} &\nwait $!\nwait" if trap else f"{python}\necho the shell goes on"
    shell.write_text(f"#!/bin/sh\n{body}\n")
    shell.chmod(0o755)
    process = launch(str(shell))
    out, err = ended_by(process, signal.SIGTERM, "ready\n")
    assert out == ("trapped\nsaved\n" if trap else "saved\nthe shell goes on\n"), err
    assert process.returncode == 143, err


def test_the_environment_of_torchrun_and_of_a_gang(script):
    program = script("print(*(f'{k}={v}' for k, v in sorted(os.environ.items())), sep='|')")
    code, out, _ = run(
        program, "--lr", "1",
        env={
            "DDPJOB_UID": "u", "DDPJOB_ATTEMPT": "4", "DDPJOB_REPLICA": "1", "PET_NNODES": "3",
            "PET_NPROC_PER_NODE": "2", "MASTER_ADDR": "job-0.job.ns.svc", "MASTER_PORT": "29500",
        },
    )  # fmt: skip
    assert code == 0
    lines = {m[1]: m[2] for m in re.finditer(r"^\[rank (\d)\] (.*)$", out, re.MULTILINE)}
    assert sorted(lines) == ["2", "3"]
    wanted = {
        "RANK": "3", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "3", "ROLE_RANK": "3", "ROLE_WORLD_SIZE": "6",
        "MASTER_ADDR": "job-0.job.ns.svc", "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1",
        "TORCHELASTIC_RESTART_COUNT": "0", "DDPJOB_ROUND": "0", "TORCHELASTIC_RUN_ID": "u-4-0",
    }  # fmt: skip
    found = dict(part.partition("=")[::2] for part in lines["3"].split("|"))
    assert {name: found.get(name) for name in wanted} == wanted


def test_where_torch_cannot_bind_to_cpus_nothing_is_trained(script):
    """There is no GPU here."""
    code, out, err = run("--numa-binding", "node", script("print('begun')"))
    assert code == 64, err
    assert "--numa-binding node: torch cannot bind this process: " in err
    assert "begun" not in out


def test_one_process_per_pod_has_its_log_unchanged(script):
    """And nothing is left in shared memory."""
    text = "print(os.environ['DDPJOB_TRAINER_STATE_DIR'])\nprint('to stderr', file=sys.stderr)"
    code, out, err = run(script(text))
    assert (code, err) == (0, "to stderr\n")
    assert not Path(out.removesuffix("\n")).exists()


def test_a_module_and_an_executable(tmp_path):
    (tmp_path / "my_module.py").write_text("import sys; print('module', sys.argv[1:])")
    code, out, err = run("-m", "my_module", "--x", "1", env={"PYTHONPATH": f"{PATHS}:{tmp_path}"})
    assert (code, out) == (0, "module ['--x', '1']\n"), err
    code, out, _ = run("sh", "-c", "echo $RANK of $WORLD_SIZE")
    assert (code, out) == (0, "0 of 1\n")


@pytest.mark.parametrize(
    ("arguments", "env", "code", "words"),
    [
        (["missing.py"], {}, 127, "missing.py: no such script"),
        (["no-such-program"], {}, 127, "no-such-program: not found"),
        ([str(SOURCES / "ddpjob_trainer/py.typed")], {}, 126, "is not executable"),
        ([str(SOURCES / "ddpjob_trainer")], {}, 126, "is a directory: name the script in it"),
        (["look.ipynb"], {}, 64, "look.ipynb: a notebook, which Python does not start: jupyter"),
        ([], {}, 2, "required: PROGRAM"),
        (["sh"], {"DDPJOB_REPLICA": "0", "MASTER_ADDR": ""}, 64, "MASTER_ADDR"),
        (["sh"], {"DDPJOB_GRACE_SECONDS": "soon"}, 64, "DDPJOB_GRACE_SECONDS='soon'"),
    ],
)
def test_what_cannot_be_started_says_why(arguments, env, code, words):
    returned, out, err = run(*arguments, env=env)
    assert (returned, out) == (code, "")
    assert words in err
    assert "Traceback" not in err


def test_state_of_a_script_of_somebody_elses(script, wait_until):
    """As most people's: torch alone, a bar on stderr, the same lines of every rank."""
    program = script(
        """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(1, 10**6):
    loss = model(torch.ones(2, 4)).pow(2).mean()
    loss.backward(); opt.step(); opt.zero_grad()
    said = f" 10%|#   | {step}/1000000 [00:12<00:15, 36.50it/s, loss=0.5]"
    print(said if rank == 0 else "step 7 loss 9", end="\\r", flush=True, file=sys.stderr)
    time.sleep(0.01)
"""
    )
    (port,) = free_ports(1)
    with launched("--nproc", "3", "--metrics-port", str(port), program):

        def printed():
            try:
                return json.loads(page(port, "state")).get("printed", {})
            except OSError:  # it starts
                return {}

        wait_until(lambda: printed().get("stepsPerSecond", 0) > 0, "a rate")
        found = printed()
        assert (found["totalSteps"], found["loss"]) == (10**6, 0.5)
        assert found["step"] > 1
        assert "step" not in json.loads(page(port, "state")), "by this it would be judged"
        assert 'ddpjob_trainer_loss{rank="0"} 0.5' in page(port, "metrics")
