"""Parse and run the `ddpjob` command, where it does not hand over to kubectl-ddp (cluster.py)."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator, Sequence
from types import FrameType

import ddpjob_contract as contract
from ddpjob_tools import audit, chaos, cluster, gpu_check
from ddpjob_tools.local import command as local
from ddpjob_trainer.arguments import joined

_VERBS = {"audit": audit, "chaos": chaos, "gpu-check": gpu_check, "local": local}


def _parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"    {name:<18}{what}" for name, what in cluster.COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="ddpjob",
        description="What you need beside a DDPJob: on this machine, and in a cluster.",
        epilog=f"in a cluster, as kubectl ddp COMMAND:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {contract.__version__}")
    commands = parser.add_subparsers(
        title="on this machine", dest="command", required=True, metavar="COMMAND"
    )
    for verb in _VERBS.values():
        verb.add(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(joined(words))
    with _ended_by_sigterm():
        code: int = _VERBS[options.command].main(options)
        return code


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Raise SystemExit at SIGTERM, for every `finally` that ends processes."""

    def end(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    old = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)
