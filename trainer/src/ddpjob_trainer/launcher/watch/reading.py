"""Feed the newest lines of rank 0 to the reader of printed numbers; say once what it recognized.

The supervisor's loop calls look(); reports/ shows the numbers where the library reports no steps.
It runs in the main thread because only there a signal ends an expression that never would.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from ddpjob_trainer.launcher.output import OutputPump
from ddpjob_trainer.launcher.watch.pace import Pace
from ddpjob_trainer.launcher.watch.printed import Numbers, Reader

_EVERY_SECONDS: Final = 0.25
#: Of processor time, so a busy machine cuts nothing off. The hub hears nothing meanwhile.
_MOST_SECONDS: Final = 0.1


class _TooSlowError(Exception):
    """An expression has used up its time."""


class Reading:
    """Numbers of the present round, for show only. ``output``: spec.output."""

    def __init__(
        self, output: Mapping[str, Any], say: Callable[[str], None], *, forms: bool = True
    ) -> None:
        """Take ``forms`` False for a program that uses the library, which reports its steps."""
        self._say = say
        self._slow: set[str] = set()
        self._searching = False
        self._said = self._due = 0.0
        self.pace = Pace()
        given = output if forms or output.get("forms") else {**output, "forms": "Never"}
        self._reader = Reader(given, self._search)
        self.off = given.keys() <= {"forms"} and given.get("forms") == "Never"
        if not self.off:
            signal.signal(signal.SIGVTALRM, self._ring)

    @property
    def numbers(self) -> Numbers:
        """Return what was read last; from another thread, too."""
        return self._reader.numbers

    def begin(self) -> None:
        """Start over with a round."""
        self._reader.begin()
        self.pace = Pace()

    def look(self, pump: OutputPump, now: float, *, last: bool = False) -> bool:
        """Read the lines that are new; return whether it did. ``last``: at once."""
        if self.off or (now < self._due and not last):
            return False
        self._due = now + _EVERY_SECONDS
        for line in pump.fresh():
            self._reader.read(line, now)
        if self.numbers.step is not None:
            self.pace.count(self.numbers.step, now)
        if self._reader.recognized and not self._said:
            self._said = now
            found = "; ".join(
                f"{of} in {text.strip()[:60]!r}" for of, text in self._reader.recognized.items()
            )
            self._say(
                f"read from the output, only to be shown: {found}; to read otherwise set"
                " spec.output (run --read 'step=REGEX'), to read nothing its forms: Never"
                " (run --read never)"
            )
        return True

    def facts(self) -> dict[str, float] | None:
        """Return State.printed, None while nothing was read."""
        found, now = self.numbers, time.monotonic()
        values = {
            "step": found.step,
            "totalSteps": found.total_steps,
            "loss": found.loss,
            "stepsPerSecond": self.pace.per_second(now),
        }
        return {name: value for name, value in values.items() if value is not None} or None

    def metrics(self) -> dict[str, float]:
        """Return values by the names of the library's metrics."""
        found = self.numbers
        since = time.time() - time.monotonic()
        values = {"step": found.step, "loss": found.loss}
        if found.at:
            values["heartbeat_timestamp_seconds"] = found.at + since
        return {name: float(value) for name, value in values.items() if value is not None}

    def _ring(self, signum: int, frame: object) -> None:
        if self._searching:
            self._searching = False
            raise _TooSlowError

    def _search(self, pattern: re.Pattern[str], line: str) -> re.Match[str] | None:
        if pattern.pattern in self._slow:
            return None
        try:
            self._searching = True
            signal.setitimer(signal.ITIMER_VIRTUAL, _MOST_SECONDS)
            found = pattern.search(line)
            self._searching = False
        except _TooSlowError:
            self._slow.add(pattern.pattern)
            self._say(
                f"warning: the expression {pattern.pattern!r} of spec.output took more than"
                f" {_MOST_SECONDS:g} s for one line and is left out from now on: avoid repeats of"
                " repeats, such as (a+)+"
            )
            return None
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        return found
