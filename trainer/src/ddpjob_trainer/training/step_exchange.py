"""Exchange a step's numbers among ranks, so that all draw the same conclusions.

One exchange per step runs beside the update. Values of hosts are read when the step ends; values
of a GPU when the next step has been queued, so that the GPU stays busy, or sooner where a snapshot
or a check depends on them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import SupportsFloat
from zlib import crc32

import torch

from ddpjob_trainer.comm.exchange import Sent, send
from ddpjob_trainer.comm.world import World
from ddpjob_trainer.errors import ConfigError, NotCommittedError
from ddpjob_trainer.gpu.accelerator import Number
from ddpjob_trainer.optim.nan_policy import NanPolicy
from ddpjob_trainer.telemetry.console import say
from ddpjob_trainer.telemetry.run_log import Values
from ddpjob_trainer.telemetry.stragglers import Stragglers
from ddpjob_trainer.training.run_context import RunContext
from ddpjob_trainer.training.step import Step

#: Of what is exchanged, that which a GPU computes.
_MEASURED = frozenset({"not finite", "losses", "logged"})

#: Names of logged means in a step.
MOST = 16


class StepExchange:
    """One process's side of a step's exchange. Every rank calls alike, start() once per step."""

    def __init__(self, process: RunContext, nan: NanPolicy) -> None:
        self._process = process
        self._nan = nan
        self._ahead = 1 if process.world.accelerator.queues else 0
        self._ended: deque[Step] = deque()  # whose losses may still be on their way
        self._sent: Sent | None = None  # of the step last committed
        self.logged = LoggedMeans(process.world)
        world = process.world
        self._stragglers = Stragglers(world.rank, world.size, process.progress.spent)
        self.stop = False  # a rank has been asked to stop
        self.asked = False  # this one's script has called step.stop()
        self.enough = False  # a rank's script has

    def start(self, step: Step, *, allowed: bool) -> None:
        """Tell the others of a step. ``allowed``: whether its gradients may be applied."""
        process, averaging = self._process, self._process.averaging
        losses = [process.world.accelerator.number(loss) for loss in step.losses]
        weights = step.weights or [1.0] * len(losses)
        counted = [loss for loss, weight in zip(losses, weights, strict=True) if weight]
        step.sent = self._sent = send(
            process.world,
            {
                "stop": [float(process.shutdown.signal > 0)],
                "enough": [float(self.asked)],
                "snapshots": process.snapshots.report(),
                "replay": process.replay.report(),
                "drill": process.drill.report(),
                "work": self._stragglers.report(),
                "not finite": self._nan.report(counted, allowed=allowed),
                "losses": averaging.losses(losses, step.weights),
                "weights": averaging.weights(step.weights),
                "weighted": [float(bool(step.weights))],
                "logged": self.logged.report(),
            },
            measured=_MEASURED,
        )
        step.refused = self._nan.refused

    def finish(self, step: Step) -> None:
        """Hear the other hosts, after the loop's body.

        Raises ConfigError where the ranks do not agree, PeerLostError.
        """
        process, heard = self._process, _sent(step).host.sums
        self.stop = heard["stop"][0] > 0
        self.enough = heard["enough"][0] > 0
        process.snapshots.learn(heard["snapshots"])
        process.replay.learn(heard["replay"])
        process.drill.learn(heard["drill"])
        if process.world.rank == 0:  # who reports
            slow = self._stragglers.learn(heard["work"])
            if slow is not None:
                process.progress.held_up(slow)
        self._check_weighted(step, heard["weighted"][0])
        self.logged.step_ended()
        process.progress.body_ended()
        process.replay.step_ended(step)
        self._ended.append(step)

    def learn(self, *, all_steps: bool) -> None:
        """Take in ended steps whose numbers are likely known, or wait for all; report them.

        Raises DivergedError and ConfigError where the ranks do not agree.
        """
        ahead = 0 if all_steps else self._ahead
        while len(self._ended) > ahead:
            step = self._ended.popleft()
            self.logged.learn(step.index, _sent(step).device.sums["logged"])
            self._check_finite(step)
            self._process.replay.known()
            self._process.recorder.stepped(step.index + 1, step.losses)
            self._process.progress.stepped(step.index + 1, self.mean_loss(step))

    def check_finite(self, newest: Step | None) -> None:
        """Wait for all, and for the step under way; tell nobody. Raises DivergedError."""
        if self._ahead:
            for step in (*self._ended, *([newest] if newest is not None else [])):
                if step.committed:
                    self._check_finite(step)

    def _check_finite(self, step: Step) -> None:
        reported = _sent(step).device.sums["not finite"]
        self._nan.after(step.index, self.mean_loss(step), step.losses, reported, step.refused)

    def wait(self) -> None:
        """Leave no exchange under way; hear of all steps."""
        if self._sent is not None:
            for message in self._sent:
                _ = message.sums
        self.learn(all_steps=True)

    def not_finite(self, step: Step) -> Sequence[float]:
        """Wait for the others; return the sums of NanPolicy.report()."""
        return _sent(step).device.sums["not finite"]

    def factor(self, step: Step) -> float:
        """Wait for the others; return what gradients of weighted losses are to be multiplied by."""
        heard = _sent(step).host.sums
        self._check_weighted(step, heard["weighted"][0])
        factor = self._process.averaging.factor(heard["weights"])
        if not math.isfinite(factor):
            raise ConfigError(
                f"step {step.index}: the weights given to step.backward() add up to 0 over all"
                " batches and ranks: nothing is left to train on"
            )
        return factor

    def mean_loss(self, step: Step) -> float:
        """See Step.loss."""
        if not step.committed:
            raise NotCommittedError(f"step {step.index}: its loss is known after step.commit()")
        if step.mean is None:
            with self._process.shutdown.listening():  # a rank may ask for it alone
                sent = _sent(step)
                weights = sent.host.sums["weights"] if step.weights else None
                losses = sent.device.sums["losses"]
            step.mean = self._process.averaging.mean_loss(losses, weights)
        return step.mean

    def compare_streams(self, first: bytes) -> None:
        """Warn where the first batches of all streams are the same. Every rank calls it."""
        world = self._process.world
        firsts = world.gather_bytes("the comparison of streams", first)
        if len(firsts) > 1 and len(set(firsts)) == 1 and world.rank == 0:
            say(
                0,
                f"warning: all {len(firsts)} processes read the same batch from their streams: each"
                " must read a share of its own, by run.rank and run.world_size",
            )

    def _check_weighted(self, step: Step, count: float) -> None:
        size = self._process.world.size
        if 0 < count < size:
            raise ConfigError(
                f"step {step.index}: {count:.0f} of {size} ranks have given"
                " step.backward(weight=...): give it on every rank, or on none"
            )


@dataclass(slots=True)
class Mean:
    """A number that is known when the step has ended. ``mine``: what this rank has logged."""

    mine: list[SupportsFloat] = field(default_factory=list)
    value: float = math.nan

    def __float__(self) -> float:
        return self.value


class LoggedMeans:
    """run.log(..., reduce="mean"): means over all ranks and calls, in the step's one exchange.

    Every rank sends as many numbers in every step, since it cannot know what the others log: a
    hash of the names, and places for sums and counts.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._means: dict[str, Mean] = {}
        self._told = False
        self._reported: deque[dict[str, Mean]] = deque()  # of steps that are not yet known

    def add(self, values: Values) -> Values:
        """Take values of a step; return the future means of names new in it.

        Raises ConfigError.
        """
        if self._told:
            raise ConfigError(
                "run.log(reduce='mean') came after step.commit(), with which the ranks tell one"
                " another their values: call it before"
            )
        found = {name: Mean() for name in values if name not in self._means}
        count = len(self._means) + len(found)
        if count > MOST:
            raise ConfigError(
                f"run.log(reduce='mean') was given {count} names; {MOST} at most fit into a step"
            )
        self._means |= found
        for name, value in values.items():
            self._means[name].mine.append(value)
        return found

    def report(self) -> list[Number]:
        """Return this step's numbers, to be added up over all ranks."""
        self._told = True
        self._reported.append(self._means)
        if not self._means:  # as in nearly every step of most runs
            return [0.0] * (1 + 2 * MOST)
        names = sorted(self._means)
        logged = [self._means[name].mine for name in names]
        free = [0.0] * (MOST - len(names))
        sums = [sum(map(self._number, values)) for values in logged]
        counts = [float(len(values)) for values in logged]
        return [_hash(names), *sums, *free, *counts, *free]

    def learn(self, step: int, sums: Sequence[float]) -> None:
        """Hear the others of the oldest step that is not known yet.

        Raises ConfigError when not all gave the same names.
        """
        means = self._reported.popleft()
        names = sorted(means)
        if sums[0] != self._world.size * _hash(names):
            raise ConfigError(
                f"step {step}: run.log(reduce='mean') was given"
                f" {', '.join(map(repr, names)) or 'nothing'} here, and other names on another"
                " rank: give the same names on every rank, in every step"
            )
        for place, name in enumerate(names, 1):
            means[name].value = sums[place] / sums[place + MOST]

    def step_ended(self) -> None:
        """Begin the next step's means."""
        self._means, self._told = {}, False

    def _number(self, value: SupportsFloat) -> Number:
        if isinstance(value, torch.Tensor):
            return self._world.accelerator.number(value)
        return float(value)


def _hash(names: Sequence[str]) -> float:
    """Hash names to 32 bits: their sum is exact for two million ranks."""
    return float(crc32("\0".join(names).encode()))


def _sent(step: Step) -> Sent:
    assert step.sent is not None, "start() comes first"
    return step.sent
