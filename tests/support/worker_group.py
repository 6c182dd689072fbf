"""A launcher's group of three workers that nothing starts and nothing can end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ddpjob_trainer.environment import Key, read_launcher
from ddpjob_trainer.launcher.launch_config import LaunchConfig, make_launch_config
from ddpjob_trainer.launcher.output import Log, OutputPump
from ddpjob_trainer.launcher.processes.fork_server import Program
from ddpjob_trainer.launcher.worker_group import WorkerGroup

NEVER = 4194304  # above every pid: nothing is ever reaped


def config_of_three(report: Path | None = None) -> LaunchConfig:
    program = Program("sh", (), module=False)
    return make_launch_config(read_launcher({}), program, nproc=3, termination_log=report)


def make_group(
    tmp_path: Path,
    start: Callable[[int], int | None] = lambda local_rank: NEVER + local_rank,
    unresolved: Callable[[], str] = str,
) -> tuple[WorkerGroup, list[str]]:
    """The workers, and what is said of them."""
    said: list[str] = []
    pump = OutputPump(Log(), prefixed=True)
    workers = WorkerGroup(config_of_three(), Key(1, 0), tmp_path, pump, said.append, unresolved)
    workers.start(lambda local_rank, out, err: start(local_rank), 0.0)
    return workers, said
