"""Warm spares: what they have imported, and that a script cannot tell that it runs in one.

It runs in fresh interpreters, then from a fork server (round 0) and in a spare (round 1).
"""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.launching import PATHS, launched
from support.patience import PATIENCE
from support.rounds import children, kill, patched

#: Without torch a launcher's fork server is there at once; for what has nothing to do with torch.
BARE = """
from ddpjob_trainer.liveness.heartbeat import RankStateWriter
from pathlib import Path
round_ = os.environ["DDPJOB_ROUND"]
here = Path(__file__ if "__file__" in globals() else ".").resolve().parent
RankStateWriter(Path(os.environ["DDPJOB_TRAINER_STATE_DIR"]), rank).update(phase="step", step=1)
def until_spares(times=1):
    trace = here / "trace"
    while not os.environ.get("FRESH") and trace.read_text().count('"spares"') < times:
        time.sleep(0.01)
"""


@pytest.fixture
def bare(tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """Run a script whose fork server finds no torch."""
    (tmp_path / "torch.py").write_text("raise ImportError('not in this test')")

    def run(text: str, *options: str, first: str = "", **env: str) -> tuple[int, str, str]:
        path = tmp_path / "script.py"
        path.write_text(first + BEGIN + text)
        more = {"PYTHONPATH": f"{tmp_path}:{PATHS}", **env}
        # As in a pod: `python` makes an absolute path of it for the script.
        return whole(tmp_path, *options, os.path.relpath(path), "--lr", "1", **more)

    return run


BEGIN = "import os, sys, time, signal\nrank = int(os.environ['RANK'])\n"


def whole(tmp_path: Path, *words: str, **env: str) -> tuple[int, str, str]:
    with launched(*words, env={"DDPJOB_TRAINER_TRACE": str(tmp_path / "trace"), **env}) as launcher:
        out, err = launcher.communicate(timeout=PATIENCE)
        return launcher.returncode, out, err


FACTS = r"""
import atexit, gc, json, pickle, threading
class Thing:
    pass
# What is frozen at Python's end is never collected, and bindings tell of it as leaks.
atexit.register(lambda: print(f"frozen: {gc.get_freeze_count()}", file=sys.stderr))
facts = {
    "argv": sys.argv, "path": sys.path, "file": __file__, "name": __name__,
    "spec": getattr(__spec__, "name", None),
    "package": __package__, "doc": __doc__, "annotations": __annotations__,
    "loader": type(__loader__).__name__, "cached": __cached__,
    "globals": sorted(name for name in globals() if name.startswith("__")),
    "main": sys.modules["__main__"].__dict__ is globals(),
    "pickles": type(pickle.loads(pickle.dumps(Thing()))) is Thing,
    "threads": threading.active_count(), "tasks": len(os.listdir("/proc/self/task")),
    "main thread": threading.current_thread() is threading.main_thread(),
    "fds": sorted(os.readlink(f"/proc/self/fd/{n}").split(":")[0].split("-")[0]
                  for n in range(64) if os.path.lexists(f"/proc/self/fd/{n}")),
    "key": len(os.pread(int(os.environ["DDPJOB_TRAINER_KEY_FD"]), 64, 0)),
    "stdin": os.readlink("/proc/self/fd/0"), "cwd": os.getcwd(), "umask": os.umask(0o22),
    "out": [sys.stdout.encoding, sys.stdout.line_buffering, sys.stdout.write_through,
            sys.stdout.name, sys.stderr.encoding, sys.stderr.write_through],
    "signals": [str(signal.getsignal(s)) for s in signal.valid_signals()],
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "flags": str(sys.flags), "orig": sys.orig_argv, "hook": sys.excepthook is sys.__excepthook__,
    "gc": [gc.isenabled(), gc.get_threshold()], "group": os.getpgid(0) == os.getpid(),
    "nice": os.nice(0), "affinity": sorted(os.sched_getaffinity(0)),
    "limits": sorted(open("/proc/self/limits")), "oom": open("/proc/self/oom_score_adj").read(),
    "environment": {k: v for k, v in os.environ.items()
                    if k not in ("DDPJOB_ROUND", "TORCHELASTIC_RESTART_COUNT", "FRESH",
                                 "DDPJOB_TRAINER_STATE_DIR", "DDPJOB_TRAINER_DRILL",
                                 "DDPJOB_TRAINER_KEY_FD",
                                 "DDPJOB_REACHED_STEP",
                                 # of another launcher
                                 "MASTER_PORT", "DDPJOB_TRAINER_MASTER", "TORCHELASTIC_RUN_ID",
                                 "DDPJOB_TRAINER_RUN_ID",
                                 "DDPJOB_TRAINER_REPLAY_DIR", "PROMETHEUS_MULTIPROC_DIR")},
}
(here / f"facts-{round_}").write_text(json.dumps(facts))
"""

ENDS = """
def inner():
    raise ValueError(f"seven")
until_spares()
sys.stdout.write("out of round " + round_)
inner()
"""


def same(tmp_path: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    """Run in fresh interpreters, then from the fork server and in a spare; compare."""
    ends = [run("--spares", "0", FRESH="1")]
    fresh = json.loads((tmp_path / "facts-1").read_text())
    ends.append(run())
    for round_ in (0, 1):
        assert json.loads((tmp_path / f"facts-{round_}").read_text()) == fresh, round_
    traces = []
    for code, out, err in ends:
        assert (code, out) == (1, "out of round 0out of round 1"), err
        assert err.count("frozen: 0") == 2, err
        traces += re.findall(r"Traceback.*?ValueError: seven\n", err, re.DOTALL)
    assert len(traces) == 4
    assert len(set(traces)) == 1


def test_a_script_in_a_spare_sees_what_it_sees_in_a_fresh_interpreter(bare, tmp_path):
    text = BARE + FACTS + ENDS
    words = ("--max-rounds-without-progress", "1")
    same(tmp_path, lambda *more, **env: bare(text, *words, *more, first='"""It."""\n', **env))


def test_a_module_in_a_spare_sees_what_it_sees_in_a_fresh_interpreter(tmp_path, monkeypatch):
    for folder in ("package", "none"):
        (tmp_path / folder).mkdir()
    for name in ("__init__", "sibling"):
        (tmp_path / f"package/{name}.py").touch()
    text = BARE.replace(").resolve().parent", ").resolve().parent.parent") + FACTS + ENDS
    (tmp_path / "package/train.py").write_text("from . import sibling\n" + BEGIN + text)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "none/torch.py").write_text("raise ImportError('not in this test')")
    paths = f"{tmp_path}/none:{PATHS}"
    words = ("--max-rounds-without-progress", "1", "-m", "package.train", "--lr", "1")
    same(tmp_path, lambda *more, **env: whole(tmp_path, *more, *words, PYTHONPATH=paths, **env))


def test_a_script_and_what_its_imports_see_are_those_of_this_moment(bare, tmp_path):
    """Where what stands before it says where, or as what, it is imported; the script is edited."""
    (tmp_path / "settings.py").write_text("VALUE = 'default'")
    (tmp_path / "reader.py").write_text("import settings\nSEEN = settings.VALUE")
    (tmp_path / "found.py").write_text("WHERE = 'beside the script'")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/found.py").write_text("WHERE = 'mine'")
    first = (
        "import os, sys\nimport settings\nsettings.VALUE = 'changed'\nimport reader\n"
        "sys.path.insert(0, os.path.dirname(__file__) + '/mine')\nimport found\n"
    )
    text = """
print(reader.SEEN, found.WHERE, "before", flush=True)
if round_ == "0":
    until_spares()
    text = open(__file__).read()
    open(__file__, "w").write(text.replace("be" + "fore", "after"))
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit("in words")
"""
    code, out, err = bare(BARE + text, "--max-rounds-without-progress", "1", first=first)
    assert (code, out) == (1, "changed mine before\nchanged mine after\n"), err
    assert "\nin words\n" in err


@pytest.mark.tier("all")
def test_a_child_that_an_import_leaves_behind_does_no_harm(bare, tmp_path):
    """It holds the line by which the spare was called."""
    (tmp_path / "forking.py").write_text(
        "import os, time\nif os.fork() == 0:\n    time.sleep(60)\n    os._exit(0)\n"
    )
    patched(tmp_path, {"launcher.processes.spares._ANSWER_SECONDS": 30})
    code, _, err = bare(
        BARE + "if round_ == '0':\n    until_spares()\n    sys.exit(5)\ntime.sleep(33)",
        first="import forking\n",
    )
    assert code == 0, err
    assert "round 2" not in err


@pytest.mark.parametrize("who", ["a spare", "the fork server"])
@pytest.mark.parametrize("what", ["dies", "holds a GPU"])
def test_what_no_import_survives_is_not_tried_for_ever(tmp_path, wait_until, who, what):
    """A file stands for the GPU driver's. The round that follows does without spares."""
    driver = tmp_path / "nvidia-uvm"
    driver.touch()
    does = "os._exit(3)" if what == "dies" else f"f = open({str(driver)!r})"
    (tmp_path / "torch.py").write_text("raise ImportError('not in this test')")
    (tmp_path / ("mine.py" if who == "a spare" else "safetensors.py")).write_text(
        "import os, sys\nforked = any('fork_server' in name for name in sys.modules)\n"
        f"if forked and os.environ.get('DDPJOB_ROUND', '1') == '1': {does}\n"
    )
    script = tmp_path / "script.py"
    first = "import mine\n" if who == "a spare" else ""
    text = "print(round_, flush=True)\nif round_ == '0': time.sleep(3600)\n"
    script.write_text(first + BEGIN + BARE + text)
    (tmp_path / "sitecustomize.py").write_text(
        f"from ddpjob_trainer.gpu import devices\ndevices._DRIVER = {(str(driver),)!r}\n"
    )
    env = {"PYTHONPATH": f"{tmp_path}:{PATHS}"}
    with launched("--nproc", "2", str(script), env=env) as launcher:
        line = launcher.stderr.readline()
        why = f"{who} died 3 times in a row" if what == "dies" else f"an import has opened {driver}"
        assert line == f"launcher: no warm spares: {why}\n"
        wait_until(lambda: len(children(launcher.pid)) == 2, "only workers are left")
        before = [launcher.stdout.readline() for _ in range(2)]  # of those that are killed
        kill(*children(launcher.pid))
        out, err = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 0, err
    said = re.findall(r"\d$", "".join([*before, out]), re.MULTILINE)
    assert sorted(said) == ["0", "0", "1", "1"]
    assert "no warm spares" not in err


def test_spares_that_were_asked_for_come_without_our_library_too(tmp_path, wait_until):
    (tmp_path / "torch.py").write_text("raise ImportError('not in this test')")
    script = tmp_path / "script.py"
    script.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(3600)\n")
    trace = tmp_path / "trace"
    env = patched(tmp_path, {"launcher.starter._STARTED_SECONDS": 0.1})
    env["DDPJOB_TRAINER_TRACE"] = str(trace)
    with launched("--spares", "1", str(script), env=env) as launcher:
        first = int(launcher.stdout.readline())
        wait_until(lambda: trace.exists() and '"spares"' in trace.read_text(), "a spare")
        others = children(launcher.pid).keys() - {first}
        kill(first)
        assert int(launcher.stdout.readline()) in others


#: Modules that count who imports them, each one line.
COUNTED = "with open(__file__ + '.log', 'a') as log: log.write('x')\n"


def imported(path: Path) -> int:
    return len(path.with_name(path.name + ".log").read_text())


def test_what_is_preloaded_is_imported_once(bare, tmp_path):
    """What cannot be is told, and left to each process."""
    modules = [tmp_path / "shared.py", tmp_path / "later.py"]
    for path in modules:
        path.write_text(COUNTED)
    text = (
        BARE
        + """
print("has", round_, flush=True)
(here / f"has-{rank}-{round_}").touch()
if round_ == "0":
    until_spares()
    while len(list(here.glob("has-*"))) < 3:
        time.sleep(0.01)
    sys.exit(3)
until_spares(2)  # those of the round that does not come, so that none is at its imports
"""
    )
    words = ("--nproc", "3", "--preload", "shared, absent,later")
    first = "import shared, later\n"
    code, out, err = bare(text, *words, first=first)
    assert code == 0, err
    for rank in range(3):
        said = [line for line in out.splitlines() if line.startswith(f"[rank {rank}]")]
        assert said == [f"[rank {rank}] has 0", f"[rank {rank}] has 1"]
    assert err.count("imports --preload's modules itself: absent: ModuleNotFound") == 1
    assert [imported(path) for path in modules] == [1, 1]


def test_a_module_that_leaves_threads_behind_is_not_preloaded(bare, tmp_path):
    thread = """
import os, pathlib, threading
pathlib.Path(__file__).with_name("server").write_text(str(os.getpid()))
threading.Thread(target=threading.Event().wait, daemon=True).start()
"""
    (tmp_path / "threaded.py").write_text(thread)
    given_up = """
server = here / "server"
while not server.exists() or Path("/proc", server.read_text()).exists():
    time.sleep(0.01)
"""
    code, _, err = bare(BARE + given_up, "--preload", "json,threaded")
    assert code == 0, err
    words = "no warm spares: the import of threaded has left threads behind: leave it out of --prel"
    assert err.count(words) == 1


# --- With torch ------------------------------------------------------------------------------

TRAINING = """
import json, os, random, sys, time
from pathlib import Path
import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset
import ddpjob_trainer as ddp

here = Path(__file__).parent
fresh = os.environ.get("FRESH", "")
round_, rank = os.environ["DDPJOB_ROUND"], int(os.environ["RANK"])
def drawn():
    return [np.random.randint(2**31), torch.randint(2**31, ()).item(), random.randrange(2**31)]
facts = {
    "drawn": drawn(), "torch threads": torch.get_num_threads(),
    "interop": torch.get_num_interop_threads(), "tasks": len(os.listdir("/proc/self/task")),
    "cuda": torch.cuda.is_initialized(), "dtype": str(torch.get_default_dtype()),
    "grad": torch.is_grad_enabled(), "deterministic": torch.are_deterministic_algorithms_enabled(),
    "fds": sorted(os.readlink(f"/proc/self/fd/{n}").split(":")[0].split("-")[0]
                  for n in range(3, 64) if os.path.exists(f"/proc/self/fd/{n}")),
}
run = ddp.start(total_steps=3, global_batch=8, seed=1,
                snapshots=ddp.Snapshots(directory=here / f"snapshots{fresh}", every=1))
before = set(sys.modules)
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
model, optimizer = run.prepare(model, optimizer, scheduler=scheduler, clip_grad_norm=1.0)
for step in run.steps(TensorDataset(torch.ones(64, 8), torch.zeros(64, 2))):
    for x, y in step.batches:
        step.backward(nn.functional.mse_loss(model(x), y))
    step.commit()
    if round_ == "0" and step.index == 1:
        while not fresh and '"spares"' not in (here / "trace").read_text():
            time.sleep(0.02)
        facts["late"] = sorted(set(sys.modules) - before)
        (here / f"draft-{rank}").write_text(json.dumps(facts))  # the other one kills us when both
        (here / f"draft-{rank}").rename(here / f"facts{fresh}-0-{rank}")  # are there
        while len(list(here.glob(f"facts{fresh}-0-*"))) < 2:
            time.sleep(0.02)
        os._exit(9)
run.finish()
facts["late"] = sorted(set(sys.modules) - before)
(here / f"facts{fresh}-{round_}-{rank}").write_text(json.dumps(facts))
"""


@pytest.mark.tier("all")
def test_what_torch_is_like_in_a_spare(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(TRAINING)
    for options, env in ((("--spares", "0"), {"FRESH": "-fresh"}), ((), {})):
        code, _, err = whole(tmp_path, "--nproc", "2", *options, str(script), **env)
        assert code == 0, err
    found: dict[str, dict[str, Any]] = {
        path.name: json.loads(path.read_text()) for path in tmp_path.glob("facts-*")
    }
    draws = {name: facts.pop("drawn") for name, facts in found.items()}
    for number, generator in enumerate(("numpy", "torch", "random")):
        drawn = {draw[number] for draw in draws.values()}
        assert len(drawn) == len(found) == 8, f"{generator}: forks draw alike"
    late = {name: set(facts.pop("late")) for name, facts in found.items()}
    assert len(late["facts-fresh-0-0"]) > 100, "fresh interpreters import them in the first step"
    for rank in (0, 1):
        assert len(late[f"facts-1-{rank}"]) < 10, late[f"facts-1-{rank}"]
        assert found[f"facts-1-{rank}"] == found[f"facts-fresh-0-{rank}"]


def test_the_first_round_comes_from_the_fork_server_too(bare, tmp_path):
    """So a kill right after the start finds it warm; what imports print is seen as ever."""
    (tmp_path / "noisy.py").write_text("import os; print('imported for', os.environ['RANK'])")
    text = (
        BARE
        + """
import noisy
print("spare" if any("fork_server" in name for name in sys.modules) else "fresh", flush=True)
if round_ == "0" and rank == 1:
    sys.exit(3)
"""
    )
    code, out, err = bare(text, "--nproc", "3")
    assert code == 0, err
    first = [f"[rank {rank}] imported for {rank}" for rank in range(3)]
    assert set(first) <= set(out.splitlines())
    assert out.count("spare\n") >= 4, out  # the others of round 0 may have been stopped before
