"""Six plain scripts of usual habits run unchanged from what `init` prints, as pods run them.

They are run by `ddpjob local` in a folder that has the manifest and nothing else.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.launching import PATHS
from support.patience import WHOLE
from support.tiers import some_in_gate

PLAIN = Path(__file__).with_name("plain")
#: What `init` is given, what each of two ranks prints (rank 0 alone: one line), what is gone then.
SCRIPTS = {
    "reads_and_writes.py data": (["weights ['weight', 'bias']"], "model.pt"),
    "with_options.py --output results -- --lr 0.5": (["rate 0.5", "rate 0.5"], ""),
    "configured.py config.json": (["width 5", "width 5"], "config-used.json"),
    "-m packaged.train": (["package True 7", "package True 7"], ""),
    "logged.py": (["lines 3", "lines 3"], "logs/rank-0.log, logs/rank-1.log"),
    "calls_others.py tools": (
        ["found ready-0.txt", "found ready-1.txt"],
        "ready-0.txt, ready-1.txt",
    ),
}


def command(here: Path, *words: str, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ddpjob_tools", *words],
        cwd=here, input=given, capture_output=True, text=True, check=False, timeout=WHOLE,
        env={**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.fault("U12")
@pytest.mark.parametrize(
    "words", some_in_gate(SCRIPTS, "reads_and_writes.py data", "calls_others.py tools")
)
def test_a_plain_script_runs_as_it_did_on_the_laptop(words, tmp_path):
    here, elsewhere = tmp_path / "laptop", tmp_path / "elsewhere"
    shutil.copytree(PLAIN, here)
    elsewhere.mkdir()
    manifest = command(here, "init", *words.split()).stdout
    shutil.rmtree(here)
    done = command(elsewhere, "local", "-", given=manifest)
    assert done.returncode == 0, done.stderr
    printed, gone = SCRIPTS[words]
    assert sorted(line.partition("] ")[2] for line in done.stdout.splitlines()) == printed
    lost = [line for line in done.stderr.splitlines() if "gone with the working directory" in line]
    assert [f": {gone}; ddpjob init --output" in line for line in lost] == [True] * bool(gone)
    kept = sorted(path.name for path in elsewhere.glob("*-snapshots/*/output/*"))
    assert kept == (["rank-0.pt", "rank-1.pt"] if "--output" in words else [])
