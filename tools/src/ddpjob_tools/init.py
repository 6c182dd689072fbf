"""Write the DDPJob manifest for a script: `ddpjob init`, ready for `kubectl apply`.

Files of this machine travel in a ConfigMap, so that the stock image runs a script that is in no
image. Writes text without a connection; checks names and sizes by the API server's rules, earlier.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import ddpjob_contract as contract
from ddpjob_tools import travels, verb
from ddpjob_tools.stock import IMAGE, MODULES, job_name
from ddpjob_trainer.arguments import check_resume, resume_words
from ddpjob_trainer.environment import outside_of_jobs
from ddpjob_trainer.errors import ConfigError

#: The ConfigMap's path in the pods; its files are read-only there.
FILES = "/workspace/.files"
#: The script's working directory, a folder of each pod, into which the launcher copies them.
FOLDER = "/workspace/job"
#: The path of --snapshots' claim in the pods; scripts may be on it, too.
CLAIM = "/snapshots"
#: A ConfigMap holds 1 MiB, its other fields included.
MOST_BYTES = 1_000_000
_KEY = re.compile(r"(?!\.\.)[-._a-zA-Z0-9]{1,253}")
_NOT_IN_KEYS = re.compile(r"[^-._a-zA-Z0-9]")
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
#: Without a unit it would be bytes, which is never meant.
_QUANTITY = re.compile(r"(?=[0-9.]*[1-9])[0-9]+(\.[0-9]+)?([KMGTPE]i|[kMGTPE])")
_CPU = re.compile(r"(?=[0-9.]*[1-9])([0-9]+(\.[0-9]+)?|[0-9]+m)")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: As in the CRD.
_BOUNDS = (
    ("replicas", 1, 10_000), ("nproc", 1, 64), ("gpus", 0, 64), ("every_steps", 1, 10**9),
)  # fmt: skip
_CLAIM_NAME = re.compile(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?")
#: No number, in whichever version of YAML: kubectl reads 1e3 as one, PyYAML does not.
_PLAIN = re.compile(r"/?[a-zA-Z][-a-zA-Z0-9./]+")

_DESCRIPTION = """\
Print the manifest of a DDPJob that runs SCRIPT. A script that is on this machine travels in a
ConfigMap with the other FILES, so the stock image will do; one that is not must be in --image, or
below /snapshots on the claim.
FILES are files and folders. The folder in which this command is called becomes the script's working
directory: all lie below it in the pods as they do here. What follows -- are the script's own
arguments.
"""
_EPILOG = """\
examples:
  ddpjob init train.py | kubectl apply --server-side -f -
  ddpjob init train.py models vocab.txt --replicas 4 --gpus 8 -- --lr 0.1 > job.yaml
  ddpjob init src/train.py data --output runs > job.yaml
  ddpjob init a.py --output out --resume-args '--from {newest}' --resume-when 'out/*.pt'
  ddpjob init -m package.train > job.yaml            all of the folder package
  ddpjob init /app/train.py --image REGISTRY/mine:1 > job.yaml
  ddpjob init /snapshots/code-1/train.py --snapshots CLAIM > job.yaml

The claim of --snapshots must exist and offer ReadWriteMany; --claim 10Gi makes it, too.
"""

_HEAD = """\
# Written by ddpjob init; `kubectl explain ddpjob.spec` describes every field.
"""


_OPTIONS: tuple[verb.Option, ...] = (
    ("--name NAME", str, None, "of the job (default: from the script's name)"),
    ("--replicas N", int, 2, "pods (2)"),
    ("--nproc N", int, None, "processes per pod (one per GPU)"),
    ("--gpus N", int, 0, "GPUs per pod (0)"),
    ("--image IMAGE", str, IMAGE, f"({IMAGE})"),
    ("--snapshots CLAIM", str, None, "PersistentVolumeClaim for snapshots (NAME-snapshots)"),
    ("--claim SIZE", str, None, "make that claim, of this size: 10Gi"),
    ("--output DIR", list, None,
     ("what the script writes below DIR is kept, in the folder output of its snapshots; all else"
      " that it writes ends with its pod; may come more than once")),
    ("--cpu N", str, "1", "CPUs that a pod requests (1)"),
    ("--memory SIZE", str, "2Gi", "and its memory (2Gi)"),
    ("--env NAME=VALUE", list, [],
     "a variable of the script's environment; may come more than once"),
    ("--resume-args WORDS", str, "",
     "more arguments of the script at every start but the first, as '--resume {newest}'"),
    ("--resume-when GLOB", str, "",
     "its checkpoints, as 'runs/*.pt': {newest} in --resume-args is the newest"),
    ("--every-steps N", int, 100, "steps between snapshots (100)"),
)  # fmt: skip


def add(commands: Any) -> None:
    """Describe the command to argparse."""
    parser = verb.add(
        commands, "init", "print the DDPJob manifest for a script", _OPTIONS,
        description=_DESCRIPTION, epilog=_EPILOG,
        allow_abbrev=False,  # the script's --out is not our --output
    )  # fmt: skip
    verb.add_module(parser, "SCRIPT")
    parser.add_argument("script", metavar="SCRIPT", help="what `ddpjob-trainer run` is to start")
    # Without a default argparse requires them.
    parser.add_argument(
        "files", metavar="FILES", nargs="*", default=[], type=Path, help="what else it reads"
    )


def main(options: argparse.Namespace) -> int:
    """Print the manifest; return the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # as YAML is, in any locale
    return verb.ended("ddpjob", lambda: _print(options))


def _print(options: argparse.Namespace) -> int:
    name = _checked(options)
    files = _files(options)
    _check_output(options, files)
    objects = _objects(options, name, files)
    print(_HEAD + "---\n".join(map(_dumped, objects)), end="")
    for note in _notes(options, files):
        verb.say("ddpjob", note)
    return 0


def _notes(args: argparse.Namespace, files: Mapping[str, Path]) -> Iterator[str]:
    """Yield what the script may lack in the pods."""
    root = Path() if args.module else Path(next(iter(files), "")).parent
    for one in travels.forgotten(files, root):
        yield f"{one}: imported, but does not travel: name it too, if the image lacks it"
    for one in travels.linked_folders(args.files):
        yield f"{one}: a linked folder, does not travel: name it too, if the script reads it"
    if args.image == IMAGE:
        for name in travels.lacking(files, MODULES | sys.stdlib_module_names):
            yield (
                f"{name}: imported, but not in {IMAGE}: name an image that has it with --image, see"
                " docs/start/your-script.md"
            )
    # Our library forms the group itself, and so may what the stock image lacks.
    others = (MODULES | sys.stdlib_module_names | {"torchvision", "tqdm"}) - {"ddpjob_trainer"}
    processes = args.replicas * (args.nproc or args.gpus or 1)
    if processes > 1 and travels.trains_alone(files, others):
        yield (
            f"{args.script}: names no torch.distributed, so each of {processes} processes would"
            " train by itself: give --replicas 1, or see docs/start/your-script.md"
        )
    for word in travels.named(args.arguments, files) if files else ():
        if not _kept(args, word):
            yield f"{word}: named by an argument, but does not travel: name it before --, too"
    when = args.resume_when
    if when and files and not when.startswith("/") and not _kept(args, when):
        yield f"--resume-when {when}: ends with its pod: keep the folder with --output"


def _kept(args: argparse.Namespace, path: str) -> bool:
    """Return whether a path lies below a folder of --output."""
    normal = PurePosixPath(os.path.normpath(path))
    return any(normal.is_relative_to(os.path.normpath(one)) for one in args.output or ())


def _checked(args: argparse.Namespace) -> str:
    """Return the job's name. Raises ConfigError for a wrong option, with its cure."""
    stem = args.script if args.module else Path(args.script).stem
    derived = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")
    name = job_name("--name", args.name or derived, most=53)
    if args.snapshots and not _CLAIM_NAME.fullmatch(args.snapshots):
        raise ConfigError(f"--snapshots {args.snapshots!r}: not a name of a claim")
    if args.claim is not None and not _QUANTITY.fullmatch(args.claim):
        raise ConfigError(f"--claim {args.claim!r}: must be a size, such as 10Gi")
    if not args.image.strip():
        raise ConfigError("--image: must name an image, such as REGISTRY/mine:1")
    _check_pod(args)
    for option, least, most in _BOUNDS:
        value = getattr(args, option)
        if value is not None and not least <= value <= most:
            shown = f"--{option.replace('_', '-')} {value}"
            raise ConfigError(f"{shown}: at least {least}" + f", at most {most}" * (value > most))
    if args.gpus and (args.nproc or 0) > args.gpus:
        raise ConfigError(f"--nproc {args.nproc}: each process needs a GPU: --gpus {args.nproc}")
    if args.script.startswith(f"{CLAIM}/{name}/"):
        raise ConfigError(f"{args.script}: the snapshots of {name} go there: give another --name")
    return name


def _check_pod(args: argparse.Namespace) -> None:
    if not _QUANTITY.fullmatch(args.memory):
        raise ConfigError(f"--memory {args.memory!r}: must be a size, such as 16Gi")
    if not _CPU.fullmatch(args.cpu):
        raise ConfigError(f"--cpu {args.cpu!r}: must be a number, such as 4 or 500m")
    for one in args.env:
        _check_variable(one)
    words = resume_words(args.resume_args)
    check_resume(words, args.resume_when)
    for one in (*words, args.resume_when):
        if "$" in one:
            raise ConfigError(f"{one}: without $: nothing is put in its place")


def _check_variable(given: str) -> None:
    name, equals, _ = given.partition("=")
    if not equals or not _VARIABLE.fullmatch(name):
        raise ConfigError(f"--env {given}: must be NAME=VALUE, such as HF_HOME=/snapshots/hf")
    if not outside_of_jobs({name: ""}, keep=contract.USER_ENV):
        raise ConfigError(f"--env {given}: {name} is the operator's to set: leave it out")


def _files(args: argparse.Namespace) -> dict[str, Path]:
    """Return the travelling files by path in the working directory, the script first.

    Raises ConfigError.
    """
    if args.module and not _MODULE.fullmatch(args.script):
        raise ConfigError(f"{args.script}: not the name of a module, such as package.train")
    path = Path(args.script.partition(".")[0] if args.module else args.script)
    if args.module and not path.is_dir():
        path = path.with_suffix(".py")
    if not args.module:
        travels.check_script(path)
    here = path.exists() if args.module else path.is_file()
    in_pods = args.module or args.script.startswith("/")
    if not here and not _on_claim(args) and (args.image == IMAGE or not in_pods):
        cure = "change to its folder, or" if args.module else "give one, or an absolute path and"
        raise ConfigError(f"{path}: no such file here: {cure} name the --image that it is in")
    if not here and args.files:
        raise ConfigError(f"{args.files[0]}: files travel with a script of this machine only")
    return travels.placed([path, *args.files]) if here else {}


def _on_claim(args: argparse.Namespace) -> bool:
    """Return whether the script is on the claim of the snapshots."""
    return args.script.startswith(f"{CLAIM}/") and not args.module


def _check_output(args: argparse.Namespace, files: Mapping[str, Path]) -> None:
    """Refuse an output folder that cannot be a link in the working directory.

    Raises ConfigError.
    """
    if args.output is None:
        return
    for output in args.output:
        given, shown = PurePosixPath(output), f"--output {output}"
        if given.is_absolute() or ".." in given.parts or not given.parts:
            raise ConfigError(
                f"{shown}: must be a folder below the working directory, such as results"
            )
        if _on_claim(args) and not files:
            raise ConfigError(f"{shown}: leave it out: all that is written beside it is kept")
        for inner in map(PurePosixPath, files):
            if inner.is_relative_to(given) or given.is_relative_to(inner):
                raise ConfigError(f"{shown}: {inner} travels to there: name another folder")
        outer = [one for one in args.output if one is not output and given.is_relative_to(one)]
        if outer:
            raise ConfigError(f"{shown}: is kept by --output {outer[0]}: leave it out")


def _objects(
    args: argparse.Namespace, name: str, files: Mapping[str, Path]
) -> Iterator[dict[str, Any]]:
    claim = args.snapshots or f"{name}-snapshots"
    nproc = "auto" if args.gpus else 1
    if args.claim:  # all pods write their snapshots there
        yield _object("v1", "PersistentVolumeClaim", claim, spec={
            "accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": args.claim}},
        })  # fmt: skip
    template: dict[str, Any] = {}
    keys = _keys(files)
    if files:
        config_map = _config_map(name, files, keys)
        yield config_map
        # Files that were edited change the template, of which the API server knows when it may.
        digest = hashlib.sha256(json.dumps(config_map).encode()).hexdigest()[:16]
        template["metadata"] = {"annotations": {"files-sha256": digest}}
    template["spec"] = _pod(args, name, files, keys)
    restart: dict[str, Any] = {}
    if words := resume_words(args.resume_args):
        restart["resumeArgs"] = [*words]
        restart |= {"resumeWhen": args.resume_when} if args.resume_when else {}
    yield _object("ddpjob.dev/v1alpha1", "DDPJob", name, spec={
        "replicas": args.replicas,
        "nprocPerNode": nproc if args.nproc is None else args.nproc,
        "snapshot": {
            "path": CLAIM,
            "volume": {"persistentVolumeClaim": {"claimName": claim}},
            "everySteps": args.every_steps,
        },
        **({"restart": restart} if restart else {}),
        "template": template,
    })  # fmt: skip


def _object(api_version: str, kind: str, name: str, **more: Any) -> dict[str, Any]:
    return {"apiVersion": api_version, "kind": kind, "metadata": {"name": name}, **more}


def _pod(
    args: argparse.Namespace, name: str, files: Mapping[str, Path], keys: Mapping[str, str]
) -> dict[str, Any]:
    words = ["ddpjob-trainer", "run", *(("--files", FILES, "--anew") if files else ())]
    words += [word for output in args.output or () for word in ("--output", output)]
    words += [*_program(args, files), *args.arguments]
    trainer: dict[str, Any] = {
        "name": "trainer",
        "image": args.image,
        # Kubernetes would expand variables: $$ is a literal $.
        "command": [word.replace("$", "$$") for word in words],
    }
    if args.env:
        variables = dict(one.split("=", 1) for one in args.env)
        trainer["env"] = [
            {"name": name, "value": value.replace("$", "$$")} for name, value in variables.items()
        ]
    if directory := _directory(args, files):
        trainer["workingDir"] = directory
    trainer["securityContext"] = {
        "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}
    }  # fmt: skip
    trainer["resources"] = {"requests": {"cpu": args.cpu, "memory": args.memory}}
    if args.gpus:
        trainer["resources"]["limits"] = {"nvidia.com/gpu": args.gpus}
    user = {"runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000}
    pod: dict[str, Any] = {
        "securityContext": {
            "runAsNonRoot": True, **user,
            # A kubelet looks through the whole volume in each start otherwise.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [trainer],
    }  # fmt: skip
    if files:
        trainer["volumeMounts"] = [
            {"name": "work", "mountPath": FOLDER}, {"name": "files", "mountPath": FILES},
        ]  # fmt: skip
        # What is written in the first ends with the pod.
        pod["volumes"] = [{"name": "work", "emptyDir": {}}, _volume(args, name, keys, files)]
    return pod


def _program(args: argparse.Namespace, files: Mapping[str, Path]) -> Sequence[str]:
    if args.module:
        return ("-m", args.script)
    at = next(iter(files), args.script)
    # Any other program is found in the PATH, as by a shell.
    return (at if at.endswith(".py") or not files else f"./{at}",)


def _directory(args: argparse.Namespace, files: Mapping[str, Path]) -> str:
    """Return the script's working directory; "": the image's, which holds the script."""
    if files:
        return FOLDER
    # The folder copied to the claim, as the user saw it.
    return "/".join(args.script.split("/")[:-1][:3]) if _on_claim(args) else ""


def _keys(files: Mapping[str, Path]) -> dict[str, str]:
    """Map keys in the ConfigMap, without folders or spaces, to paths in the pods."""
    found: dict[str, str] = {}
    for path in files:
        key = _NOT_IN_KEYS.sub("_", path.replace("/", "."))
        while key in found:
            key = f"_{key}"
        if not _KEY.fullmatch(key):
            raise ConfigError(f"{path}: may not begin with '..', nor be longer than 253 characters")
        found[key] = path
    return found


def _volume(
    args: argparse.Namespace, name: str, keys: Mapping[str, str], files: Mapping[str, Path]
) -> dict[str, Any]:
    source: dict[str, Any] = {"name": f"{name}-files"}
    program = not args.module and not args.script.endswith(".py")
    if program or any(os.access(path, os.X_OK) for path in files.values()):
        source["defaultMode"] = 0o755
    if any(key != path for key, path in keys.items()):
        source["items"] = [{"key": key, "path": path} for key, path in keys.items()]
    return {"name": "files", "configMap": source}


def _config_map(name: str, files: Mapping[str, Path], keys: Mapping[str, str]) -> dict[str, Any]:
    sizes = {path: _size(path) for path in files.values()}
    if sum(sizes.values()) > MOST_BYTES:
        raise ConfigError(
            f"{sum(sizes.values())} bytes of files, the largest {max(sizes, key=sizes.__getitem__)}"
            f": a ConfigMap holds {MOST_BYTES}; lay them on a claim or build an image, see"
            " docs/start/your-script.md"
        )
    text: dict[str, str] = {}
    binary: dict[str, str] = {}
    for key, inner in keys.items():
        content = files[inner].read_bytes()
        try:
            text[key] = content.decode()
        except UnicodeDecodeError:
            binary[key] = base64.b64encode(content).decode()
    held = {"data": text, "binaryData": binary}
    full = {field: found for field, found in held.items() if found}
    return _object("v1", "ConfigMap", f"{name}-files", **full)


def _size(path: Path) -> int:
    """Return a readable file's size in bytes. Raises ConfigError."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file here; the script's own arguments follow --")
    try:
        with path.open("rb"):
            return path.stat().st_size
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def _dumped(body: Mapping[str, Any]) -> str:
    """Format an object as YAML, with a script as it is in its file."""
    import yaml  # here: gpu-check and others run where it is not installed

    class Dumper(yaml.SafeDumper):
        """Writes lines as a block where YAML allows it. It quotes what may read as no string."""

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        # In a block YAML 1.1 reads three more characters as ends of lines, as "\n".
        plain = "\n" in value and not re.search("[\x85\u2028\u2029]", value)
        block = plain and not value.startswith((" ", "\t", "\n"))
        style = "|" if block else None if _PLAIN.fullmatch(value) else '"'
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    found: str = yaml.dump(body, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100)
    return found
