"""What the ranks tell one another at the end of each step, and what all of them conclude from it.

One exchange per step, which runs beside the update: this rank's losses and their weights, whether
it was told to stop, what it thinks of the gradients, facts of its snapshots. What hosts say is
heard when the step ends, what devices have measured perhaps a step later.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ddpjob_trainer.comm.exchange import Exchange, Sent
from ddpjob_trainer.comm.world import World
from ddpjob_trainer.errors import ConfigError, NotCommittedError
from ddpjob_trainer.gradients.ddp import Averaging
from ddpjob_trainer.optim.nan_policy import NanPolicy
from ddpjob_trainer.snapshot.manager import Snapshots
from ddpjob_trainer.telemetry.console import say
from ddpjob_trainer.training.logged_means import LoggedMeans
from ddpjob_trainer.training.replay import Replay
from ddpjob_trainer.training.shutdown import Shutdown
from ddpjob_trainer.training.step import Step

#: Of what is exchanged, that which a GPU computes.
_MEASURED = frozenset({"not finite", "losses", "logged"})


class StepExchange:
    """One process's side. Every rank makes the same calls, start() once per step."""

    def __init__(
        self,
        world: World,
        shutdown: Shutdown,
        snapshots: Snapshots,
        averaging: Averaging,
        nan: NanPolicy,
        replay: Replay,
    ) -> None:
        self._world = world
        self._shutdown = shutdown
        self._snapshots = snapshots
        self._averaging = averaging
        self._nan = nan
        self._replay = replay
        self._exchange = Exchange(world)
        self.logged = LoggedMeans(world)
        self._sent: Sent | None = None  # of the step last committed
        self.stop = False  # a rank has been told to stop
        self.asked = False  # this one's script has called step.stop()
        self.enough = False  # a rank's script has

    def start(self, step: Step, *, allowed: bool) -> None:
        """Tell the others of a step. ``allowed``: whether its gradients may be applied."""
        losses = [self._world.accelerator.number(loss) for loss in step.losses]
        weights = step.weights or [1.0] * len(losses)
        counted = [
            loss
            for loss, part, weight in zip(losses, step.parts, weights, strict=True)
            if part.samples and weight
        ]
        step.sent = self._sent = self._exchange.start(
            {
                "stop": [float(self._shutdown.signal > 0)],
                "enough": [float(self.asked)],
                "snapshots": self._snapshots.report(),
                "replay": self._replay.report(),
                "not finite": self._nan.report(counted, allowed=allowed),
                "losses": self._averaging.losses(losses, step.weights),
                "weights": self._averaging.weights(step.weights),
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
        heard = _sent(step).told()
        self.stop = heard["stop"][0] > 0
        self.enough = heard["enough"][0] > 0
        self._snapshots.learn(heard["snapshots"])
        self._replay.learn(heard["replay"])
        self._check_weighted(step, heard["weighted"][0])
        self.logged.step_ended()

    def learn(self, step: Step) -> float:
        """Hear of a finished step what was measured, each once. Return its mean loss.

        Raises DivergedError and ConfigError where the ranks do not agree.
        """
        self.logged.learn(step.index, _sent(step).measured()["logged"])
        return self.check_finite(step)

    def check_finite(self, step: Step) -> float:
        """Return a committed step's mean loss. Raises DivergedError."""
        loss = self.mean_loss(step)
        reported = _sent(step).measured()["not finite"]
        self._nan.after(step.index, loss, step.losses, reported, step.refused)
        return loss

    def wait(self) -> None:
        """Leave no exchange under way."""
        if self._sent is not None:
            self._sent.told()
            self._sent.measured()

    def not_finite(self, step: Step) -> Sequence[float]:
        """Wait for the others; return the sums of NanPolicy.report()."""
        return _sent(step).measured()["not finite"]

    def factor(self, step: Step) -> float:
        """Wait for the others; return what gradients of weighted losses are to be multiplied by."""
        heard = _sent(step).told()
        self._check_weighted(step, heard["weighted"][0])
        factor = self._averaging.factor(heard["weights"])
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
            with self._shutdown.listening:  # a rank may ask for it alone
                sent = _sent(step)
                weights = sent.told()["weights"] if step.weights else None
                losses = sent.measured()["losses"]
            step.mean = self._averaging.mean_loss(losses, weights)
        return step.mean

    def compare_streams(self, first: bytes) -> None:
        """Warn where the first batches of all streams are the same. Every rank calls it."""
        firsts = self._world.gather_bytes("the comparison of streams", first)
        if len(firsts) > 1 and len(set(firsts)) == 1 and self._world.rank == 0:
            say(
                0,
                f"warning: all {len(firsts)} processes read the same batch from their streams: each"
                " must read a share of its own, by run.rank and run.world_size",
            )

    def _check_weighted(self, step: Step, count: float) -> None:
        if 0 < count < self._world.size:
            raise ConfigError(
                f"step {step.index}: {count:.0f} of {self._world.size} ranks have given"
                " step.backward(weight=...): give it on every rank, or on none"
            )


def _sent(step: Step) -> Sent:
    assert step.sent is not None, "start() comes first"
    return step.sent
