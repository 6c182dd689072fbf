"""Find a hang from within the process, where torchrun is the launcher.

A thread reads the signs of life that the launcher would, prints all stacks and ends the process
with exit code 76. A C call that holds the GIL blocks the thread; then the other ranks end, by their
collectives' timeout.
"""

from __future__ import annotations

import faulthandler
import os
import select
import threading
import time
from typing import Final

from ddpjob_contract import ExitCode
from ddpjob_trainer.liveness.hang import Deadlines, Sign, find
from ddpjob_trainer.liveness.heartbeat import RankStateWriter

_LONGEST_LOOK_SECONDS: Final = 1.0


def watch(writer: RankStateWriter, deadlines: Deadlines) -> None:
    """Watch this process from now to its end."""
    threading.Thread(target=_run, args=(writer, deadlines), name="watchdog", daemon=True).start()


def _run(writer: RankStateWriter, deadlines: Deadlines) -> None:
    interval = min(_LONGEST_LOOK_SECONDS, deadlines.shortest / 10)
    marks, since, looked = -1, 0.0, 0.0
    while True:
        now = time.monotonic()
        state = writer.state
        if state.marks != marks:
            marks, since = state.marks, now
        elif looked and now - looked > 2 * interval:  # this machine was suspended
            since += now - looked - interval
        looked = now
        hang = find([Sign(state, now - since)], deadlines)
        if hang is not None:
            _end(str(hang))
        time.sleep(interval)


def _end(message: str) -> None:
    # print() may block on a lock of the hung thread, and a pipe without a reader blocks too.
    if select.select([], [2], [], 1.0)[1]:
        os.write(2, f"ddpjob: {message}, ending with exit code {ExitCode.HANG:d}\n".encode())
        faulthandler.dump_traceback(file=2, all_threads=True)
    os._exit(ExitCode.HANG)
