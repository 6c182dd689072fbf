"""Make the manifest of a DDPJob that runs a script: for `kubectl ddp run` and `init`.

Files of this machine travel in a ConfigMap, so that the stock image runs a script that is in no
image. Needs no connection; checks names and sizes by the API server's rules, earlier.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import ddpjob_contract as contract
from ddpjob_contract import crd, resume
from ddpjob_contract.stock import IMAGE, MODULES, name_flaw
from kubectl_ddp.kubectl import Failure
from kubectl_ddp.script import travels

#: The ConfigMap's path in the pods; its files are read-only there.
FILES = "/workspace/.files"
#: The script's working directory, a folder of each pod, into which the launcher copies them.
FOLDER = "/workspace/job"
#: The path of --snapshots' claim in the pods; scripts may be on it, too.
CLAIM = "/snapshots"
#: A ConfigMap holds 1 MiB, its other fields included.
MOST_BYTES = 1_000_000
#: Of files that `run` lays on the claim: launchers hold them in memory, to lay them out again.
MOST_UPLOADED = 256 * 2**20
#: Where packages of --pip are installed, and where Python finds them.
_PACKAGES = "/workspace/.packages"
_SITE = f"{_PACKAGES}/site"
#: $1: the requirements. Nothing of the image is replaced. The stock image has no pip, but Python
#: brings it as a wheel (Debian's elsewhere), which runs as it is.
_PIP = f"""\
set -e
pip="-m pip"
python3 -m pip --version >/dev/null 2>&1 || pip=$(python3 -c '
import ensurepip, glob, os, sysconfig
bundled = os.path.join(os.path.dirname(ensurepip.__file__), "_bundled")
places = bundled, sysconfig.get_config_var("WHEEL_PKG_DIR") or bundled
found = [one for place in places for one in glob.glob(place + "/pip-*.whl")]
print(found[0] + "/pip" if found else exit("neither pip nor its wheel is in this image"))')
python3 $pip list --format=freeze > /tmp/has
python3 $pip install --no-cache-dir --prefix {_PACKAGES} -c /tmp/has -r "$1"
site=$(find {_PACKAGES} -type d -name '*-packages' | head -n 1)
[ -z "$site" ] || ln -sfn "$site" {_SITE}
"""
_KEY = re.compile(r"(?!\.\.)[-._a-zA-Z0-9]{1,253}")
_NOT_IN_KEYS = re.compile(r"[^-._a-zA-Z0-9]")
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
#: Without a unit it would be bytes, which is never meant.
_QUANTITY = re.compile(r"(?=[0-9.]*[1-9])[0-9]+(\.[0-9]+)?([KMGTPE]i|[kMGTPE])")
_CPU = re.compile(r"(?=[0-9.]*[1-9])([0-9]+(\.[0-9]+)?|[0-9]+m)")
_FORMS = (
    ("claim", _QUANTITY, "a size, such as 10Gi"),
    ("memory", _QUANTITY, "a size, such as 16Gi"),
    ("cpu", _CPU, "a number, such as 4 or 500m"),
)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: As in the CRD.
_BOUNDS = (
    ("replicas", 1, 10_000), ("nproc", 1, 64), ("gpus", 0, 64), ("every_steps", 1, 10**9),
)  # fmt: skip
_CLAIM_NAME = re.compile(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?")

#: Name and metavar; type, list where it may be given again; default; help.
_OPTIONS: tuple[tuple[str, Any, Any, str], ...] = (
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
    ("--pip FILE", Path, None,
     "install the packages of this requirements file at each start of a pod, into a folder of it"),
    ("--env NAME=VALUE", list, [],
     "a variable of the script's environment; may come more than once"),
    ("--resume-args WORDS", str, "",
     "more arguments of the script at every start but the first, as '--resume {newest}'"),
    ("--resume-when GLOB", str, "",
     "its checkpoints, as 'runs/*.pt': {newest} in --resume-args is the newest"),
    ("--every-steps N", int, None, "steps between snapshots (as few as hardly slow it down)"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Made:
    """The objects, the DDPJob last; ``uploads``: what must lie in ``folder`` of the claim before.

    Without ``uploads`` all travels in a ConfigMap.
    """

    objects: Sequence[Mapping[str, Any]]
    folder: str
    uploads: Mapping[str, Path]


def add(parser: argparse.ArgumentParser) -> None:
    """Describe script, files and options to argparse."""
    for words, kind, default, about in _OPTIONS:
        option, metavar = words.split()
        how: dict[str, Any] = {"action": "append"} if kind is list else {"type": kind}
        parser.add_argument(option, metavar=metavar, default=default, help=about, **how)
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a Python module")
    parser.add_argument("script", metavar="SCRIPT", help="what `ddpjob-trainer run` is to start")
    # Without a default argparse requires them.
    parser.add_argument(
        "files", metavar="FILES", nargs="*", default=[], type=Path, help="what else it reads"
    )


def make(args: argparse.Namespace, *, may_upload: bool = False) -> Made:
    """Make the objects; print what the script may lack. Raises Failure."""
    try:
        _check(args)
        files = _files(args)
        _check_output(args, files)
        pip = travels.placed([args.pip] if args.pip else [])
        folder = _folder(args, files, may_upload=may_upload)
        held = travels.required(pip, files) if folder else {**files, **pip}
        if sum(map(_size, held.values())) > MOST_BYTES:
            raise Failure(f"--pip {args.pip}: with the FILES that it names over {MOST_BYTES} bytes")
        found = list(_objects(args, _Files(files, held, folder, *pip)))
        notes = list(_notes(args, files))
    except OSError as error:
        raise Failure(f"{error.filename}: {error.strerror}") from None
    for note in notes:
        print(f"kubectl-ddp: {note}", file=sys.stderr)
    return Made(found, folder, files if folder else {})


@dataclass(frozen=True, slots=True)
class _Files:
    """What travels, by path in the pods: ``all`` to the script, ``held`` in the ConfigMap.

    ``folder``: of the claim, if the first are not among the second. ``pip``: the requirements.
    """

    all: Mapping[str, Path]
    held: Mapping[str, Path]
    folder: str = ""
    pip: str = ""


def _folder(args: argparse.Namespace, files: Mapping[str, Path], *, may_upload: bool) -> str:
    """Return the claim's folder for files that no ConfigMap holds, else "". Raises Failure."""
    sizes = {path: _size(path) for path in files.values()}
    total, most = sum(sizes.values()), MOST_UPLOADED if may_upload else MOST_BYTES
    if total > most:
        holds = "what travels may have" if may_upload else "a ConfigMap holds"
        cure = "lay data" if may_upload else "`kubectl ddp run` takes more, or lay them"
        raise Failure(
            f"{total} bytes of files, the largest {max(sizes, key=sizes.__getitem__)}: {holds}"
            f" {most}; {cure} on a claim or build an image, see docs/start/your-script.md"
        )
    return f"{CLAIM}/{args.name}/files" if total > MOST_BYTES else ""


def _notes(args: argparse.Namespace, files: Mapping[str, Path]) -> Iterator[str]:
    """Yield what the script may lack in the pods."""
    root = Path() if args.module else Path(next(iter(files), "")).parent
    for one in travels.forgotten(files, root):
        yield f"{one}: imported, but does not travel: name it too, if the image lacks it"
    for one in (one for path in args.files for one in sorted(path.rglob("*"))):
        if one.is_symlink() and one.is_dir():
            yield f"{one}: a linked folder, does not travel: name it too, if the script reads it"
    if args.image == IMAGE and not args.pip:
        for name in travels.lacking(files, MODULES | sys.stdlib_module_names):
            yield (
                f"{name}: imported, but not in {IMAGE}: name an image that has it with --image, or"
                " --pip requirements.txt, see docs/start/your-script.md"
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


def name_of(args: argparse.Namespace) -> str:
    """Derive a job's name from its script's."""
    stem = args.script if args.module else Path(args.script).stem
    return re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")


def _check(args: argparse.Namespace) -> None:
    """Refuse a wrong option, with its cure; derive a name where none is given. Raises Failure."""
    args.name = name = args.name or name_of(args)
    if why := name_flaw(name, most=53):
        raise Failure(f"--name: {why}")
    if args.snapshots and not _CLAIM_NAME.fullmatch(args.snapshots):
        raise Failure(f"--snapshots {args.snapshots!r}: not a name of a claim")
    for option, form, what in _FORMS:
        value = getattr(args, option)
        if value is not None and not form.fullmatch(value):
            raise Failure(f"--{option} {value!r}: must be {what}")
    if args.pip and args.pip.is_dir():
        raise Failure(f"--pip {args.pip}: a folder: give the requirements file in it")
    if not args.image.strip():
        raise Failure("--image: must name an image, such as REGISTRY/mine:1")
    for one in args.env:
        _check_variable(one)
    _check_resume(args)
    for option, least, most in _BOUNDS:
        value = getattr(args, option)
        if value is not None and not least <= value <= most:
            shown = f"--{option.replace('_', '-')} {value}"
            raise Failure(f"{shown}: at least {least}" + f", at most {most}" * (value > most))
    if args.gpus and (args.nproc or 0) > args.gpus:
        raise Failure(f"--nproc {args.nproc}: each process needs a GPU: --gpus {args.nproc}")
    if args.script.startswith(f"{CLAIM}/{name}/"):
        raise Failure(f"{args.script}: the snapshots of {name} go there: give another --name")


def _check_resume(args: argparse.Namespace) -> None:
    words = _resume_words(args)
    if why := resume.flaw(words, args.resume_when):
        raise Failure(why)
    for one in (*words, args.resume_when):
        if "$" in one:
            raise Failure(f"{one}: without $: nothing is put in its place")


def _resume_words(args: argparse.Namespace) -> list[str]:
    try:
        return shlex.split(args.resume_args)
    except ValueError as error:
        raise Failure(f"--resume-args {args.resume_args!r}: {error}") from None


def _check_variable(given: str) -> None:
    name, equals, _ = given.partition("=")
    if not equals or not _VARIABLE.fullmatch(name):
        raise Failure(f"--env {given}: must be NAME=VALUE, such as HF_HOME=/snapshots/hf")
    ours = name.startswith(contract.OWN_PREFIX) or name in contract.RESERVED_ENV
    if ours and name not in contract.USER_ENV:
        raise Failure(f"--env {given}: {name} is set by the operator: leave it out")


def _files(args: argparse.Namespace) -> dict[str, Path]:
    """Return the travelling files by path in the pods, the script first. Raises Failure."""
    if args.module and not _MODULE.fullmatch(args.script):
        raise Failure(f"{args.script}: not the name of a module, such as package.train")
    path = Path(args.script.partition(".")[0] if args.module else args.script)
    if args.module and not path.is_dir():
        path = path.with_suffix(".py")
    if not args.module:
        travels.check_script(path)
    here = path.exists() if args.module else path.is_file()
    in_pods = args.module or args.script.startswith("/")
    if not here and not _on_claim(args) and (args.image == IMAGE or not in_pods):
        cure = "change to its folder, or" if args.module else "give one, or an absolute path and"
        raise Failure(f"{path}: no such file here: {cure} name the --image that it is in")
    if not here and args.files:
        raise Failure(f"{args.files[0]}: files travel with a script of this machine only")
    return travels.placed([path, *args.files]) if here else {}


def _on_claim(args: argparse.Namespace) -> bool:
    """Return whether the script is on the claim of the snapshots."""
    return args.script.startswith(f"{CLAIM}/") and not args.module


def _check_output(args: argparse.Namespace, files: Mapping[str, Path]) -> None:
    """Refuse an output folder that cannot be a link in the working directory; raise Failure."""
    if args.output is None:
        return
    for output in args.output:
        given, shown = PurePosixPath(output), f"--output {output}"
        if given.is_absolute() or ".." in given.parts or not given.parts:
            raise Failure(f"{shown}: must be a folder below the working directory, such as results")
        if _on_claim(args) and not files:
            raise Failure(f"{shown}: leave it out: all that is written beside it is kept")
        for inner in map(PurePosixPath, files):
            if inner.is_relative_to(given) or given.is_relative_to(inner):
                raise Failure(f"{shown}: {inner} travels to there: name another folder")
        outer = [one for one in args.output if one is not output and given.is_relative_to(one)]
        if outer:
            raise Failure(f"{shown}: is kept by --output {outer[0]}: leave it out")


def _objects(args: argparse.Namespace, files: _Files) -> Iterator[dict[str, Any]]:
    name = args.name
    claim = args.snapshots or f"{name}-snapshots"
    if args.claim:  # all pods write their snapshots there
        yield _object("v1", "PersistentVolumeClaim", claim, spec={
            "accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": args.claim}},
        })  # fmt: skip
    template: dict[str, Any] = {}
    keys = _keys(files.held)
    if files.held:
        config_map = _config_map(name, files.held, keys)
        yield config_map
        # Files that were edited change the template, of which the API server knows when it may.
        digest = hashlib.sha256(json.dumps(config_map).encode()).hexdigest()[:16]
        template["metadata"] = {"annotations": {"files-sha256": digest}}
    template["spec"] = _pod(args, files, keys)
    words, volume = _resume_words(args), {"persistentVolumeClaim": {"claimName": claim}}
    yield _object(crd.API_VERSION, crd.KIND, name, spec=_full(
        replicas=args.replicas,
        nprocPerNode=args.nproc or ("auto" if args.gpus else 1),
        snapshot=_full(path=CLAIM, volume=volume, everySteps=args.every_steps),
        restart=_full(resumeArgs=words, resumeWhen=words and args.resume_when),
        template=template,
    ))  # fmt: skip


def _full(**fields: Any) -> dict[str, Any]:
    """Leave out what is empty."""
    return {name: value for name, value in fields.items() if value}


def _object(api_version: str, kind: str, name: str, **more: Any) -> dict[str, Any]:
    return {"apiVersion": api_version, "kind": kind, "metadata": {"name": name}, **more}


def _pod(args: argparse.Namespace, files: _Files, keys: Mapping[str, str]) -> dict[str, Any]:
    travel = ("--files", files.folder or FILES, "--anew") if files.all else ()
    words = ["ddpjob-trainer", "run", *travel]
    words += [word for output in args.output or () for word in ("--output", output)]
    at = next(iter(files.all), args.script)
    # Any other program is found in the PATH, as by a shell.
    at = at if at.endswith(".py") or not files.all else f"./{at}"
    words += [*(("-m", args.script) if args.module else (at,)), *args.arguments]
    variables = dict(one.split("=", 1) for one in args.env)
    own = _env(variables)
    if files.pip:
        found = variables.get("PYTHONPATH")
        variables["PYTHONPATH"] = f"{_SITE}:{found}" if found else _SITE
    unprivileged = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    requests = {"cpu": args.cpu, "memory": args.memory}
    work, mounted, packages = (
        {"name": name, "mountPath": path}
        for name, path in (("work", FOLDER), ("files", FILES), ("packages", _PACKAGES))
    )
    shown = bool(files.held and files.all and not files.folder)
    mounts = [work] * bool(files.all) + [mounted] * shown + [packages] * bool(files.pip)
    volumes: list[dict[str, Any]] = []
    if files.all:  # what is written there ends with the pod
        volumes.append({"name": "work", "emptyDir": {}})
    volumes += [_volume(args, files, keys)] if files.held else []
    init: dict[str, Any] = {}
    if files.pip:
        volumes.append({"name": "packages", "emptyDir": {}})
        init = {
            "name": "pip",
            "image": args.image,
            "command": ["sh", "-c", _PIP.replace("$", "$$"), "sh", files.pip],
            "env": [*own, {"name": "HOME", "value": "/tmp"}],
            "workingDir": FILES,
            # What pip says last is in the job's status.
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "securityContext": unprivileged,
            "resources": {"requests": requests},
            "volumeMounts": [mounted, packages],
        }
    trainer = _full(
        name="trainer",
        image=args.image,
        # Kubernetes would expand variables: $$ is a literal $.
        command=[word.replace("$", "$$") for word in words],
        env=_env(variables),
        workingDir=_directory(args, files.all),
        securityContext=unprivileged,
        resources=_full(requests=requests, limits=args.gpus and {"nvidia.com/gpu": args.gpus}),
        volumeMounts=mounts,
    )
    security = {
        "runAsNonRoot": True, "runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000,
        # A kubelet looks through the whole volume in each start otherwise.
        "fsGroupChangePolicy": "OnRootMismatch", "seccompProfile": {"type": "RuntimeDefault"},
    }  # fmt: skip
    inits = [init] if init else []
    return _full(
        securityContext=security, containers=[trainer], initContainers=inits, volumes=volumes
    )


def _env(variables: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "value": value.replace("$", "$$")} for name, value in variables.items()]


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
            raise Failure(f"{path}: may not begin with '..', nor be longer than 253 characters")
        found[key] = path
    return found


def _volume(args: argparse.Namespace, files: _Files, keys: Mapping[str, str]) -> dict[str, Any]:
    program = not args.module and not args.script.endswith(".py")
    program = program or any(os.access(path, os.X_OK) for path in files.held.values())
    moved = any(key != path for key, path in keys.items())
    items = [{"key": key, "path": path} for key, path in keys.items()] if moved else []
    source = _full(name=f"{args.name}-files", defaultMode=0o755 if program else 0, items=items)
    return {"name": "files", "configMap": source}


def _config_map(name: str, files: Mapping[str, Path], keys: Mapping[str, str]) -> dict[str, Any]:
    text: dict[str, str] = {}
    binary: dict[str, str] = {}
    for key, inner in keys.items():
        content = files[inner].read_bytes()
        try:
            text[key] = content.decode()
        except UnicodeDecodeError:
            binary[key] = base64.b64encode(content).decode()
    return _object("v1", "ConfigMap", f"{name}-files", **_full(data=text, binaryData=binary))


def _size(path: Path) -> int:
    """Return a readable file's size in bytes. Raises Failure."""
    if not path.is_file():
        raise Failure(f"{path}: no such file here; the script's own arguments follow --")
    try:
        with path.open("rb"):
            return path.stat().st_size
    except OSError as error:
        raise Failure(f"{path}: {error.strerror}") from None
