"""The training loop of one process: from the newest snapshot to the last step.

A step is: hand out its batches, a backward for each, finish averaging, exchange a few numbers
beside the update, and after the loop's body the snapshot and the question whether to stop. A step
may update several times, with some of the optimizers each.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ddpjob_trainer import failpoints, trace
from ddpjob_trainer.data import fetch
from ddpjob_trainer.data.inputs import InputOptions, open_input
from ddpjob_trainer.data.order import Indices
from ddpjob_trainer.errors import ConfigError, NotCommittedError
from ddpjob_trainer.gradients.ddp import Part, Wrapped
from ddpjob_trainer.optim.nan_policy import NanPolicy
from ddpjob_trainer.optim.update import Unit
from ddpjob_trainer.options import Options
from ddpjob_trainer.state import rng
from ddpjob_trainer.state.buffers import Backup
from ddpjob_trainer.training import run_config
from ddpjob_trainer.training.deferred_results import DeferredResults
from ddpjob_trainer.training.device_watch import DeviceWatch
from ddpjob_trainer.training.guard import Guard
from ddpjob_trainer.training.keeping import Keeping
from ddpjob_trainer.training.logged_means import LoggedMeans
from ddpjob_trainer.training.prepare import PreparedModels
from ddpjob_trainer.training.run_context import RunContext
from ddpjob_trainer.training.step import LEFT_OUT, Step, check_loss
from ddpjob_trainer.training.step_exchange import StepExchange
from ddpjob_trainer.training.touched import Touched


class Loop:
    """The loop over one dataset. ``finished_steps`` counts those of earlier incarnations too."""

    def __init__(
        self,
        process: RunContext,
        options: Options,
        trained: PreparedModels,
        dataset: Any,
        given: InputOptions,
    ) -> None:
        self.finished_steps = 0
        self.guard = Guard(trained.state, trained.updater)
        self._touched = Touched(process.averaging, trained.updater)
        self._world = process.world
        self._shutdown = process.shutdown
        self._progress = process.progress
        self._snapshots = process.snapshots
        self._averaging = process.averaging
        self._recorder = process.recorder
        self._trained = trained
        self._input = open_input(
            dataset, given, run_config.place(options, process.world, process.progress.alive)
        )
        self._order = self._input.order
        self._options = options = run_config.with_steps(options, self._order)
        self._total = options.total_steps or 0
        process.progress.plan(self._total)
        if self._input.stream is not None:
            trained.state.register("data stream", self._input.stream, per_rank=True)
        self._averaging.plan(self._order, 0)  # says now if it cannot be divided
        self._progress.built(partial(trained.updater.readings, process.world.accelerator))
        trace.mark("built")
        self._nan = NanPolicy(options.nan_policy, process.world)
        self.exchange = StepExchange(
            process.world, process.shutdown, process.snapshots, process.averaging, self._nan,
            process.replay,
        )  # fmt: skip
        self._backup = Backup(trained.module) if options.nan_policy == "skip" else None
        self._peers = process.shutdown.peers
        self._mismatch = process.mismatch
        self._replay = process.replay
        self._step: Step | None = None
        self.within_step = False  # its body runs
        self._left = False  # early
        self.ended = False  # with its last step, or early on all ranks
        self._device_watch = DeviceWatch(process.world.accelerator, process.progress)
        self._results = DeferredResults(process, self.exchange)
        self.kept = Keeping(process, options, trained, self._input, self._results)
        self._generator = self._steps()
        self._layout_known = False

    def steps(self) -> Generator[Step, None, None]:
        """Yield the steps that are still to do, after the newest snapshot if there is one."""
        return self._generator

    def _steps(self) -> Generator[Step, None, None]:
        for model in self._trained.models:
            model.wrapped.on_forward = self._forward_begins
        with self._shutdown.in_loop():
            try:
                self._input.start()
                self._resume()
                self._device_watch.start()
                while not self._is_last():
                    step = self._begin()
                    self.within_step = True
                    yield step
                    self.within_step = False
                    if not step.committed:
                        raise NotCommittedError(
                            f"step {step.index} was left without step.commit(): call it at the"
                            f" end of the loop's body{LEFT_OUT}"
                        )
                    self._end(step)
            except GeneratorExit:  # left early: what follows may change the weights, and take long
                self._left = True
                self.finished_steps += self._step is not None and self._step.committed
                self._snapshots.before_update()
                self._progress.phase("done")
                raise
            finally:
                self.within_step = False
                self._device_watch.stop()
                self._input.close()
                self.guard.stop()
            with self._peers("the end of run.steps()"):
                self._recorder.ended(self._trained.state)
        self.ended = True
        self._progress.phase("done")

    def _is_last(self) -> bool:
        enough = self.kept.finished or self.exchange.enough
        return enough or self.finished_steps >= self._total

    def left(self) -> None:
        """The loop is over, perhaps early: wait for all ranks, leave no exchange under way."""
        self._generator.close()  # after a break a variable may hold it, as in tqdm(run.steps())
        if not self.ended:
            self._mismatch.leave(self._step)
            if self._left and self._step is not None and self._shutdown.caught is None:
                self._end_early(self._step)
        self.exchange.wait()
        self._results.learn(all_steps=True)

    def check_finite(self) -> None:
        """Wait for what was measured in the steps so far. Raises DivergedError."""
        self._results.check_finite(self._step)

    def logged_means(self) -> LoggedMeans | None:
        """What takes them, within a step's body."""
        return self.exchange.logged if self.within_step else None

    def _end_early(self, step: Step) -> None:
        with self._peers("the end of run.steps()"):
            if step.committed:
                self._hear(step)
            self.kept.left_early(self.finished_steps)
            self._replay.conclude(end=True)
            self._recorder.ended(self._trained.state, committed=step.committed)
        self.ended = True
        self._progress.phase("done")

    def _resume(self) -> None:
        self._trained.begin()
        with self._peers("the start of run.steps()"):
            stored = self.kept.restore()
        done = self.finished_steps = self.kept.resumed_after
        if self.kept.finished:
            self._progress.plan(done)
        else:
            left = range(done, self._total)
            self._input.begin(left, self._positions, fresh=self.kept.other_data)
            with self._peers("the start of run.steps()"):
                self.kept.compare_samples()
        self.guard.scheduled()
        self._progress.resumed(done, stored)
        length = self._order.steps_per_epoch if self._input.stream is None else None
        self._recorder.resumed(done, length)
        trace.mark("loaded")

    def _positions(self, step: int) -> list[Indices]:
        return [part.positions for part in self._averaging.plan(self._order, step)]

    # --- A step, in the order of its calls ------------------------------------------------

    def _begin(self) -> Step:
        self._progress.at("data")
        self._device_watch.queued("body")
        index = self.finished_steps
        parts = self._averaging.parts(self._order, index)
        rng.reseed(self._options.seed, index, self._averaging.outside)
        epoch = self._input.epoch(index)
        length = self._order.steps_per_epoch if self._input.stream is None else None
        self._step = Step(self, index, parts, self._batches(index, parts), epoch, length)
        return self._step

    def _batches(self, index: int, parts: Sequence[Part]) -> Iterator[Any]:
        for number, part in enumerate(parts):
            self._progress.at("data")
            batch = self._input.next(index, number, part.positions)
            self._replay.batch(batch)
            batch = fetch.to_device(batch, self._world.accelerator)
            self._device_watch.queued("data")
            if self._input.draws:  # whoever made it: what is drawn from here on is the same
                rng.reseed(self._options.seed, index, part.shard, int(part.positions[0]))
            elif part.reseed:
                rng.reseed(self._options.seed, index, part.shard)
            self._progress.at("forward")
            forwards = self._trained.forwards
            assert self._step is not None
            self._step.handed += 1
            yield batch
            if self._options.level == "elastic" and self._trained.forwards == forwards:
                self._step.check_forward()

    def _forward_begins(self, model: Wrapped) -> None:
        """See each forward through a wrapper, evaluations included."""
        if self._step is None:
            return
        graph = torch.is_grad_enabled()
        self._averaging.before_forward(model, self._step.part(), graph=graph)
        if graph:
            self._trained.forwards += 1
            if self._backup is not None:
                self._backup.take(self._step.index)

    def backward(
        self, step: Step, loss: torch.Tensor, *, weight: float | None, retain_graph: bool
    ) -> None:
        """See Step.backward."""
        trained, number = self._trained, step.part()
        check_loss(loss)
        if not trained.forwards:
            raise ConfigError(
                "the loss was not computed through the model that prepare() returned since the"
                " last update: the ranks would drift apart. Call that model, not the one that"
                " prepare() was given"
            )
        self.guard.before_backward(loss)
        self._touched.before_backward(number, first=not step.covered)
        step.add(number, loss.detach(), weight)
        self._progress.at("backward")
        counts = step.parts[number].samples and weight != 0
        marked = self._nan.mark(loss) if counts else loss
        # Where nobody waits for another ranks may have more calls than others.
        waits = self._averaging.waits
        self._device_watch.queued("forward")
        with self._peers(f"step {step.index}") if waits else self._shutdown.listening:
            scaled = trained.updater.scale(marked)
            self._averaging.backward(scaled, number, weight=weight, retain_graph=retain_graph)
        self._device_watch.queued("backward")
        self._touched.after_backward(weighted=weight is not None)
        self._progress.at("body")

    def update(self, step: Step, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """See Step.update."""
        if self._options.level == "elastic":
            raise ConfigError(
                "level='elastic' adds the shards' gradients up once per step: update with"
                " step.commit() only, or use level='resume'"
            )
        step.check_update("update()")
        step.check_weightless()
        given = self._trained.updater.find(optimizers)
        with self._peers(f"step {step.index}"):
            units, allowed = self._average(given or self._trained.updater.units)
            for unit in given:
                if not unit.has_gradients():
                    raise ConfigError(
                        f"step {step.index}: no gradient has reached the parameters of the"
                        f" {type(unit.optimizer).__name__} that step.update() was given: call"
                        " step.backward() on a loss of them since the last update()"
                    )
            self._apply(step, units, allowed=allowed)
        step.updated()
        self._progress.at("body")

    def commit(self, step: Step) -> None:
        """See Step.commit."""
        step.check_commit()
        with self._peers(f"step {step.index}"):
            if step.updates:
                self.exchange.start(step, allowed=True)
            else:
                units, allowed = self._average(self._trained.updater.units)
                self.exchange.start(step, allowed=allowed)
                if step.weights and allowed:
                    self._trained.updater.multiply(units, self.exchange.factor(step))
                self._apply(step, units, allowed=allowed, told=True)
        self._progress.at("body")
        self._device_watch.queued("update")
        failpoints.reach("step")
        step.committed = True

    def _average(self, units: Sequence[Unit]) -> tuple[list[Unit], bool]:
        """Make the gradients of these optimizers' parameters equal on all ranks.

        Return those of several that a gradient has reached, and whether they may be applied.
        """
        updater = self._trained.updater
        self._progress.at("backward")
        self.guard.check_schedulers()
        updater.check_gradients()
        self._touched.before_update(units)
        self._averaging.finish([unit.parameters for unit in units])
        if not self._layout_known:
            self._layout_known = True
            self.kept.take_layout(self._averaging.layout())
        self._progress.at("update")
        self._trained.forwards = 0
        reached = [unit for unit in units if len(units) == 1 or unit.has_gradients()]
        measured = updater.measure(reached)
        # A scaler decides itself: overflows are its daily bread.
        finite = updater.scaler is not None or all(self._nan.allows(*one) for one in measured)
        return reached, finite

    def _apply(
        self, step: Step, units: Sequence[Unit], *, allowed: bool, told: bool = False
    ) -> None:
        """Update, or leave the update out. ``told``: the step's exchange is under way."""
        self._snapshots.before_update()
        if allowed and self._trained.updater.hooks:
            allowed = self._before_update(step, units)
        updated = allowed and self._trained.updater.update(units)
        self.guard.scheduled()
        if updated:
            return
        if not allowed:
            losses = [float(loss) for loss in step.losses]
            reported = self.exchange.not_finite(step) if told else None
            self._nan.refuse(step.index, self._trained.module, losses, reported)
            self._trained.updater.forget()
        self._progress.skipped_update()
        if self._backup is not None:
            self._backup.put_back()

    def _before_update(self, step: Step, units: Sequence[Unit]) -> bool:
        """Call the hooks; return whether the gradients may be applied all the same.

        They draw numbers that are equal on all ranks, as their gradients are, and that nothing else
        depends on.
        """
        updater = self._trained.updater
        with rng.preserved():
            rng.reseed(self._options.seed, step.index, -1 - step.updates)
            measured = updater.before_update(units)
        return updater.scaler is not None or all(
            self._nan.allows(*one, now=True) for one in measured
        )

    def mean_loss(self, step: Step) -> float:
        """See Step.loss."""
        return self.exchange.mean_loss(step)

    def stop(self) -> None:
        """See Step.stop."""
        self.exchange.asked = True

    def _hear(self, step: Step) -> None:
        self.exchange.finish(step)
        self._progress.body_ended()
        self._replay.step_ended(step)
        self._results.add(step)

    def _end(self, step: Step) -> None:
        """After the loop's body, so that what it does after commit() is in the snapshot too."""
        self.guard.step_ended()
        done = self.finished_steps = step.index + 1
        self._progress.at("agreement")
        first = done == self.kept.resumed_after + 1
        with self._peers(f"step {step.index}"):
            self._hear(step)
            if self._input.stream is not None and first:
                self.exchange.compare_streams(self._input.stream.first)
            if self.exchange.enough:
                self._progress.plan(done)
            finished = self._is_last()
            self.kept.step_ended(done, last=self.exchange.stop or finished, finished=finished)
            self._replay.conclude(end=finished)
        if first:
            trace.mark("step")
        if not finished:
            self._recorder.wait(done)
            if self.exchange.stop:
                self._progress.close(hurry=True)
                self._shutdown.stop(done)
