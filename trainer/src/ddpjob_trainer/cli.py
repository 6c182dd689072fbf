"""Parse and run the `ddpjob-trainer` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ddpjob_contract as contract
from ddpjob_contract.crd import DEFAULTS
from ddpjob_contract.text import without_credentials
from ddpjob_trainer import printing
from ddpjob_trainer.arguments import joined
from ddpjob_trainer.environment import EVENTS, TRACEBACK, read_launcher, wants_traceback
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.evidence import commands as evidence
from ddpjob_trainer.launcher import torchrun, workdir

_RUN_DESCRIPTION = """\
Start the training processes of this pod (or, without a cluster, of this machine), watch them,
report how they ended, and leave no process behind. Any program that torchrun can start runs
unchanged: each process gets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and the rest.
"""

_RUN_EPILOG = """\
examples:
  ddpjob-trainer run --nproc 3 train.py --lr 0.1     three processes on this machine
  ddpjob-trainer run train.py                        in a DDPJob: nprocPerNode processes
  ddpjob-trainer run --nproc 2 -m package.train      as python -m package.train
  ddpjob-trainer run ./train                         any executable

exit code: that of the first process that failed, 128+n when signal n killed it
"""
#: Verbs of `ddpjob` that were this command's before 0.2.0.
_MOVED = ("audit", "chaos", "gpu-check", "init", "local")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ddpjob-trainer", description="Run PyTorch DDP training that resumes bit for bit.",
        epilog=f"{', '.join(_MOVED)}: see ddpjob --help",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"%(prog)s {contract.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="start and watch training processes",
        description=_RUN_DESCRIPTION,
        epilog=_RUN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # the program's --resume is not our --resume-args
    )
    _add_launcher(run)
    run.add_argument(
        "-m", "--module", action="store_true", help="PROGRAM is a Python module, as in python -m"
    )
    run.add_argument(
        "--files",
        type=Path,
        metavar="DIR",
        help="first copy what is in DIR, such as a ConfigMap, into the working directory",
    )
    run.add_argument(
        "--anew",
        action="store_true",
        help="before each restart in place remove what PROGRAM wrote into the working directory, as"
        " a new pod does (with --files, a folder that was empty, and several launchers)",
    )
    run.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        action="append",
        default=[],
        help="keep what PROGRAM writes below DIR of the working directory beside the snapshots, in"
        f" ${contract.SNAPSHOT_DIR}/{workdir.OUTPUT}; given twice: each in its folder DIR there",
    )
    run.add_argument("program", metavar="PROGRAM", help="a script (*.py), or an executable")
    run.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="passed on to PROGRAM"
    )
    _add_snapshot(commands)
    evidence.add(commands)
    _add_looks(commands)
    return parser


def _add_launcher(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="processes on this machine (default: nprocPerNode of the DDPJob, else 1)",
    )
    parser.add_argument(
        "--metrics-port",
        type=int,
        metavar="PORT",
        help=f"serve /state, /healthz and /metrics there (default: ${contract.METRICS_PORT}, "
        "else not at all)",
    )
    parser.add_argument(
        "--termination-log",
        type=Path,
        metavar="FILE",
        help="write the JSON report of how training ended to FILE (default: "
        f"{contract.TERMINATION_LOG} where that file exists, as in a pod)",
    )
    parser.add_argument(
        "--events",
        type=Path,
        metavar="FILE",
        help="append one JSON object per step, resume, snapshot and failure to FILE (default: "
        f"${EVENTS}, else none)",
    )
    parser.add_argument(
        "--max-rounds-without-progress",
        type=int,
        metavar="N",
        help="after a failure restart all processes in place, at most N times in a row without"
        " progress, such as a newer snapshot; 0: never (default: restart.inPlace of the DDPJob,"
        " without one"
        f" {DEFAULTS['restart.inPlace.maxWithoutProgress']})",
    )
    parser.add_argument(
        "--spares",
        default="auto",
        metavar="N|auto",
        help="processes kept ready for the next round, which have imported torch already; 0: none"
        " (default: auto, one per process of a program that imports ddpjob_trainer)",
    )
    parser.add_argument(
        "--preload",
        default="",
        metavar="NAMES",
        help="modules that spares import in advance, such as torchvision,PIL: those that take a"
        " script long to import",
    )
    parser.add_argument(
        "--resume-args",
        metavar="WORDS",
        help="more arguments of PROGRAM at every start but the first, such as '--resume {newest}',"
        " where {newest} is the newest match of --resume-when (default: restart.resumeArgs of the"
        " DDPJob, else none)",
    )
    parser.add_argument(
        "--resume-when",
        metavar="GLOB",
        help="checkpoints of PROGRAM, such as 'out/*.pt': where nothing matches, it begins again"
        " without --resume-args (default: restart.resumeWhen of the DDPJob, else no condition)",
    )
    parser.add_argument(
        "--read",
        metavar="WHAT=REGEX",
        action="append",
        default=[],
        help="show what PROGRAM prints: step, totalSteps, loss or a number by a name of yours, as"
        r" 'accuracy=acc (\S+)', with one group. The usual forms are read anyway, except with"
        " `--read never` (default: output of the DDPJob)",
    )
    torchrun.add(parser)


def _add_snapshot(commands: Any) -> None:
    snapshot = commands.add_parser(
        "snapshot",
        help="list, check and export snapshots",
        description="Look at the snapshots of a run. Reads only; safe beside a running job.",
    )
    verbs = snapshot.add_subparsers(dest="verb", required=True, metavar="VERB")
    where = "the snapshot directory: <spec.snapshot.path>/<job name>, or $DDPJOB_SNAPSHOT_DIR"
    verbs_help = {
        "ls": "list all snapshots and say which ones a resume would take",
        "verify": "check every byte; exit code 1 if a snapshot is damaged",
        "export": "write the model's weights to one safetensors file",
    }
    for verb, text in verbs_help.items():
        one = verbs.add_parser(verb, help=text, description=f"{text[0].upper()}{text[1:]}.")
        one.add_argument("directory", type=Path, metavar="DIR", help=where)
    one.add_argument("out", type=Path, metavar="FILE", help="file to write; must not exist")
    one.add_argument("--step", type=int, metavar="N", help="which one (default: the newest valid)")


def _add_looks(commands: Any) -> None:
    what = "print the stacks of all ranks of this pod, as they are now"
    stacks = commands.add_parser("stacks", help=what, description=f"{what[0].upper()}{what[1:]}.")
    what = "profile steps of a rank of this pod, and print where the trace lies"
    profile = commands.add_parser("profile", help=what, description=f"{what[0].upper()}{what[1:]}.")
    profile.add_argument("--rank", type=int, required=True, metavar="N", help="which one")
    profile.add_argument("--steps", type=int, default=5, metavar="N", help="how many (default: 5)")
    where = f"where the launcher serves /metrics (default: ${contract.METRICS_PORT})"
    for one in (stacks, profile):
        one.add_argument("--metrics-port", type=int, metavar="PORT", help=where)


def _look(options: argparse.Namespace) -> int:
    from ddpjob_trainer.launcher.reports import live

    try:
        env = read_launcher(os.environ)
    except ConfigError as error:
        _say(str(error))
        return 1
    uid = "" if env.replica is None else env.identity.uid
    more = {name: vars(options)[name] for name in ("rank", "steps") if name in options}
    return live.ask(options.command, options.metrics_port or env.metrics_port, uid, **more)


def _snapshot(options: argparse.Namespace) -> int:
    # These need torch, which `run` must never import.
    from ddpjob_trainer.snapshot import reader
    from ddpjob_trainer.snapshot.reader import SnapshotToolError

    try:
        if options.verb == "ls":
            return reader.ls(options.directory)
        if options.verb == "verify":
            return reader.verify(options.directory)
        return reader.export(options.directory, options.out, step=options.step)
    except (SnapshotToolError, OSError) as error:
        _say(str(error))
    except Exception as error:  # what a stranger wrote, or a bug
        if wants_traceback(os.environ):
            raise
        _say(f"{type(error).__name__}: {error} ({TRACEBACK}=1 shows the traceback)")
    return 1


def _evidence(options: argparse.Namespace) -> int:
    if "://" not in options.directory:
        return evidence.main(options, Path(options.directory))
    # This needs fsspec, which a directory does not.
    from ddpjob_trainer.snapshot.remote.transfer import fetched

    try:
        with fetched(options.directory) as directory:
            return evidence.main(options, directory)
    except Exception as error:  # libraries of stores have exceptions of their own
        words = f"{options.directory} cannot be read: {type(error).__name__}: {error}"
        _say(without_credentials(words, options.directory))
        return 1


def _hold_standard_files() -> None:
    """Open /dev/null for closed descriptors 0 to 2, else our other files get them."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)


def _run(options: argparse.Namespace) -> int:
    from ddpjob_trainer.launcher.launch_config import CannotStartError, make_launch_config
    from ddpjob_trainer.launcher.processes.fork_server import Program
    from ddpjob_trainer.launcher.supervisor import Supervisor

    _hold_standard_files()
    try:
        env = read_launcher(os.environ)
        given = vars(options)
        try:
            refill = workdir.fill(
                options.files, options.output, os.environ, _say, restores=options.anew
            )
        except OSError as error:  # a full or broken disk: another node's may work
            _say(f"the working directory was not made ready: {error}")
            return 1
        config = make_launch_config(
            env,
            Program(options.program, tuple(options.arguments), options.module),
            **torchrun.translate(given, env, options.program, module=options.module),
            metrics_port=options.metrics_port,
            termination_log=options.termination_log,
            events=options.events,
            spares=options.spares,
            preload=options.preload,
            resume_args=options.resume_args,
            read=options.read,
            resume_when=options.resume_when,
        )
        supervisor = Supervisor(config, refill)
    except CannotStartError as error:
        _say(str(error))
        return error.code
    except ConfigError as error:
        _say(str(error))
        return contract.ExitCode.BAD_CONFIG
    return supervisor.run()


def _say(text: str) -> None:
    printing.warn(f"ddpjob-trainer: {text}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    if words and words[0] in _MOVED:
        parser.error(f"write `ddpjob {words[0]}`")
    options = parser.parse_args(joined(words))
    if options.command == "evidence":
        return _evidence(options)
    if options.command == "snapshot":
        return _snapshot(options)
    if options.command in ("stacks", "profile"):
        return _look(options)
    return _run(options)


if __name__ == "__main__":
    sys.exit(main())
