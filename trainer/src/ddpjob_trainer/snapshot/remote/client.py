"""Link a rank to its process for the object store: tell it, ask it.

Only at the start, when a snapshot may have to be fetched, and at the end, when the last one must
not be lost with the disk, the rank waits.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from ddpjob_contract.text import without_credentials
from ddpjob_trainer.environment import Identity, SnapshotSettings, source_folders
from ddpjob_trainer.errors import ConfigError, PeerLostError
from ddpjob_trainer.printing import say
from ddpjob_trainer.snapshot.ondisk import lineage

_MODULE = "ddpjob_trainer.snapshot.remote.process"
_LOOK_SECONDS = 0.2


def check_upload(url: str, directory: object) -> None:
    """Raise ConfigError for what cannot work; the store itself is asked by the process only."""
    if "://" not in url:
        shown = without_credentials(url, url)
        raise ConfigError(f"snapshots.upload={shown!r} must be a URL such as s3://bucket/job")
    if directory is None:
        raise ConfigError(
            "snapshots.upload needs snapshots.directory, too: snapshots are written to disk first"
        )
    if importlib.util.find_spec("fsspec") is None:
        raise ConfigError("snapshots.upload needs fsspec: pip install 'ddpjob-trainer[upload]'")


class RemoteProcess:
    """One of them, and the lines that it says. Raises OSError where it cannot be started."""

    def __init__(self, do: str, settings: SnapshotSettings, **more: Any) -> None:
        assert settings.directory is not None, "check_upload() said so"
        paths = [source_folders(), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        assert self._process.stdout is not None
        self._out = self._process.stdout.fileno()
        os.set_blocking(self._out, False)
        self._text = b""
        self.ended = False
        root = str(settings.directory.absolute())
        order = {"do": do, "url": settings.upload, "root": root, "keep": settings.keep, **more}
        self.send(order)

    def send(self, request: dict[str, Any]) -> None:
        """Say something. That it is gone shows in answers()."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()

    def answers(self, seconds: float = 0.0) -> list[dict[str, Any]]:
        """Return what it has said since the last call, waiting so long for the first."""
        poll = select.poll()
        poll.register(self._out, select.POLLIN)
        if not self.ended and poll.poll(seconds * 1000):
            with contextlib.suppress(BlockingIOError):
                while data := os.read(self._out, 1 << 16):
                    self._text += data
                self.ended = True
        *lines, self._text = self._text.split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """End it now, whatever it is doing."""
        with contextlib.suppress(OSError), self._process:  # closes its pipes and waits
            self._process.kill()


def fetch_if_newer(
    settings: SnapshotSettings, identity: Identity, alive: Callable[[], None]
) -> int:
    """Bring to disk what only the store has; return its step, -1: of none.

    ``alive`` is called as long as bytes come. Raises OSError, PeerLostError, ConfigError.
    """
    root, url = settings.directory, without_credentials(settings.upload, settings.upload)
    known = lineage.read_starts(lineage.Disk(root)).values() if root and root.is_dir() else ()
    if any((start.uid, start.attempt) == (identity.uid, identity.attempt) for start in known):
        return -1  # a restart in place: the disk is that of the round before
    process = RemoteProcess("fetch", settings, resume=settings.resume, identity=asdict(identity))
    with contextlib.closing(process):
        while not process.ended:
            for answer in process.answers(_LOOK_SECONDS):
                alive()
                if "say" in answer:
                    say(0, answer["say"])
                elif "step" in answer:
                    if answer["step"] is None:
                        return -1
                    say(0, f"fetched the snapshot of step {answer['step']} from {url}")
                    return int(answer["step"])
                elif "kind" in answer:
                    kinds = {"PeerLostError": PeerLostError, "ConfigError": ConfigError}
                    raise kinds.get(answer["kind"], OSError)(answer["text"])
    raise OSError(f"{url}: the process that reads it ended")


class Uploads:
    """Rank 0's uploads. Nothing of it raises, and nothing but wait() waits."""

    def __init__(
        self,
        settings: SnapshotSettings,
        sequence: int,
        count: Callable[[int | None], None],
        secret: str = "",
    ) -> None:
        self._settings = settings
        self._own = {"sequence": sequence, "secret": secret}
        self._count = count
        self._process: RemoteProcess | None = None
        self._over = False
        self._reported = False
        self._pending = -1

    def committed(self, step: int) -> None:
        """Have a snapshot uploaded that is durable on disk."""
        if self._over:
            return
        try:
            if self._process is None or self._process.ended:
                self.close()
                self._process = RemoteProcess("upload", self._settings, **self._own)
        except OSError as error:
            self._failed(step, f"no process for it: {error}")
            return
        self._pending = step
        self._process.send({"step": step})

    def receive(self, seconds: float = 0.0) -> bool:
        """Take in what became of them; return whether it has ended."""
        if self._process is None:
            return True
        for answer in self._process.answers(seconds):
            if "uploaded" in answer:
                self._count(answer["uploaded"])
                self._reported = False
                if answer["uploaded"] >= self._pending:
                    self._pending = -1
            elif "failed" in answer:
                self._over = answer.get("over", False)
                self._failed(answer["failed"], answer["text"])
        if self._process.ended and self._pending >= 0 and not self._over:
            self._failed(self._pending, "its process ended")
            self._pending = -1
        return self._process.ended

    def _failed(self, step: int, text: str) -> None:
        self._count(None)
        if not self._reported:  # once for a series of failures
            again = "no more are uploaded" if self._over else "it is tried again"
            say(0, f"the snapshot of step {step} was not uploaded: {text}; {again}")
        self._reported = True

    def wait(self, seconds: float, alive: Callable[[], None]) -> None:
        """Wait so long until the newest is uploaded: the disk may be gone after this."""
        self.receive()
        if self._process is None or self._pending < 0:
            return
        self._process.send({"now": True})
        deadline = time.monotonic() + seconds
        while self._pending >= 0 and not self._over and time.monotonic() < deadline:
            self.receive(_LOOK_SECONDS)
            alive()
        if self._pending >= 0:
            say(0, f"the snapshot of step {self._pending} is on disk only so far")

    def close(self) -> None:
        """End the process; what is half uploaded counts for nobody."""
        if self._process is not None:
            self._process.close()
            self._process = None
