"""Leave the run: together with the others by finish(), or alone at exit.

finish() cannot know whether an exception that is on its way will end the process, as in a
`finally`, or is caught for good. So it does nothing then.
"""

from __future__ import annotations

import atexit

from ddpjob_trainer import failpoints
from ddpjob_trainer.comm.world import leave_group
from ddpjob_trainer.telemetry.console import say
from ddpjob_trainer.training.loop import Loop
from ddpjob_trainer.training.run_context import RunContext


class Teardown:
    """One process's side of leaving the run."""

    def __init__(self, process: RunContext) -> None:
        self._process = process
        self.loop: Loop | None = None  # to leave
        self._closed = False
        atexit.register(self._at_exit)

    def finish(self, error: BaseException | None) -> None:
        """Wait for the other ranks and leave the process group, unless ``error`` is under way."""
        if error is not None or self._closed:
            return
        process = self._process
        if self.loop is not None:
            self.loop.left()
        with process.shutdown.peers("run.finish()"):
            failpoints.reach("barrier")
            process.snapshots.settle()
            with process.progress.during("agreement"):
                process.world.barrier()
        process.progress.phase("done")
        process.progress.finished()
        self._close(together=True)

    def _at_exit(self) -> None:
        """Close alone; warn of a missing finish(). The exit code that follows is unknown here."""
        if self._closed:
            return
        loop, process = self.loop, self._process
        tells = process.world.rank == 0 and process.snapshots.are_made
        if loop is not None and not loop.ended and not process.shutdown.failing and tells:
            say(
                0,
                f"the loop was left after step {loop.finished_steps} without run.finish(): no"
                " snapshot says that the run is finished, and who starts it again trains on. Call"
                " run.finish() where it is over",
            )
        self._close(together=False)

    def _close(self, *, together: bool) -> None:
        self._closed = True
        process, failing = self._process, self._process.shutdown.failing
        process.mismatch.close()
        if not failing:  # else it ends at once, which closes all there is
            process.snapshots.close()
        process.progress.close(hurry=failing)
        if not failing:
            leave_group(together=together)
