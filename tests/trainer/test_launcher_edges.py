"""The launcher at its edges: what cannot start, signals while it imports, its output."""

import ctypes
import fcntl
import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from support.launching import NO_ROUNDS, PATHS, RUN, free_ports, launch, launched, page, run
from support.patience import PATIENCE
from support.rounds import patched

_PTRACE_SEIZE = 0x4206

#: For `patched`: however long a reader of the output stands still.
PATIENT_LOG = {
    f"launcher.output.{name}": PATIENCE for name in ("_PATIENCE_SECONDS", "_FLUSH_SECONDS")
}


def test_what_cannot_be_started_has_the_shells_exit_codes(tmp_path):
    program = tmp_path / "program"
    program.write_text("no first line that names an interpreter\n")
    program.chmod(0o755)
    code, _, err = run(str(program))
    assert (code, "Exec format error" in err) == (126, True)
    code, _, err = run("true", env=_seam(tmp_path, "subprocess.Popen", "raise BlockingIOError(11)"))
    assert (code, "cannot start" in err) == (1, True)


def test_closed_standard_files_do_not_become_other_files(tmp_path):
    events = tmp_path / "events"
    command = [*RUN, "--events", str(events), "sh", "-c", "echo secret; echo secret >&2"]
    closed = f"exec {shlex.join(command)} <&- >&- 2>&-"
    env = {**os.environ, **patched(tmp_path, {"launcher.output._END_SECONDS": PATIENCE})}
    done = subprocess.run(["sh", "-c", closed], env=env, timeout=PATIENCE, check=False)
    assert done.returncode == 0
    assert [json.loads(line)["event"] for line in events.read_text().splitlines()] == ["end"]


def test_sigterm_while_the_launcher_imports_ends_it_even_as_pid_1(tmp_path):
    """Anything but the default action shows that a handler was there for PID 1 too."""
    seam = "ddpjob_trainer.environment.read_launcher"
    code, _, err = run("true", env=_seam(tmp_path, seam, "os.kill(os.getpid(), 15)"))
    assert code == 143, err


def _seam(directory: Path, name: str, body: str) -> dict[str, str]:
    """Replace a function of a module in a new interpreter."""
    module = name.rpartition(".")[0]
    (directory / "sitecustomize.py").write_text(
        f"import os, {module}\ndef replaced(*_, **__):\n    {body}\n{name} = replaced\n"
    )
    return {"PYTHONPATH": os.pathsep.join((str(directory), PATHS))}


def test_a_partial_line_and_a_progress_bar_are_seen_at_once(script, tmp_path):
    """With a prefix each state of a bar is a line."""
    code, out, _ = run("--nproc", "2", script("sys.stdout.write('1 %\\r2 %\\rdone')"))
    assert code == 0
    assert re.findall(r"\[rank 1\] (.*)", out.replace("\r", "\n")) == ["1 %", "2 %", "done"]
    program = script(
        f"""
sys.stdout.write('epoch 1\\r> ')
sys.stdout.flush()
while not os.path.exists({str(tmp_path / "seen")!r}):
    time.sleep(0.01)
"""
    )
    with launch(program) as process:
        assert process.stdout is not None
        seen = b""
        while seen != b"epoch 1\r> ":
            assert select.select([process.stdout], [], [], PATIENCE)[0], seen
            seen += os.read(process.stdout.fileno(), 100)
        (tmp_path / "seen").touch()
        assert process.wait(PATIENCE) == 0


def test_a_slow_reader_of_a_non_blocking_pipe_gets_every_line(script, tmp_path, wait_until):
    read, write = os.pipe()
    os.set_blocking(write, False)
    program = script("for n in range(20000): print('line', n)")
    env = {**os.environ, **patched(tmp_path, PATIENT_LOG)}
    with subprocess.Popen([*RUN, program], env=env, stdout=write) as process:
        # Nothing is read until the pipe is full.
        wait_until(lambda: not select.select([], [write], [], 0)[1], "the pipe is full")
        os.close(write)
        with os.fdopen(read, "rb") as stream:
            lines = stream.read().splitlines()
        assert process.wait(PATIENCE) == 0
    assert len(lines) == 20000


def test_a_newer_file_of_the_program_is_progress(script, tmp_path):
    """Three rounds write their checkpoint before they fail, then two in a row do not."""
    path, aside, report = (tmp_path / name for name in ("checkpoints/last", "aside", "report"))
    path.parent.mkdir()
    program = script(f"""
round = int(os.environ["DDPJOB_ROUND"])
if round < 3:
    open({str(aside)!r}, "w").close()
    os.utime({str(aside)!r}, (0, round + 1))
    os.rename({str(aside)!r}, {str(path)!r})  # it is looked at any time, and is never older then
sys.exit(1)
""")
    words = ("--max-rounds-without-progress", "1", "--termination-log", str(report), program)
    env = patched(tmp_path, {"launcher.reports.state._POLL_SECONDS": PATIENCE})
    code, _, err = run(*words, env=env | {"DDPJOB_PROGRESS_PATH": str(path.parent)})
    assert (code, "failed 2 times without progress in between" in err) == (1, True)
    found = json.loads(report.read_text())
    assert (found["round"], found["fileModifiedAt"]) == (3, "1970-01-01T00:00:03.000000Z")
    run(*words)  # the same without a word about the path
    assert json.loads(report.read_text())["round"] == 1


@pytest.mark.fault("T10")
def test_a_log_that_nobody_reads_stops_no_round_no_health_and_no_sigterm(
    script, tmp_path, wait_until
):
    """Not read at all, from the start; and all along workers would write more."""
    program = script(
        f"""
import threading
if os.environ["DDPJOB_ROUND"] == "1":
    open({str(tmp_path)!r} + f"/second-{{rank}}", "w").close()
elif rank == 1:
    print("last words", file=sys.stderr, flush=True)
    sys.exit(3)
while True:
    print("x" * 1000, flush=True)
"""
    )
    report = tmp_path / "report"
    (port,) = free_ports(1)
    read, write = os.pipe()
    try:
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
        with subprocess.Popen(
            [*RUN, "--nproc", "3", "--metrics-port", str(port), "--termination-log", str(report),
             program],
            env={**os.environ, "PYTHONPATH": PATHS, "DDPJOB_GRACE_SECONDS": "5"},
            stdout=write, stderr=write,
        ) as process:  # fmt: skip
            try:
                seconds = [tmp_path / f"second-{rank}" for rank in range(3)]
                wait_until(lambda: all(path.exists() for path in seconds), "round 1")
                assert page(port, "healthz") == "ok\n"
                assert json.loads(page(port, "state"))["round"] == 1
                process.send_signal(signal.SIGTERM)
                assert process.wait(PATIENCE) == 143
            finally:
                process.kill()
    finally:
        os.close(read)
        os.close(write)
    content = json.loads(report.read_bytes())
    assert (content["kind"], content["round"]) == ("sigterm", 1)
    assert content["rounds"][0]["code"] == 3


@contextmanager
def traced(pid: int) -> Iterator[None]:
    """Its end is not seen by its parent, as that of one that waits for a disk or a device."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    assert libc.ptrace(_PTRACE_SEIZE, pid, None, None) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)  # lets go of it


def until_traced(folder: Path) -> str:
    """A program of which rank 0 stays and rank 1 fails once rank 0 is traced."""
    return f"""
if rank == 0:
    open({str(folder)!r} + "/pid", "w").write(str(os.getpid()) + "\\n")
    time.sleep(3600)
while not os.path.exists({str(folder)!r} + "/traced"):
    time.sleep(0.01)
sys.exit(7)
"""


@contextmanager
def rank_0_traced(folder: Path, wait_until: Any) -> Iterator[int]:
    pid = folder / "pid"
    wait_until(lambda: pid.exists() and pid.read_text().endswith("\n"), "rank 0")
    with traced(int(pid.read_text())):
        (folder / "traced").touch()
        yield int(pid.read_text())


@pytest.mark.fault("T10")
def test_a_worker_that_not_even_sigkill_ends_is_left_and_named(script, tmp_path, wait_until):
    report = tmp_path / "report"
    words = ("--nproc", "2", "--termination-log", str(report), script(until_traced(tmp_path)))
    with launched(*words) as process, rank_0_traced(tmp_path, wait_until) as pid:
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 7, err
    content = json.loads(report.read_bytes())
    assert (content["rank"], content["code"]) == (1, 7)
    assert f"rank 0 (pid {pid}) was killed, but has not ended" in str(content)


@pytest.mark.parametrize(
    ("step", "signum", "lines"),
    [
        ("termination.finish", signal.SIGTERM, 100),
        ("supervisor.RuntimeDir.close", signal.SIGUSR1, 1),
    ],
)
def test_no_signal_after_the_report_changes_the_end_and_sigterm_hurries_it(
    script, tmp_path, step, signum, lines
):
    program = script(f"for _ in range({lines}): os.write(1, b'x' * 1023 + b'\\n')")
    env = patched(tmp_path, PATIENT_LOG)
    with (tmp_path / "sitecustomize.py").open("a") as file:
        file.write(
            f"""
import os
from ddpjob_trainer.launcher import supervisor
from ddpjob_trainer.launcher.reports import termination
def interrupted(*args, step={step}):
    found = step(*args)
    os.kill(os.getpid(), {signum:d})
    return found
{step} = interrupted
"""
        )
    with launched(program, env=env) as process:  # nobody reads the output
        assert process.wait(timeout=PATIENCE) == 0


@pytest.mark.fault("T13")
def test_ranks_that_do_not_talk_hear_of_one_that_ended_long_before():
    program = "test $RANK = 1 || sleep 3600"
    env = {"DDPJOB_HANG_STEP_SECONDS": "0.2"}
    with launched("--nproc", "3", "sh", "-c", program, env=env) as process:
        assert process.stderr is not None
        words = next(line for line in process.stderr if "more than 0.2 s ago" in line)
    assert "rank 1 ended with exit code 0" in words
    assert "2 of the others have not ended" in words


# --- Terminals ---------------------------------------------------------------------------------

ONE_OF_TWO = {
    "DDPJOB_UID": "u", "DDPJOB_ATTEMPT": "1", "DDPJOB_REPLICA": "1",
    "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
}  # fmt: skip


def output(program: str, *, terminal: bool) -> str:
    """What a launcher with one rank of two writes."""
    read, write = pty.openpty() if terminal else os.pipe()
    with subprocess.Popen(
        [*RUN, *NO_ROUNDS, program],
        env={**os.environ, "PYTHONPATH": PATHS, **ONE_OF_TWO},
        stdout=write,
    ) as process:
        os.close(write)
        found = b""
        while data := _read(read):
            found += data
        os.close(read)
        assert process.wait(PATIENCE) == 0
    return found.decode().replace("\r\n", "\n")


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 4096)
    except OSError:  # what a terminal says when its other side is closed
        return b""
