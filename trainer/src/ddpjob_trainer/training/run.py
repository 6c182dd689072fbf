"""Give the user's script its Run: prepare, steps, evaluate, hashes, finish.

The loop stays the user's. A Run knows the position in the run, so data order, random numbers,
resume, snapshots, SIGTERM and the loss of a peer are its business. Made by start().
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self, TypeVar, overload

import torch

from ddpjob_trainer import failpoints
from ddpjob_trainer.arguments import as_path, flag, whole
from ddpjob_trainer.comm.world import leave_group
from ddpjob_trainer.data import fetch
from ddpjob_trainer.data.inputs import InputOptions
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.optim.update import Hook
from ddpjob_trainer.options import ModelOptions, Options
from ddpjob_trainer.printing import say
from ddpjob_trainer.snapshot import weights
from ddpjob_trainer.snapshot.training_state import weights_sha256
from ddpjob_trainer.state import stateful
from ddpjob_trainer.state.stateful import Keepable, Values
from ddpjob_trainer.telemetry.run_log import checked, number_of
from ddpjob_trainer.training import evaluation
from ddpjob_trainer.training.evaluation import Metric, Metrics
from ddpjob_trainer.training.loop import Loop
from ddpjob_trainer.training.models.prepare import PreparedModels, named, shaped_like
from ddpjob_trainer.training.run_context import RunContext
from ddpjob_trainer.training.snapshot_policy import is_better
from ddpjob_trainer.training.step import Step

Models = torch.nn.Module | Sequence[torch.nn.Module] | Mapping[str, torch.nn.Module]
Optimizers = TypeVar(
    "Optimizers",
    bound=torch.optim.Optimizer
    | Sequence[torch.optim.Optimizer]
    | Mapping[str, torch.optim.Optimizer],
)


class Run:
    """A training run, as one of its processes sees it. Made by start()."""

    def __init__(self, process: RunContext, options: Options) -> None:
        self.options = options
        self._process = process
        self._trained = PreparedModels(options, process.averaging, process.world)
        self._loop: Loop | None = None
        self._teardown = Teardown(process)

    # --- Where we are --------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Number of this process, 0 to world_size - 1."""
        return self._process.world.rank

    @property
    def world_size(self) -> int:
        """Number of processes, at least 1."""
        return self._process.world.size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes."""
        return self._process.world.rank == 0

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self._process.world.device

    @property
    def finished_steps(self) -> int:
        """Steps done so far, those before a resume included."""
        return self._loop.finished_steps if self._loop is not None else 0

    # --- Before the loop -----------------------------------------------------------------

    def prepare(
        self,
        model: Models,
        optimizer: Optimizers,
        *,
        scheduler: Any = None,
        scheduler_every: str | None = None,
        clip_grad_norm: float | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        ema: float | None = None,
        compile: bool | str = False,  # noqa: A002 - PyTorch's name
        sync_batchnorm: bool = False,
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
        comm_hook: str | None = None,
        before_update: Hook | None = None,
    ) -> tuple[Any, Optimizers]:
        """Wrap the model in DistributedDataParallel and take charge of what it trains with.

        Give several models and optimizers in lists or dicts; they are returned so. It may be called
        again for more. Every parameter that requires a gradient must have an optimizer.

        ``scheduler``: one, or a list; each advances with its optimizer's updates
        (``scheduler_every="step"``, the default), or at the end of each epoch (``"epoch"``).
        ``clip_grad_norm`` bounds the 2-norm of all gradients that an update applies, together.
        ``grad_scaler`` replaces fp16's default one.
        ``ema``: decay of an exponential moving average of the parameters, as 0.999; see
        evaluate(ema=True). ``compile``: True, or a torch.compile backend's name.
        ``sync_batchnorm``: BatchNorm over all processes (CUDA only). ``comm_hook``: gradients
        travel as "bf16" or "fp16". The others are DistributedDataParallel's own.
        ``before_update``: called with {name: parameter} before an update, when each ``.grad`` holds
        the mean over the global batch, unscaled and not yet clipped; it may change them in place,
        on every rank alike. Random numbers that it draws are equal on all.

        Raises ConfigError, also for options that do not go together.
        """
        given = ModelOptions.among(locals())
        if self._loop is not None:
            raise ConfigError("prepare() was called after steps(): prepare all models before it")
        trained = self._trained
        schedulers = scheduler.values() if isinstance(scheduler, Mapping) else scheduler
        if not isinstance(scheduler, Mapping | list | tuple):
            schedulers = [scheduler]
        models = named(model, torch.nn.Module, "model", len(trained.models))
        count = len(trained.updater.units)
        optimizers = named(optimizer, torch.optim.Optimizer, "optimizer", count)
        with self._together("run.prepare()"):
            wrapped = trained.add(models, optimizers, list(schedulers), given, before_update)
        for one in trained.models[-len(models) :]:
            one.wrapped.waiting = partial(self._process.progress.during, "agreement")
        return shaped_like(model, wrapped), optimizer

    def state(self, name: str = "state", /, **values: Any) -> Values:
        """Keep small values of the loop in the snapshots, as attributes: state.best, state.bad.

        Numbers, strings, None and tuples of these, with their first values. Rank 0's are kept. Call
        it before steps(). Raises ConfigError.
        """
        self.register(name, kept := Values(values))
        return kept

    def register(self, name: str, obj: Keepable, *, per_rank: bool = False) -> None:
        """Keep one more object in the snapshots.

        It has state_dict() and load_state_dict(), or is a generator of torch, of any device, numpy
        or random, or a dict of numbers, strings, tensors, lists, deques and dicts: a mean, say.
        Rank 0's value is kept; with ``per_rank`` that of each rank, for the same world size. Raises
        ConfigError.
        """
        if self._loop is not None:
            raise ConfigError(
                f"register({name!r}) was called after steps(): a resume would not know it; call it"
                " before run.steps()"
            )
        if per_rank and self._process.resizes:
            raise ConfigError(
                f"register({name!r}, per_rank=True) is for a fixed number of processes, and this"
                " job's changes: leave per_rank out, or spec.minReplicas"
            )
        self._trained.state.register(name, obj, per_rank=per_rank)

    # --- The loop ------------------------------------------------------------------------

    def steps(
        self,
        dataset: Any,
        *,
        workers: int | None = None,
        prefetch: int | None = None,
        pin_memory: bool | None = None,
        shuffle: bool | None = None,
        sampler: Any = None,
        weights: Any = None,
        batched: bool | None = None,
        generators: Sequence[Any] | None = None,
    ) -> Iterator[Step]:
        """Yield the steps that are still to do, after the newest snapshot, if any.

        ``dataset``: map-style, or a DataLoader over one; else a stream: an IterableDataset, or a
        DataLoader over one, of which each process reads its own.
        ``workers``: processes per rank that make batches ahead, each ``prefetch`` (default 2) of
        them; by default none. The result does not depend on them. ``pin_memory``: in page-locked
        memory; by default on CUDA with workers.
        ``shuffle``: differently in each epoch, the default; False: the dataset's own order.
        ``sampler``: another order, as a torch Sampler, a sequence of indices, or a function from
        the epoch to one. ``weights``: one per sample; an epoch draws as many samples as there are,
        with replacement. ``batched``: whether a stream of unknown type yields batches, not samples.
        ``generators``: of torch, numpy or random, or objects with reseed(seed), that samples draw
        from and that no attribute of the dataset or its transforms holds.

        Raises ConfigError for what cannot be read in this way.
        """
        asked = locals()
        trained = self._ready("steps()")
        if self._loop is not None:
            raise ConfigError("steps() was called twice; it counts all epochs itself")
        given = InputOptions.among(asked)
        self._loop = Loop(self._process, self.options, trained, dataset, given)
        self._teardown.loop = self._loop
        yield from self._loop.steps

    # --- After the loop, or within ----------------------------------------------------------

    @contextlib.contextmanager
    def evaluating(
        self, *, ema: bool = False, model: torch.nn.Module | None = None
    ) -> Iterator[torch.nn.Module]:
        """Yield the bare model in eval mode, without gradients; training notices nothing.

        ``ema``: the moving average instead, see prepare(ema=...). ``model``: which, of several.
        """
        trained = self._ready("evaluating()")
        guard = self._loop.guard.asleep() if self._loop is not None else contextlib.nullcontext()
        module = trained.model_of(model).weights(ema=ema)
        # An average's follow from the model's, unless update_bn() gives it others.
        kept = stateful.preserved_buffers(module, not ema)
        during = self._process.progress.during("evaluation")
        with during, guard, kept, evaluation.evaluating(module):
            yield module

    @overload
    def evaluate(
        self, dataset: fetch.Dataset, metric: Metric, *, batch_size: int = 256,
        collate: fetch.Collate | None = None, reduce: str = "sum", ema: bool = False,
        model: torch.nn.Module | None = None, workers: int = 0,
    ) -> float: ...  # fmt: skip

    @overload
    def evaluate(
        self, dataset: fetch.Dataset, metric: Metrics, *, batch_size: int = 256,
        collate: fetch.Collate | None = None, reduce: str = "sum", ema: bool = False,
        model: torch.nn.Module | None = None, workers: int = 0,
    ) -> dict[str, float]: ...  # fmt: skip

    def evaluate(
        self,
        dataset: fetch.Dataset,
        metric: Metric | Metrics,
        *,
        batch_size: int = 256,
        collate: fetch.Collate | None = None,
        reduce: str = "sum",
        ema: bool = False,
        model: torch.nn.Module | None = None,
        workers: int = 0,
    ) -> float | dict[str, float]:
        """Return the sum of ``metric(model, batch)`` over the dataset, shared among the ranks.

        Every sample is seen exactly once. A metric that is a dict of numbers gives a dict of sums.
        ``reduce``: "mean" if the metric is a batch's mean; the result is then the mean over all
        samples. ``collate``: default start()'s.
        ``ema``: of the moving average, see prepare(ema=...). ``model``: which, of several.
        ``workers``: processes per rank that make the batches. Every rank must call it.

        Raises ConfigError.
        """
        given = evaluation.check(locals())
        trained = self._ready("evaluate()")
        world = self._process.world
        step = self._loop.step if self._loop is not None and self._loop.within_step else None
        if self._process.rescue is not None and step is not None and step.committed:
            self._process.rescue.evaluates()
        with self._process.progress.during("agreement"), self._together("run.evaluate()"):
            evaluation.share_buffers(trained.module, world, trained.steady_buffers())
            if ema:
                evaluation.share_buffers(trained.model_of(model).weights(ema=True), world)
        source = fetch.Batches(dataset, collate or self.options.collate, self.options.seed)
        with (
            self.evaluating(ema=ema, model=model) as module,
            stateful.preserved_buffers(module, ema),
        ):
            alive = partial(self._process.progress.at, "evaluation")
            share = evaluation.share_of_metric(module, source, metric, world, given, alive)
        with self._process.progress.during("agreement"), self._together("run.evaluate()"):
            found = evaluation.total(share, world, mean=given.reduce == "mean")
        self._process.recorder.logged(self._step_to_log(), "evaluate()", found)
        return found

    def sum(self, value: float) -> float:
        """Add up a number over all ranks. Every rank must call it."""
        number = float(number_of("run.sum()", value))
        with self._together("run.sum()"), self._process.progress.during("agreement"):
            return self._process.world.sum([number])[0]

    def log(self, values: Mapping[str, float | torch.Tensor], *, step: int | None = None) -> None:
        """Tell numbers of your own to the event log, TensorBoard and Logging.log.

        ``values``: by name, numbers or tensors of one element, which are read when the step has
        ended. ``step``: finished steps; default: those when the present step has ended, so
        ``step.index + 1`` within the loop. Rank 0's values count; others may call it or not.
        Raises ConfigError.
        """
        found = checked(values, self._process.world.accelerator.number)
        at = None if step is None else whole("step", step)
        if self.is_main and found:
            found = self._process.world.accelerator.soon(found)
            self._process.progress.log(self._step_to_log() if at is None else at, found)

    def _step_to_log(self) -> int:
        return self.finished_steps + (self._loop is not None and self._loop.within_step)

    def save(
        self, path: str | os.PathLike[str], *, ema: bool = False,
        model: torch.nn.Module | None = None,
    ) -> None:  # fmt: skip
        """Write the weights to a safetensors file, atomically; rank 0 does, at any time.

        It holds the model's state_dict() (``ema``: the moving average's), for start(resume=...).
        ``model``: which, of several; default: all, each under its name. Other ranks may call
        it or not. Raises OSError.
        """
        trained = self._ready("save()")
        file, ema = as_path("path", path), flag("ema", ema)
        if self.is_main:
            if self._loop is not None:
                self._loop.exchange.check_finite(self._loop.step)
            module = trained.module
            if ema or model is not None:
                module = trained.model_of(model).weights(ema=ema)
            with self._process.progress.under("snapshot"):
                about = {"step": str(self._step_to_log()), "ema": str(ema).lower()}
                left_out = weights.save(file, module, about)
            if left_out:
                say(0, f"warning: {', '.join(left_out)} is not in {path}: only tensors can be")

    def keep_best(
        self, value: float | torch.Tensor, path: str | os.PathLike[str], *, mode: str = "min",
        ema: bool = False, model: torch.nn.Module | None = None,
    ) -> bool:  # fmt: skip
        """Save the weights if this value is the best so far; return whether it is.

        ``value``: as evaluate() returns it, equal on all ranks, within the loop or after it.
        ``mode``: "min" or "max". The best so far is kept in the snapshots. Raises ConfigError,
        OSError.
        """
        if self._loop is None:
            raise ConfigError("call keep_best() in the loop, or after it")
        number, name = float(number_of("keep_best()", value)), str(as_path("path", path))
        flag("ema", ema)
        better = is_better(number, mode, self._loop.snapshots.best.get(name))
        self._process.recorder.logged(self._step_to_log(), "keep_best()", number)
        if better:
            self.save(path, ema=ema, model=model)
            self._loop.snapshots.best[name] = [number, mode]
        return better

    def alive(self) -> None:
        """Tell the hang watchdog that a long piece of the script's own work makes progress."""
        self._process.progress.alive()

    def weights_sha256(self) -> str:
        """Hash all parameters and buffers, names and types included; 64 hexadecimal digits."""
        return weights_sha256(self._ready("weights_sha256()").module)

    def state_sha256(self) -> str:
        """Hash all else that a snapshot holds: optimizer, scheduler, this rank's generators.

        Every rank must call it.
        """
        with self._together("run.state_sha256()"):
            return self._ready("state_sha256()").state.sha256(self.rank)

    def finish(self) -> None:
        """Wait for the other ranks and the newest snapshot, and leave the process group."""
        self._teardown.finish(sys.exc_info()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._teardown.finish(error)

    # --- Inside --------------------------------------------------------------------------

    def _together(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Enter what every rank does, once all have left the loop if it is over."""
        if self._loop is not None and not self._loop.within_step:
            self._loop.left()
        return self._process.shutdown.peers(what)

    def _ready(self, caller: str) -> PreparedModels:
        if not self._trained.models:
            raise ConfigError(f"call run.prepare(model, optimizer) before {caller}")
        return self._trained


# --- Teardown -------------------------------------------------------------------------------------
# finish() cannot know whether an exception that is on its way will end the process, as in a
# `finally`, or is caught for good. So it does nothing then.


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
            process.snapshots.wait_durable()
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
        tells = process.world.rank == 0 and process.snapshots.enabled
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
