"""What may be imported once for all workers, and what each has to import for itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddpjob_trainer.launcher.processes import fork_server
from ddpjob_trainer.launcher.processes.sharing import Shared
from ddpjob_trainer.launcher.processes.watch import stamp
from support.patience import PATIENCE

SOURCES = Path(__file__).parents[3] / "trainer/src"

#: Source of a module, and why it cannot be shared; None: it can.
MODULES = {
    "defines": ("class A: ...\nx = 1", None),
    "reads_another_variable": ("import os\nos.environ.get('HOME'), os.getenv('NONE')", None),
    "reads_a_rank": ("import os\nos.environ['RANK']", "reads RANK"),
    "asks_for_a_rank": ("from os import getenv\ngetenv('LOCAL_RANK')", "reads LOCAL_RANK"),
    "tests_for_a_rank": ("import os\n'RANK' in os.environ", "reads RANK"),
    "reads_a_rank_in_bytes": ("import os\nos.environb.get(b'RANK')", "reads RANK"),
    "copies_the_environment": (
        "import os\nos.environ.copy()",
        "reads the whole environment",
    ),
    "sets_a_variable": ("import os\nos.environ['B'] = ''", "changes the environment"),
    "removes_a_variable": ("import os\ndel os.environ['C']", "changes the environment"),
    "sets_it_for_c": ("import os\nos.putenv('B', '')", "calls os.putenv()"),
    "keeps_a_set_variable": ("import os\nos.environ.setdefault('A', 'x')", None),
    "knows_its_pid": ("import os\nos.getpid()", "calls os.getpid()"),
    "makes_a_directory_of_its_own": (
        "import tempfile\nd = tempfile.TemporaryDirectory()",
        "calls os.getpid()",
    ),
    "may_ask_for_its_pid_later": ("from os import getpid\nassert getpid.__class__", None),
    "has_a_unique_name": ("import uuid\nuuid.uuid4()", "calls os.urandom()"),
    "draws_a_secret": ("import secrets\nsecrets.randbits(8)", "calls os.urandom()"),
    "has_a_generator": (
        "import random\nrandom.Random()",
        "seeds a generator from the system",
    ),
    "has_a_seeded_generator": ("import random\nrandom.Random(1).random()", None),
    "draws": ("import random\nrandom.random()", "draws random numbers"),
    "seeds": ("import random\nrandom.seed(1)", "draws random numbers"),
    "draws_from_numpy": ("import numpy\nnumpy.random.rand()", "draws random numbers"),
    "seeds_torch": ("import torch\ntorch.generator.state = [1]", "draws random numbers"),
    "initialises_cuda": ("import torch\ntorch.cuda.initialized = True", "initialises CUDA"),
    "prints": ("print('hello')", "prints"),
    "prints_as_c_does": ("import os\nos.write(2, b'hello')", "prints"),
    "starts_a_thread": (
        "import threading as t\nt.Thread(target=t.Event().wait, daemon=True).start()",
        "starts threads",
    ),
    "had_a_thread": (
        "import threading\nt = threading.Thread(target=int)\nt.start()\nt.join()",
        None,
    ),
    "opens_a_file": ("f = open('kept', 'w')", "leaves descriptors open"),
    "opens_a_socket": ("import socket\ns = socket.socketpair()", "leaves descriptors open"),
    "writes_a_file": ("with open('log', 'a') as f: f.write('x')", None),
    "forks": (
        "import os\nif os.fork() == 0:\n    os._exit(0)\nos.wait()",
        "starts processes",
    ),
    "leaves_a_child": (
        "import subprocess\np = subprocess.Popen(['sleep', '9'])",
        "starts processes",
    ),
    "changes_directory": (
        "import os\nos.mkdir('d')\nos.chdir('d')",
        "changes the working directory or umask",
    ),
    "changes_umask": ("import os\nos.umask(0o77)", "changes the working directory or umask"),
    "handles_a_signal": (
        "import signal\nsignal.signal(signal.SIGUSR2, signal.SIG_IGN)",
        "handles or blocks signals",
    ),
    "blocks_a_signal": (
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])",
        "handles or blocks signals",
    ),
    "sets_a_timer": (
        "import signal\nsignal.setitimer(signal.ITIMER_REAL, 600)",
        "handles or blocks signals",
    ),
    "shares_memory": ("import mmap\nm = mmap.mmap(-1, 8)", "maps shared memory"),
    "is_written_meanwhile": (
        "import os\nos.utime(__file__)",
        "was edited meanwhile",
    ),
    "leaves_something_for_the_end": ("import atexit\natexit.register(int)", None),
    "looks_for_modules": ("import sys\nsys.path.append('x')\nsys.meta_path.append(1)", None),
}  # fmt: skip

#: Stands in for torch as far as it is looked at.
TORCH = """
import sys, types
class Generator:
    state = [0]
    def get_state(self):
        return types.SimpleNamespace(tolist=lambda: list(self.state))
generator = default_generator = Generator()
cuda = types.ModuleType("torch.cuda")
cuda.initialized = False
cuda.is_initialized = lambda: cuda.initialized
sys.modules["torch.cuda"] = cuda
"""
WATCH = """
import json, sys, os, builtins, io, random, numpy.random, torch
from ddpjob_trainer.launcher.processes.watch import Import, watched_import
def world():
    return [type(os.environ), os.getpid, os.urandom, random.Random.seed, open, io.open]
before = world()
found = {}
for name in sys.argv[1:]:
    reasons = []
    path = list(sys.meta_path)
    watched_import(Import(name), {"RANK", "LOCAL_RANK"}, reasons.append)
    found[name] = reasons
    sys.meta_path[:] = path
assert world() == before
assert sys.modules["may_ask_for_its_pid_later"].getpid is os.getpid
print(json.dumps(found))
"""


def interpreter(directory: Path, text: str, *arguments: str) -> str:
    """What a fresh interpreter prints that finds modules in this directory."""
    done = subprocess.run(
        [sys.executable, "-c", text, *arguments],
        cwd=directory,
        env={
            **os.environ,
            "PYTHONPATH": f"{directory}:{SOURCES}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "RANK": "0",
            "A": "a",
            "C": "c",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert not done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def reasons(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    directory = tmp_path_factory.mktemp("modules")
    (directory / "torch.py").write_text(TORCH)
    for name, (source, _) in MODULES.items():
        (directory / f"{name}.py").write_text(source)
    found: dict[str, list[str]] = json.loads(interpreter(directory, WATCH, *MODULES))
    return found


@pytest.mark.parametrize("name", MODULES)
def test_why_a_module_cannot_be_shared(reasons, name):  # type: ignore[no-untyped-def]
    expected = MODULES[name][1]
    assert reasons[name][:1] == ([expected] if expected else [])


LONG = "1e6"  # seconds
SHARE = """
import os, sys
from ddpjob_trainer.launcher.processes.sharing import share
from ddpjob_trainer.launcher.processes.watch import Import
names = ["first", "second", "third"]
me = os.getpid()
shared = share(map(Import, names), {"RANK"}, float(sys.argv[1]))
print([name for name in names if name in sys.modules], os.getpid() == me, len(shared.files))
"""


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ("x = 1", "['first', 'second', 'third'] True 3"),
        ("import os\nos.environ['RANK']", "['first'] False 1"),
        ("print('once per worker')", "['first'] False 1"),
        ("raise ValueError", "['first'] False 1"),
        ("import sys\nsys.exit(0)", "['first'] False 1"),
        ("import os\nos._exit(0)", "['first'] False 1"),
        ("import os\nos.kill(os.getpid(), 9)", "['first'] False 1"),
        ("import os\nif not os.fork():\n    os._exit(os.getpid())", "['first'] False 1"),
    ],
)  # fmt: skip
def test_the_first_that_cannot_be_shared_ends_it(tmp_path, second, expected):  # type: ignore[no-untyped-def]
    for name, text in {"first": "", "second": second, "third": ""}.items():
        (tmp_path / f"{name}.py").write_text(text)
    assert interpreter(tmp_path, SHARE, LONG) == expected + "\n"


def test_what_takes_too_long_ends_it(tmp_path):  # type: ignore[no-untyped-def]
    for name, text in {"first": "", "second": "import time\ntime.sleep(1e6)", "third": ""}.items():
        (tmp_path / f"{name}.py").write_text(text)
    # The limit is one for all imports: on a busy machine "first" would use it up.
    assert interpreter(tmp_path, f"import first\n{SHARE}", "1") == "['first'] False 0\n"


def test_what_takes_long_is_given_up_where_it_is_seen_first(tmp_path):  # type: ignore[no-untyped-def]
    """Not at its end: the workers of the first round wait for it."""
    (tmp_path / "first.py").write_text(
        "print('refused')\nimport time\nwhile True:\n    time.sleep(0.01)\n"
        "    try: import none\n    except ImportError: pass\n"
    )
    for name in ("second", "third"):
        (tmp_path / f"{name}.py").touch()
    assert interpreter(tmp_path, SHARE, LONG) == "[] False 0\n"


def test_a_file_that_was_read_and_has_changed_since_is_seen(tmp_path):  # type: ignore[no-untyped-def]
    path = tmp_path / "table"
    path.write_text("1")
    shared = Shared({str(path): stamp(str(path)) or (0, 0, 0)})
    assert not shared.edited()
    path.write_text("22")
    assert shared.edited()
    path.unlink()
    assert shared.edited()


def test_what_an_import_reads_may_not_change(tmp_path):  # type: ignore[no-untyped-def]
    (tmp_path / "reader.py").write_text(
        "import other\nopen('table').read()\nopen('log', 'a')\n"
        "try: open('comes later')\nexcept FileNotFoundError: pass\n"
    )
    (tmp_path / "other.py").touch()
    (tmp_path / "table").touch()
    text = (
        "import os\nfrom ddpjob_trainer.launcher.processes.sharing import Import, share\n"
        "print(*sorted(map(os.path.basename, share([Import('reader')], ()).files)))"
    )
    assert interpreter(tmp_path, text) == "comes later other.py reader.py table\n"


@pytest.mark.parametrize(
    ("source", "modules"),
    [
        ("'''Doc.'''\nfrom __future__ import annotations\nimport os", ["__future__", "os"]),
        ("from json import loads\nx = 1", ["json"]),
        ("import os\nrank = os.environ['RANK']\nimport json", ["os"]),
        ("import os\nif True:\n    import csv\nimport json", ["os"]),
        ("import os\nclass A: ...\nimport json", ["os"]),
    ],
)
def test_only_what_is_imported_before_all_else_is_shared(source, modules):  # type: ignore[no-untyped-def]
    """So a shared import sees what it would see in the script."""
    found = fork_server.imports_of(source.encode(), "", first=True)
    assert [one.module for one in found] == modules


def test_what_a_module_loads_when_it_is_asked_for_is_imported_under_watch(tmp_path):  # type: ignore[no-untyped-def]
    (tmp_path / "lazy.py").write_text("def __getattr__(name):\n    import first\n    return 1")
    (tmp_path / "first.py").write_text("")
    text = SHARE.replace("map(Import, names)", "[Import('lazy', ('name', 'other'))]")
    assert interpreter(tmp_path, text, LONG) == "['first'] True 2\n"
    (tmp_path / "first.py").write_text("print('seen')")
    assert interpreter(tmp_path, text, LONG) == "[] False 0\n"


def test_who_may_ask_is_told_by_the_module_that_does(tmp_path):  # type: ignore[no-untyped-def]
    (tmp_path / "filelock").mkdir()
    (tmp_path / "filelock/__init__.py").write_text("from . import _api")
    (tmp_path / "filelock/_api.py").write_text("import os\nos.getpid()")
    (tmp_path / "first.py").write_text("import filelock")
    (tmp_path / "second.py").write_text("import os, filelock\nos.getpid()")
    assert interpreter(tmp_path, SHARE, LONG) == "['first'] False 3\n"
