"""Work out a manifest's replicas on this machine: command, variables, directories.

command.py calls make() and starts what it returns. The variables are those of the
operator's pods (ddpjob_contract.environment), on 127.0.0.1. Paths that only the pods have are
replaced where the manifest names them. A working directory that is an emptyDir is a folder for each
replica here, gone with the job's end.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import ddpjob_contract as contract
from ddpjob_contract import exits, stock
from ddpjob_contract.crd import AUTO, GRACE_SECONDS
from ddpjob_contract.environment import Member, Snapshots
from ddpjob_tools.local.manifest import Manifest, Node
from ddpjob_tools.local.restarts import Limits, limits_of
from ddpjob_trainer.environment import TRACEBACK, output_variable, outside_of_jobs
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.gpu import devices

#: In a path: the replica that reads it.
OWN = f"$({contract.REPLICA})"


@dataclass(frozen=True, slots=True)
class File:
    """A file of a ConfigMap. ``mode`` None: as any file's."""

    content: bytes
    mode: int | None


@dataclass(frozen=True, slots=True)
class Work:
    """The working directories. ``mounts``: of ConfigMaps, which launchers copy into them."""

    folder: Path
    mounts: Sequence[Path]
    files: Mapping[Path, File]

    def of(self, replica: int | str) -> Path:
        """Return a replica's own folder; $(NAME) of its number will do."""
        return self.folder / str(replica)

    def enter(self, replica: int) -> Path:
        """Make a replica's folder empty, as a pod finds it."""
        shutil.rmtree(self.of(replica), ignore_errors=True)
        self.of(replica).mkdir(parents=True)
        return self.of(replica)

    def has(self, inner: Path) -> bool:
        """Return whether a launcher will copy this file there."""
        return any(mount / inner in self.files for mount in self.mounts)

    def lost(self) -> list[str]:
        """Return the files that the script has written there, which end with a pod."""
        found = set()
        for pod in self.folder.iterdir():
            for path in filter(Path.is_file, pod.rglob("*")):
                inner = path.relative_to(pod)
                if "__pycache__" not in inner.parts and not self._copy(path, inner):
                    found.add(str(inner))
        return sorted(found)

    def _copy(self, path: Path, inner: Path) -> bool:
        held = (self.files.get(mount / inner) for mount in self.mounts)
        return any(one is not None and one.content == path.read_bytes() for one in held)


def work_at(manifest: Manifest, folders: Mapping[str, Path]) -> str:
    """Return where the emptyDir is; "": the working directory is none, or --map names it."""
    at = manifest.trainer["workingDir"].text().rstrip("/")
    volumes = manifest.pod["volumes"].items()
    empty = {one["name"].text() for one in volumes if "emptyDir" in one.fields()}
    mounts = manifest.trainer["volumeMounts"].items()
    here = {one["name"].text() for one in mounts if one["mountPath"].text().rstrip("/") == at}
    return at if at not in folders and here & empty else ""


def config_maps(manifest: Manifest, scratch: Path) -> tuple[dict[Path, File], dict[str, Path]]:
    """Return the files to write, and the folder of each mount of a ConfigMap.

    Raises ConfigError.
    """
    volumes = {one["name"].text(): one["configMap"] for one in manifest.pod["volumes"].items()}
    files: dict[Path, File] = {}
    mounted: dict[str, Path] = {}
    for number, mount in enumerate(manifest.trainer["volumeMounts"].items()):
        source = volumes.get(mount["name"].text())
        held = manifest.config_maps.get(source["name"].text()) if source else None
        if source is None or held is None:
            continue
        folder = scratch / str(number)
        places = {one["path"].text(): one for one in source["items"].items()}
        for path, item in places.items() or [(key, None) for key in held]:
            if ".." in path.split("/") or path[:1] in ("/", ""):
                raise ConfigError(f"volumes: items: path {path!r} must stay in the folder")
            key = item["key"].text() if item else path
            mode = item["mode"].value if item else None
            mode = source["defaultMode"].value if mode is None else mode
            if key in held:
                files[folder / path] = File(held[key], mode if type(mode) is int else None)
            elif not source["optional"].value:
                raise ConfigError(
                    f"volumes: items: key {key!r}: the ConfigMap has no such one, so no pod could"
                    " start: name a key that it has, or set optional: true"
                )
        at = mount["mountPath"].text().rstrip("/")
        if not at.startswith("/"):
            raise mount["mountPath"].odd("below /")
        mounted[at] = folder / mount["subPath"].text()
    return files, mounted


class Paths:
    """Puts our folders in a pod's place, wherever a path begins in a text."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self._folders = folders
        longest = sorted(folders, key=len, reverse=True)
        any_of = "|".join(map(re.escape, longest)) or r"(?!)"
        self._pattern = re.compile(rf"(?<![\w.)~/-])(?:{any_of})(?![\w.-])")

    def __call__(self, given: str) -> str:
        """Return the text with our paths."""
        return self._pattern.sub(lambda found: str(self._folders[found[0]]), given)


_HOST = "127.0.0.1"
_VARIABLE = re.compile(r"\$(\$|\(([^()]*)\))")
_SCRIPT = re.compile(r"\S+\.py")  # with a space it is more likely a line for a shell
_CONTAINER = "the trainer container's"
#: Started with this Python, whatever PATH has.
_OURS = {"ddpjob-trainer": "ddpjob_trainer", "ddpjob": "ddpjob_tools"}
_FEW = 16  # processes, of each of which torch alone takes some 300 MB
#: Fields of a pod that have a like here.
_FIELDS = {
    "metadata.name": f"$({contract.NAME})-$({contract.REPLICA})",
    "metadata.namespace": f"$({contract.NAMESPACE})",
    "spec.nodeName": "localhost",
    **dict.fromkeys(("status.podIP", "status.hostIP"), _HOST),
}


@dataclass(frozen=True, slots=True)
class Job:
    """All replicas. ``files``: what ConfigMaps hold, see write()."""

    manifest: Manifest
    uid: str
    replicas: int
    nproc: int
    limits: Limits
    grace_seconds: int
    directory: str | None  # the processes' own, None: this one
    work: Work | None  # in its place, if it is an emptyDir
    snapshots: Path | None  # where those of this job are
    progress_path: Path | None
    resume_args: Sequence[str]
    resume_when: str
    files: Mapping[Path, File]
    shell: Mapping[str, str]
    given: Sequence[tuple[str, str]]  # the container's variables, paths replaced
    words: Sequence[str]  # its command and arguments, paths replaced
    notes: Sequence[str]

    def write(self) -> None:
        """Put the files of ConfigMaps where the processes will look for them."""
        for path, file in self.files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.content)
            if file.mode is not None:
                path.chmod(file.mode & 0o777 | 0o600)  # it is removed in the end

    def ports(self) -> int:
        """Return how many ports environment() wants."""
        return 2 + self.replicas

    def environment(self, attempt: int, replica: int, ports: Sequence[int]) -> dict[str, str]:
        """Return all variables of one replica's launcher."""
        found = self.variables(attempt, replica, ports)
        # The cluster's interfaces are not here, and the host's name may have an address elsewhere.
        found |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        return {**self.shell, **found, **self._gpus(replica)}

    def variables(self, attempt: int, replica: int, ports: Sequence[int]) -> dict[str, str]:
        """Return those that the container has in a pod."""
        found = self._ours(attempt, replica, ports)
        for name, value in self.given:
            found[name] = expand(value, found)
        return found

    def command(self, variables: Mapping[str, str]) -> list[str]:
        """Return what to start with these. Raises ConfigError where this machine lacks it."""
        first, *rest = (expand(word, variables) for word in self.words)
        script = next((word for word in (first, *rest) if _SCRIPT.fullmatch(word)), None)
        work = self.work and self.work.of(variables[contract.REPLICA])
        folder = work or Path(self.directory or ".")
        if script and not self._has(folder, script):
            raise ConfigError(f"{_CONTAINER} command: {script}: no such file here; {_cure(script)}")
        if first in _OURS:
            return [sys.executable, "-m", _OURS[first], *rest]
        found = shutil.which(first, path=variables.get("PATH", self.shell["PATH"]))
        if found is None and not self._has(folder, first):
            raise ConfigError(f"{_CONTAINER} command: {first}: not found here; {_cure(first)}")
        return [found or first, *rest]

    def _has(self, folder: Path, path: str) -> bool:
        there = folder / path
        if self.work is not None and there.is_relative_to(folder):
            return self.work.has(there.relative_to(folder))
        return there in self.files or there.is_file()

    def _ours(self, attempt: int, replica: int, ports: Sequence[int]) -> dict[str, str]:
        master, hub, *metrics = ports
        value, limits = self.manifest.setting, self.limits
        silence = self.manifest.at("hang.outputSeconds")
        snapshots = None
        if self.snapshots:
            every = self.manifest.at("snapshot.everySteps")
            snapshots = Snapshots(
                directory=str(self.snapshots),
                every_steps=None if every.value in (None, AUTO) else every.whole(1),
                keep=value("snapshot.keep"),
                resume=value("snapshot.resume"),
            )
        return Member(
            name=self.manifest.name,
            namespace=self.manifest.namespace,
            uid=self.uid,
            attempt=attempt,
            replica=replica,
            replicas=self.replicas,
            nproc=self.nproc,
            address=_HOST,
            master_port=master,
            hub_port=hub,
            metrics_port=metrics[replica],
            grace=self.grace_seconds,
            max_without_progress=limits.in_place,
            drill=limits.drill,
            final_exit_codes=exits.final_codes(limits.ruled),
            heal_after=limits.heal_after,
            hub=attempt,
            replacement=False,
            replace_seconds=0,  # all launchers share this machine's hub port
            hang_startup=value("hang.startupSeconds"),
            hang_step=value("hang.stepSeconds"),
            hang_snapshot=value("hang.snapshotSeconds"),
            hang_output=None if silence.value is None else silence.whole(),
            snapshots=snapshots,
            progress_path=str(self.progress_path or ""),
            resume_args=self.resume_args,
            resume_when=self.resume_when,
        ).environment() | output_variable(self.manifest.spec["output"].fields())

    def _gpus(self, replica: int) -> dict[str, str]:
        """Give each process one GPU, as in pods; with too few the CPU for all."""
        has = devices.visible(self.shell)
        if not has:
            return {}
        chosen = self.shell.get("CUDA_VISIBLE_DEVICES")
        names = (
            [one for one in chosen.split(",") if one] if chosen else [str(n) for n in range(has)]
        )
        mine = names[replica * self.nproc : (replica + 1) * self.nproc]
        return {"CUDA_VISIBLE_DEVICES": ",".join(mine) if self.replicas * self.nproc <= has else ""}


def make(
    manifest: Manifest,
    shell: Mapping[str, str],
    scratch: Path,
    snapshots: Path,
    folders: dict[str, Path],
    *,
    replicas: int | None = None,
    nproc: int | None = None,
) -> Job:
    """Plan a manifest's job; ``replicas`` and ``nproc`` take the place of the manifest's.

    ``scratch``: for the files of ConfigMaps. ``folders``: a pod's path -> ours. Raises ConfigError.
    """
    spec, trainer = manifest.spec, manifest.trainer
    files, mounted = config_maps(manifest, scratch)
    work = None
    if at := work_at(manifest, folders):
        work = Work(scratch / "work", list(mounted.values()), files)
        mounted[at] = work.of(OWN)
    folders = mounted | folders
    saves = spec["snapshot"].value is not None
    if saves:
        at = spec["snapshot"]["path"].text().rstrip("/")
        if not at.startswith("/"):
            raise spec["snapshot"]["path"].odd("an absolute directory, like /snapshots")
        folders = {at: snapshots.absolute()} | folders
    replaced = Paths(folders)
    restart = spec["restart"]

    def first(given: Node) -> str:
        """Read a path of replica 0, which looks there for all."""
        return expand(replaced(given.text()), {contract.REPLICA: "0"})

    grace = manifest.pod["terminationGracePeriodSeconds"]
    own = outside_of_jobs(shell, keep=(*contract.USER_ENV, TRACEBACK))
    own["PATH"] = f"{Path(sys.executable).parent}:{own.get('PATH', '')}"
    job = Job(
        manifest=manifest,
        uid=uuid.uuid4().hex,
        replicas=(spec["replicas"] if replicas is None else Node(replicas, "--replicas")).whole(1),
        nproc=manifest.nproc if nproc is None else Node(nproc, "--nproc").whole(1),
        limits=limits_of(manifest),
        grace_seconds=max(1, GRACE_SECONDS if grace.value is None else grace.whole()),
        directory=_directory(trainer["workingDir"].text(), replaced, files, work),
        work=work,
        snapshots=Path(replaced(at), manifest.name) if saves else None,
        progress_path=Path(path) if (path := first(restart["progressPath"])) else None,
        resume_args=list(map(first, restart["resumeArgs"].items())),
        resume_when=first(restart["resumeWhen"]),
        files=files,
        shell=own,
        given=[(name, replaced(value)) for name, value in _given(manifest, shell)],
        words=_words(trainer, replaced, own_folder=work is not None),
        notes=list(_notes(manifest, folders)),
    )
    if None in (replicas, nproc):
        _check_size(job)
    job.command(job.variables(1, 0, range(job.ports())))  # refuses before anything starts
    return job


def _check_size(job: Job) -> None:
    most = max(_FEW, 4 * (os.cpu_count() or 1))
    if job.replicas * job.nproc > most:
        raise ConfigError(
            f"{job.replicas} replicas of {job.nproc} processes: more than {most} are too many for"
            f" this machine: ask for fewer, or for all: --replicas {job.replicas} --nproc"
            f" {job.nproc}"
        )


def _directory(
    wanted: str, replaced: Paths, files: Mapping[Path, File], work: Work | None
) -> str | None:
    directory = replaced(wanted)
    to_be_made = {folder for file in files for folder in map(str, file.parents)}
    if wanted and not (work or directory in to_be_made or Path(directory).is_dir()):
        raise ConfigError(f"{_CONTAINER} workingDir: {wanted}: no such folder; {_cure(wanted)}")
    return directory or None


def _words(trainer: Node, replaced: Paths, *, own_folder: bool) -> list[str]:
    """Return the command; a folder of --map is the user's: no launcher removes anything there."""
    if not trainer["command"].items():
        raise ConfigError(
            f"{_CONTAINER} command: is missing, and the image's own is not known here"
        )
    words = [replaced(one.text()) for name in ("command", "args") for one in trainer[name].items()]
    if not own_folder and words[:3:2] == ["ddpjob-trainer", "--files"] and words[4:5] == ["--anew"]:
        del words[4]
    return words


def expand(given: str, variables: Mapping[str, str]) -> str:
    """Replace $(NAME) as Kubernetes does: an unknown one stays, $$ is a $."""

    def value(found: re.Match[str]) -> str:
        return "$" if found[1] == "$" else variables.get(found[2], found[0])

    return _VARIABLE.sub(value, given)


def _env_source(manifest: Manifest, source: Node) -> Mapping[str, bytes] | None:
    return manifest.config_maps.get(source["configMapRef"]["name"].text())


def _given(manifest: Manifest, shell: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the container's variables. Raises ConfigError."""
    for source in manifest.trainer["envFrom"].items():
        for key, value in (_env_source(manifest, source) or {}).items():
            yield f"{source['prefix'].text()}{key}", _variable(value)
    for variable in manifest.trainer["env"].items():
        name = variable["name"].text()
        if not name:
            raise variable["name"].odd("a string")
        if unknown := variable.fields().keys() - {"name", "value", "valueFrom"}:
            raise ConfigError(f"{_CONTAINER} env: {name}: no field {min(map(str, unknown))}")
        if outside_of_jobs({name: ""}, keep=contract.USER_ENV) == {}:
            raise ConfigError(f"{_CONTAINER} env: {name} is set by the operator: leave it out")
        if "valueFrom" not in variable.fields():
            yield name, variable["value"].text()
        elif (found := _from(manifest, name, variable["valueFrom"], shell)) is not None:
            yield name, found


def _variable(content: bytes) -> str:
    """Read what a ConfigMap holds, where $( is no reference."""
    return content.decode(errors="replace").replace("\0", "").replace("$", "$$")


def _from(manifest: Manifest, name: str, source: Node, shell: Mapping[str, str]) -> str | None:
    """Return a valueFrom's value; None: an optional one that is not there. Raises ConfigError."""
    if name in shell:
        return shell[name].replace("$", "$$")
    of_pod = source["fieldRef"]["fieldPath"].text()
    if of_pod in _FIELDS:
        return _FIELDS[of_pod]
    key = source["configMapKeyRef"]
    held = manifest.config_maps.get(key["name"].text(), {}).get(key["key"].text())
    if held is not None:
        return _variable(held)
    if (key if key.value else source["secretKeyRef"])["optional"].value is True:
        return None
    raise ConfigError(
        f"{_CONTAINER} env: valueFrom of {name} is known to a cluster only: give it a value in this"
        f" shell, export {name}=..."
    )


def _notes(manifest: Manifest, folders: Mapping[str, Path]) -> Iterator[str]:
    trainer = manifest.trainer
    image, torch = str(trainer["image"].value), _torch()
    if image.rpartition("/")[2] == stock.IMAGE.rpartition("/")[2] and torch != stock.TORCH:
        yield (
            f"torch is {torch} here and {stock.TORCH} in {image}: what runs here may fail there, or"
            f" train to other numbers; pip install torch=={stock.TORCH}"
        )
    if left_out := manifest.left_out():
        yield f"ignored here: {', '.join(left_out)}"
    if any(_env_source(manifest, source) is None for source in trainer["envFrom"].items()):
        yield "envFrom: what is not in the file is known to a cluster only; export it in this shell"
    at = (mount["mountPath"].text() for mount in trainer["volumeMounts"].items())
    bare = [one for one in at if one.rstrip("/") not in folders and not Path(one).exists()]
    if bare:
        yield f"nothing is mounted at {', '.join(bare)}: --map {bare[0]}=DIR gives it a folder"


def _torch() -> str:
    try:
        return metadata.version("torch").partition("+")[0]
    except metadata.PackageNotFoundError:  # of a distribution, or for programs without one
        return stock.TORCH


def _cure(path: str) -> str:
    if not path.startswith("/"):
        return "it may be in the image only: give it here, or change to its folder"
    top = "/".join(path.split("/")[:2])
    return f"--map {top}=DIR names the folder that is {top} in the image"
