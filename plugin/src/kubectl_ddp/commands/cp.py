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
from pathlib import Path, PurePosixPath
from typing import Any

from kubectl_ddp import gang, reader
from kubectl_ddp.kubectl import Failure, Kubectl, judge
from kubectl_ddp.text import clean

_OUTPUT = "output"  # what `run --output` of the launcher keeps
_END, _BLOCK = 1024, 1 << 16  # bytes
_WEIGHTS = "model.safetensors"
#: $1: file or folder, $2: the job's folder. A file that grows while it is read is no failure.
_COPY = """\
if cd "$1" 2>/dev/null; then tar c . || [ $? -eq 1 ]
elif [ -e "$1" ]; then cd "$(dirname "$1")" && { tar c "./$(basename "$1")" || [ $? -eq 1 ]; }
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
                raise Failure(f"{error.filename or folder}: {error.strerror}") from None
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
        target = self._folder / name
        if name.startswith("/") or ".." in name.split("/"):
            _leave(name, "it would be outside of the folder")
        elif member.isdir():
            target.mkdir(parents=True, exist_ok=True)
        elif member.isreg() and (source := archive.extractfile(member)):
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                shutil.copyfileobj(source, file)
            os.utime(target, (member.mtime, member.mtime))
            self.files[name] = target
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
            (self._folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, self._folder / name)


def _leave(name: str, why: str) -> None:
    print(clean(f"left out: {name}: {why}"), file=sys.stderr)
