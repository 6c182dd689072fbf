"""Run the training loop of one process, from the newest snapshot to the last step.

Read it from the top: Loop._steps() is the whole run, and each method below is called by one above.
A step: hand out its batches, a backward for each, average and update (updates.py), exchange a few
numbers beside that (step_exchange.py), and after the loop's body the snapshot (snapshot_policy.py).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from functools import partial
from typing import Any

from ddpjob_trainer import trace
from ddpjob_trainer.data import fetch, generators
from ddpjob_trainer.data.inputs import InputOptions, open_input
from ddpjob_trainer.data.order import Indices
from ddpjob_trainer.gradients.ddp import Part, Wrapped
from ddpjob_trainer.optim.nan_policy import NanPolicy
from ddpjob_trainer.options import Options
from ddpjob_trainer.telemetry.progress import DeviceWatch
from ddpjob_trainer.training import run_config
from ddpjob_trainer.training.models.prepare import PreparedModels
from ddpjob_trainer.training.rescue import ChangedError
from ddpjob_trainer.training.run_context import RunContext
from ddpjob_trainer.training.snapshot_policy import SnapshotPolicy
from ddpjob_trainer.training.step import Step
from ddpjob_trainer.training.step_exchange import StepExchange
from ddpjob_trainer.training.updates import Updates


class Loop:
    """The loop over one dataset. ``finished_steps`` counts those of earlier incarnations too.

    ``within_step``: its body runs. ``ended``: with its last step, or early on all ranks. Raises
    ConfigError where the batches cannot be divided.
    """

    def __init__(
        self,
        process: RunContext,
        options: Options,
        trained: PreparedModels,
        dataset: Any,
        given: InputOptions,
    ) -> None:
        # --- Where the loop is
        self.finished_steps = 0
        self.within_step = False
        self.ended = False
        self._left_early = False  # on this rank
        self.step: Step | None = None  # the newest

        # --- What it trains on, and for how long
        self._process = process
        self._trained = trained
        settings = run_config.batch_settings(process, options)
        self._input = open_input(dataset, given, settings)
        self._options = options = run_config.with_steps(options, self._input.order)
        self._total = options.total_steps or 0
        process.progress.plan(self._total)
        for text in trained.updater.check_schedules(self._epoch_steps(), self._total):
            settings.say(text)
        if self._input.stream is not None:
            trained.state.register("data stream", self._input.stream, per_rank=True)
        # Raises for batches that cannot be divided: now, and not in the first step.
        process.averaging.plan(self._input.order, 0)
        process.progress.built(partial(trained.updater.readings, process.world.accelerator))
        trace.mark("built")

        # --- The parts of a step
        nan = NanPolicy(options.nan_policy, process.world)
        self._device_watch = DeviceWatch(process.world.accelerator, process.progress)
        self.exchange = StepExchange(process, nan)
        self.snapshots = SnapshotPolicy(process, options, trained, self._input, self.exchange)
        self._updates = Updates(process, options, trained, self.exchange, nan, self._device_watch)
        self.guard = self._updates.guard
        self.steps = self._steps()

    # --- The run ----------------------------------------------------------------------------

    def _steps(self) -> Generator[Step, None, None]:
        for model in self._trained.models:
            model.wrapped.on_forward = self._forward_begins
        # A signal waits for a step's end, on which all ranks agree.
        with self._process.shutdown.in_loop():
            try:
                # Workers fork before the load: they start beside it, with little memory.
                self._input.start()
                self._resume()
                self._device_watch.start()
                while not self._is_last():
                    self._process.profiler.step_begins(self.finished_steps)
                    step = self._begin()
                    self.within_step = True
                    yield step  # the script's body: forward, backward, commit
                    self.within_step = False
                    step.check_committed()
                    self._end(step)
            except GeneratorExit:  # by break or return
                self._left_early = True
                self.finished_steps += self.step is not None and self.step.committed
                # What the script does next may change the weights: finish their copy first.
                self._process.wait_for_readers()
                # It may take long, too, and is not a hang.
                self._process.progress.phase("done")
                raise
            finally:
                self.within_step = False
                self._device_watch.stop()
                self._process.profiler.end()
                self._input.close()
                self.guard.stop()
            with self._process.shutdown.peers("the end of run.steps()"):
                self._process.recorder.ended(self._trained.state)
        self.ended = True
        self._process.progress.phase("done")

    # --- Resume -----------------------------------------------------------------------------

    def _resume(self) -> None:
        """Load the newest snapshot, and go to its place in the data."""
        process = self._process
        self._trained.begin()
        with process.shutdown.peers("the start of run.steps()"):
            self.snapshots.restore()
        done = self.finished_steps = self.snapshots.resumed_after
        if self.snapshots.finished:
            process.progress.plan(done)
        else:
            left = range(done, self._total)
            self._input.begin(left, self._positions, fresh=self.snapshots.other_data)
            with process.shutdown.peers("the start of run.steps()"):
                self.snapshots.compare_samples()
        self.guard.scheduled()
        process.progress.resumed(done)
        process.recorder.resumed(done, self._epoch_steps())
        process.drill.begin(
            done, epoch=self._epoch_steps(), total=self._total, rescued=self.snapshots.rescued
        )
        if process.rescue is not None:
            boundary = self._trained.boundary(lambda: self.snapshots.best)
            process.rescue.begin(boundary, self._facts, done)
        trace.mark("loaded")

    def _facts(self) -> dict[str, Any]:
        """Return the configuration of a snapshot that a rescue makes. Raises ChangedError."""
        if self.exchange.stop_called or self.exchange.enough:
            raise ChangedError("step.stop() was called, which the next start would not know")
        return self.snapshots.facts()

    def _positions(self, step: int) -> list[Indices]:
        plan = self._process.averaging.plan(self._input.order, step)
        return [part.positions for part in plan]

    def _is_last(self) -> bool:
        enough = self.snapshots.finished or self.exchange.enough
        return enough or self.finished_steps >= self._total

    # --- Begin a step: its batches ------------------------------------------------------------

    def _begin(self) -> Step:
        averaging = self._process.averaging
        self._process.progress.at("data")
        self._device_watch.queued("body")
        index = self.finished_steps
        parts = averaging.parts(self._input.order, index)
        # Random numbers are a function of the step, so a step that is done again draws the same.
        generators.reseed(self._options.seed, index, averaging.outside)
        batches, epoch = self._batches(index, parts), self._input.epoch(index)
        self.step = Step(self._updates, index, parts, batches, epoch, self._epoch_steps())
        return self.step

    def _epoch_steps(self) -> int | None:
        return self._input.order.steps_per_epoch if self._input.stream is None else None

    def _batches(self, index: int, parts: Sequence[Part]) -> Iterator[Any]:
        process, seed = self._process, self._options.seed
        for number, part in enumerate(parts):
            process.progress.at("data")
            batch = self._input.next(index, number, part.positions)
            process.replay.batch(batch)
            batch = fetch.to_device(batch, process.world.accelerator)
            self._device_watch.queued("data")
            if self._input.draws:  # whether a worker made it or not, later draws are the same
                generators.reseed(seed, index, part.shard, int(part.positions[0]))
            elif part.reseed:  # level elastic: a shard draws the same on whichever rank it is
                generators.reseed(seed, index, part.shard)
            process.progress.at("forward")
            forwards = self._trained.forwards
            assert self.step is not None
            self.step.received += 1
            yield batch
            # Shards that take turns have random numbers of their own: none may be passed over.
            if process.averaging.in_turn and self._trained.forwards == forwards:
                self.step.check_forward()

    def _forward_begins(self, model: Wrapped) -> None:
        if self.step is not None:
            self._updates.forward_begins(self.step, model)

    # --- End a step: agree, save, stop -----------------------------------------------------------

    def _end(self, step: Step) -> None:
        """End the step after the body. What that does after commit() is in the snapshot too."""
        process = self._process
        self.guard.step_ended()
        done = self.finished_steps = step.index + 1
        if process.rescue is not None:
            process.rescue.step_ended(done)

        # The ranks agree: on the numbers that they have exchanged beside the update.
        process.progress.at("agreement")
        with process.shutdown.peers(f"step {step.index}"):
            self.exchange.finish(step)
            if self._input.stream is not None and done == self.snapshots.resumed_after + 1:
                self.exchange.compare_streams(self._input.stream.first)
            if self.exchange.enough:  # a script asked for the end: this step is the last
                process.progress.plan(done)

            # A snapshot, where one is due; and of the last step in any case.
            finished = self._is_last()
            last = self.exchange.stop or finished
            self.snapshots.step_ended(done, last=last, finished=finished)
            process.replay.conclude(end=finished)
        trace.first("step")

        # Only now, with the snapshot on its way, may the process end by a signal or for a drill.
        if not finished:
            process.recorder.wait(done)
            self._stop_if_asked(done)

    def _stop_if_asked(self, done: int) -> None:
        """End the process where all ranks end: by a signal, or for a drill."""
        process = self._process
        if self.exchange.stop:
            process.progress.close(hurry=True)
            process.shutdown.stop(done)
        if process.drill.is_due(done):
            with process.shutdown.peers("a drill"):
                self.exchange.report(all_steps=True)
                process.world.barrier()  # all have their record: the first to end ends all
            process.progress.close(hurry=True)
            process.shutdown.drill(done)

    # --- Leave: for Run and Teardown ------------------------------------------------------------

    def left(self) -> None:
        """Leave the loop, perhaps early: wait for all ranks, end the exchange under way."""
        self.steps.close()  # after a break a variable may hold it, as in tqdm(run.steps())
        if self._left_early and not self.ended:
            self._end_early()
        self.exchange.wait()

    def _end_early(self) -> None:
        """Wait until every rank has left the loop here; keep that end for good."""
        process, step, place = self._process, self.step, "before its first step"
        if step is not None:
            when = "after" if step.committed else "before"
            place = f"in step {step.index}, {when} its commit()"
        call = f"the end of the loop, left {place}"
        with process.shutdown.peers(call):
            process.world.barrier()
            process.world.gather_bytes(call, b"")  # raises ConfigError where places differ
            if step is not None:
                if step.committed:
                    self.exchange.finish(step)
                self.snapshots.left_early(self.finished_steps)
                process.replay.conclude(end=True)
                process.recorder.ended(self._trained.state, committed=step.committed)
        self.ended = True
        process.progress.phase("done")
