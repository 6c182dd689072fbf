"""Exchange a step's numbers among ranks, so that all draw the same conclusions.

One exchange per step runs beside the update. Values of hosts are read when the step ends; values
of a GPU when the next step has been queued, so that the GPU stays busy, or sooner where a snapshot
or a check depends on them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from ddpjob_trainer.comm.world import Sent, send
from ddpjob_trainer.errors import ConfigError, NotCommittedError
from ddpjob_trainer.liveness.step_times import Stragglers
from ddpjob_trainer.optim.nan_policy import NanPolicy
from ddpjob_trainer.printing import say
from ddpjob_trainer.training.run_context import RunContext
from ddpjob_trainer.training.step import Step

#: Of what is exchanged, that which a GPU computes.
_MEASURED = frozenset({"not finite", "losses"})


class StepExchange:
    """One process's side of a step's exchange. Every rank calls alike, start() once per step."""

    def __init__(self, process: RunContext, nan: NanPolicy) -> None:
        self._process = process
        self._nan = nan
        # Where a GPU queues its work, a step's losses are read one step later: it stays busy.
        self._ahead = 1 if process.world.accelerator.queues else 0
        self._ended: deque[Step] = deque()  # whose losses may still be on their way
        self._sent: Sent | None = None  # of the step last committed
        world = process.world
        self._stragglers = Stragglers(world.rank, world.size, process.progress.spent)
        self.stop = False  # a rank got a signal: all end after this step
        self.stop_called = False  # this rank's script has called step.stop()
        self.enough = False  # a rank's script has: this step is the run's last
        self._read = False  # this rank's script has read a step's loss

    # --- During the step ----------------------------------------------------------------------

    def start(self, step: Step, *, allowed: bool) -> None:
        """Send a step's numbers. ``allowed``: whether its gradients may be applied."""
        process, averaging = self._process, self._process.averaging
        losses = [process.world.accelerator.number(loss) for loss in step.losses]
        weights = step.weights or [1.0] * len(losses)
        # A batch without weight was left out: its NaN harms nobody.
        counted = [loss for loss, weight in zip(losses, weights, strict=True) if weight]
        step.sent = self._sent = send(
            process.world,
            {
                "stop": [float(process.shutdown.signal > 0)],
                "enough": [float(self.stop_called)],
                "snapshots": process.snapshots.report(),
                "replay": process.replay.report(),
                "drill": process.drill.report(),
                "work": self._stragglers.report(),
                "not finite": self._nan.report(counted, allowed=allowed),
                "losses": averaging.losses(losses, step.weights),
                "weights": averaging.weights(step.weights),
                "weighted": [float(bool(step.weights))],
                "rescue": process.rescue.report() if process.rescue is not None else [],
            },
            measured=_MEASURED,
        )
        step.refused = self._nan.refused

    def not_finite(self, step: Step) -> Sequence[float]:
        """Wait for the others; return the sums of NanPolicy.report()."""
        return _sent(step).device.sums["not finite"]

    def factor(self, step: Step) -> float:
        """Wait for the others; return what gradients of weighted losses are to be multiplied by."""
        sums = _sent(step).host.sums
        self._check_weighted(step, sums["weighted"][0])
        factor = self._process.averaging.factor(sums["weights"])
        if not math.isfinite(factor):
            raise ConfigError(
                f"step {step.index}: the weights given to step.backward() add up to 0 over all"
                " batches and ranks: nothing is left to train on"
            )
        return factor

    def receive_early(self, step: Step) -> None:
        """Wait for the others before the update, with a rescue, where the body reads step.loss.

        Such a body waits for a peer that dies. Then its update is done, and its boundary never
        comes: nobody could save either step.
        """
        if self._read and self._process.rescue is not None:
            _ = _sent(step).host.sums

    # --- After the loop's body ----------------------------------------------------------------

    def finish(self, step: Step) -> None:
        """Hand all hosts' sums to the parts that sent them. Raises ConfigError, PeerLostError."""
        process, sums = self._process, _sent(step).host.sums
        self.stop = sums["stop"][0] > 0
        self.enough = sums["enough"][0] > 0
        process.snapshots.receive(sums["snapshots"])
        process.replay.receive(sums["replay"])
        process.drill.receive(sums["drill"])
        if process.rescue is not None:
            process.rescue.receive(sums["rescue"])
        if process.world.rank == 0:  # who reports
            slow = self._stragglers.receive(sums["work"])
            if slow is not None:
                process.progress.reported_straggler(slow)
        self._check_weighted(step, sums["weighted"][0])
        process.progress.body_ended()
        process.replay.step_ended(step)
        self._ended.append(step)

    def report(self, *, all_steps: bool) -> None:
        """Report ended steps: those whose numbers are likely known, or wait for all.

        Raises DivergedError and ConfigError where the ranks do not agree.
        """
        ahead = 0 if all_steps else self._ahead
        while len(self._ended) > ahead:
            step = self._ended.popleft()
            self._check_finite(step)
            self._process.replay.known()
            self._process.recorder.stepped(step.index + 1, step.losses)
            self._process.progress.stepped(step.index + 1, self.mean_loss(step))

    def check_finite(self, newest: Step | None) -> None:
        """Check every pending step for NaN, without reporting it. Raises DivergedError."""
        if self._ahead:
            for step in (*self._ended, *([newest] if newest is not None else [])):
                if step.committed:
                    self._check_finite(step)

    def wait(self) -> None:
        """Wait until no exchange is under way; report all steps."""
        if self._sent is not None:
            for message in self._sent:
                _ = message.sums
        self.report(all_steps=True)

    def _check_finite(self, step: Step) -> None:
        reported = _sent(step).device.sums["not finite"]
        self._nan.after(step.index, self.mean_loss(step), step.losses, reported, step.refused)

    def mean_loss(self, step: Step) -> float:
        """See Step.loss."""
        if not step.committed:
            raise NotCommittedError(f"step {step.index}: its loss is known after step.commit()")
        self._read = True
        if step.mean is None:
            with self._process.shutdown.listening:  # a rank may ask for it alone
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
                " must read its own share, by run.rank and run.world_size",
            )

    def _check_weighted(self, step: Step, count: float) -> None:
        size = self._process.world.size
        if 0 < count < size:
            raise ConfigError(
                f"step {step.index}: {count:.0f} of {size} ranks have given"
                " step.backward(weight=...): give it on every rank, or on none"
            )


def _sent(step: Step) -> Sent:
    assert step.sent is not None, "start() comes first"
    return step.sent
