"""The launcher's directory: where there is room, and nothing of dead launchers is left."""

import os
import subprocess
import sys
import tempfile
from collections import namedtuple
from pathlib import Path

import pytest

from ddpjob_trainer.environment import Key
from ddpjob_trainer.launcher.host import NoRoomError, RuntimeDir
from support.launching import PATHS

_HOLD = """
import sys, time
from ddpjob_trainer.launcher.host import RuntimeDir
print(RuntimeDir(2, (sys.argv[1],)).path, flush=True)
time.sleep(600)
"""


@pytest.fixture
def full(monkeypatch):  # type: ignore[no-untyped-def]
    prefixes: set[str] = set()
    real = os.statvfs
    Found = namedtuple("Found", "f_blocks f_bavail f_frsize f_files f_favail")

    def statvfs(path: Path) -> object:
        if any(str(path).startswith(prefix) for prefix in prefixes):
            return Found(16, 0, 4096, 100, 100)
        return real(path)

    monkeypatch.setattr(os, "statvfs", statvfs)
    return prefixes


def test_a_killed_launchers_directory_is_removed_a_living_ones_is_not(tmp_path):
    foreign = tmp_path / "ddpjob-trainer-of-an-earlier-version"
    foreign.mkdir()
    (tmp_path / "ddpjob-launcher-file").touch()
    command = [sys.executable, "-c", _HOLD, str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": PATHS}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as dead:
        gone = Path(dead.stdout.readline().strip())
        dead.kill()
    (gone / "round-0").mkdir()
    (gone / "round-0" / "rank-0.state").write_bytes(b"x")
    living = RuntimeDir(2, (str(tmp_path),))
    runtime_dir = RuntimeDir(2, (str(tmp_path),))
    assert (living.path.exists(), gone.exists(), foreign.exists()) == (True, False, True)
    assert runtime_dir.metrics.is_dir()
    runtime_dir.close()
    assert not runtime_dir.path.exists()


def test_without_room_anywhere_the_error_names_places_and_cure(tmp_path, full):
    runtime_dir = RuntimeDir(2, (str(tmp_path), "/nowhere"))
    full.add(str(tmp_path))
    with pytest.raises(NoRoomError, match=r"make /dev/shm bigger or free it, .*: No space left"):
        runtime_dir.begin(Key(1, 0))
    words = r"or set TMPDIR .* 1536 KiB \(.*: No space left on device; /nowhere: No such"
    with pytest.raises(NoRoomError, match=words):
        RuntimeDir(2, (str(tmp_path), "/nowhere"))
    assert list(tmp_path.iterdir()) == [runtime_dir.path]
    full.clear()
    assert runtime_dir.begin(Key(1, 1)).is_dir()  # somebody has made room


def test_a_read_only_root_has_no_temporary_directory(tmp_path, monkeypatch):
    """`readOnlyRootFilesystem: true`; /dev/shm is a volume of the operator's."""

    def nowhere() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    runtime_dir = RuntimeDir(1, (str(tmp_path), None))
    assert runtime_dir.path.parent == tmp_path
    runtime_dir.close()
    with pytest.raises(NoRoomError, match="set TMPDIR to a directory"):
        RuntimeDir(1, (None,))
