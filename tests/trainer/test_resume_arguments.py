"""Programs that go on from a checkpoint only where an argument says so: restart.resumeArgs."""

import json
from pathlib import Path

import pytest

import ddpjob_contract as contract
from support.launching import launch, run
from support.patience import WHOLE
from support.rounds import two_launchers

#: Counts to 6 from the number in --resume, writes each; one process is killed at 3, once.
SCRIPT = """
import argparse, os, pathlib, signal
parser = argparse.ArgumentParser()
parser.add_argument("--resume", type=pathlib.Path)
parser.add_argument("out", type=pathlib.Path)
given = parser.parse_args()
begun = int(given.resume.read_text()) if given.resume else 0
rank = os.environ["RANK"]
print(f"<{rank} from {begun} with {given.resume}>", flush=True)
given.out.mkdir(exist_ok=True)
for step in range(begun + 1, 7):
    if rank == "0" and os.environ.get("SAVES", "1") == "1":
        (given.out / "new").write_text(str(step))
        os.rename(given.out / "new", given.out / f"step-{step}")
    if step == 3 and rank == "0" and os.environ["DDPJOB_ROUND"] == "0" and not given.resume:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "count.py"
    path.write_text(SCRIPT)
    return path


def words(folder: Path) -> list[str]:
    return ["--resume-args", "--resume={newest}", "--resume-when", f"{folder}/step-*"]


@pytest.mark.parametrize("spares", ["0", pytest.param("2", marks=pytest.mark.tier("all"))])
def test_it_goes_on_in_place_from_the_newest(script, tmp_path, spares):
    out = tmp_path / "out"
    given = [*words(out), "--nproc", "2", "--spares", spares, str(script), str(out)]
    code, said, errors = run(*given)
    assert code == 0, errors
    assert "<0 from 0 with None>" in said
    for rank in "01":
        assert f"<{rank} from 3 with {out}/step-3>" in said
    assert f"going on with --resume={out}/step-3" in errors


def test_without_a_checkpoint_it_begins_again_and_that_is_said(script, tmp_path):
    out = tmp_path / "out"
    env = {"SAVES": "0"}
    code, said, errors = run(*words(out), "--nproc", "1", str(script), str(out), env=env)
    assert code == 0, errors
    assert said.count("<0 from 0 with None>") == 2
    assert f"no checkpoint at {out}/step-*: training begins again, without --resume=" in errors


def test_the_first_start_leaves_what_is_there_and_says_so(script, tmp_path):
    (tmp_path / "step-5").write_text("5")
    code, said, errors = run(*words(tmp_path), str(script), str(tmp_path / "out"))
    assert "<0 from 0 with None>" in said
    assert "step-5 is there before the first start" in errors
    assert code == 0, errors


@pytest.mark.parametrize(
    "hub", ["hub", pytest.param("alone", marks=pytest.mark.tier("all"))]
)  # fmt: skip
def test_new_pods_go_on_and_all_from_the_checkpoint_of_replica_0(script, tmp_path, hub):
    """Each has a folder of its own here, as one that reads an old listing of a file server."""
    for pod, step in enumerate((4, 5)):
        folder = tmp_path / f"pod-{pod}"
        folder.mkdir()
        for number in range(4, step + 1):
            (folder / f"step-{number}").write_text(str(number))
    env = {
        contract.RESUME_ARGS: json.dumps(["--resume", "{newest}"]),
        contract.RESUME_WHEN: "step-*",
        contract.ATTEMPT: "2",
        contract.HUB: "2",
    }
    if hub == "alone":  # without rounds there is no hub: each looks by itself
        env[contract.IN_PLACE_MAX_WITHOUT_PROGRESS] = "0"
    with two_launchers(tmp_path, str(script), "out", apart=True, **env) as launchers:
        ended = [one.communicate(timeout=WHOLE) for one in launchers]
        assert [one.returncode for one in launchers] == [0, 0], ended
    agreed = (4, 4) if hub == "hub" else (4, 5)
    for rank, step in enumerate(agreed):
        assert f"<{rank} from {step} with step-{step}>" in ended[rank][0]
    assert "the hub was replaced" not in ended[1][1]


def test_a_programs_own_option_of_the_same_beginning_stays_its_own(script, tmp_path):
    (tmp_path / "five").write_text("5")
    given = [str(script), "--resume", str(tmp_path / "five"), str(tmp_path / "out")]
    code, said, errors = run(*given)
    assert (code, "<0 from 5 with" in said) == (0, True), errors
    echo = tmp_path / "echo.py"
    echo.write_text("import sys; print(sys.argv[1:])")
    process = launch(str(echo), "--resume-args", "--x")
    assert process.communicate(timeout=WHOLE)[0] == "['--resume-args', '--x']\n"
