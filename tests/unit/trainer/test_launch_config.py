"""What the launcher makes of its environment and its command line."""

import dataclasses
import os
import pwd
import subprocess
import sys
import tempfile
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

import ddpjob_contract as contract
from ddpjob_contract.crd import DEFAULTS
from ddpjob_trainer.environment import Key, overwritten_master, read_launcher, read_worker
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.launcher.launch_config import (
    LaunchConfig,
    common_environment,
    make_launch_config,
    rank_environment,
)
from ddpjob_trainer.launcher.processes.fork_server import Program
from support.launching import PATHS
from support.patience import PATIENCE

BUDGET = contract.IN_PLACE_MAX_WITHOUT_PROGRESS
POD = {
    contract.REPLICA: "0",
    contract.REPLICAS: "1",
    contract.NPROC_PER_NODE: "2",
    contract.UID: "uid",
    contract.ATTEMPT: "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "2222",
}


@pytest.fixture
def script(tmp_path):  # type: ignore[no-untyped-def]
    path = tmp_path / "train.py"
    path.write_text("import ddpjob_trainer\n")
    return str(path)


def config(script: str, env: dict[str, str], **options: object) -> LaunchConfig:
    return make_launch_config(read_launcher(env), Program(script, (), False), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("env", "given", "rounds"),
    [
        ({}, None, DEFAULTS["restart.inPlace.maxWithoutProgress"]),
        ({}, 0, 0),
        ({BUDGET: "0"}, None, 0),
        ({BUDGET: "7"}, None, 7),
        ({BUDGET: "7"}, 2, 2),
        (POD, None, 0),
        (POD | {BUDGET: "5"}, None, 5),
        (POD | {BUDGET: "5"}, 0, 0),
        # Between pods they need a hub.
        (POD | {contract.REPLICAS: "3", BUDGET: "5"}, None, 0),
        (POD | {contract.REPLICAS: "3", BUDGET: "5", contract.HUB_PORT: "2223"}, None, 5),
    ],
)
def test_rounds_without_progress(script, env, given, rounds):
    made = config(script, env, rounds_without_progress=given)
    assert made.rounds_without_progress == rounds
    assert made.spares == (made.nproc if rounds else 0)
    # An operator of before did not say after what time a budget heals.
    assert made.heal_after == (0 if contract.REPLICA in env else 3600)
    assert config(script, env | {contract.HEAL_AFTER_SECONDS: "70"}).heal_after == 70


def test_a_number_that_cannot_be_and_what_is_no_modules_name_are_refused(script):
    for given, refusal in (
        ({"nproc": 0}, "--nproc=0 must be at least 1"),
        ({"nproc": 100_000}, "--nproc=100000 must be at most 1024"),
        ({"rounds_without_progress": -1}, "--max-rounds-without-progress=-1 must be at least 0"),
        ({"metrics_port": -1}, "--metrics-port=-1 must be at least 0"),
        ({"metrics_port": 99_999}, "--metrics-port=99999 must be at most 65535"),
        ({"preload": "PIL,a b"}, "--preload: 'a b' must be a module's name"),
        ({"spares": "few"}, "--spares 'few' must be a number or auto"),
        ({"resume_args": "--resume '"}, "--resume-args .*No closing quotation"),
        ({"resume_args": "--resume={newest}"}, "{newest} needs --resume-when GLOB"),
        ({"resume_when": "ck/*.pt"}, "needs --resume-args"),
    ):
        with pytest.raises(ConfigError, match=refusal):
            config(script, {}, **given)


def test_the_arguments_of_later_starts(script):
    of_job = {contract.RESUME_ARGS: '["--resume", "{newest}"]', contract.RESUME_WHEN: "ck/*.pt"}
    made = config(script, POD | of_job)
    assert made.resume_words("ck/7.pt") == ("--resume", "ck/7.pt")
    assert made.resume_words("") == (), "no checkpoint is there"
    assert not made.replacement
    assert config(script, POD | of_job | {contract.ATTEMPT: "2"}).replacement, "the hub chooses one"
    assert not config(script, POD | {contract.ATTEMPT: "2"}).replacement
    made = config(script, POD | of_job, resume_args="--init_from=resume 'a b'", resume_when="")
    assert made.resume_words("") == ("--init_from=resume", "a b")


@pytest.mark.parametrize(
    ("text", "given", "spares"),
    [
        ("import ddpjob_trainer", "auto", 3),
        ("import ddpjob_trainer", "2", 2),
        ("import ddpjob_trainer", "9", 3),
        ("import ddpjob_trainer", "0", 0),
        # It may set variables that torch reads, before it imports torch.
        ("import torch", "auto", 0),
        ("import torch", "3", 3),
    ],
)
def test_spares(tmp_path, text, given, spares):
    path = tmp_path / "train.py"
    path.write_text(text)
    made = config(str(path), {}, nproc=3, spares=given, preload="PIL, scipy.stats,")
    assert (made.spares, made.preload) == (spares, ("PIL", "scipy.stats"))


INTERRUPTED = """
import os, signal, sys, types
import ddpjob_trainer
from ddpjob_trainer.__main__ import main

signal.signal(signal.SIGINT, signal.default_int_handler)
interrupt = lambda *_: os.kill(os.getpid(), signal.SIGINT)
class Finder:
    find_spec = interrupt
if sys.argv[1] == "import":
    sys.meta_path.insert(0, Finder())
else:
    ddpjob_trainer.cli = sys.modules["ddpjob_trainer.cli"] = types.SimpleNamespace(main=interrupt)
sys.exit(main())
"""


@pytest.mark.parametrize("when", ["import", "begun"])
def test_an_interrupt_right_after_the_start_is_a_plain_end(when):
    command, env = [sys.executable, "-c", INTERRUPTED, when], {**os.environ, "PYTHONPATH": PATHS}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stderr) == (130, "")


def test_a_read_only_root_and_a_user_of_whom_the_image_knows_nothing(script, monkeypatch, tmp_path):
    """Temporary files go to memory (torch._dynamo asks for a directory); a name and a home."""
    made, own = config(script, POD), {"HOME": str(tmp_path)}
    found = common_environment(made, {**own, contract.TOKEN: "secret"})
    assert found.items() >= own.items()
    assert contract.TOKEN not in found
    assert "TMPDIR" not in found

    def unknown(uid: int) -> NoReturn:
        raise KeyError(uid)

    def nowhere() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(os, "access", lambda path, mode: path == str(tmp_path))
    found = common_environment(made, {"HOME": "/"})
    assert (found["USER"], found["HOME"]) == (str(os.getuid()), tempfile.gettempdir())
    found = common_environment(made, own | {"USER": "ada"})
    assert (found["USER"], found["HOME"]) == ("ada", str(tmp_path))
    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    assert common_environment(made, {})["TMPDIR"] == "/dev/shm"


def waiting(script: str, **more: str) -> LaunchConfig:
    """The config of a standby in seat 3 of three replicas."""
    gang = {contract.REPLICAS: "3", contract.REPLICA: "3", contract.STANDBY: "1", BUDGET: "3"}
    hub = {contract.HUB_PORT: "2223", contract.NAME: "j", contract.NAMESPACE: "ns"}
    return config(script, POD | gang | hub | {contract.REPLACEMENT: "1"} | more)


def test_a_standby_serves_what_go_names(script, tmp_path):
    """Its ranks see nothing of the pod's seat."""
    runtime: Any = SimpleNamespace(metrics=tmp_path, replay=tmp_path, round_path=lambda key: key)
    serving = dataclasses.replace(waiting(script), replica=1)
    env = rank_environment(serving, 1, Key(7, 2), runtime)
    assert (env["RANK"], env["GROUP_RANK"], env["WORLD_SIZE"]) == ("3", "1", "6")
    assert (env[contract.REPLICA], env["PET_NODE_RANK"]) == ("1", "1")


def test_a_new_hub_calls_the_standbys_too(script):
    hub = waiting(script, **{contract.REPLICA: "0"})
    assert list(hub.others()) == [1, 2, 3]
    assert hub.others()[3] == ("j-3.j.ns.svc", 2223)


def test_a_standby_without_rounds_is_refused(script):
    with pytest.raises(ConfigError, match="a standby pod needs restarts in place"):
        waiting(script, **{BUDGET: "0"})


HABIT = {"MASTER_ADDR": "localhost", "MASTER_PORT": "12355"}
PLACE = {"RANK": "0", "WORLD_SIZE": "2"}


def test_what_a_script_sets_for_rank_0s_address_does_not_count(script, tmp_path):
    given = config(script, {"PET_NNODES": "2", **POD})
    place = SimpleNamespace(metrics=tmp_path, replay=tmp_path, round_path=lambda key: tmp_path)
    env = rank_environment(given, 0, Key(1, 0), place)  # type: ignore[arg-type]
    assert read_worker(env).master == ("127.0.0.1", 2222)
    assert overwritten_master(env) == ""
    assert read_worker(env | HABIT).master == ("127.0.0.1", 2222)
    assert "MASTER_PORT to localhost:12355; rank 0 is at 127.0.0.1:2222" in overwritten_master(
        env | HABIT
    )
    # Below torchrun its agent's counts; without a launcher the operator's, else the script's.
    torchrun = env | HABIT | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert read_worker(torchrun).master == ("localhost", 12355)
    of_pod = {**PLACE, contract.REPLICA: "0", "PET_MASTER_ADDR": "a", "PET_MASTER_PORT": "1"}
    assert read_worker(of_pod | HABIT).master == ("a", 1)
    assert read_worker(PLACE | HABIT).master == ("localhost", 12355)


@pytest.mark.parametrize(
    ("source", "starts"),
    [
        ("import ddpjob_trainer as ddp\nrun = ddp.start()", True),
        ("import ddpjob_trainer\ndef main(): ddpjob_trainer.start()", True),
        ("from ddpjob_trainer import start as go", True),
        ("import ddpjob_trainer as ddp\nddp.read_snapshot('x')\nthread.start()", False),
        ("from ddpjob_trainer import read_snapshot", False),
        ("import ddp\nddp.start()", False),
        ("x = (", False),
    ],
)
def test_who_calls_start_and_who_only_reads_snapshots(tmp_path, source, starts):
    (tmp_path / "train.py").write_text(source)
    path = str(tmp_path / "train.py")
    assert config(path, {}).calls_start is starts
    assert config(path, {}).watched_at_start is False, "nobody waits for it"
    assert config(path, {"PET_NNODES": "2", **POD}).watched_at_start is starts


def test_a_relative_directory_of_snapshots_is_the_launchers(script, tmp_path, monkeypatch):
    """A script may be elsewhere before it comes to ddp.start()."""
    monkeypatch.chdir(tmp_path)
    given = config(script, {contract.SNAPSHOT_DIR: "snaps", **POD})
    place = SimpleNamespace(metrics=tmp_path, replay=tmp_path, round_path=lambda key: tmp_path)
    env = rank_environment(given, 0, Key(1, 0), place)  # type: ignore[arg-type]
    assert env[contract.SNAPSHOT_DIR] == str(tmp_path / "snaps")
