"""Parse and run the command `ddpjob-trainer chaos`."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ddpjob_contract as contract
from ddpjob_tools.chaos.experiment import Result, Settings, run
from ddpjob_tools.prove.disturb import ChaosError
from ddpjob_tools.prove.kill import SIGNALS
from ddpjob_trainer.arguments import MOST_PROCESSES, real, whole
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.failpoints import POINTS

_DESCRIPTION = """\
Does training survive? Run a script undisturbed, then once more while its processes are killed, and
compare every bit: each rank's loss of every step, parameters, buffers, optimizer, scheduler,
whatever else is registered, and random number generators.

The script is started by `ddpjob-trainer run` and needs no change; it must train with this library
and leave snapshot_dir to the environment. Kills come at random instants and at named points, to any
rank and to the launcher, also while processes still come back from the kill before. When the
launcher ends, chaos starts the next attempt, as the operator does in a cluster.
"""

_EPILOG = """\
examples:
  ddpjob-trainer chaos --nproc 4 --kills 20 --seed 1 train.py --lr 0.1
  ddpjob-trainer chaos --nproc 3 --kills 10 --signals KILL --points none train.py
  ddpjob-trainer chaos --nproc 3 --kills 5 --keep evidence -m package.train

exit code: 0 identical, 1 DIFFERENT or training did not come back, 3 nothing shown (no restart went
on from a snapshot), 64 not possible as asked
"""
_NOTHING_SHOWN = 3
_NAMES = {s.name.removeprefix("SIG"): s for s in SIGNALS}


def _signals(text: str) -> tuple[signal.Signals, ...]:
    return tuple(_NAMES[name] for name in _listed(text.upper().replace("SIG", ""), _NAMES))


def _points(text: str) -> tuple[str, ...]:
    names = _listed(text, ("all", "none", *POINTS))
    return POINTS if "all" in names else tuple(name for name in names if name != "none")


def _listed(text: str, known: Collection[str]) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
    return names


def add(commands: Any) -> None:
    """Describe the command to argparse."""
    parser = commands.add_parser(
        "chaos",
        help="kill training at random and compare with an undisturbed run, bit for bit",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    whole = {"type": int, "metavar": "N"}
    parser.add_argument("--nproc", required=True, **whole, help="processes on this machine")
    parser.add_argument("--kills", default=20, **whole, help="how many (default: 20)")
    parser.add_argument("--seed", default=1, **whole, help="draws the kills (default: 1)")
    parser.add_argument(
        "--signals",
        type=_signals,
        default=SIGNALS,
        metavar="LIST",
        help="of KILL,TERM,STOP (default: all). Half of the stopped processes are continued after"
        " a moment, the others must be found by the hang detection",
    )
    parser.add_argument(
        "--points",
        type=_points,
        default=POINTS,
        metavar="LIST",
        help=f"all (default), none, or of {','.join(POINTS)}; other kills come at random instants",
    )
    parser.add_argument("--every", default=5, **whole, help="steps between snapshots (default: 5)")
    parser.add_argument(
        "--patience",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="give up when nothing happens for so long (default: 120)",
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        help="keep records, logs and snapshots in DIR, which must be new or empty",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to FILE too")
    parser.add_argument("-m", "--module", action="store_true", help="PROGRAM is a Python module")
    parser.add_argument("program", metavar="PROGRAM", help="a script (*.py), or an executable")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="for PROGRAM")


def _check(options: argparse.Namespace) -> None:
    whole("--nproc", options.nproc, least=1, most=MOST_PROCESSES)
    for name in ("kills", "every"):
        whole(f"--{name}", getattr(options, name), least=1)
    real("--patience", options.patience)
    is_script = options.program.endswith(".py") and not options.module
    if is_script and not Path(options.program).is_file():
        raise ConfigError(f"{options.program}: no such script")
    if options.keep is not None and options.keep.exists() and any(options.keep.iterdir()):
        raise ConfigError(f"--keep {options.keep} is not empty: choose a new directory")


def main(options: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    code: int = contract.ExitCode.BAD_CONFIG
    directory = None
    try:
        _check(options)
        directory = options.keep or Path(tempfile.mkdtemp(prefix="ddpjob-chaos-"))
        code = _run(_settings(options, directory.absolute()), options.json)
    except ConfigError as error:
        _say(str(error))
    except ChaosError as error:
        _say(str(error))
        code = 1
    except KeyboardInterrupt:
        _say("interrupted")
        code = 128 + signal.SIGINT
    finally:
        if directory is not None and (options.keep or code in (1, _NOTHING_SHOWN)):
            _say(f"records, logs and snapshots are in {directory}")
        elif directory is not None:
            shutil.rmtree(directory, ignore_errors=True)
    return code


def _settings(options: argparse.Namespace, directory: Path) -> Settings:
    return Settings(
        program=(*["-m"] * options.module, options.program, *options.arguments),
        nproc=options.nproc,
        kills=options.kills,
        seed=options.seed,
        signals=options.signals,
        points=options.points,
        every=options.every,
        patience=options.patience,
        directory=directory,
        environment=os.environ,
    )


def _say(text: str) -> None:
    print(f"chaos: {text}", file=sys.stderr, flush=True)


def _run(settings: Settings, report: Path | None) -> int:
    result = run(settings, lambda text: print(text, flush=True))
    print(f"sha256 undisturbed {result.calm}\nsha256 disturbed   {result.wild}")
    for difference in result.differences:
        print(f"  {difference}")
    print(result.verdict, flush=True)
    if report is not None:
        report.write_text(json.dumps(_as_json(settings, result), indent=1))
    return {"identical": 0, "DIFFERENT": 1}.get(result.verdict, _NOTHING_SHOWN)


def _as_json(settings: Settings, result: Result) -> dict[str, Any]:
    kills = [
        {**asdict(made.kill), "signal": made.kill.signal.name, "how": made.how}
        | ({"seconds": round(made.seconds, 4)} if made.seconds else {})
        for made in result.made
    ]
    return {
        "identical": result.verdict == "identical",
        "verdict": result.verdict,
        "nproc": settings.nproc,
        "seed": settings.seed,
        "kills": kills,
        "launches": result.launches,
        "restarts": result.restarts,
        "undisturbed_sha256": result.calm,
        "disturbed_sha256": result.wild,
        "differences": result.differences,
    }
