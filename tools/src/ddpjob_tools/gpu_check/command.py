"""Parse and run the command `ddpjob-trainer gpu-check`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ddpjob_contract import ExitCode
from ddpjob_tools.gpu_check.checks import CHECKS, QUICK, Finding, environment
from ddpjob_tools.gpu_check.launches import Setup
from ddpjob_trainer.arguments import MOST_PROCESSES, whole
from ddpjob_trainer.errors import ConfigError

_DESCRIPTION = """\
Does it hold on these GPUs? Run small trainings on all GPUs of this machine, kill and hang some, and
say of each promise whether it holds here: one line per check, PASS, WARN, FAIL or SKIP, what was
measured, the limit, and what to do. It takes minutes, and all the GPUs.
"""

_EPILOG = """\
examples:
  ddpjob-trainer gpu-check                      all GPUs of this machine
  ddpjob-trainer gpu-check --quick              checks 1 to 4, a minute
  ddpjob-trainer gpu-check --checks 6,8         only these
  ddpjob-trainer gpu-check --device cpu --nproc 2    what means anything without a GPU

exit code: 0 no check failed, 1 one did, 64 there is no GPU (the driver's own words are shown)
"""


def _numbers(text: str) -> tuple[int, ...]:
    names = {str(check.number): check.number for check in CHECKS}
    odd = [word for word in text.split(",") if word.strip() not in names]
    if odd:
        raise argparse.ArgumentTypeError(f"{odd[0]!r} is no check: 1 to {max(names.values())}")
    return tuple(names[word.strip()] for word in text.split(","))


def add(commands: Any) -> None:
    """Describe the command to argparse."""
    parser = commands.add_parser(
        "gpu-check",
        help="check on this machine's GPUs what is promised, and measure",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nproc", type=int, metavar="N", help="processes (default: one per GPU)")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda",
        help="cpu: only what means anything there (default: cuda)",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="checks 1 to 4 only")
    parser.add_argument("--checks", type=_numbers, metavar="LIST", help="only these, as 1,6,8")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found to FILE")


def main(options: argparse.Namespace) -> int:
    """Run the checks; return the exit code."""
    try:
        if options.nproc is not None:
            whole("--nproc", options.nproc, least=1, most=MOST_PROCESSES)
        with tempfile.TemporaryDirectory(prefix="ddpjob-gpu-check-") as directory:
            return _main(options, Path(directory))
    except ConfigError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return ExitCode.BAD_CONFIG


def _main(options: argparse.Namespace, directory: Path) -> int:
    cuda = options.device == "cuda"
    facts = environment()
    gpus = len(facts["gpus"])
    if cuda and not gpus:
        print(f"gpu-check: no GPU: {facts['error']}", file=sys.stderr)
        _write(options.json, facts, ())
        return ExitCode.BAD_CONFIG
    if cuda and options.nproc is not None and options.nproc > gpus:
        raise ConfigError(f"--nproc {options.nproc}, but there are {gpus} GPUs: one process each")
    nproc = options.nproc or (gpus if cuda else 2)
    setup = Setup(nproc, cuda, directory, facts)
    wanted = options.checks or (QUICK if options.quick else tuple(c.number for c in CHECKS))
    found: list[Finding] = []
    for check in CHECKS:
        if check.number in wanted:
            for finding in check.run(setup):
                print(finding.line(), flush=True)
                found.append(finding)
    _write(options.json, facts, found)
    failed = [finding for finding in found if finding.verdict == "FAIL"]
    print(f"{len(failed)} failed of {len(found)}", flush=True)
    return 1 if failed else 0


def _write(path: Path | None, facts: dict[str, Any], found: Sequence[Finding]) -> None:
    if path is not None:
        body = {"environment": facts, "checks": [asdict(finding) for finding in found]}
        path.write_text(json.dumps(body, indent=1) + "\n")
