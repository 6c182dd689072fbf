"""Which exceptions of a script's start would come again, and which something else may cure."""

import json
import os

import pytest

from ddpjob_trainer.launcher.processes.fork_server import Program
from ddpjob_trainer.launcher.processes.source import would_repeat

FOUND = "FileNotFoundError: [Errno 2] No such file or directory: "


@pytest.mark.parametrize(
    ("exception", "raised_in", "again"),
    [
        ("KeyError: 'lr'", "train.py", True),
        ("ModuleNotFoundError: No module named 'timm'", "train.py", True),
        ("SyntaxError: invalid syntax", "pkg/model.py", True),
        ("OddConfig: no such model", "train.py", True),  # a class of the script
        (f"{FOUND}'configs/base.yaml'", "train.py", True),
        (f"{FOUND}'link/last.pt'", "train.py", False),  # on a volume
        (f"{FOUND}'/data/train.bin'", "train.py", False),
        ("KeyError: 'lr'", json.__file__, False),
        ("KeyError: 'lr'", "", False),
        ("KeyError: 'lr'", "/elsewhere/train.py", False),
        ("OSError: [Errno 5] Input/output error: 'configs/base.yaml'", "train.py", False),
        ("ConnectionRefusedError: [Errno 111] Connection refused", "train.py", False),
        ("RuntimeError: CUDA error: unspecified launch failure", "train.py", False),
        ("AssertionError: no files in /data", "train.py", False),
        ("TimeoutError: timed out", "train.py", False),
        ("MemoryError", "train.py", False),
        ("torch.OutOfMemoryError: CUDA out of memory.", "train.py", False),
        ("urllib.error.URLError: <urlopen error>", "train.py", False),
    ],
)
@pytest.mark.parametrize("module", [False, True])
def test_what_would_come_again(tmp_path, monkeypatch, *, exception, raised_in, again, module):
    volume, here = tmp_path / "volume", tmp_path / "code"
    volume.mkdir()
    here.mkdir()
    (here / "link").symlink_to(volume)
    monkeypatch.chdir(here)
    program = Program("pkg.train" if module else "train.py", (), module)
    file = os.path.join(here, raised_in) if raised_in else ""  # noqa: PTH118
    assert would_repeat(program, exception, file) is again
