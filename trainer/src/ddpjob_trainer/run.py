"""The loop API: start, prepare, steps, backward, commit.

The loop stays the user's. A Run knows the position in the run, so data order, random numbers,
resume, snapshots, SIGTERM and the loss of a peer are its business.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpjob_trainer import batches, evaluation, failpoints, rng
from ddpjob_trainer.averaging import Averaging, Part
from ddpjob_trainer.ending import Ending
from ddpjob_trainer.errors import ConfigError, NotCommittedError
from ddpjob_trainer.evaluation import Metric
from ddpjob_trainer.exchange import Exchange
from ddpjob_trainer.options import ModelOptions, Options
from ddpjob_trainer.order import DataOrder
from ddpjob_trainer.preparing import Trained, make_trained
from ddpjob_trainer.progress import Progress
from ddpjob_trainer.recording import Recording
from ddpjob_trainer.snapshotting import Snapshots
from ddpjob_trainer.state import Stateful, flat_sha256, weights_sha256
from ddpjob_trainer.world import World, agree, say

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


@dataclass(slots=True)
class Step:
    """One optimizer step. ``index`` counts from 0; ``batches`` yields this rank's batches."""

    run: Run
    index: int
    parts: Sequence[Part]
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


class Run:
    """A training run, as one of its processes sees it. Made by start()."""

    def __init__(
        self,
        world: World,
        options: Options,
        ending: Ending,
        progress: Progress,
        snapshots: Snapshots,
        averaging: Averaging,
        recording: Recording,
    ) -> None:
        self.options = options
        self.finished_steps = 0
        self._world = world
        self._ending = ending
        self._progress = progress
        self._snapshots = snapshots
        self._averaging = averaging
        self._recording = recording
        self._exchange = Exchange(world)
        self._trained: Trained | None = None
        self._step: Step | None = None
        self._layout_known = False
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
        options = ModelOptions(clip_grad_norm, bucket_cap_mb)
        self._trained = make_trained(
            self._averaging, model, optimizer, scheduler, options, self.device
        )
        self._trained.model.register_forward_pre_hook(self._forward_begins)
        return self._trained.model, optimizer

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
        self._averaging.parts(order, 0)  # says now if it cannot be divided
        self._config = self._fingerprint(len(dataset))
        self._progress.built(trained.readings)
        with self._ending.in_loop():
            with self._peers():
                agree(self._world, self._options_of_all() | self._snapshots.facts())
                self._snapshots.check(trained.state)
                self.finished_steps, stored = self._snapshots.restore(trained.state, self._config)
            self._config["buckets"] = stored.get("buckets")
            self._progress.resumed(self.finished_steps)
            self._recording.resumed(self.finished_steps)
            while self.finished_steps < self.options.total_steps:
                step = self._begin(dataset, order)
                yield step
                if not step.committed:
                    raise NotCommittedError(
                        f"step {step.index} was left without step.commit(): call it at the end"
                        " of the loop's body"
                    )
                self._end_step(trained, step)
            with self._peers():
                self._recording.ended(trained.state)
        self._progress.phase("done")

    def _begin(self, dataset: Any, order: DataOrder) -> Step:
        index = self.finished_steps
        parts = self._averaging.parts(order, index)
        rng.reseed(self.options.seed, index, self._averaging.outside)
        self._step = Step(self, index, parts, self._batches(dataset, index, parts))
        return self._step

    def _batches(self, dataset: Any, index: int, parts: Sequence[Part]) -> Iterator[Any]:
        for part in parts:
            if part.reseed:
                rng.reseed(self.options.seed, index, part.shard)
            self._progress.at("data")
            batch = batches.fetch(dataset, part.indices, self.options.collate)
            batch = batches.to_device(batch, self.device)
            self._progress.at("forward")
            yield batch

    def _forward_begins(self, *_: object) -> None:
        """Runs before each forward through the wrapper, evaluations included."""
        trained, step = self._trained, self._step
        if trained is not None and step is not None and torch.is_grad_enabled():
            trained.forwards += 1
            self._averaging.before_forward(len(step.losses))

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
        if len(step.losses) == len(step.parts):
            raise ConfigError(
                f"step.backward() was called more than {len(step.parts)} times in step"
                f" {step.index}: call it once for each batch of step.batches"
                " (start(micro_batches=...) says how many there are)"
            )
        trained.forwards = 0
        self._progress.at("backward")
        with self._peers():
            self._averaging.backward(loss, len(step.losses))
        step.losses.append(loss.detach())
        self._progress.at("body")

    def _commit(self, step: Step) -> None:
        trained = self._ready("commit()")
        self._check_commit(step)
        self._progress.at("backward")
        with self._peers():
            self._averaging.finish()
            values = [float(loss) for loss in step.losses]
            report = [float(self._ending.signal > 0), self._snapshots.report()]
            self._exchange.start([*report, *self._averaging.losses(values)])
            if not self._layout_known:
                self._compare_layout()
        self._progress.at("update")
        self._snapshots.before_update()
        trained.update()
        self._progress.at("body")
        failpoints.reach("step")
        step.committed = True

    def _check_commit(self, step: Step) -> None:
        done, wanted = len(step.losses), len(step.parts)
        if step.committed or not done:
            raise NotCommittedError(
                f"step {step.index}: commit() was called "
                + ("twice" if step.committed else "before step.backward(loss)")
            )
        if done < wanted:
            raise NotCommittedError(
                f"step {step.index}: commit() was called after {done} of {wanted} batches: go"
                " through all of step.batches and call step.backward(loss) for each"
            )

    def _compare_layout(self) -> None:
        self._layout_known = True
        layout = self._averaging.layout()
        before = self._config.get("buckets")
        self._config["buckets"] = layout
        if before not in (None, layout) and self.is_main:
            say(
                0,
                "warning: gradients travel in other buckets than before the snapshot: the"
                " result will not equal an undisturbed run's bit for bit",
            )

    def _end_step(self, trained: Trained, step: Step) -> None:
        """After the loop's body, so that what it does after commit() is in the snapshot too."""
        done = self.finished_steps = step.index + 1
        self._progress.at("agreement")
        with self._peers():
            stop, saved, *losses = self._exchange.wait()
            self._snapshots.learn(saved)
            last = stop > 0 or done == self.options.total_steps
            if self._snapshots.due(done, last=last):
                self._snapshots.save(done, trained.state, self._config)
                if last:  # there is no further step that would tell the others
                    self._snapshots.learn(self._world.sum([self._snapshots.report()])[0])
        self._progress.stepped(done, self._averaging.mean_loss(losses))
        self._recording.stepped(done, step.losses)
        if stop and done < self.options.total_steps:
            self._ending.stop(done)

    # --- After the loop ------------------------------------------------------------------

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[torch.nn.Module]:
        """Yield the bare model in eval mode, without gradients; training notices nothing."""
        module = self._ready("evaluating()").state.module
        with self._progress.during("evaluation"), evaluation.evaluating(module):
            yield module

    def evaluate(self, dataset: batches.Dataset, metric: Metric, *, batch_size: int = 256) -> float:
        """Return the sum of ``metric(model, batch)`` over the dataset, shared among the ranks.

        Every sample is seen exactly once; the ranks' shares may differ by one batch.
        """
        with self._peers():
            evaluation.share_buffers(self._ready("evaluate()").state.module, self._world)
        with self.evaluating() as module:
            total = evaluation.share_of_metric(
                module, dataset, metric, self._world,
                batch_size=batch_size, collate=self.options.collate,
                alive=lambda: self._progress.at("evaluation"),
            )  # fmt: skip
        return self.sum(total)

    def sum(self, value: float) -> float:
        """Add up a number over all ranks. Every rank must call it."""
        with self._progress.during("agreement"), self._peers():
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
                failpoints.reach("barrier")
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

    def _ready(self, caller: str) -> Trained:
        if self._trained is None:
            raise ConfigError(f"call run.prepare(model, optimizer) before {caller}")
        return self._trained

    def _options_of_all(self) -> dict[str, Any]:
        """What must be equal on all ranks, lest they wait for different things."""
        names = (
            "seed",
            "global_batch",
            "micro_batches",
            "samples",
            "total_steps",
            "level",
            "shards",
        )
        return {name: self._config[name] for name in names}

    def _fingerprint(self, samples: int) -> dict[str, Any]:
        return {
            "seed": self.options.seed,
            "global_batch": self.options.global_batch,
            "micro_batches": self.options.micro_batches,
            "samples": samples,
            "total_steps": self.options.total_steps,
            "level": self.options.level,
            "shards": self.options.shards if self.options.level == "elastic" else None,
            "threads": self.options.threads,
            "world_size": self.world_size,
            "device": self.device.type,
            "torch": torch.__version__,
        }
