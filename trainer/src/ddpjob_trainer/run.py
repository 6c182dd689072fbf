"""The loop API: start, prepare, steps, backward, commit.

The loop stays the user's. A Run knows the position in the run, so data order, random numbers,
resume, snapshots, SIGTERM and the loss of a peer are its business.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpjob_trainer import batches, exact, rng
from ddpjob_trainer.ending import Ending
from ddpjob_trainer.errors import ConfigError, NotCommittedError
from ddpjob_trainer.order import DataOrder
from ddpjob_trainer.progress import Progress
from ddpjob_trainer.snapshotting import Snapshots
from ddpjob_trainer.state import Stateful, TrainingState, flat_sha256, weights_sha256
from ddpjob_trainer.world import World, agree, say

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)
Metric = Callable[[torch.nn.Module, Any], torch.Tensor | float]


@dataclass(frozen=True, slots=True)
class Options:
    """What start() was given, defaults filled in."""

    total_steps: int
    global_batch: int
    seed: int
    level: str
    threads: int
    collate: batches.Collate | None


@dataclass(slots=True)
class Step:
    """One optimizer step. ``index`` counts from 0; ``batches`` yields this rank's batches."""

    run: Run
    index: int
    batches: Iterator[Any]
    losses: list[torch.Tensor] = field(default_factory=list)
    committed: bool = False

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of a scalar loss and average them over all ranks."""
        self.run._backward(self, loss)

    def commit(self) -> None:
        """Apply the gradients: clip, optimizer, scheduler.

        Snapshot, metrics and SIGTERM follow when the loop's body ends, so state that the body
        changes after commit(), an EMA for example, is in the snapshot as well.
        """
        self.run._commit(self)


@dataclass(slots=True)
class _Trained:
    """What prepare() was given."""

    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    scheduler: Any
    clip: float | None
    state: TrainingState
    warm: bool = False
    forwards: int = 0  # through the wrapper, with gradients, since the last backward

    def count_forward(self, *_: object) -> None:
        self.forwards += torch.is_grad_enabled()


class Run:
    """A training run, as one of its processes sees it. Made by start()."""

    def __init__(
        self,
        world: World,
        options: Options,
        ending: Ending,
        progress: Progress,
        snapshots: Snapshots,
    ) -> None:
        self.options = options
        self.finished_steps = 0
        self._world = world
        self._ending = ending
        self._progress = progress
        self._snapshots = snapshots
        self._trained: _Trained | None = None
        self._config: dict[str, Any] = {}
        self._closed = False
        atexit.register(self._close)

    # --- Where we are --------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Number of this process, 0 to world_size - 1."""
        return self._world.rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self._world.size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes."""
        return self._world.rank == 0

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self._world.device

    # --- Before the loop -----------------------------------------------------------------

    def prepare(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        *,
        scheduler: Any = None,
        clip_grad_norm: float | None = None,
        bucket_cap_mb: float | None = None,
    ) -> tuple[DistributedDataParallel, Optimizer]:
        """Wrap the model in DistributedDataParallel and take charge of what it trains with.

        ``scheduler`` advances at every commit. ``clip_grad_norm`` bounds the norm of all
        gradients together. ``bucket_cap_mb`` is DDP's: gradients travel in buckets of that
        size (default 25). Raises ConfigError.
        """
        if self._trained is not None:
            raise ConfigError("prepare() was called twice; one model per run")
        if isinstance(model, DistributedDataParallel):
            raise ConfigError("give prepare() the plain model; it wraps it in DDP itself")
        _check_optimizer(model, optimizer)
        model.to(self.device)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ConfigError("the model has no parameter that requires a gradient")
        wrapped = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb)
        state = TrainingState(model)
        state.register("optimizer", optimizer)
        if scheduler is not None:
            state.register("scheduler", scheduler)
        self._trained = _Trained(wrapped, optimizer, scheduler, clip_grad_norm, state)
        wrapped.register_forward_pre_hook(self._trained.count_forward)
        return wrapped, optimizer

    def register(self, name: str, obj: Stateful) -> None:
        """Keep one more object with state_dict and load_state_dict in the snapshots."""
        self._ready("register()").state.register(name, obj)

    # --- The loop ------------------------------------------------------------------------

    def steps(self, dataset: batches.Dataset) -> Iterator[Step]:
        """Yield the steps that are still to do, after the newest snapshot if there is one."""
        trained = self._ready("steps()")
        if self._config:
            raise ConfigError("steps() was called twice; it counts all epochs itself")
        batches.check(dataset)
        order = DataOrder(self.options.seed, len(dataset), self.options.global_batch)
        order.shard(0, self.rank, self.world_size)  # says now if it cannot be divided
        self._config = self._fingerprint(len(dataset))
        with self._ending.in_loop():
            with self._peers():
                agree(self._world, self._options_of_all() | self._snapshots.facts())
                self._snapshots.check(trained.state)
                self.finished_steps, stored = self._snapshots.restore(trained.state, self._config)
            self._config["buckets"] = stored.get("buckets")
            self._progress.resumed(self.finished_steps)
            while self.finished_steps < self.options.total_steps:
                index = self.finished_steps
                rng.reseed(self.options.seed, index, self.rank)
                step = Step(self, index, self._batches(dataset, order, index))
                yield step
                if not step.committed:
                    raise NotCommittedError(
                        f"step {index} was left without step.commit(): call it at the end of the"
                        " loop's body"
                    )
                self._end_step(trained, step)
        self._progress.phase("done")

    def _batches(self, dataset: Any, order: DataOrder, index: int) -> Iterator[Any]:
        share = order.shard(index, self.rank, self.world_size)
        yield batches.to_device(batches.fetch(dataset, share, self.options.collate), self.device)

    def _backward(self, step: Step, loss: torch.Tensor) -> None:
        trained = self._ready("backward()")
        if loss.numel() != 1 or not loss.requires_grad:
            raise ConfigError(
                f"step.backward() needs a scalar loss with a gradient, not {list(loss.shape)}"
                f" requires_grad={loss.requires_grad}"
            )
        if not trained.forwards:
            raise ConfigError(
                "the loss was not computed through the model that prepare() returned since the"
                " last step.backward(): the ranks would drift apart. Call that model, and"
                " step.backward() after each forward"
            )
        trained.forwards = 0
        with self._peers():
            if not trained.warm and self.options.level != "off":
                exact.warm_up(trained.model, loss)
                self._compare_layout(trained)
            trained.warm = True
            loss.backward()  # type: ignore[no-untyped-call]
        step.losses.append(loss.detach())

    def _compare_layout(self, trained: _Trained) -> None:
        layout = exact.bucket_layout(trained.model)
        before = self._config.get("buckets")
        self._config["buckets"] = layout
        if before not in (None, layout) and self.is_main:
            say(
                0,
                "warning: gradients travel in other buckets than before the snapshot: the"
                " result will not equal an undisturbed run's bit for bit",
            )

    def _commit(self, step: Step) -> None:
        trained = self._ready("commit()")
        if step.committed or not step.losses:
            raise NotCommittedError(
                f"step {step.index}: commit() was called "
                + ("twice" if step.committed else "before step.backward(loss)")
            )
        if trained.clip is not None:
            torch.nn.utils.clip_grad_norm_(trained.model.parameters(), trained.clip)
        trained.optimizer.step()
        if trained.scheduler is not None:
            trained.scheduler.step()
        trained.optimizer.zero_grad(set_to_none=True)
        step.committed = True

    def _end_step(self, trained: _Trained, step: Step) -> None:
        """After the loop's body, so that what it does after commit() is in the snapshot too."""
        done = self.finished_steps = step.index + 1
        loss = sum(float(value) for value in step.losses) / len(step.losses)
        with self._peers():
            total, stop, saved = self._world.sum(
                [loss, float(self._ending.signal > 0), self._snapshots.report()]
            )
            self._snapshots.learn(saved)
            last = stop > 0 or done == self.options.total_steps
            if self._snapshots.due(done, last=last):
                self._snapshots.save(done, trained.state, self._config)
                if last:  # there is no further step that would tell the others
                    self._snapshots.learn(self._world.sum([self._snapshots.report()])[0])
        self._progress.stepped(done, total / self.world_size)
        if stop and done < self.options.total_steps:
            self._ending.stop(done)

    # --- After the loop ------------------------------------------------------------------

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[torch.nn.Module]:
        """Yield the bare model in eval mode, without gradients; training notices nothing."""
        module = self._ready("evaluating()").state.module
        modes = [(part, part.training) for part in module.modules()]  # some may be frozen
        module.eval()
        try:
            with torch.no_grad(), rng.preserved():
                yield module
        finally:
            for part, training in modes:
                part.training = training

    def evaluate(self, dataset: batches.Dataset, metric: Metric, *, batch_size: int = 256) -> float:
        """Return the sum of ``metric(model, batch)`` over the dataset, shared among the ranks.

        Every sample is seen exactly once; the ranks' shares may differ by one batch.
        """
        total = 0.0
        with self._peers():  # each rank's BatchNorm has seen other samples: rank 0's hold
            for buffer in self._ready("evaluate()").state.module.buffers():
                self._world.broadcast_tensor(buffer)
        with self.evaluating() as module:
            for start in range(self.rank * batch_size, len(dataset), self.world_size * batch_size):
                indices = batches.span(start, min(start + batch_size, len(dataset)))
                batch = batches.fetch(dataset, indices, self.options.collate)
                total += float(metric(module, batches.to_device(batch, self.device)))
        return self.sum(total)

    def sum(self, value: float) -> float:
        """Add up a number over all ranks. Every rank must call it."""
        with self._peers():
            return self._world.sum([float(value)])[0]

    def weights_sha256(self) -> str:
        """Hash all parameters and buffers, names and types included."""
        return weights_sha256(self._ready("weights_sha256()").state.module)

    def state_sha256(self) -> str:
        """Hash all else that a snapshot holds: optimizer, scheduler, this rank's generators."""
        state = self._ready("state_sha256()").state
        return flat_sha256(state.capture([rng.capture()]))

    def finish(self) -> None:
        """Wait for the other ranks and leave the process group."""
        # In a `finally` after an exception the others still wait for our gradients.
        if not self._closed and sys.exc_info()[0] is None:
            with self._peers():
                self._world.barrier()
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.finish()

    # --- Inside --------------------------------------------------------------------------

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            if dist.is_initialized():
                dist.destroy_process_group()

    @contextlib.contextmanager
    def _peers(self) -> Iterator[None]:
        """End this process at once when a peer is gone: exit code 75."""
        try:
            yield
        except RuntimeError as error:
            self._ending.if_peer_lost(error)
            raise

    def _ready(self, caller: str) -> _Trained:
        if self._trained is None:
            raise ConfigError(f"call run.prepare(model, optimizer) before {caller}")
        return self._trained

    def _options_of_all(self) -> dict[str, Any]:
        """What must be equal on all ranks, lest they wait for different things."""
        names = ("seed", "global_batch", "samples", "total_steps", "level")
        return {name: self._config[name] for name in names}

    def _fingerprint(self, samples: int) -> dict[str, Any]:
        return {
            "seed": self.options.seed,
            "global_batch": self.options.global_batch,
            "samples": samples,
            "total_steps": self.options.total_steps,
            "level": self.options.level,
            "threads": self.options.threads,
            "world_size": self.world_size,
            "device": self.device.type,
            "torch": torch.__version__,
        }


def _check_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """An optimizer of another model would train nothing, silently."""
    known = set(model.parameters())
    for group in optimizer.param_groups:
        if any(parameter not in known for parameter in group["params"]):
            raise ConfigError("the optimizer holds parameters that are not the model's")
