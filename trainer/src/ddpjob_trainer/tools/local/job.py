"""What a manifest's replicas are on this machine: command, variables, directories.

The variables are those of the operator's pods (ddpjob_contract.environment), on 127.0.0.1. Paths
that only the pods have are replaced where the manifest names them.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import ddpjob_contract as contract
from ddpjob_contract import exits
from ddpjob_contract.crd import GRACE_SECONDS
from ddpjob_contract.environment import Member, Snapshots
from ddpjob_trainer import gpu_devices
from ddpjob_trainer.environment import TRACEBACK, outside_of_jobs
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.tools import stock
from ddpjob_trainer.tools.local.manifest import Manifest, count, text
from ddpjob_trainer.tools.local.restarts import Limits, limits_of
from ddpjob_trainer.tools.local.work import OWN, Work, mounted_at

_HOST = "127.0.0.1"
_VARIABLE = re.compile(r"\$(\$|\(([^()]*)\))")
_SCRIPT = re.compile(r"\S+\.py")  # with a space it is more likely a line for a shell
_CONTAINER = "the trainer container's"
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
    files: Mapping[Path, bytes]
    modes: Mapping[Path, int]  # of those of them that want another than a file has
    shell: Mapping[str, str]
    given: Sequence[tuple[str, str]]  # the container's variables, paths replaced
    words: Sequence[str]  # its command and arguments, paths replaced
    notes: Sequence[str]

    def write(self) -> None:
        """Put the files of ConfigMaps where the processes will look for them."""
        for path, content in self.files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            if path in self.modes:
                path.chmod(self.modes[path])

    def ports(self) -> int:
        """How many ports environment() wants."""
        return 2 + self.replicas

    def environment(self, attempt: int, replica: int, ports: Sequence[int]) -> dict[str, str]:
        """All variables of one replica's launcher."""
        found = self.variables(attempt, replica, ports)
        # The cluster's interfaces are not here, and the host's name may have an address elsewhere.
        found |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        return {**self.shell, **found, **self._gpus(replica)}

    def variables(self, attempt: int, replica: int, ports: Sequence[int]) -> dict[str, str]:
        """Those that the container has in a pod."""
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
        if first == "ddpjob-trainer":
            return [sys.executable, "-m", "ddpjob_trainer", *rest]
        found = shutil.which(first, path=variables.get("PATH", self.shell["PATH"]))
        if found is None and not self._has(folder, first):
            raise ConfigError(f"{_CONTAINER} command: {first}: not found here; {_cure(first)}")
        there = folder / first
        if found is None and not (self.modes.get(there, 0) & 0o111 or os.access(there, os.X_OK)):
            raise ConfigError(
                f"{_CONTAINER} command: {first}: may not be executed: chmod +x, or in a ConfigMap"
                " defaultMode: 0755"
            )
        return [found or first, *rest]

    def _has(self, folder: Path, path: str) -> bool:
        there = folder / path
        if self.work is not None and there.is_relative_to(folder):
            return self.work.has(there.relative_to(folder))
        return there in self.files or there.is_file()

    def _ours(self, attempt: int, replica: int, ports: Sequence[int]) -> dict[str, str]:
        master, hub, *metrics = ports
        value, limits = self.manifest.setting, self.limits
        snapshots = None
        if self.snapshots:
            snapshots = Snapshots(
                directory=str(self.snapshots),
                every_steps=value("snapshot.everySteps"),
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
            hang_startup=value("hang.startupSeconds"),
            hang_step=value("hang.stepSeconds"),
            hang_snapshot=value("hang.snapshotSeconds"),
            snapshots=snapshots,
            progress_path=str(self.progress_path or ""),
        ).environment()

    def _gpus(self, replica: int) -> dict[str, str]:
        """Give each process one GPU, as in pods; with too few the CPU for all."""
        has = gpu_devices.visible(self.shell)
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
    """``scratch``: for the files of ConfigMaps. ``folders``: a pod's path -> ours.

    Raises ConfigError that names the field.
    """
    trainer, snapshot = manifest.trainer, manifest.spec.get("snapshot")
    files, modes, mounted = _config_maps(manifest, scratch)
    work = None
    if at := mounted_at(manifest, folders):
        work = Work(scratch / "work", list(mounted.values()), files)
        mounted[at] = work.of(OWN)
    folders = mounted | folders
    if snapshot is not None:
        at = str(snapshot.get("path", "")).rstrip("/")
        if not at.startswith("/"):
            raise ConfigError("spec.snapshot.path: must be an absolute directory, like /snapshots")
        folders = {at: snapshots.absolute()} | folders
    if not trainer.get("command"):
        raise ConfigError(
            f"{_CONTAINER} command: must be there, for what the image starts by itself is not"
            " known here"
        )
    replaced = _Paths(folders)
    directory = None
    if (wanted := trainer.get("workingDir")) is not None:
        directory = replaced(wanted)
        to_be_made = {folder for file in files for folder in map(str, file.parents)}
        if not (work or directory in to_be_made or Path(directory).is_dir()):
            raise ConfigError(f"{_CONTAINER} workingDir: {wanted}: no such folder; {_cure(wanted)}")
    own = outside_of_jobs(shell, keep=(*contract.USER_ENV, TRACEBACK))
    own["PATH"] = f"{Path(sys.executable).parent}:{own.get('PATH', '')}"
    progress = (manifest.spec.get("restart") or {}).get("progressPath")
    grace = manifest.pod.get("terminationGracePeriodSeconds", GRACE_SECONDS)
    found = Job(
        manifest=manifest,
        uid=uuid.uuid4().hex,
        replicas=_first("replicas", replicas, manifest.spec.get("replicas")),
        nproc=_first("nproc", nproc, manifest.nproc),
        limits=limits_of(manifest),
        grace_seconds=max(1, grace if type(grace) is int else GRACE_SECONDS),
        directory=directory,
        work=work,
        snapshots=None if snapshot is None else Path(replaced(at), manifest.name),
        # Beside replica 0, where it is looked at.
        progress_path=Path(expand(replaced(progress), {contract.REPLICA: "0"}))
        if progress
        else None,
        files=files,
        modes=modes,
        shell=own,
        given=[(name, replaced(value)) for name, value in _given(manifest, shell)],
        words=_words(trainer, replaced, own_folder=work is not None),
        notes=list(_notes(manifest, folders)),
    )
    most = max(_FEW, 4 * (os.cpu_count() or 1))
    pods, each = found.replicas, found.nproc
    if pods * each > most and None in (replicas, nproc):
        raise ConfigError(
            f"{pods} replicas of {each} processes: more than {most} would be too much for this"
            f" machine, and must be asked for: --replicas {pods} --nproc {each}, or fewer"
        )
    found.command(found.variables(1, 0, range(found.ports())))  # refuses before anything starts
    return found


def _words(
    trainer: Mapping[str, Any], replaced: Callable[[str], str], *, own_folder: bool
) -> list[str]:
    """Return the command; a folder of --map is the user's: no launcher removes anything there."""
    words = [replaced(word) for word in (*trainer["command"], *(trainer.get("args") or []))]
    if not own_folder and words[:3:2] == ["ddpjob-trainer", "--files"] and words[4:5] == ["--anew"]:
        del words[4]
    return words


def _first(name: str, option: int | None, field: object) -> int:
    return count(f"spec.{name}", field) if option is None else count(f"--{name}", option)


def expand(given: str, variables: Mapping[str, str]) -> str:
    """$(NAME) as Kubernetes does it: an unknown one stays, $$ is a $."""

    def value(found: re.Match[str]) -> str:
        return "$" if found[1] == "$" else variables.get(found[2], found[0])

    return _VARIABLE.sub(value, given)


class _Paths:
    """Puts our folders in the place of a pod's, wherever a path begins in a text."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self._folders = folders
        longest = sorted(folders, key=len, reverse=True)
        any_of = "|".join(map(re.escape, longest)) or r"(?!)"
        self._pattern = re.compile(rf"(?<![\w.)~/-])(?:{any_of})(?![\w.-])")

    def __call__(self, given: str) -> str:
        return self._pattern.sub(lambda found: str(self._folders[found[0]]), given)


def _config_maps(
    manifest: Manifest, scratch: Path
) -> tuple[dict[Path, bytes], dict[Path, int], dict[str, Path]]:
    """Files to write, their modes, and what each mount of a ConfigMap in the manifest is here."""
    kinds = {one.get("name"): one for one in manifest.pod.get("volumes") or []}
    files: dict[Path, bytes] = {}
    modes: dict[Path, int] = {}
    mounted: dict[str, Path] = {}
    for number, mount in enumerate(manifest.trainer.get("volumeMounts") or []):
        source = (kinds.get(mount.get("name")) or {}).get("configMap") or {}
        held = manifest.config_maps.get(source.get("name", ""))
        if held is None:
            continue
        folder = scratch / str(number)
        items = source.get("items") or [{"key": key, "path": key} for key in held]
        for item in items:
            key, path = item.get("key"), str(item.get("path", ""))
            if ".." in path.split("/") or path[:1] in ("/", ""):
                raise ConfigError(f"volumes: items: path {path!r} must stay in the folder")
            if key not in held and not source.get("optional"):
                raise ConfigError(f"volumes: items: key {key!r}: the ConfigMap has no such one")
            if key in held:
                files[folder / path] = held[key]
                if type(mode := item.get("mode", source.get("defaultMode"))) is int:
                    modes[folder / path] = mode & 0o777 | 0o600  # it is removed in the end
        at = str(mount.get("mountPath") or "").rstrip("/")
        if not at.startswith("/"):
            raise ConfigError(f"{_CONTAINER} volumeMounts: mountPath {at!r} must be below /")
        mounted[at] = folder / (mount.get("subPath") or "")
    return files, modes, mounted


def _env_source(manifest: Manifest, source: Mapping[str, Any]) -> Mapping[str, bytes] | None:
    return manifest.config_maps.get((source.get("configMapRef") or {}).get("name", ""))


def _given(manifest: Manifest, shell: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    trainer = manifest.trainer
    for source in trainer.get("envFrom") or []:
        for key, value in (_env_source(manifest, source) or {}).items():
            yield f"{source.get('prefix') or ''}{key}", _variable(value)
    for variable in trainer.get("env") or []:
        name = text(f"{_CONTAINER} env: name", variable.get("name"))
        if outside_of_jobs({name: ""}, keep=contract.USER_ENV) == {}:
            raise ConfigError(f"{_CONTAINER} env: {name} is the operator's to set: leave it out")
        if unknown := variable.keys() - {"name", "value", "valueFrom"}:
            raise ConfigError(f"{_CONTAINER} env: {name}: no field {min(map(str, unknown))}")
        if variable.get("value", "") is None:
            yield name, ""
        elif "valueFrom" not in variable:
            yield name, text(f"{_CONTAINER} env: {name}", variable.get("value", ""))
        elif (found := _from(manifest, name, variable["valueFrom"] or {}, shell)) is not None:
            yield name, found


def _variable(content: bytes) -> str:
    """Read what a ConfigMap holds, where $( is no reference."""
    return content.decode(errors="replace").replace("\0", "").replace("$", "$$")


def _from(
    manifest: Manifest, name: str, source: Mapping[str, Any], shell: Mapping[str, str]
) -> str | None:
    """Of a variable with valueFrom; None: an optional one that is not there. Raises ConfigError."""
    if name in shell:
        return shell[name].replace("$", "$$")
    of_pod = (source.get("fieldRef") or {}).get("fieldPath")
    if of_pod in _FIELDS:
        return _FIELDS[of_pod]
    key = source.get("configMapKeyRef") or {}
    held = manifest.config_maps.get(key.get("name", ""), {}).get(key.get("key", ""))
    if held is not None:
        return _variable(held)
    if (key or source.get("secretKeyRef") or {}).get("optional") is True:
        return None
    raise ConfigError(
        f"{_CONTAINER} env: valueFrom of {name} is known to a cluster only: give it a value in this"
        f" shell, export {name}=..."
    )


def _notes(manifest: Manifest, folders: Mapping[str, Path]) -> Iterator[str]:
    image, torch = str(manifest.trainer.get("image")), _torch()
    if image.rpartition("/")[2] == stock.IMAGE.rpartition("/")[2] and torch != stock.TORCH:
        yield (
            f"torch is {torch} here and {stock.TORCH} in {image}: what runs here may fail there, or"
            f" train to other numbers; pip install torch=={stock.TORCH}"
        )
    if left_out := manifest.left_out():
        yield f"without a meaning here: {', '.join(left_out)}"
    sources = manifest.trainer.get("envFrom") or []
    if any(_env_source(manifest, source) is None for source in sources):
        yield "envFrom: what is not in the file is known to a cluster only; export it in this shell"
    mounts = (str(m.get("mountPath")) for m in manifest.trainer.get("volumeMounts") or [])
    bare = [one for one in mounts if one.rstrip("/") not in folders and not Path(one).exists()]
    if bare:
        yield f"nothing is mounted at {', '.join(bare)}: --map {bare[0]}=DIR gives it a folder"


def _torch() -> str:
    try:
        return metadata.version("torch").partition("+")[0]
    except metadata.PackageNotFoundError:  # of a distribution, or for programs without one
        return stock.TORCH


def _cure(path: str) -> str:
    top = "/".join(path.split("/")[:2]) if path.startswith("/") else ""
    return (
        f"--map {top}=DIR names the folder that is {top} in the image"
        if top
        else ("it may be in the image only: give it here, or change to its folder")
    )
