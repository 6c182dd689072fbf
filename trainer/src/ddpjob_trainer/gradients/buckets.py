"""Average gradients over the ranks after backward, where DDP's reducer cannot.

ddp.py uses it for several models whose losses run through one another, parameters that are frozen
for a while, a second backward through one graph: the reducer waits for gradients that do not come,
or silently leaves some on their rank. Here the layout depends on the order of the parameters only,
so there is no order to learn first; a parameter without a gradient on any rank keeps none. The
price: communication begins only when the last backward has ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist

from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.gradients.tree_reduce import Gradients, Vector

CAP_MB = 25.0  # as DistributedDataParallel's


class Buckets:
    """Averages the gradients of some parameters, always in the same pieces."""

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], *, ranks: int, cap_mb: float | None
    ) -> None:
        cap = (cap_mb or CAP_MB) * (1 << 20)
        self._ranks = ranks
        self._pieces = [_Piece(part) for part in _cut(parameters, cap)]

    def __len__(self) -> int:
        return len(self._pieces)

    def average(self) -> None:
        """Replace each gradient by its mean over the ranks; all must call it.

        A gradient missing on some ranks counts as zeros there. Raises ConfigError.
        """
        if self._ranks == 1:
            return
        works = [piece.start(self._ranks) for piece in self._pieces]
        for piece, work in zip(self._pieces, works, strict=True):
            work.wait()
            piece.put_back()


def _cut(
    parameters: Sequence[torch.nn.Parameter], cap: float
) -> Iterator[list[torch.nn.Parameter]]:
    """Yield pieces of one dtype and device, at most ``cap`` bytes or one parameter."""
    groups: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for group in groups.values():
        piece: list[torch.nn.Parameter] = []
        size = 0
        for parameter in group:
            if piece and size + parameter.nbytes > cap:
                yield piece
                piece, size = [], 0
            piece.append(parameter)
            size += parameter.nbytes
        yield piece


class _Piece:
    """Gradients sent together, with one mark per parameter: whether it had a gradient."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        *starts, end = [0, *accumulate(parameter.numel() for parameter in parameters)]
        whole = parameters[0].new_zeros(end + len(parameters), requires_grad=False)
        self._vector = Vector(whole, parameters, starts, end)
        self._all_here = False

    def start(self, ranks: int) -> dist.Work:
        gradients: Gradients = [parameter.grad for parameter in self._parameters]
        if any(g is not None and g.layout is not torch.strided for g in gradients):
            raise ConfigError(
                "sparse gradients cannot be averaged for several models, or after a second"
                " backward: use Embedding(sparse=False)"
            )
        self._all_here = None not in gradients
        with torch.no_grad():
            self._vector.fill(gradients)
            self._vector.whole.div_(ranks)  # before the sum, as DDP does: less overflows
        work: dist.Work = dist.all_reduce(self._vector.whole, async_op=True)
        return work

    def put_back(self) -> None:
        views = self._vector.views
        if not self._all_here:  # else no mark is read back from the device
            marks = self._vector.marks.tolist()
            for parameter, mark in zip(self._parameters, marks, strict=True):
                if mark and parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
        pairs = [(p.grad, v) for p, v in zip(self._parameters, views, strict=True)]
        there = [(gradient, view) for gradient, view in pairs if gradient is not None]
        if there:
            with torch.no_grad():
                torch._foreach_copy_([gradient for gradient, _ in there], [v for _, v in there])
