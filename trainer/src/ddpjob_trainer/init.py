"""`ddpjob-trainer init`: the DDPJob manifest for a script, ready for `kubectl apply`.

Files that are on this machine travel in a ConfigMap, so that the stock image runs a script that
nobody has built into an image. Writes text and calls nobody; its rules about names and sizes are
those of the API server, told earlier.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ddpjob_trainer import contract
from ddpjob_trainer.errors import ConfigError

IMAGE = "ddpjob/trainer:0.1.0"
#: Where the ConfigMap's files are in the pods.
FOLDER = "/workspace/job"
#: A ConfigMap holds 1 MiB, its other fields included.
MOST_BYTES = 1_000_000
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,51}[a-z0-9])?")
_KEY = re.compile(r"(?!\.\.)[-._a-zA-Z0-9]{1,253}")
_CLAIM_NAME = re.compile(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?")

_DESCRIPTION = """\
Print the manifest of a DDPJob that runs SCRIPT. A script that is on this machine travels in a
ConfigMap with the other FILES, so the stock image will do; one that is not must be in --image.
"""
_EPILOG = """\
examples:
  ddpjob-trainer init train.py | kubectl apply --server-side -f -
  ddpjob-trainer init train.py model.py --replicas 4 --gpus 8 -- --lr 0.1 > job.yaml
  ddpjob-trainer init /app/train.py --image REGISTRY/mine:1 > job.yaml

The claim of --snapshots must exist and offer ReadWriteMany; --claim 10Gi makes it, too.
"""


def add(commands: Any) -> None:
    """Add the command to the parser of `ddpjob-trainer`."""
    parser = commands.add_parser(
        "init",
        help="print the DDPJob manifest for a script",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("script", metavar="SCRIPT", help="what `ddpjob-trainer run` is to start")
    parser.add_argument(
        "files", metavar="FILES", nargs="*", type=Path, help="what else it reads or imports"
    )
    parser.add_argument("--name", help="of the job (default: from the script's name)")
    parser.add_argument("--replicas", type=int, default=2, metavar="N", help="pods (2)")
    parser.add_argument("--nproc", type=int, metavar="N", help="processes per pod (one per GPU)")
    parser.add_argument("--gpus", type=int, default=0, metavar="N", help="GPUs per pod (0)")
    parser.add_argument("--image", default=IMAGE, help=f"({IMAGE})")
    parser.add_argument(
        "--snapshots", metavar="CLAIM", help="PersistentVolumeClaim for snapshots (NAME-snapshots)"
    )
    parser.add_argument("--claim", metavar="SIZE", help="make that claim, of this size: 10Gi")
    parser.add_argument(
        "--every-steps", type=int, default=100, metavar="N", help="steps between snapshots (100)"
    )


def main(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Print the manifest; ``arguments``: the script's own. The exit code."""
    try:
        print(render(options, arguments), end="")
    except ConfigError as error:
        print(f"ddpjob-trainer: {error}", file=sys.stderr)
        return contract.ExitCode.BAD_CONFIG
    return 0


def render(args: argparse.Namespace, arguments: Sequence[str]) -> str:
    """The manifest as YAML. Raises ConfigError that names what is wrong and the cure."""
    local = Path(args.script).is_file()
    if not local and (args.image == IMAGE or not args.script.startswith("/")):
        raise ConfigError(
            f"{args.script}: no such file here; give one, or with --image an absolute path in it"
        )
    if not local and args.files:
        raise ConfigError(f"{args.files[0]}: files travel with a script of this machine only")
    name = args.name or re.sub(r"[^a-z0-9]+", "-", Path(args.script).stem.lower()).strip("-")
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"--name {name!r}: lower-case letters, digits and '-', a letter first, 53 at most"
        )
    if args.snapshots and not _CLAIM_NAME.fullmatch(args.snapshots):
        raise ConfigError(f"--snapshots {args.snapshots!r}: not a name of a claim")
    for option, least in (("replicas", 1), ("every_steps", 1), ("gpus", 0), ("nproc", 1)):
        value = getattr(args, option)
        if value is not None and value < least:
            raise ConfigError(f"--{option.replace('_', '-')} {value}: at least {least}")
    files = [Path(args.script), *args.files] if local else []
    return "---\n".join(_parts(args, name, files, arguments))


def _parts(
    args: argparse.Namespace, name: str, files: Sequence[Path], arguments: Sequence[str]
) -> Iterator[str]:
    claim = args.snapshots or f"{name}-snapshots"
    if args.claim:
        yield _CLAIM.format(claim=claim, size=_quoted(args.claim))
    if files:
        yield _config_map(name, files)
    script = f"{FOLDER}/{files[0].name}" if files else args.script
    # Kubernetes would put variables in: $$ is a $ that stays.
    words = [word.replace("$", "$$") for word in ("ddpjob-trainer", "run", script, *arguments)]
    yield _JOB.format(
        name=name,
        replicas=args.replicas,
        nproc=args.nproc or ("auto" if args.gpus else 1),
        claim=claim,
        every=args.every_steps,
        image=_quoted(args.image),
        command=", ".join(map(_quoted, words)),
        limits=_LIMITS.format(gpus=args.gpus) if args.gpus else "",
        mount=_MOUNT if files else "",
        volume=_VOLUME.format(name=name) if files else "",
    )


def _config_map(name: str, files: Sequence[Path]) -> str:
    data, size = {}, 0
    for path in files:
        try:
            text = path.read_bytes().decode()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: {error}; only text files travel in a ConfigMap") from None
        if path.name in data or not _KEY.fullmatch(path.name):
            raise ConfigError(f"{path.name}: letters, digits, '-', '_' and '.', each name once")
        data[path.name], size = text, size + len(text.encode())
    if size > MOST_BYTES:
        raise ConfigError(
            f"{size} bytes of files: a ConfigMap holds {MOST_BYTES}; build an image, see"
            " docs/your-script.md"
        )
    # Quoted, as `null`, `yes` and `1.0` are no strings for YAML.
    entries = "".join(f'  "{name}": {_scalar(text)}\n' for name, text in data.items())
    return _CONFIG_MAP.format(name=name) + entries


def _scalar(text: str) -> str:
    """A string as YAML: a block that reads like the file, where YAML can say it so."""
    readable = all(c in "\t\n" or c.isprintable() for c in text)
    first, *_ = text.split("\n")
    if not readable or not first.strip() or first[0] in " \t" or text.endswith("\n\n"):
        return _quoted(text)
    lines = text.removesuffix("\n").split("\n")
    body = "\n".join(f"    {line}" if line else "" for line in lines)
    return ("|\n" if text.endswith("\n") else "|-\n") + body


def _quoted(text: str) -> str:
    plain = (c if " " <= c <= "~" and c not in '"\\' else f"\\U{ord(c):08x}" for c in text)
    return f'"{"".join(plain)}"'


_CLAIM = """\
# All pods write their snapshots here: the class must offer ReadWriteMany.
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: "{claim}"
spec:
  accessModes: [ReadWriteMany]
  resources:
    requests:
      storage: {size}
"""
_CONFIG_MAP = """\
apiVersion: v1
kind: ConfigMap
metadata:
  name: "{name}-files"
data:
"""
_JOB = """\
# Written by ddpjob-trainer init; `kubectl explain ddpjob.spec` describes every field.
apiVersion: ddpjob.dev/v1alpha1
kind: DDPJob
metadata:
  name: "{name}"
spec:
  replicas: {replicas}
  nprocPerNode: {nproc}
  snapshot:
    path: /snapshots
    volume:
      persistentVolumeClaim:
        claimName: "{claim}"
    everySteps: {every}
  template:
    spec:
      securityContext:
        runAsNonRoot: true
        runAsUser: 1000
        runAsGroup: 1000
        fsGroup: 1000
        seccompProfile:
          type: RuntimeDefault
      containers:
        - name: trainer
          image: {image}
          command: [{command}]
          securityContext:
            allowPrivilegeEscalation: false
            capabilities:
              drop: [ALL]
          resources:
            requests:
              cpu: "1"
              memory: 2Gi
{limits}{mount}{volume}"""
_LIMITS = """\
            limits:
              nvidia.com/gpu: {gpus}
"""
_MOUNT = f"""\
          volumeMounts:
            - name: files
              mountPath: {FOLDER}
"""
_VOLUME = """\
      volumes:
        - name: files
          configMap:
            name: "{name}-files"
"""
