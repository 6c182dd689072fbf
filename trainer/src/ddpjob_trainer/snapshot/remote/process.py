"""Talk to the object store in a process beside rank 0: fetch once, or upload.

A launcher starts one, too, at its end, for its evidence.
It never imports torch, has a low priority, and ends with its rank. Requests and answers are JSON,
one per line.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from ddpjob_contract.text import without_credentials
from ddpjob_trainer.environment import Identity
from ddpjob_trainer.errors import ConfigError, PeerLostError
from ddpjob_trainer.snapshot.remote.store import Store
from ddpjob_trainer.snapshot.remote.transfer import EvidenceCopy, Uploader, fetch

_NICE = 10
_FIRST_SECONDS = 1.0
_MOST_SECONDS = 300.0
_FETCH_ATTEMPTS = 5


def answer(**about: Any) -> None:
    """Tell the rank."""
    print(json.dumps(about), flush=True)


def why(error: BaseException, url: str) -> str:
    """Word any library's error in one line, without the credentials of its URL."""
    lines = without_credentials(str(error), url).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


def listen(requests: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Take in what the rank says; end this process when it is gone."""
    for line in sys.stdin:
        requests.put(json.loads(line))
    os._exit(0)


def end_with_rank() -> None:
    """End this process even where one that the rank forked holds our pipe open."""
    rank = os.getppid()
    while os.getppid() == rank:
        time.sleep(1.0)
    os._exit(0)


def run_fetch(order: dict[str, Any]) -> None:
    """Answer {step}, or {text, kind} when it cannot be done."""
    url, pause = order["url"], _FIRST_SECONDS
    shown = without_credentials(url, url)
    for left in reversed(range(_FETCH_ATTEMPTS)):
        try:
            step = fetch(
                Store(url), Path(order["root"]), Identity(**order["identity"]),
                resume=order["resume"], tell=lambda text: answer(say=text),
                alive=lambda: answer(alive=True),
            )  # fmt: skip
            answer(step=step)
        except (PeerLostError, ConfigError) as error:
            answer(kind=type(error).__name__, text=str(error))
        except Exception as error:  # libraries have exceptions of their own
            if left:
                answer(say=f"{shown}: {why(error, url)}; trying again in {pause:.0f} s")
                time.sleep(pause)
                pause *= 2
                continue
            answer(kind="OSError", text=f"{shown} cannot be read: {why(error, url)}")
        return


class UploadQueue:
    """What is to be uploaded, and when it is tried again. ``now``: a monotonic clock."""

    def __init__(self, make: Callable[[], Uploader], now: Callable[[], float], url: str) -> None:
        self._make = make
        self._now = now
        self._url = url
        self._uploader: Uploader | None = None
        self._wanted = -1
        self._failures = 0
        self._next = 0.0

    def wait_seconds(self) -> float | None:
        """Return how long there is nothing to do; None: until a request."""
        if self._wanted < 0:
            return None
        return max(0.0, self._next - self._now())

    def want(self, step: int) -> None:
        """Ask for a newer snapshot; older ones need not be uploaded any more."""
        self._wanted = max(self._wanted, step)

    def attempt(self, *, at_once: bool = False) -> dict[str, Any] | None:
        """Upload what is wanted, if it is time; return what there is to tell."""
        if self._wanted < 0 or not (at_once or self._now() >= self._next):
            return None
        step = self._wanted
        try:
            if self._uploader is None:
                self._uploader = self._make()
            self._uploader.upload(step)
        except (PeerLostError, ConfigError) as error:
            self._wanted = -1
            return {"failed": step, "text": str(error), "over": True}
        except Exception as error:  # libraries have exceptions of their own
            self._failures += 1
            pause = min(_MOST_SECONDS, _FIRST_SECONDS * 2 ** (self._failures - 1))
            self._next = self._now() + pause
            return {"failed": step, "text": why(error, self._url)}
        self._failures, self._wanted = 0, -1
        return {"uploaded": step}


def run_uploads(order: dict[str, Any], requests: queue.SimpleQueue[dict[str, Any]]) -> NoReturn:
    """Answer {uploaded} or {failed, text}; asked for it {now}, do not wait after a failure."""
    root, own = Path(order["root"]), (order["sequence"], order["keep"], order.get("secret", ""))
    url: str = order["url"]
    uploads = UploadQueue(lambda: Uploader(Store(url), root, *own), time.monotonic, url)
    kept: EvidenceCopy | None = None
    while True:
        request: dict[str, Any] = {}
        with contextlib.suppress(queue.Empty):
            request = requests.get(timeout=uploads.wait_seconds())
        if "step" in request:
            uploads.want(request["step"])
        outcome = uploads.attempt(at_once="now" in request)
        if outcome is not None:
            answer(**outcome)
        if outcome is not None and "uploaded" in outcome:
            with contextlib.suppress(Exception):  # a snapshot that fails, too, says why
                kept = kept or EvidenceCopy(url, root)
                kept.copy()


def main() -> None:
    """Do what the first line says."""
    # A Ctrl-C or a SIGTERM to the whole group is the rank's business.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    os.nice(_NICE)
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=end_with_rank, daemon=True).start()
    threading.Thread(target=listen, args=(requests,), daemon=True).start()
    order = requests.get()
    if order["do"] == "fetch":
        run_fetch(order)
        os._exit(0)
    if order["do"] == "evidence":
        EvidenceCopy(order["url"], Path(order["root"]), frozenset(order["names"])).copy()
        os._exit(0)
    run_uploads(order, requests)


if __name__ == "__main__":
    main()
