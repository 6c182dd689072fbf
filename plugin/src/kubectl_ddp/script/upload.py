"""Lay a script's files on the job's claim before there is a job: `kubectl ddp run` of large code.

By a tar into a pod of the job's image and user, which mounts the claim and is deleted then.
"""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kubectl_ddp import reader
from kubectl_ddp.gang import Job
from kubectl_ddp.kubectl import Failure, Kubectl, Object, judge
from kubectl_ddp.reader import Consent

_BY_HAND = "docs/start/your-script.md#more-files-a-claim"
#: Files of an earlier job of this name would stay among these.
_UNPACK = 'rm -rf "$1" && mkdir -p "$1" && tar x -C "$1"'


def lay(kubectl: Kubectl, job: Object, files: Mapping[str, Path], folder: str) -> None:
    """Copy the files into a folder of the claim; raise Failure."""
    name = f"{job['metadata']['name']}-files-{secrets.token_hex(3)}"
    body = reader.manifest(Job(job), name, (), Consent(), writes=True)
    # A node may have to be bought and the image pulled: it says what it waits for.
    with reader.staying(kubectl, body, _BY_HAND, patient=True):
        words = ("exec", "-i", name, "--", "sh", "-c", _UNPACK, "sh", folder)
        with (
            tempfile.TemporaryFile("w+", encoding="utf-8") as said,
            kubectl.running(*words, stdin=subprocess.PIPE, stdout=said, stderr=said) as process,
        ):
            stream: Any = process.stdin
            try:
                with tarfile.open(fileobj=stream.buffer, mode="w|", dereference=True) as archive:
                    for inner, path in files.items():
                        archive.add(path, inner, recursive=False, filter=_runs)
                stream.close()
            except BrokenPipeError:
                pass  # it says why
            except OSError as error:
                with contextlib.suppress(OSError):  # what it still holds would fail later
                    stream.close()
                what = f"{path}: {error.strerror or 'shrank while it was read'}"
                raise Failure(f"{what}: no job is created; run it again") from None
            process.wait()
            said.seek(0)
            text = said.read()
        judge(process, text)
    print(f"{len(files)} files laid on the claim, in {folder}", file=sys.stderr)


def _runs(one: tarfile.TarInfo) -> tarfile.TarInfo:
    """Let a program be started whatever its mode is here, as one of a ConfigMap is."""
    one.mode |= 0o755
    return one
