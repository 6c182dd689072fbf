"""`ddpjob local` and `make try` with real processes: the same bits, no orphans."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from kubectl_ddp import cli as plugin
from support.launching import PATHS, ROOT, finished
from support.patience import WHOLE
from support.rounds import EVERY, Training, alive

#: Tells who runs, and stays until it is told to end, or killed where it does not listen.
STAY = """
import os, signal, sys, time
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(sys.argv[1] + "/at-stay-" + os.environ["RANK"], "w") as out:
    print(os.getpid(), file=out)
while True:
    time.sleep(60)
"""


@contextmanager
def local(directory: Path, manifest: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A run in ``directory``; killed when the test is over."""
    (directory / "job.yaml").write_text(manifest)
    with subprocess.Popen(
        [sys.executable, "-m", "ddpjob_tools", "local", "job.yaml", *options],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def initialised(script: Path, capsys: Any, *words: str) -> str:
    """What `init` prints for three replicas; without spares and drills, not the point here."""
    options = ("--replicas", "3", "--every-steps", str(EVERY), "--name", "job")
    with chdir(script.parent):
        assert plugin.run(["init", script.name, *options, "--", *words]) == 0
    objects = list(yaml.safe_load_all(capsys.readouterr().out))
    job = objects[-1]["spec"]
    job["restart"] = {"inPlace": {"drill": "Never"}}
    pod = job["template"]["spec"]
    pod["terminationGracePeriodSeconds"] = 600  # no test waits for that
    pod["containers"][0]["command"][2:2] = ["--spares", "0"]
    return json.dumps({"kind": "List", "items": objects})


def launchers(driver: int) -> dict[str, int]:
    """Replica -> pid."""
    found = {}
    for pid in map(int, Path(f"/proc/{driver}/task/{driver}/children").read_text().split()):
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        env = dict(entry.partition(b"=")[::2] for entry in entries)
        found[env[b"DDPJOB_REPLICA"].decode()] = pid
    return found


@pytest.mark.tier("all")
def test_a_killed_launcher_changes_no_bit(tmp_path, capsys):
    outcomes = []
    for name in ("undisturbed", "disturbed"):
        training = Training(tmp_path / name)
        text = initialised(training.script, capsys, str(training.directory))
        training.script.unlink()  # it runs from the ConfigMap
        if name == "disturbed":
            training.hold("1-0-step-9")
        with local(training.directory, text) as process:
            if name == "disturbed":
                training.at("1-0-step-9")
                find = partial(training.directory.glob, "job-snapshots/job/*/step-*.json")
                training.until(lambda find=find: any(find()), "a whole snapshot")
                os.kill(launchers(process.pid)["1"], signal.SIGKILL)
            out, _ = process.communicate(timeout=WHOLE)
        assert process.returncode == 0, out
        outcomes.append(training.outcome())
    assert outcomes[0] == outcomes[1]
    steps = (training.directory / "losses-0").read_text().splitlines()
    assert sum(line.startswith("0 ") for line in steps) == 1, "attempt 2 did not resume"
    assert "local: attempt 1 ended: job-1 with exit code 137; restarting in 0 s" in out
    assert "local: attempt 2: replicas 3" in out
    assert "[job-0] " in out


@pytest.mark.parametrize(
    ("signals", "deaf"),
    [
        ([signal.SIGINT], ""),
        ([signal.SIGTERM], ""),
        ([signal.SIGINT, signal.SIGINT], "deaf"),
        ([signal.SIGKILL], "deaf"),
    ],
)
def test_whatever_ends_it_leaves_no_process(signals, deaf, tmp_path, capsys):
    training = Training(tmp_path)
    training.script.write_text(STAY)
    with local(tmp_path, initialised(training.script, capsys, str(tmp_path), deaf)) as process:
        pids = [*training.at("stay"), *launchers(process.pid).values()]
        process.send_signal(signals[0])
        if len(signals) > 1:  # two at once would be one
            assert process.stdout is not None
            assert any("ending, within" in line for line in process.stdout)
            process.send_signal(signals[1])
        out, _ = process.communicate(timeout=WHOLE)
    training.until(lambda: not any(map(alive, pids)), f"no process is left of {pids}\n{out}")
    expected = -signal.SIGKILL if signal.SIGKILL in signals else 128 + signals[0]
    assert process.returncode == expected, out


@pytest.mark.tier("all")
def test_make_try_kills_a_process_changes_no_bit_and_shows_it():
    code, out = finished(ROOT / "dev/demo/local.py")
    assert code == 0, out
    assert "--- kill -9 " in out
    assert "restart proven: " in out
    assert "  restarts in place          1 (a process was killed)\n" in out
    assert "  the two are                identical\n" in out


def test_make_try_needs_the_environment_only():
    """Neither root nor Go: what `programs` and `images` of other targets build."""
    text = (ROOT / "Makefile").read_text()
    assert "\ntry: setup ##" in text
    assert "\n\t@$(BIN)/python dev/demo/local.py" in text
