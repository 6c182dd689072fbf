"""Bring a job's results home: `kubectl ddp cp`, as a tar from a pod of the job, or one made for it.

What comes is a stranger's archive: files and folders are written, below the folder, and no links.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import posixpath
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from kubectl_ddp import gang, reader
from kubectl_ddp.kubectl import Failure, Kubectl, judge
from kubectl_ddp.text import clean

_OUTPUT = "output"  # what `run --output` of the launcher keeps
_END, _BLOCK = 1024, 1 << 16  # bytes
_WEIGHTS = "model.safetensors"
#: $1: file or folder, $2: the job's folder. A file that grows or goes while it is read is no
#: failure; tar's exit code is 1 as well where one shrank, and has zeros for what is lost.
_COPY = """\
copy() {
  { said=$(LC_ALL=C tar c "$1" 2>&1 >&3); code=$?; } 3>&1
  [ -z "$said" ] || printf '%s\\n' "$said" >&2
  [ $code -eq 1 ] || return $code
  printf '%s\\n' "$said" | while read -r line; do
    case $line in
      *' file changed as we read it'|*' File removed before we read it') ;;
      *) printf '%s\\n' "$line" >&2; exit 1 ;;
    esac
  done
}
if cd "$1" 2>/dev/null; then copy .
elif [ -e "$1" ]; then cd "$(dirname "$1")" && copy "./$(basename "$1")"
else echo "$1 is not there; in $2 are: $(ls -m "$2" | tr -d '\\n')" >&2; exit 2; fi
"""
_EXPORT = f"""\
d=$(mktemp -d) && ddpjob-trainer snapshot export "$2" "$d/{_WEIGHTS}" >&2 &&
    tar c -C "$d" {_WEIGHTS}
code=$?; rm -rf "$d"; exit $code
"""


def run(kubectl: Kubectl, options: argparse.Namespace) -> int:
    """Copy; raise Failure."""
    if options.folder.exists() and not options.folder.is_dir():
        raise Failure(f"{options.folder}: a file, where a folder is expected")
    name, _, path = options.source.partition(":")
    job = gang.find_job(kubectl, name)
    members = gang.find_members(kubectl, job)
    snapshot = job.spec.get("snapshot") or {"path": ""}
    home = posixpath.join(snapshot["path"], job.name)
    source = posixpath.join(home, path or _OUTPUT)
    with contextlib.ExitStack() as stack:
        alive = [one for _, one in sorted(members.items()) if one.running]
        alive = [one for one in alive if one.state != "Terminating"]
        if not snapshot["path"] and not (alive and path.startswith("/")):
            raise Failure(f"{name} has no spec.snapshot: only /PATH of a running pod can be copied")
        if alive:
            where = [alive[0].name, "-c", alive[0].container]
        elif PurePosixPath(source).is_relative_to(snapshot["path"]):
            allowed = reader.consent(options)
            where = [stack.enter_context(reader.opened(kubectl, job, allowed))]
        else:
            raise Failure(f"{source} is not below {snapshot['path']}, and no pod of {name} runs")
        script = _EXPORT if options.weights else _COPY
        words = ("exec", "-n", job.namespace, *where, "--", "sh", "-c", script, "sh", source, home)
        count, size = _unpacked(kubectl, words, options.folder)
    print(f"{options.folder}: {count} files, {size / 2**20:.1f} MiB", file=sys.stderr)
    return 0


class _Watched:
    """Reads an archive, and whether it came to its end: tarfile takes a cut header for one."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._last = stream.buffer, b""

    def read(self, size: int) -> bytes:
        """Return the next bytes."""
        found: bytes = self._stream.read(size)
        self._last = (self._last + found)[-_END:]
        return found

    @property
    def ended(self) -> bool:
        """Tell whether the last that came was the end of an archive: two blocks of zeros."""
        return self._last == bytes(_END)


def _unpacked(kubectl: Kubectl, words: tuple[str, ...], folder: Path) -> tuple[int, int]:
    """Return how many files came, and their bytes. Raises Failure."""
    found, broken = _Found(folder), False
    with tempfile.TemporaryFile("w+", encoding="utf-8") as said:
        with kubectl.running(*words, stdout=subprocess.PIPE, stderr=said) as process:
            stream: Any = _Watched(process.stdout)
            try:
                with tarfile.open(fileobj=stream, mode="r|") as archive:
                    for member in archive:
                        found.take(archive, member)
                found.copy_links()
            except tarfile.ReadError:
                broken = True
            except OSError as error:
                where = error.filename2 or error.filename or folder
                raise Failure(f"{where}: {error.strerror}") from None
            while stream.read(_BLOCK):
                pass
            process.wait()
        said.seek(0)
        text = said.read()
    judge(process, text)
    if broken or not stream.ended:
        raise Failure(f"the copy broke off after {len(found.files)} files: try again")
    print(clean(text), end="", file=sys.stderr)
    return len(found.files), found.size


class _Found:
    """Writes an archive's files, by name. tarfile's own filter came with 3.11.4 only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._links: list[tuple[str, str]] = []
        self.files: dict[str, Path] = {}
        self.size = 0

    def take(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        """Write a file or a folder; a link waits for what it leads to."""
        name = posixpath.normpath(member.name)
        if name.startswith("/") or ".." in name.split("/") or "\0" in name:
            _leave(name, "it would be outside of the folder")
        elif member.isdir():
            self._made(name)
        elif member.isreg() and (source := archive.extractfile(member)):

            def write(path: Path) -> None:
                with path.open("xb") as file:
                    shutil.copyfileobj(source, file)
                with contextlib.suppress(OSError, OverflowError, ValueError):  # any number came
                    os.utime(path, (member.mtime, member.mtime))

            self.files[name] = self._written(name, write)
            self.size += member.size
        else:
            beside = posixpath.dirname(name) if member.issym() else ""
            self._links.append((name, posixpath.join(beside, member.linkname)))

    def copy_links(self) -> None:
        """Make each link to a file that came a copy of it: a link may lead anywhere later."""
        for name, leads in self._links:
            source = self.files.get(posixpath.normpath(leads))
            if source is None:
                _leave(name, f"no file, nor a link to one that came: {leads}")
                continue
            self._written(name, partial(shutil.copy2, source))

    def _made(self, name: str) -> Path:
        """Make a folder. Raises Failure where a link, which may lead anywhere, is on the way."""
        path = self._folder
        for part in PurePosixPath(name).parts:
            path /= part
            if path.is_symlink():
                raise Failure(f"{path}: a link, nothing is written through it: remove it")
        path.mkdir(parents=True, exist_ok=True)
        return path

    def _written(self, name: str, write: Callable[[Path], object]) -> Path:
        """Write a file beside its place: an earlier copy stays until this one is whole."""
        target = self._made(posixpath.dirname(name)) / posixpath.basename(name)
        beside = target.with_name(f".kubectl-ddp-{os.getpid()}")
        try:
            beside.unlink(missing_ok=True)
            write(beside)
            return beside.replace(target)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise


def _leave(name: str, why: str) -> None:
    print(clean(f"left out: {name}: {why}"), file=sys.stderr)
