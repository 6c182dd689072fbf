"""Find a hang from within the process, where torchrun is the launcher.

A thread reads the signs of life that the launcher would, prints all stacks and ends the process
with exit code 76. A C call that holds the GIL blocks the thread; then faulthandler's own timer
prints the stacks and ends the process, with exit code 1.
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
#: The thread keeps resetting the timer, which must always expire after the thread's deadline.
_TIMER_FACTOR: Final = 1.5
_TIMER_SECONDS: Final = 5.0
_WRITE_SECONDS: Final = 1.0


class Watchdog:
    """Watches from start() to the end of the process."""

    def __init__(self, writer: RankStateWriter, deadlines: Deadlines) -> None:
        self._writer = writer
        self._deadlines = deadlines
        self._interval = min(_LONGEST_LOOK_SECONDS, deadlines.shortest / 10)

    def start(self) -> None:
        """Watch from now on."""
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def _run(self) -> None:
        marks, since, looked = -1, 0.0, 0.0
        wound = 0.0
        while True:
            now = time.monotonic()
            state = self._writer.state
            if state.phase == "done":  # a long evaluation, say, has no limit
                if wound:  # once: from here on the timer is the script's
                    faulthandler.cancel_dump_traceback_later()
                wound, looked = 0.0, now  # finish() may still have a snapshot to wait for
                time.sleep(self._interval)
                continue
            if state.marks != marks:
                marks, since = state.marks, now
            elif looked and now - looked > 2 * self._interval:  # this machine was suspended
                since += now - looked - self._interval
            looked = now
            hang = find([Sign(state, now - since)], self._deadlines)
            if hang is not None:
                self._end(str(hang))
            if now >= wound:
                wound = now + self._wind_up()
            time.sleep(self._interval)

    def _wind_up(self) -> float:
        """Reset the timer; return after how many seconds to do so again."""
        longest = max(self._deadlines.startup, self._deadlines.step, self._deadlines.snapshot)
        faulthandler.dump_traceback_later(longest * _TIMER_FACTOR + _TIMER_SECONDS, exit=True)
        return min(longest / 4, 60.0)

    def _end(self, message: str) -> None:
        # print() may block on a lock that the hung thread holds, and a pipe without a reader blocks
        # too.
        if select.select([], [2], [], _WRITE_SECONDS)[1]:
            os.write(2, f"ddpjob: {message}, ending with exit code {ExitCode.HANG:d}\n".encode())
            faulthandler.dump_traceback(file=2, all_threads=True)
        os._exit(ExitCode.HANG)
