"""Workers that hang are ended, with the exit code of a hang and their stacks in the log,
in GET /state and, as far as there is room, in the termination report.

Stacks are asked for, waited for a moment, and only then the worker is killed; the supervisor's
loop goes on meanwhile. Who does not end within the grace period is asked as well, just before.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from ddpjob_trainer.contract import ExitCode
from ddpjob_trainer.hang import Deadlines, Hang
from ddpjob_trainer.launcher.gang import Gang
from ddpjob_trainer.launcher.metrics import LauncherMetrics
from ddpjob_trainer.launcher.watch import HangWatch, StackRequest

#: So long before the end of the grace period stacks are asked for.
_BEFORE_KILL_SECONDS = 0.3


class Overdue:
    """One launcher's, over all rounds. ``stacks``: of the last hang, for GET /state."""

    def __init__(
        self, deadlines: Deadlines, counted: LauncherMetrics, say: Callable[[str], None]
    ) -> None:
        self.stacks = ""
        self._deadlines = deadlines
        self._counted = counted
        self._say = say
        self.begin()

    def begin(self) -> None:
        """A round begins."""
        self._watch = HangWatch(self._deadlines)
        self._request: StackRequest | None = None
        self._hang: Hang | None = None
        self._why_asked = ""

    def tick(self, gang: Gang, now: float, *, terminating: bool) -> float:
        """Do what is due; return when to call again. ``terminating``: we were told to end."""
        if self._request is not None:
            if not self._request.is_done(now):
                return self._request.due(now)
            self._answered(gang, self._request)
            self._request = None
        elif terminating:
            return self._before_kill(gang, now)
        elif not gang.stopping:
            self._hang = self._watch.look(gang.state_dir, gang.pids, now)
            if self._hang is not None:
                self._counted.hangs[self._hang.phase] += 1
                self._ask(gang, str(self._hang), now)
                return now
        return now + self._watch.interval

    def _ask(self, gang: Gang, why: str, now: float) -> None:
        self._why_asked = why
        self._say(f"{why}; stacks of all threads follow")
        self._request = StackRequest(gang.state_dir, gang.pids, now)

    def _answered(self, gang: Gang, request: StackRequest) -> None:
        hang = self._hang
        self.stacks = request.text(first=hang.rank if hang else None)
        with contextlib.suppress(OSError):
            os.write(2, self.stacks.encode())
        if hang is not None and not gang.stopping:
            last_lines = request.brief(hang.rank)
            gang.condemn(hang.rank, ExitCode.HANG, f"Hang: {hang}", last_lines)

    def _before_kill(self, gang: Gang, now: float) -> float:
        if gang.kill_at is None or self._why_asked or not gang.pids:
            return now + self._watch.interval
        moment = gang.kill_at - _BEFORE_KILL_SECONDS
        if now < moment:
            return moment
        ranks = ", ".join(map(str, sorted(gang.pids)))
        if now < gang.kill_at:  # else there is no time for an answer
            self._hang = None
            self._ask(gang, f"the grace period is over and not ended: rank {ranks}", now)
        return now
