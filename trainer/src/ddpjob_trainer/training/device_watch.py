"""Measure the device's work, and tell the hang watch while the loop makes no progress.

When a GPU hangs, the hosts of all ranks wait somewhere. So Loop queues a mark behind each batch,
forward, backward and update. The first mark that has not been passed says whether this rank waits
for its own work or for another's.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

from ddpjob_trainer.gpu.accelerator import Accelerator
from ddpjob_trainer.liveness.heartbeat import Activity
from ddpjob_trainer.telemetry.progress import Progress

_LOOK_SECONDS = 1.0
#: Whose seconds are the device's; what it does for other ones, their hosts wait for.
_COUNTED: tuple[Activity, ...] = ("data", "forward", "backward", "update")


class DeviceWatch:
    """A thread, where there is a queue to be watched."""

    def __init__(self, accelerator: Accelerator, progress: Progress) -> None:
        self._accelerator = accelerator
        self._progress = progress
        self._marks: deque[tuple[Activity, Any]] = deque()
        self._passed: Any = None  # the newest mark that was
        self._seconds: dict[Activity, float] = dict.fromkeys(_COUNTED, 0.0)
        self._over = threading.Event()
        self._told: tuple[float, Activity] | None = None

    def start(self) -> None:
        """Look now and then, until stop()."""
        if self._accelerator.queues:
            self._progress.measured_by(self._seconds)
            threading.Thread(target=self._run, name="device watch", daemon=True).start()

    def stop(self) -> None:
        """Look no more."""
        self._over.set()

    def queued(self, activity: Activity) -> None:
        """Mark all that was queued since the last mark as of this activity."""
        if self._accelerator.queues:
            self._marks.append((activity, self._accelerator.mark()))

    def look(self, now: float) -> None:
        """Report the device's activity if the loop gave no sign of life for long.

        Once, and again when it does something else: what never changes is a hang.
        """
        while self._marks and self._marks[0][1].query():
            activity, mark = self._marks.popleft()
            if self._passed is not None and activity in self._seconds:
                self._seconds[activity] += self._passed.elapsed_time(mark) / 1000
            self._passed = mark
        since = self._progress.since[1]
        if not self._marks or now - since < _LOOK_SECONDS:
            return
        found = (since, self._marks[0][0])
        if found != self._told:
            self._told = found
            self._progress.stands(found[1])

    def _run(self) -> None:
        try:
            self._accelerator.enter()
            while not self._over.wait(_LOOK_SECONDS):
                self.look(time.monotonic())
        except RuntimeError:  # of CUDA; the main thread hears of it, too
            return
