"""Add up the seconds of a rank's steps by what they went to.

Progress and the adapters' Record call it as activities and steps end; its sums go into the rank's
record, and from there into the launcher's Account. Never imports torch.
"""

from __future__ import annotations

from typing import Final

from ddpjob_trainer.liveness.heartbeat import ACTIVITIES, Activity, StepSeconds

#: A backward waits for the other ranks' gradients, an agreement for their numbers.
_WORK: Final[tuple[Activity, ...]] = ("data", "forward", "update", "body", "evaluation")


class StepAccount:
    """``reached``: the last step that was finished before this process: up to it all is repeated.

    A step's seconds run from the end of the one before; the first belongs to the start.
    """

    def __init__(self, reached: int = 0) -> None:
        self._reached = reached
        self._of_step = dict.fromkeys(ACTIVITIES, 0.0)
        self._of_device: dict[Activity, float] = {}
        self.sums = StepSeconds()
        self.newest = (0.0, 0.0)  # of the last ended step: without waiting for others, for data

    def passed(self, activity: Activity, seconds: float) -> None:
        """Add seconds of the step under way."""
        self._of_step[activity] += seconds

    def measured(self, activity: Activity, total: float) -> None:
        """Replace the host's seconds by a device's, of which the sum so far is known."""
        self._of_step[activity] = total - self._of_device.get(activity, 0.0)
        self._of_device[activity] = total

    def stepped(self, step: int, seconds: float, now: float) -> StepSeconds:
        """Return the sums with a step that has ended. ``now``: monotonic."""
        spent, sums = self._of_step, self.sums
        self._of_step = dict.fromkeys(ACTIVITIES, 0.0)
        self.newest = (sum(spent[one] for one in _WORK), spent["data"])
        if not sums.last:
            self.sums = sums._replace(last=now)
            return self.sums
        new = step > self._reached
        self.sums = StepSeconds(
            sums.trained + seconds,
            sums.repeated + (not new) * seconds,
            sums.data + new * spent["data"],
            sums.snapshot + new * spent["snapshot"],
            now,
        )
        return self.sums
