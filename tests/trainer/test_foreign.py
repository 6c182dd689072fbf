"""Scripts of other trainers, as their manuals have them, under `ddpjob-trainer run`.

A rank is killed, and all go on in place from the checkpoint that the script wrote itself. The
packages are no dependency of ours: `make foreign` runs this in an environment that has them.
"""

import importlib.util
import json
import os
import signal
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from kubectl_ddp import evidence
from kubectl_ddp.commands import why
from kubectl_ddp.gang import Job
from support import plugin
from support.launching import finished, free_ports, launched, page
from support.rounds import kill

SCRIPTS = Path(__file__).parents[1] / "support/foreign"
RANKS = range(3)
STEPS, HELD_AFTER = 30, 10  # see toy.py
SECONDS = 200  # three cold starts of a large package on a busy machine
_CALLBACK = (
    "from ddpjob_trainer.adapters.{} import DDPJobCallback; callbacks.append(DDPJobCallback())"
)
#: The package that a script needs, and the line that makes its adapter work.
FOREIGN = {
    "accelerate": "from ddpjob_trainer.adapters.accelerate import follow; follow(accelerator)",
    "lightning": _CALLBACK.format("lightning"),
    "transformers": _CALLBACK.format("transformers"),
}


@pytest.fixture(params=FOREIGN)
def script(request: pytest.FixtureRequest) -> Path:
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed here: make foreign")
    return SCRIPTS / f"with_{request.param}.py"


def outcome(directory: Path) -> list[float]:
    """The weights at the end, after every step and the same on all ranks."""
    found = [json.loads((directory / f"ended-{rank}").read_text()) for rank in RANKS]
    assert [one["step"] for one in found] == [STEPS] * 3
    assert found[0] == found[1] == found[2]
    weights: list[float] = found[0]["weights"]
    return weights


def await_all(directory: Path, launcher: Any, wait_until: Callable[..., None]) -> list[Path]:
    """Wait until all ranks are where one dies or hangs."""
    places = [directory / f"at-{rank}" for rank in RANKS]
    wait_until(
        lambda: all(p.exists() for p in places) or launcher.poll() is not None, "all there", SECONDS
    )
    return places


def longest_silence(script: Path) -> int:
    """Seconds within which any start prints: three at once, on a machine of whatever load."""
    began = time.monotonic()
    finished("-c", f"import torch, {script.stem.removeprefix('with_')}")
    return 10 + int(8 * (time.monotonic() - began))


def explained(directory: Path) -> str:
    """What `kubectl ddp why` says of the first round that failed, from what launchers kept."""
    _, kept = finished("-m", "ddpjob_trainer", "evidence", "ls", "--json", directory / "kept")
    job = Job(plugin.job())
    *_, case = why.cases(job, (), evidence.parsed(kept), everything=True)
    return "\n".join(why.page(job, case, 1, datetime.now(UTC), 200))


def train(script: Path, directory: Path, wait_until: Callable[..., None]) -> dict[str, Any]:
    """Kill rank 1 where all wait, unless they need not; the termination report."""
    report = directory / "report"
    words = ("--nproc", "3", "--termination-log", str(report))
    env = {"DDPJOB_SNAPSHOT_DIR": str(directory / "kept")}
    with launched(*words, str(script), str(directory), env=env) as launcher:
        if not (directory / "go").exists():
            places = await_all(directory, launcher, wait_until)
            kill(int(places[1].read_text()))
            (directory / "go").touch()
        _, err = launcher.communicate(timeout=SECONDS)
        assert launcher.returncode == 0, err
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def test_a_killed_rank_of_an_unmodified_script_comes_back_in_place(script, tmp_path, wait_until):
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    for directory in (calm, killed):
        directory.mkdir()
    (calm / "go").touch()
    assert train(script, calm, wait_until)["round"] == 0
    report = train(script, killed, wait_until)
    assert report["round"] == 1
    assert (report["rounds"][0]["rank"], report["rounds"][0]["signal"]) == (1, signal.SIGKILL)
    said = explained(killed)
    assert "First:     rank 1, " in said
    assert "(Killed, SIGKILL, exit code 137)" in said
    for rank in RANKS:
        assert (killed / f"begun-{rank}").read_text().split() == ["0", str(HELD_AFTER)]
    # Not bit for bit: no word of ours orders the sums of plain DDP after a restart.
    assert outcome(killed) == pytest.approx(outcome(calm), rel=1e-4, abs=1e-6)


def test_what_a_script_prints_is_shown_and_its_silence_ends_it(script, tmp_path, wait_until):
    """Unmodified: so it is watched by spec.output and spec.hang.outputSeconds alone."""
    (port,) = free_ports(1)
    words = ("--nproc", "3", "--metrics-port", str(port))
    env = {
        "DDPJOB_HANG_OUTPUT_SECONDS": str(longest_silence(script)),
        "DDPJOB_SNAPSHOT_DIR": str(tmp_path / "kept"),
    }

    def printed() -> dict[str, float]:
        found: dict[str, float] = json.loads(page(port, "state")).get("printed") or {}
        return found

    with launched(*words, str(script), str(tmp_path), env=env) as launcher:
        places = await_all(tmp_path, launcher, wait_until)
        wait_until(lambda: {"step", "loss"} <= printed().keys(), "step and loss", SECONDS)
        assert 0 <= printed()["step"] <= HELD_AFTER + 5
        os.kill(int(places[1].read_text()), signal.SIGSTOP)
        (tmp_path / "go").touch()
        _, err = launcher.communicate(timeout=2 * SECONDS)
    assert launcher.returncode == 0, err
    said = explained(tmp_path)
    assert "First:     rank 1, " in said
    assert "no rank has printed a line for" in said
    outcome(tmp_path)


def test_with_an_adapter_a_script_reports_progress_and_a_hang_ends_it(script, tmp_path, wait_until):
    """Rank 1 is stopped by SIGSTOP where all wait, the others in a collective or for their data."""
    adapted = tmp_path / script.name
    line = FOREIGN[script.stem.removeprefix("with_")]
    text = script.read_text().replace("# (the adapter)", line)
    assert line in text
    adapted.write_text(text)
    (tmp_path / "toy.py").write_text((SCRIPTS / "toy.py").read_text())
    (port,) = free_ports(1)
    report = tmp_path / "report"
    words = ("--nproc", "3", "--termination-log", str(report), "--metrics-port", str(port))
    env = {"DDPJOB_HANG_STEP_SECONDS": "5"}
    with launched(*words, str(adapted), str(tmp_path), env=env) as launcher:
        places = await_all(tmp_path, launcher, wait_until)
        state = json.loads(page(port, "state"))
        os.kill(int(places[1].read_text()), signal.SIGSTOP)
        (tmp_path / "go").touch()
        _, err = launcher.communicate(timeout=SECONDS)
    assert launcher.returncode == 0, err
    assert (state["phase"], state["snapshotStep"]) == ("step", HELD_AFTER), state
    assert HELD_AFTER <= state["step"] < STEPS
    assert state["loss"] > 0
    found = json.loads(report.read_text())
    assert found["round"] == 1, err
    assert (found["rounds"][0]["rank"], found["rounds"][0]["kind"]) == (1, "hang"), err
    assert found["step"] == STEPS
    assert found["snapshotStep"] == STEPS
    outcome(tmp_path)
