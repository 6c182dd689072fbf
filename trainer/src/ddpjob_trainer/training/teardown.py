"""Leave the run: together with the others, or alone because of an exception.

finish() cannot know whether an exception that is on its way will end the process, as in a
`finally`, or is caught for good. So what it has to do is done at exit then.
"""

from __future__ import annotations

import atexit
import sys

from ddpjob_trainer import failpoints
from ddpjob_trainer.comm.world import leave_group
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.telemetry.console import say
from ddpjob_trainer.training.loop import Loop
from ddpjob_trainer.training.run_context import RunContext


class Teardown:
    """One process's side."""

    def __init__(self, process: RunContext) -> None:
        self._process = process
        self._loop: Loop | None = None
        self._caught: Exception | None = None
        self._closed = False
        self._met = False  # all ranks have been here
        atexit.register(self._at_exit)

    def began(self, loop: Loop) -> None:
        """There is a loop to leave."""
        self._loop = loop

    def finish(self, error: BaseException | None) -> None:
        """Wait for the other ranks and leave the process group, unless an error is on its way."""
        if isinstance(error, Exception):
            self._caught = error
        if error is None and not self._closed:
            self._together()
            self._close()

    def _together(self) -> None:
        process = self._process
        if self._loop is not None:
            self._loop.left()
        else:
            process.mismatch.leave(None, entered=False)
        with process.shutdown.peers("run.finish()"):
            failpoints.reach("barrier")
            process.snapshots.settle()
            with process.progress.during("agreement"):
                process.world.barrier()
        process.progress.phase("done")
        self._met = True

    def _at_exit(self) -> None:
        shutdown = self._process.shutdown
        if self._caught is not None and not shutdown.failing and not self._closed:
            shutdown.caught = self._caught
            try:
                self._together()
            except ConfigError as error:
                shutdown.refuse(error)
            except Exception as error:  # Python would print it and end with exit code 0
                sys.excepthook(type(error), error, error.__traceback__)
        self._tell_of_no_finish()
        self._close()

    def _tell_of_no_finish(self) -> None:
        """Whether exit code 0 follows nobody knows here; sys.exit(1) is no end of a run."""
        loop, process = self._loop, self._process
        if loop is None or loop.ended or self._met or process.shutdown.failing:
            return
        if process.world.rank == 0 and process.snapshots.are_made:
            say(
                0,
                f"the loop was left after step {loop.finished_steps} without run.finish(): no"
                " snapshot says that the run is finished, and who starts it again trains on. Call"
                " run.finish() where it is over",
            )

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            process, failing = self._process, self._process.shutdown.failing
            process.mismatch.close()
            process.snapshots.close(failing=failing)
            process.progress.close(hurry=failing)
            if not failing:  # else it ends at once, which closes all there is
                leave_group(together=self._met)
