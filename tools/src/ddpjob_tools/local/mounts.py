"""Put folders of this machine in the place of the pods': ConfigMaps, the working directory.

job.py calls it. A working directory that is an emptyDir is a folder for each replica here, gone
with the job's end.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ddpjob_contract as contract
from ddpjob_tools.local.manifest import Manifest
from ddpjob_trainer.errors import ConfigError

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
