"""On the PYTHONPATH of scripts under test: tells of a process group's threads that outlive it.

Python that has begun to finalize takes the GIL from such a thread, which aborts the process, with
all the work done. It needs the moment: once in some thousand runs. The thread is there each time.

Where TEST_HELD_FROM_SNAPSHOT is set, rank 0 stands still in round 0 when it has told of a snapshot
of that step or a later one.
"""

import atexit
import contextlib
import os
import re
import sys
import time
from pathlib import Path


def tell() -> None:
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            name = (task / "comm").read_text().strip()
            if "gloo" in name:
                print(f"rank {os.environ.get('RANK')} has left a thread: {name}", file=sys.stderr)


atexit.register(tell)


def hold(first: int) -> None:
    write = sys.stdout.write

    def write_and_wait(text: str) -> int:
        size = write(text)
        told = re.search(r"step .* snapshot (\d+)$", text)
        if told and int(told[1]) >= first and os.environ.get("DDPJOB_ROUND") == "0":
            sys.stdout.flush()
            while True:
                time.sleep(60)
        return size

    sys.stdout.write = write_and_wait  # type: ignore[method-assign]


if held_from := os.environ.get("TEST_HELD_FROM_SNAPSHOT"):
    hold(int(held_from))
