"""Prepare a script's working directory: its files, its output folder, its snapshots'.

`ddpjob-trainer run` calls it before it looks for the script. The launcher does this itself, since
an init container would need the claim of the snapshots as a second volume, which kubelets older
than 1.36 may wait for without an end.
"""

from __future__ import annotations

import filecmp
import glob
import os
import re
import shutil
import stat
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import ddpjob_contract as contract
from ddpjob_trainer.errors import ConfigError

# --- Before the program ---------------------------------------------------------------------------

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
        say(f"could not create {folder} of ${contract.SNAPSHOT_DIR}: {one}; writes to it will fail")


# --- Checkpoints ----------------------------------------------------------------------------------
# The launcher with the hub looks for all of the gang, when nothing runs: hub.py hands the answer
# on with Go. `ddpjob audit` looks by the same rules.

#: A file server that does not answer must not stop the launcher.
_POLL_SECONDS: Final = 0.2
#: So often a program may fail from one checkpoint.
_TRIES: Final = 2

_File = tuple[int, int]  # device and inode, the same by whichever name
_Match = tuple[int, list[tuple[int, str]], _File, str]  # modified at, name in parts, file, name
_NONE: Final[_Match] = (0, [], (0, 0), "")


class Checkpoints:
    """``pattern``: of files or directories, relative to the working directory; "": of none.

    ``emptied``: a restart removes what lies in the working directory itself.
    """

    def __init__(self, pattern: str, *, emptied: bool = False) -> None:
        self._pattern, self._emptied = pattern, emptied
        self._found: list[list[_Match]] | None = None  # of the look that is under way
        self._newest: _Match = _NONE  # at the last look
        self._given = ""  # by it
        self._failures: Counter[str] = Counter()  # of a program that went on from it
        self._earlier: set[tuple[int, _File]] = set()  # what an earlier run has left

    def leave(self) -> str:
        """Take all that is there for an earlier run's; return the newest of it, "" for none."""
        if not self._pattern:
            return ""
        names: list[str] = []
        self._aside(self._leave, names).join(_POLL_SECONDS)
        return next(iter(names), "")

    def look(self, *, failed: bool = False) -> str | None:
        """Return the newest, "" for none, None while a look lasts.

        ``failed``: the program that went on from the last one has ended by its own failure. Where
        it does so twice an older one is next: the newest may be half written.
        """
        if not self._pattern:
            return ""
        if self._found is None:
            self._found = []
            self._thread = self._aside(self._look, self._found)
        self._thread.join(_POLL_SECONDS)
        if self._thread.is_alive():
            return None
        (found,), self._found = self._found, None
        found = [one for one in found if (one[0], one[2]) not in self._earlier]
        newest = next(iter(found), _NONE)
        if newest > self._newest:
            self._failures.clear()  # it got on
        elif failed:
            self._failures[self._given] += 1
        self._newest = newest
        names = [name for *_, name in found]
        sound = [name for name in names if self._failures[name] < _TRIES]
        self._given = next(iter(sound or names), "")
        return self._given

    def _aside(self, search: Callable[[list[Any]], None], found: list[Any]) -> threading.Thread:
        thread = threading.Thread(target=search, args=(found,), name="checkpoints", daemon=True)
        thread.start()
        return thread

    def _look(self, found: list[list[_Match]]) -> None:
        found.append(matching_checkpoints(self._pattern, Path.cwd(), emptied=self._emptied))

    def _leave(self, names: list[str]) -> None:
        found = matching_checkpoints(self._pattern, Path.cwd(), emptied=self._emptied)
        self._earlier = {(at, file) for at, _, file, _ in found}
        names += [name for *_, name in found]


def matching_checkpoints(pattern: str, folder: Path, *, emptied: bool = False) -> list[_Match]:
    """Return what matches, the newest first: by time of modification, then by name.

    An empty file or directory does not: a save has only begun. Of a file with several names, as
    of one that a link called latest leads to, the last name counts.
    """
    found: list[_Match] = []
    # Path.glob() takes no absolute pattern.
    for name in glob.iglob(pattern, root_dir=folder, recursive=True):  # noqa: PTH207
        path = folder / name
        try:
            about = path.stat()
            folders = stat.S_ISDIR(about.st_mode) and bool(os.listdir(path))  # noqa: PTH208
        except OSError:
            continue
        if not folders and not (stat.S_ISREG(about.st_mode) and about.st_size):
            continue
        if not (emptied and path.resolve().is_relative_to(folder.resolve())):
            file = (about.st_dev, about.st_ino)
            found.append((about.st_mtime_ns, _numbered(name), file, name))
    return sorted({one[2]: one for one in sorted(found)}.values(), reverse=True)


def _numbered(name: str) -> list[tuple[int, str]]:
    """Order names by their numbers: step-9 comes before step-10."""
    parts = re.findall(r"\d+|\D+", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
