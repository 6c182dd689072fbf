"""Parse and run the `ddpjob` command, where it does not hand over to kubectl-ddp (cluster.py)."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from types import FrameType

import ddpjob_contract as contract
from ddpjob_tools import audit, chaos, cluster, gpu_check, init
from ddpjob_tools.local import command as local
from ddpjob_trainer.arguments import joined


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
    audit.add(commands)
    chaos.add(commands)
    gpu_check.add(commands)
    init.add(commands)
    local.add(commands)
    return parser


def _cure(words: Sequence[str], unknown: Sequence[str], rest: Sequence[str]) -> str:
    """Tell a user of `init` to put the script's own options after --."""
    if words[0] != "init":
        return ""
    ours = [word for word in words if word not in unknown]
    shown = shlex.join(["ddpjob", *ours, "--", *unknown, *rest])
    return f"; those of the script follow --, as in: {shown}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    rest: list[str] = []
    parser = _parser()
    of_init = words[:1] == ["init"]
    if of_init and "--" in words:
        at = words.index("--")
        words, rest = words[:at], words[at + 1 :]
    options, unknown = parser.parse_known_args(joined(words, anywhere=of_init))
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{_cure(words, unknown, rest)}")
    if of_init:
        return init.main(options, rest)
    if options.command == "local":
        return local.main(options)
    with _ended_by_sigterm():
        tools = {"audit": audit.main, "chaos": chaos.main, "gpu-check": gpu_check.main}
        return tools[options.command](options)


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
