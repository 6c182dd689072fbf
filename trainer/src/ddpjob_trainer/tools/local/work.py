"""A working directory that is an emptyDir: a folder for each replica, gone with the job's end."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ddpjob_contract as contract
from ddpjob_trainer.tools.local.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Work:
    """``folder``: holds those of the replicas. ``mounts``: of ConfigMaps, which launchers copy."""

    folder: Path
    mounts: Sequence[Path]
    files: Mapping[Path, bytes]

    def of(self, replica: int | str) -> Path:
        """Return a replica's own folder; $(NAME) of its number will do."""
        return self.folder / str(replica)

    def enter(self, replica: int) -> Path:
        """Make a replica's folder anew, as a pod finds it empty."""
        shutil.rmtree(self.of(replica), ignore_errors=True)
        self.of(replica).mkdir(parents=True)
        return self.of(replica)

    def has(self, inner: Path) -> bool:
        """Whether a launcher will copy this file there."""
        return any(mount / inner in self.files for mount in self.mounts)

    def lost(self) -> list[str]:
        """Return the files that the script has written there, which end with a pod."""
        found = set()
        for pod in self.folder.iterdir():
            for path in pod.rglob("*"):
                inner = path.relative_to(pod)
                if (
                    path.is_file()
                    and "__pycache__" not in inner.parts
                    and not self._copy(path, inner)
                ):
                    found.add(str(inner))
        return sorted(found)

    def _copy(self, path: Path, inner: Path) -> bool:
        held = (self.files.get(mount / inner) for mount in self.mounts)
        return any(one is not None and one == path.read_bytes() for one in held)


#: In a path: the replica of whoever reads it.
OWN = f"$({contract.REPLICA})"


def mounted_at(manifest: Manifest, folders: Mapping[str, Path]) -> str:
    """Return where in the pods it is; "": none is the working directory, or --map names it."""
    at = str(manifest.trainer.get("workingDir") or "").rstrip("/")
    empty = {one.get("name") for one in manifest.pod.get("volumes") or [] if "emptyDir" in one}
    mounts = manifest.trainer.get("volumeMounts") or []
    here = {one.get("name") for one in mounts if str(one.get("mountPath")).rstrip("/") == at}
    return at if at not in folders and here & empty else ""
