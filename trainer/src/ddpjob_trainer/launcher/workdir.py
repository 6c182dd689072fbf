"""Prepare a script's working directory: its files, its output folder, its snapshots'.

`ddpjob-trainer run` calls it before it looks for the script. The launcher does this itself, since
an init container would need the claim of the snapshots as a second volume, which kubelets older
than 1.36 may wait for without an end.
"""

from __future__ import annotations

import filecmp
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import ddpjob_contract as contract
from ddpjob_trainer.errors import ConfigError

#: Below the job's snapshots: what the script wrote to the folder of --output, or to several.
OUTPUT: Final = "output"
#: A file server that does not answer must not delay a script that needs none.
_ANSWER_SECONDS: Final = 10.0


def fill(
    files: Path | None,
    outputs: Sequence[Path],
    env: Mapping[str, str],
    say: Callable[[str], None],
    *,
    restores: bool = False,
) -> Callable[[Path], None] | None:
    """Copy ``files`` here, make the snapshots' folder, and link ``outputs`` to folders in it.

    ``restores``: return a function that restores the folder, except a path, if it was empty. Raises
    ConfigError, OSError.
    """
    # A user's own folder may be a whole disk.
    ours = restores and files is not None and not any(Path().iterdir())
    if files is not None:
        _copy(files)
    copied = [path for path in Path().rglob("*") if path.is_file()] if ours else []
    # Their source may be of a later version by then.
    kept = {path: (path.read_bytes(), path.stat().st_mode) for path in copied}
    snapshots = env.get(contract.SNAPSHOT_DIR, "")
    if outputs:
        _link(outputs, snapshots)
    elif snapshots and "://" not in snapshots:
        _make(Path(snapshots), say)

    def again(keep: Path) -> None:
        _clear(outputs, keep.absolute())
        for path, (data, mode) in kept.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            path.chmod(mode)
        if outputs:
            _link(outputs, snapshots)

    return again if ours else None


def _clear(outputs: Sequence[Path], keep: Path) -> None:
    """Empty the working directory, but for the links to the outputs and a path."""
    here = Path.cwd()
    for folder, folders, names in os.walk(".", topdown=False):
        for path in (Path(folder, name) for name in (*names, *folders)):
            if (path in outputs and path.is_symlink()) or (here / path).is_relative_to(keep):
                continue
            if path.is_symlink() or not path.is_dir():
                path.unlink()
            elif not any(path.iterdir()):
                path.rmdir()


def _copy(files: Path) -> None:
    """Copy a ConfigMap's files, without the folders that the kubelet adds."""
    if not files.is_dir():
        raise ConfigError(f"--files {files}: no such folder: mount one there, or leave it out")
    for one in sorted(files.iterdir()):
        if one.is_dir() and not one.name.startswith(".."):
            shutil.copytree(one, one.name, copy_function=_copy_new, dirs_exist_ok=True)
        elif not one.is_dir():
            _copy_new(str(one), one.name)


def _copy_new(source: str, target: str) -> None:
    """Copy a missing file, refuse a different one: `local --map` may name a user's folder."""
    if not os.path.lexists(target):
        shutil.copy(source, target)
    elif not filecmp.cmp(source, target, shallow=False):
        raise ConfigError(
            f"--files: {target} is in the working directory already, with other content: make the"
            " manifest again, or start in an empty folder"
        )


def _link(outputs: Sequence[Path], snapshots: str) -> None:
    if not snapshots or "://" in snapshots:
        raise ConfigError(
            f"--output {outputs[0]}: needs ${contract.SNAPSHOT_DIR}, where it is kept: give the"
            " DDPJob spec.snapshot, or leave it out"
        )
    for output in outputs:
        kept = Path(snapshots).absolute() / OUTPUT / (output if len(outputs) > 1 else "")
        kept.mkdir(parents=True, exist_ok=True)
        output.parent.mkdir(parents=True, exist_ok=True)
        if output.is_symlink() and os.readlink(output) == str(kept):  # noqa: PTH115
            continue
        if os.path.lexists(output):
            raise ConfigError(f"--output {output}: is here already: name a folder that is not")
        output.symlink_to(kept)


def _make(folder: Path, say: Callable[[str], None]) -> None:
    problem: list[str] = []

    def make() -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem.append(f"{error.strerror}")

    thread = threading.Thread(target=make, name="snapshots", daemon=True)
    thread.start()
    thread.join(_ANSWER_SECONDS)
    if thread.is_alive():
        problem.append(f"no answer within {_ANSWER_SECONDS:g} s")
    for one in problem:
        say(f"{folder} of ${contract.SNAPSHOT_DIR} was not made: {one}; whoever writes there fails")
