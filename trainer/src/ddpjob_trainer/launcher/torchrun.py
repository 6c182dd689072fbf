"""Translate the options of torchrun that have a counterpart here; others are unknown.

cli.py calls it for `ddpjob-trainer run`. Never imports torch.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Mapping
from typing import Any, Final

from ddpjob_trainer.environment import LauncherEnvironment
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.gpu import devices

_HERE: Final = ("localhost", "127.0.0.1", "::1")
#: No effect here: failures are seen at once, and there is one kind of rendezvous.
_WITHOUT_MEANING: Final = ("rdzv-id", "monitor-interval", "start-method", "event-log-handler")
_NUMA: Final = ("node", "socket", "exclusive", "core-complex")


def add(parser: argparse.ArgumentParser) -> None:
    """Add torchrun's options to a parser, for translate()."""
    group = parser.add_argument_group("torchrun's spellings")

    def option(name: str, text: str = argparse.SUPPRESS, **more: Any) -> None:
        names = {f"--{name}": "", f"--{name.replace('-', '_')}": ""}  # both spellings, once
        group.add_argument(*names, dest=f"torchrun_{name}", help=text, **more)

    option("nproc-per-node", "as --nproc; also gpu, cpu or auto", metavar="N")
    option("max-restarts", "as --max-rounds-without-progress", type=int, metavar="N")
    option("standalone", "what the launcher does outside a DDPJob anyway", action="store_true")
    option("nnodes", "1, or the replicas of the DDPJob", metavar="N")
    option("node-rank", "0, or the index of this replica", type=int, metavar="N")
    option("master-addr", "this machine, or the DDPJob's", metavar="HOST")
    option("master-port", "of the store; in a DDPJob its own", type=int, metavar="PORT")
    option("rdzv-backend", "static or c10d: here the same", metavar="NAME")
    option(
        "rdzv-endpoint", "as --master-addr and --master-port", metavar="HOST[:PORT]", type=endpoint
    )
    option("numa-binding", "bind each process to CPUs near its GPU, by torch", choices=_NUMA)
    option("no-python", "executables are started as they are anyway", action="store_true")
    for name in _WITHOUT_MEANING:
        option(name)


def translate(
    given: Mapping[str, Any], env: LauncherEnvironment, program: str, *, module: bool
) -> dict[str, Any]:
    """Return arguments of make_launch_config. ``given``: what was parsed. Raises ConfigError."""
    options = {
        name.removeprefix("torchrun_"): value
        for name, value in given.items()
        if name.startswith("torchrun_") and value is not None and value is not False
    }
    found: dict[str, Any] = {"nproc": given["nproc"]}
    if "nproc-per-node" in options:
        _once(given["nproc"], "--nproc-per-node", "--nproc")
        found["nproc"] = _processes(options["nproc-per-node"])
    rounds = found["rounds_without_progress"] = given["max_rounds_without_progress"]
    if "max-restarts" in options:
        _once(rounds, "--max-restarts", "--max-rounds-without-progress")
        found["rounds_without_progress"] = options["max-restarts"]
    if "no-python" in options and (module or program.endswith(".py")):
        what = "-m" if module else f"{program}, which is started by python"
        raise ConfigError(f"--no-python contradicts {what}: leave one of the two out")
    if "numa-binding" in options:
        found["numa_binding"] = options["numa-binding"]
    found["master_port"] = _port(options, env)
    return found


def _once(other: object, name: str, same: str) -> None:
    if other is not None:
        raise ConfigError(f"{name} and {same} mean the same: give one of them")


def _processes(value: str) -> int:
    if value.isdigit():
        return int(value)
    if value not in ("gpu", "cpu", "auto"):
        raise ConfigError(f"--nproc-per-node {value} must be a number, gpu, cpu or auto")
    gpus = devices.visible(os.environ) if value != "cpu" else 0
    if value == "gpu" and not gpus:
        raise ConfigError("--nproc-per-node gpu: this machine shows none; give a number, or cpu")
    return gpus or len(os.sched_getaffinity(0))


def _port(options: Mapping[str, Any], env: LauncherEnvironment) -> int | None:
    """Return the store's port, None: any. Refuse what contradicts this launcher's place."""
    host, port = options.get("rdzv-endpoint", (None, None))
    asked = {**options, "rdzv-endpoint": host, "master-port": options.get("master-port") or port}
    hosts = env.master[:1] if env.master else _HERE
    fits: dict[str, Collection[object]] = {
        "standalone": (env.replicas == 1,),
        "nnodes": (f"{env.replicas}", f"{env.replicas}:{env.replicas}"),
        "node-rank": (env.replica or 0,),
        "master-addr": hosts,
        "master-port": env.master[1:] if env.master else range(1, 65536),
        "rdzv-endpoint": hosts,
        "rdzv-backend": ("static", "c10d"),
    }
    for name, values in fits.items():
        if asked.get(name) is not None and asked[name] not in values:
            place = "a machine alone, and several need a DDPJob"
            if env.master:
                place = f"replica {env.replica} of {env.replicas}, with rank 0 at {env.master}"
            raise ConfigError(f"--{name} {asked[name]} does not fit {place}: leave it out")
    found: int | None = asked["master-port"]
    return found


def endpoint(text: str) -> tuple[str, int | None]:
    """Parse HOST[:PORT]."""
    host, _, port = text.rpartition(":")
    host, port = (host, port) if host else (port, "")
    return host.strip("[]"), int(port or 0) or None  # of IPv6
