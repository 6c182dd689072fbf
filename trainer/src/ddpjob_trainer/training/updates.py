"""Do the middle of a step: forwards, backwards, updates. A Step's calls end here.

Gradients are added up until update() or commit() makes them equal on all ranks and applies them,
or leaves the update out where one is not finite. commit() starts the step's exchange beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddpjob_trainer import failpoints, trace
from ddpjob_trainer.data import generators
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.gradients.ddp import Wrapped
from ddpjob_trainer.optim.nan_policy import NanPolicy
from ddpjob_trainer.optim.update import Unit
from ddpjob_trainer.options import Options
from ddpjob_trainer.printing import say
from ddpjob_trainer.state.stateful import BufferBackup
from ddpjob_trainer.telemetry.progress import DeviceWatch
from ddpjob_trainer.training.models.guard import Guard, Touched
from ddpjob_trainer.training.models.prepare import Model, PreparedModels
from ddpjob_trainer.training.run_context import RunContext
from ddpjob_trainer.training.step import Step, check_loss
from ddpjob_trainer.training.step_exchange import StepExchange


class Updates:
    """One process's side of a step's forwards, backwards and updates."""

    def __init__(
        self,
        process: RunContext,
        options: Options,
        trained: PreparedModels,
        exchange: StepExchange,
        nan: NanPolicy,
        device_watch: DeviceWatch,
    ) -> None:
        self.guard = Guard(trained.state, trained.updater)
        self._touched = Touched(process.averaging, trained.updater)
        self._process = process
        self._options = options
        self._trained = trained
        self.exchange = exchange
        self._nan = nan
        self._device_watch = device_watch
        self._trained_in: dict[str, int | None] = {}  # step, by model in train mode; None: warned
        self._training: dict[str, torch.nn.Module | None] = {}  # a part of each that was so last
        self._backup = BufferBackup(trained.module) if options.nan_policy == "skip" else None

    # --- Forward and backward -----------------------------------------------------------------

    def forward_begins(self, step: Step, model: Wrapped) -> None:
        """Prepare each forward through a wrapper, evaluations included."""
        graph = torch.is_grad_enabled()
        self._process.averaging.before_forward(model, step.part(), graph=graph)
        if graph:
            self._trained.forwards += 1
            if self._backup is not None:  # a skipped update takes back what BatchNorm has seen, too
                self._backup.take(step.index)

    def backward(
        self, step: Step, loss: torch.Tensor, *, weight: float | None, retain_graph: bool
    ) -> None:
        """See Step.backward."""
        averaging, progress, number = self._process.averaging, self._process.progress, step.part()

        # Refuse a loss whose gradients the ranks would not average.
        check_loss(loss)
        if not self._trained.forwards:
            raise ConfigError(
                "the loss was not computed through the model that prepare() returned since the"
                " last update: the ranks would drift apart. Call that model, not the one that"
                " prepare() was given"
            )
        self._touched.before_backward(number, first=not step.consumed)
        step.add(number, loss.detach(), weight)

        # Backward, averaged as it goes.
        progress.at("backward")
        marked = loss if weight == 0 else self._nan.mark(loss)
        shutdown = self._process.shutdown
        self._device_watch.queued("forward")
        # Where nobody waits for another ranks may have more calls than others.
        with shutdown.peers(f"step {step.index}") if averaging.waits else shutdown.listening:
            scaled = self._trained.updater.scale(marked)
            averaging.backward(scaled, number, weight=weight, retain_graph=retain_graph)

        # Note what a script can get wrong without an error: see _warn_of_eval() and Touched.
        for model in self._trained.models:
            if self._trained_in.get(model.name, 0) is not None and self._trains(model):
                self._trained_in[model.name] = step.index
        trace.first("backward")
        self._device_watch.queued("backward")
        self._touched.after_backward(weighted=weight is not None)
        progress.at("body")

    # --- Update -------------------------------------------------------------------------------

    def update(self, step: Step, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """See Step.update."""
        self._process.averaging.check_update()
        step.check_update("update()")
        step.check_weightless()
        given = self._trained.updater.find(optimizers)
        if self._process.rescue is not None:
            self._process.rescue.several_updates()
        with self._process.shutdown.peers(f"step {step.index}"):
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
        self._process.progress.at("body")

    def commit(self, step: Step) -> None:
        """See Step.commit."""
        step.check_commit()
        with self._process.shutdown.peers(f"step {step.index}"):
            if step.updates:  # by step.update(): only the exchange is left
                self._process.averaging.share_buffers()
                self.exchange.start(step, allowed=True)
            else:
                units, allowed = self._average(self._trained.updater.units)
                self._process.averaging.share_buffers()
                # Before the update: the network's latency hides behind it.
                self.exchange.start(step, allowed=allowed)
                self.exchange.receive_early(step)
                if step.weights and allowed:
                    self._trained.updater.multiply(units, self.exchange.factor(step))
                self._apply(step, units, allowed=allowed, exchanged=True)
        if step.epoch_steps is not None and step.ends_epoch:
            self.guard.check_schedulers()
            self._trained.updater.end_epoch()
            self.guard.scheduled()
        self._warn_of_eval(step)
        self._process.progress.at("body")
        self._device_watch.queued("update")
        failpoints.reach("step")
        step.committed = True  # what follows the body is in Loop._end

    def _average(self, units: Sequence[Unit]) -> tuple[list[Unit], bool]:
        """Make the gradients of these optimizers' parameters equal on all ranks.

        Return those of several that a gradient has reached, and whether they may be applied.
        """
        updater, averaging = self._trained.updater, self._process.averaging
        # First what this rank can refuse alone.
        self._process.progress.at("backward")
        self.guard.check_schedulers()
        updater.check_gradients()
        self._touched.before_update(units)
        averaging.finish([unit.parameters for unit in units])

        # Gradients are equal from here on, so each rank decides alike, without a message.
        self._process.progress.at("update")
        self._trained.forwards = 0
        reached = [unit for unit in units if len(units) == 1 or unit.has_gradients()]
        measured = updater.measure(reached)
        # A scaler decides itself: overflows are its daily bread.
        finite = updater.scaler is not None or all(self._nan.allows(*one) for one in measured)
        return reached, finite

    def _apply(
        self, step: Step, units: Sequence[Unit], *, allowed: bool, exchanged: bool = False
    ) -> None:
        """Update, or leave the update out. ``exchanged``: the step's exchange is under way."""
        updater = self._trained.updater
        # A snapshot of the step before may still be reading the parameters.
        self._process.wait_for_readers()
        if allowed and updater.hooks:
            allowed = self._before_update(step, units)
        updated = allowed and updater.update(units)
        self.guard.scheduled()
        if updated:
            return
        if not allowed:
            reported = self.exchange.not_finite(step) if exchanged else None
            self._nan.refuse(step.index, self._trained.module, step.losses, reported)
            updater.forget()
        self._process.progress.metrics.add("skipped_updates")
        if self._backup is not None:
            self._backup.put_back()

    def _before_update(self, step: Step, units: Sequence[Unit]) -> bool:
        """Call the hooks; return whether the gradients may be applied all the same.

        They draw numbers that are equal on all ranks, as their gradients are, and that nothing else
        depends on.
        """
        updater = self._trained.updater
        with generators.kept():
            generators.reseed(self._options.seed, step.index, -1 - step.updates)
            measured = updater.before_update(units)
        return updater.scaler is not None or all(
            self._nan.allows(*one, now=True) for one in measured
        )

    # --- A model left in eval mode ------------------------------------------------------------

    def _trains(self, model: Model) -> bool:
        """Tell whether a module without others in it is in train mode: one around may stay so."""
        last = self._training.get(model.name)  # a frozen model has many that are not
        if last is None or not last.training:
            parts = (part for part in model.module.modules() if part.training)
            last = next((part for part in parts if next(part.children(), None) is None), None)
            self._training[model.name] = last
        return last is not None

    def _warn_of_eval(self, step: Step) -> None:
        """Say once that a whole model was in eval mode in this step, and not in one before."""
        for name, last in self._trained_in.items():
            if last is None or last == step.index:
                continue
            self._trained_in[name] = None
            if self._process.world.rank == 0:
                which = f"the model {name!r}" if len(self._trained.models) > 1 else "the model"
                say(
                    0,
                    f"warning: {which} trains in eval mode since step {step.index}, and was in"
                    " train mode before: dropout is off, and BatchNorm uses what it has learned and"
                    " learns no more. If an evaluation has left it so, call model.train() after"
                    " that, or use run.evaluate() or run.evaluating(), which put it back",
                )
