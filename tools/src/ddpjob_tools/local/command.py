"""Parse and run the command `ddpjob local`."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ddpjob_contract as contract
from ddpjob_tools.local import job as local_job
from ddpjob_tools.local import manifest as manifests
from ddpjob_tools.local.attempts import Attempts
from ddpjob_trainer.arguments import check_notebook
from ddpjob_trainer.errors import ConfigError

_DESCRIPTION = """\
Run the DDPJob of a manifest on this machine, without a cluster: a launcher for each replica, with
the variables, snapshots and restarts that the manifest asks for. Files of its ConfigMaps are where
they are mounted; the image is not used, this Python and the PATH are.
"""
_EPILOG = """\
examples:
  ddpjob local job.yaml
  ddpjob init train.py | ddpjob local -
  ddpjob local manifests/examples/digits.yaml --map /workspace=. --replicas 2

Ctrl-C ends the job as a pod is ended, with a last snapshot; a second one at once. The next run goes
on from the newest snapshot: remove the directory, or name another, to begin anew.
exit code: 0, that of the replica that failed first, or 128+n after signal n
"""


def add(commands: Any) -> None:
    """Add the command to the parser of `ddpjob`."""
    parser = commands.add_parser(
        "local",
        help="run a DDPJob manifest on this machine, without a cluster",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "file", metavar="FILE", help="the manifest, YAML or JSON; -: standard input"
    )
    parser.add_argument("--replicas", type=int, metavar="N", help="instead of spec.replicas")
    parser.add_argument("--nproc", type=int, metavar="N", help="instead of spec.nprocPerNode")
    parser.add_argument(
        "--snapshots",
        type=Path,
        metavar="DIR",
        help="takes the place of the snapshot volume (./NAME-snapshots)",
    )
    parser.add_argument(
        "--map",
        action="append",
        default=[],
        metavar="PATH=DIR",
        help="the folder here that is PATH in the pods, wherever the manifest names it; repeatable",
    )


def main(options: argparse.Namespace) -> int:
    """Run it; return the exit code."""
    try:
        with tempfile.TemporaryDirectory(prefix="ddpjob-local-") as scratch:
            job = _job(options, Path(scratch))
            job.write()
            with contextlib.nullcontext() if job.snapshots is None else alone(job.snapshots):
                return Attempts(job).run()
    except OSError as error:
        said = f"{error.filename}: {error.strerror}" if error.filename else error
        print(f"ddpjob: {said}", file=sys.stderr)
    except (ConfigError, ValueError) as error:
        print(f"ddpjob: {error}", file=sys.stderr)
    return contract.ExitCode.BAD_CONFIG


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Make the folder, as a volume is there too. Keep other runs of the manifest out of it."""
    folder.mkdir(parents=True, exist_ok=True)
    held = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{folder}: another run of this manifest has its snapshots here: end it, or give"
                " this one a folder of its own with --snapshots DIR"
            ) from None
        yield
    finally:
        os.close(held)


def _job(options: argparse.Namespace, scratch: Path) -> local_job.Job:
    check_notebook(Path(options.file))
    if options.file.endswith(".py"):
        raise ConfigError(
            f"{options.file}: a script, where a manifest is expected: ddpjob init"
            f" {options.file} | ddpjob local -"
        )
    try:
        # YAML is UTF-8, whatever the locale is.
        if options.file == "-":
            text = sys.stdin.buffer.read().decode()
        else:
            text = Path(options.file).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(
            f"{options.file}: neither YAML nor JSON, but other bytes: give a manifest of a DDPJob,"
            " saved as UTF-8"
        ) from None
    manifest = manifests.read(text)
    snapshots = options.snapshots or Path(f"{manifest.name}-snapshots")
    return local_job.make(
        manifest,
        os.environ,
        scratch,
        snapshots,
        dict(map(_folder, options.map)),
        replicas=options.replicas,
        nproc=options.nproc,
    )


def _folder(given: str) -> tuple[str, Path]:
    path, _, folder = given.partition("=")
    if not path.startswith("/") or not path.strip("/") or not folder or not Path(folder).is_dir():
        raise ConfigError(
            f"--map {given}: must be an absolute path below /, '=' and a folder that is here"
        )
    return path.rstrip("/"), Path(folder).absolute()
