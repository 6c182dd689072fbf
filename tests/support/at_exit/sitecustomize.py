"""On the PYTHONPATH of scripts under test: tells of a process group's threads that outlive it.

Python that has begun to finalize takes the GIL from such a thread, which aborts the process, with
all the work done. It needs the moment: once in some thousand runs. The thread is there each time.
"""

import atexit
import contextlib
import os
import sys
from pathlib import Path


def tell() -> None:
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            name = (task / "comm").read_text().strip()
            if "gloo" in name:
                print(f"rank {os.environ.get('RANK')} has left a thread: {name}", file=sys.stderr)


atexit.register(tell)
