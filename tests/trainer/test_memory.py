"""A real cgroup with too little memory: the kernel kills a worker, and the launcher tells why."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.launching import PATHS, launched
from support.patience import PATIENCE

pytestmark = pytest.mark.tier("all")  # whether a cgroup may be made depends on the machine

LIMIT = 400 << 20
ROOT = Path("/sys/fs/cgroup")
GREEDY = "x = []\nwhile True: x.append(b'1' * (1 << 20))\n"
#: The child is killed: it is larger.
OF_A_CHILD = f"""\
import subprocess, sys
subprocess.run([sys.executable, "-c", {GREEDY!r}], check=True)
"""


@pytest.fixture
def limited() -> Iterator[Path]:
    """A cgroup of this test, of version 1 or 2, with a limit."""
    of_v1 = (ROOT / "memory").is_dir()
    place = (ROOT / "memory" if of_v1 else ROOT) / f"ddpjob-test-{os.getpid()}"
    try:
        place.mkdir()
        limit = "memory.limit_in_bytes" if of_v1 else "memory.max"
        (place / limit).write_text(str(LIMIT))
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    yield place
    deadline = time.monotonic() + PATIENCE
    while place.is_dir() and time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # while the last process in it ends
            place.rmdir()


@pytest.mark.fault("N5")
@pytest.mark.parametrize("program", [GREEDY, OF_A_CHILD], ids=["worker", "child"])
def test_a_worker_that_outgrows_the_limit_is_told_with_limit_and_peak(program, limited, tmp_path):
    report, script = tmp_path / "report", tmp_path / "greedy.py"
    script.write_text(program)
    start = f"import os, sys; open({str(limited / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))"
    (tmp_path / "sitecustomize.py").write_text(f"{start}\n")
    options = ("--max-rounds-without-progress", "1", "--termination-log", str(report))
    env = {"PYTHONPATH": f"{tmp_path}:{PATHS}"}
    with launched(*options, sys.executable, str(script), env=env) as process:
        _, err = process.communicate(timeout=PATIENCE)
    told = json.loads(report.read_bytes())
    words = "out of memory (limit 400 MiB, peak "
    assert told["kind"] == "oom", err
    assert told["exception"].startswith(words), told
    assert [record["kind"] for record in told["rounds"]] == ["oom"]
    assert told["rounds"][0]["exception"].startswith(words)
    assert f"rank 0: {words}" in err
    assert "raise resources.limits.memory" in err
