"""Handle a NaN or infinite loss or gradient: stop, skip the update, or ignore it.

Loop calls it around each update. All ranks must decide alike, before the update, and without asking
one another. Averaged gradients are equal on all ranks, so each may look at its own; a loss that is
not finite on one rank only is propagated into the gradients. Each rank sends its decision in the
step's exchange; ranks that disagree, and hence hold different gradients, end there.

Where a GPU queues its work, asking before each update would wait for it. Policy stop avoids that:
the answer is read a step later, before any snapshot, and ends the run all the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ddpjob_trainer.comm.world import World
from ddpjob_trainer.errors import DivergedError
from ddpjob_trainer.gpu.accelerator import Number
from ddpjob_trainer.printing import say

#: So many skipped updates are logged one by one; then every hundredth.
_REPORTED = 10


class NanPolicy:
    """One process's side of the NaN policy. All ranks make equal calls and get equal answers."""

    def __init__(self, policy: str, world: World) -> None:
        self._policy = policy
        self._world = world
        self.skipped = 0  # updates, in this process
        self.refused = 0  # of the last reported step
        self._refused_before = 0  # earlier in this step
        self._queues = world.accelerator.queues
        #: Updates are made before it is known whether they were allowed.
        self._late = policy == "stop" and self._queues
        self._found: list[torch.Tensor] = []  # of this step then: more than 0, if not finite

    def mark(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss; make its gradient NaN if the loss is not finite."""
        if self._policy == "ignore":
            return loss
        if not self._queues:
            return loss if math.isfinite(loss.item()) else loss * math.nan
        return loss * (loss.detach() * 0 + 1)  # decided on the device: no host waits

    def report(self, losses: Sequence[Number], *, allowed: bool) -> list[Number]:
        """Return numbers to add up over all ranks: non-finite losses or gradients, and where.

        ``allowed``: whether a following update is.
        """
        number = self._world.rank + 1.0
        bad = _any_odd(losses)
        self.refused = self._refused_before + (not allowed)
        self._refused_before = 0
        if not self._found:
            return [bad, number * bad, float(self.refused), number * (self.refused > 0)]
        found = (torch.stack(self._found) > 0).any().double()
        self._found.clear()
        return [bad, number * bad, found, number * found]

    def allows(
        self,
        parameters: Sequence[torch.nn.Parameter],
        grad_norm: torch.Tensor | None,
        *,
        now: bool = False,
    ) -> bool:
        """Return whether to apply averaged gradients. ``grad_norm``: of all of them, if known.

        ``now``: the step's report has been sent.
        """
        if self._policy == "ignore":
            return True
        gradients = [_values(p.grad) for p in parameters if p.grad is not None]
        if self._late and not now:
            self._found += [odd.to(self._world.device) for odd in _odd(gradients)]
            return True
        if grad_norm is not None and math.isfinite(grad_norm.item()):
            return True  # the reverse may not hold: squares may overflow where their roots do not
        return not any(odd.item() for odd in _odd(gradients))

    def refuse(
        self,
        step: int,
        module: torch.nn.Module,
        losses: Sequence[Number],
        reported: Sequence[float] | None,
    ) -> None:
        """Account for an update that allows() has forbidden.

        ``reported``: the sums of report(); None before the step's end, without a report. Raises
        DivergedError unless it may be skipped.
        """
        parameters = dict(module.named_parameters())
        with_gradient = ((n, p.grad) for n, p in parameters.items() if p.grad is not None)
        bad = next((name for name, gradient in with_gradient if not _finite(_values(gradient))), "")
        first = f", first that of {bad!r}" if bad else ""
        text = f"step {step}: gradients are not finite{first}; {self._losses(losses, reported)}"
        if reported is None:
            self._refused_before += 1
        else:
            self._check_agreement(step, reported, self.refused, first)
        broken = next((n for n, p in parameters.items() if not _finite(p.detach())), None)
        if broken is not None:
            raise DivergedError(
                f"{text}. Parameter {broken!r} was not finite already before this update"
            )
        if self._policy == "stop":
            raise DivergedError(
                f"{text}. The update was not made. start(nan_policy='skip') leaves such updates out"
            )
        self.skipped += 1
        if self._world.rank == 0 and (self.skipped <= _REPORTED or self.skipped % 100 == 0):
            say(0, f"{text}. The update is skipped, number {self.skipped} of this process")

    def after(
        self,
        step: int,
        loss: float,
        losses: Sequence[Number],
        reported: Sequence[float],
        refused: int,
    ) -> None:
        """Check the ranks' reports of a step, and its mean loss. ``refused``: by this rank.

        Raises DivergedError where ranks disagree, or where gradients did not show the loss.
        """
        if self._late and reported[2] == self._world.size:
            raise DivergedError(
                f"step {step}: gradients are not finite; {self._losses(losses, reported)}. The"
                " update was made, since a GPU's answer is read a step later; no snapshot was made"
                " of it. start(nan_policy='skip') leaves such updates out"
            )
        self._check_agreement(step, reported, refused)
        if self._policy == "stop" and not math.isfinite(loss):
            raise DivergedError(f"step {step}: {self._losses(losses, reported)}")

    def _check_agreement(
        self, step: int, reported: Sequence[float], refused: int, first: str = ""
    ) -> None:
        count, total = reported[2:]
        if count != refused * self._world.size:
            where = f"rank {total - 1:.0f}" if count == 1 else "some ranks only"
            raise DivergedError(
                f"step {step}: averaged gradients, which are equal on all ranks, are not finite on"
                f" {where}{first}. Look for code that changes gradients on its own, and for faulty"
                " hardware"
            )

    def _losses(self, mine: Sequence[Number], reported: Sequence[float] | None) -> str:
        value = next((x for x in map(float, mine) if not math.isfinite(x)), None)
        if reported is None:
            return (
                f"of this rank's losses {'each is finite' if value is None else f'one is {value}'}"
            )
        count, total = reported[:2]
        if not count:
            return "every loss is finite"
        if count > 1:
            return f"the losses of {count:.0f} of {self._world.size} ranks are not finite"
        rank = int(total) - 1
        return f"the loss of rank {rank} is {'not finite' if value is None else value}"


def _odd(gradients: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield a number per device and dtype: above 0 if a gradient is not finite.

    In one call of torch's: in a short step a call per tensor would show.
    """
    # Not by torch.utils, whose no_grad() takes as long as the rest of this function.
    grouped: Any = torch._C._group_tensors_by_device_and_dtype
    groups = grouped([gradients], False) if gradients else {}
    for (group,), _ in groups.values():
        found = torch.zeros(1, device=group[0].device, dtype=torch.float32)
        try:
            # GradScaler's function; multiplied by one, gradients keep their bits.
            torch._amp_foreach_non_finite_check_and_unscale_(group, found, torch.ones_like(found))
        except RuntimeError:  # complex, or an unsupported layout
            for gradient in group:
                found += ~_finite(gradient)
        yield found


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient._values() if gradient.is_sparse else gradient


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    return torch.isfinite(tensor).all()


def _any_odd(values: Sequence[Number]) -> Number:
    """Return 1.0 if one of them is not finite, else 0.0."""
    measured = [value for value in values if isinstance(value, torch.Tensor)]
    finite = all(isinstance(value, torch.Tensor) or math.isfinite(value) for value in values)
    if not measured or not finite:
        return float(not finite)
    return (~torch.isfinite(torch.stack(measured))).any().double()
