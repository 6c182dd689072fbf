"""Sum all shards' gradients in one order, whatever the number of ranks.

A reduce-scatter in two steps: all_to_all moves slices without adding, each rank adds up its slice
in the order of the tree (see shard_tree.py), all_gather distributes the sums. With a power of two
of ranks that moves the bytes of a ring all-reduce, 2 (W - 1) / W of the gradients; otherwise a rank
may own two or three subtrees, and the first half grows by as much.

Per rank and dtype, buffers are kept: one of the gradients' size for each subtree the rank owns, and
one slice (1/W of that) for each subtree that any rank owns.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist

from ddpjob_trainer.gradients import shard_tree
from ddpjob_trainer.gradients.shard_tree import Node

#: Bytes. A tensor's alignment must not decide which of a kernel's loops computes it.
_ALIGNMENT = 64

#: One tensor per parameter, in a fixed order; None where a shard did not use the parameter.
Gradients = list[torch.Tensor | None]


def add_gradients(left: Gradients, right: Gradients) -> Gradients:
    """Return left + right, in the memory of left. A missing gradient counts as zeros."""
    for place, (a, b) in enumerate(zip(left, right, strict=True)):
        # Zeros, not nothing: -0.0 + 0.0 is 0.0, as with zeros from another rank.
        if a is None and b is not None:
            left[place] = torch.zeros_like(b)
    pairs = [
        (a, torch.zeros_like(a) if b is None else b)
        for a, b in zip(left, right, strict=True)
        if a is not None
    ]
    if pairs:
        torch._foreach_add_([a for a, _ in pairs], [b for _, b in pairs])
    return left


class Reduction:
    """Averages the gradients of some parameters of one dtype on one device.

    They follow one another in a vector, then one mark per parameter: whether it had a gradient at
    all; the vector is cut into one slice per rank.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], *, count: int, ranks: int, rank: int
    ) -> None:
        self._parameters = list(parameters)
        self._count = count  # shards
        self._ranks = ranks
        root = Node(0, count)
        self._nodes = [
            list(shard_tree.subtrees(root, shard_tree.owned(count, ranks, other)))
            for other in range(ranks)
        ]
        self._mine = self._nodes[rank]
        align = max(1, _ALIGNMENT // self._parameters[0].element_size())
        ends = accumulate(-(-parameter.numel() // align) * align for parameter in self._parameters)
        *self._starts, self._end = [0, *ends]
        self._slice = -(-(self._end + len(self._parameters)) // ranks)
        self._sent: list[Vector] = []
        self._received: list[torch.Tensor] = []

    def mean(self, sums: Sequence[tuple[Node, Gradients]]) -> Gradients:
        """Return the mean over all shards from the sums of this rank's subtrees.

        Every rank must call it. The next call reuses the result's memory.
        """
        if self._ranks == 1:
            ((_, gradients),) = sums
            present = [gradient for gradient in gradients if gradient is not None]
            if present:
                torch._foreach_div_(present, self._count)
            return gradients
        if not self._sent:
            self._allocate()
        for vector, (_, gradients) in zip(self._sent, sums, strict=True):
            vector.fill(gradients)
        root = Node(0, self._count)
        mine = shard_tree.tree_sum(root, self._exchange(), torch.Tensor.add_).div_(self._count)
        result = self._sent[0]
        dist.all_gather_into_tensor(result.whole, mine)
        columns = zip(*(gradients for _, gradients in sums), strict=True)
        absent = [all(gradient is None for gradient in column) for column in columns]
        if not any(absent):  # the usual case: no mark is read back from the device
            return list(result.views)
        marks = result.marks.tolist()
        return [
            None if missing and not mark else view
            for view, mark, missing in zip(result.views, marks, absent, strict=True)
        ]

    def _allocate(self) -> None:
        whole = self._slice * self._ranks
        self._sent = [
            Vector(self._parameters[0].new_zeros(whole), self._parameters, self._starts, self._end)
            for _ in self._mine
        ]
        turns = range(max(map(len, self._nodes)))
        givers = [sum(len(nodes) > turn for nodes in self._nodes) for turn in turns]
        self._received = [self._parameters[0].new_empty(self._slice * n) for n in givers]

    def _exchange(self) -> dict[Node, torch.Tensor]:
        """Return this rank's slice of every subtree."""
        found = {}
        for turn, received in enumerate(self._received):  # all ranks' first subtrees, then second
            givers = [rank for rank, nodes in enumerate(self._nodes) if len(nodes) > turn]
            gives = len(self._mine) > turn
            dist.all_to_all_single(
                received,
                self._sent[turn].whole if gives else received.new_empty(0),
                [self._slice * (rank in givers) for rank in range(self._ranks)],
                [self._slice * gives] * self._ranks,
            )
            for giver, part in zip(givers, torch.split(received, self._slice), strict=True):
                found[self._nodes[giver][turn]] = part
        return found


class Vector:
    """All gradients in one piece of memory, to be sent or received."""

    def __init__(
        self,
        whole: torch.Tensor,
        parameters: Sequence[torch.nn.Parameter],
        starts: Sequence[int],
        end: int,
    ) -> None:
        self.whole = whole
        self.views = [
            whole[start : start + parameter.numel()].view(parameter.shape)
            for start, parameter in zip(starts, parameters, strict=True)
        ]
        self.marks = whole[end : end + len(parameters)]

    def fill(self, gradients: Gradients) -> None:
        """Copy the gradients in; zeros and a mark of zero for a missing one."""
        pairs = [(v, g) for v, g in zip(self.views, gradients, strict=True) if g is not None]
        self.marks.fill_(1)
        if len(pairs) < len(gradients):
            self.whole.zero_()
            self.marks.copy_(self.marks.new_tensor([g is not None for g in gradients]))
        if pairs:
            torch._foreach_copy_([view for view, _ in pairs], [g for _, g in pairs])
