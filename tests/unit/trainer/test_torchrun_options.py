"""torchrun's spellings that have a counterpart: taken, or refused where they do not fit."""

import argparse
import sys
from typing import Any

import pytest
from torch.distributed.run import get_args_parser
from torch.numa import binding

import ddpjob_contract as contract
from ddpjob_trainer.environment import read_launcher
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.launcher import torchrun
from ddpjob_trainer.launcher.launch_config import common_environment, make_launch_config
from ddpjob_trainer.launcher.processes import numa
from ddpjob_trainer.launcher.processes.fork_server import Program

POD = {
    contract.REPLICA: "1", contract.REPLICAS: "2", contract.UID: "uid", contract.ATTEMPT: "1",
    "MASTER_ADDR": "job-0.job.ns.svc", "MASTER_PORT": "29500",
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser()
    found.add_argument("--nproc", type=int)
    found.add_argument("--max-rounds-without-progress", type=int)
    found.add_argument("-m", "--module", action="store_true")
    torchrun.add(found)
    return found


def translate(words: str, env: dict[str, str], program: str = "train.py") -> dict[str, Any]:
    options = parser().parse_args(words.split())
    return torchrun.translate(vars(options), read_launcher(env), program, module=options.module)


def test_every_spelling_is_one_of_torchruns():
    ours = {
        n for a in parser()._actions if a.dest.startswith("torchrun_") for n in a.option_strings
    }
    theirs = {name for action in get_args_parser()._actions for name in action.option_strings}
    assert ours - theirs == set()


@pytest.mark.parametrize(
    ("words", "env", "nproc", "rounds", "port"),
    [
        ("", {}, None, None, None),
        ("--nproc 3", {}, 3, None, None),
        ("--standalone --nproc-per-node=3", {}, 3, None, None),
        ("--nproc_per_node 2 --max_restarts 5 --nnodes 1:1 --node_rank 0", {}, 2, 5, None),
        ("--master-addr localhost --master-port 29500", {}, None, None, 29500),
        ("--rdzv-backend=c10d --rdzv-endpoint=localhost:0 --rdzv-id=7", {}, None, None, None),
        ("--rdzv_endpoint 127.0.0.1:3000 --monitor-interval 5", {}, None, None, 3000),
        ("--nnodes 2 --node-rank 1 --master-addr job-0.job.ns.svc --master-port 29500", POD,
         None, None, 29500),
        ("--rdzv-endpoint job-0.job.ns.svc:29500 --max-restarts 0", POD, None, 0, 29500),
    ],
)  # fmt: skip
def test_what_is_taken(words, env, nproc, rounds, port):
    assert translate(words, env) == {
        "nproc": nproc, "rounds_without_progress": rounds, "master_port": port,
    }  # fmt: skip


def test_numa_binding_reaches_torch_before_the_program(monkeypatch):
    """In a process that becomes the program; its GPU is the local rank's."""
    assert translate("--numa_binding socket", {})["numa_binding"] == "socket"
    program = Program("train", (), module=True)
    config = make_launch_config(read_launcher({}), program, numa_binding="socket")
    plain = make_launch_config(read_launcher({}), program)
    assert config.command == (sys.executable, "-P", "-m", numa.__name__, *plain.command)
    asked_for = make_launch_config(read_launcher({}), program, numa_binding="node", spares="2")
    assert asked_for.spares == 0, (
        "torch opens the GPU, which a called spare may not before its script"
    )
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(
        binding, "_maybe_apply_numa_binding_to_current_process", lambda **what: asked.append(what)
    )
    numa.bind(common_environment(config, {"LOCAL_RANK": "2"}))
    numa.bind(common_environment(plain, {"LOCAL_RANK": "2"}))
    options = binding.NumaOptions(binding.AffinityMode("socket"))
    assert asked == [{"gpu_index": 2, "numa_options": options}]
    assert {mode.value for mode in binding.AffinityMode} == set(torchrun._NUMA)


@pytest.mark.parametrize(
    ("words", "env", "message"),
    [
        ("--nproc 2 --nproc-per-node 2", {}, "give one of them"),
        ("--max-restarts 2 --max-rounds-without-progress 2", {}, "give one of them"),
        ("--nproc-per-node many", {}, "a number, gpu, cpu or auto"),
        ("--nnodes 2", {}, "does not fit a machine alone, and several need a DDPJob: leave it out"),
        ("--nnodes 3", POD, "does not fit replica 1 of 2, with rank 0 at"),
        ("--nnodes 1:4", {}, "does not fit"),
        ("--node-rank 1", {}, "does not fit"),
        ("--node-rank 0", POD, "does not fit"),
        ("--standalone", POD, "does not fit"),
        ("--master-addr 10.0.0.1", {}, "does not fit"),
        ("--master-addr localhost", POD, "does not fit"),
        ("--master-port 29501", POD, "does not fit"),
        ("--master-port 70000", {}, "does not fit"),
        ("--rdzv-endpoint [::2]:29500", {}, "--rdzv-endpoint ::2 does not fit"),
        ("--rdzv-backend etcd", {}, "does not fit"),
        ("--no-python", {}, "contradicts train.py"),
        ("--no-python -m", {}, "contradicts -m"),
    ],
)
def test_what_is_refused_says_what_to_do(words, env, message):
    with pytest.raises(ConfigError, match=message):
        translate(words, env)


def test_auto_falls_back_to_processors(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert translate("--nproc-per-node auto", {})["nproc"] >= 1
    with pytest.raises(ConfigError, match="this machine shows none"):
        translate("--nproc-per-node gpu", {})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert translate("--nproc-per-node gpu", {})["nproc"] == 3
