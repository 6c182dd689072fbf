"""Sum all shards' gradients in one tree, whatever the number of ranks.

elastic.py uses it, ddp.py with a shard per rank. Floating-point addition is not associative, so a
sum that must not depend on the number of ranks needs an order independent of ranks. The shards,
fixed in number for the whole run, are the leaves of one binary tree; a rank owns a contiguous range
of them, adds up the subtrees within its range, and the total adds up those of all ranks in the same
tree: a reduce-scatter in two steps. all_to_all moves slices without adding, each rank adds up its
slice in the order of the tree, all_gather distributes the sums. With a power of two of ranks that
moves the bytes of a ring all-reduce, 2 (W - 1) / W of the gradients; otherwise a rank may own two
or three subtrees, and the first half grows by as much.

Per rank and dtype, buffers are kept: one of the gradients' size for each subtree the rank owns, and
one slice (1/W of that) for each subtree that any rank owns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist

#: Bytes. A tensor's alignment must not decide which of a kernel's loops computes it.
_ALIGNMENT = 64

#: One tensor per parameter, in a fixed order; None where a shard did not use the parameter.
Gradients = list[torch.Tensor | None]

#: torch 2.13 deprecates the older name.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

T = TypeVar("T")
Add = Callable[[T, T], T]


class Node(NamedTuple):
    """A subtree: the shards from ``start`` to ``end`` - 1."""

    start: int
    end: int


def owned(shards: int, ranks: int, rank: int) -> range:
    """Return the contiguous shards of a rank; the first ranks may own one more."""
    each, more = divmod(shards, ranks)
    start = rank * each + min(rank, more)
    return range(start, start + each + (rank < more))


def halves(node: Node) -> tuple[Node, Node]:
    """Split a node of two or more shards. The left half is the largest power of two below it."""
    left = 1 << (node.end - node.start - 1).bit_length() - 1
    middle = node.start + left
    return Node(node.start, middle), Node(middle, node.end)


def subtrees(root: Node, within: range) -> Iterator[Node]:
    """Yield the largest nodes that lie within a range of shards, from left to right."""
    if root.end <= within.start or root.start >= within.stop:
        return
    if within.start <= root.start and root.end <= within.stop:
        yield root
        return
    for half in halves(root):
        yield from subtrees(half, within)


def tree_sum(root: Node, known: Mapping[Node, T], add: Add[T]) -> T:
    """Return the sum of a node from those of nodes below it. Raises KeyError if one is missing."""
    if root in known:
        return known[root]
    if root.end - root.start == 1:
        raise KeyError(root)
    left, right = halves(root)
    return add(tree_sum(left, known, add), tree_sum(right, known, add))


def total(values: Iterable[float]) -> float:
    """Return the sum of one number per shard, in tree order."""
    known = {Node(index, index + 1): value for index, value in enumerate(values)}
    return tree_sum(Node(0, len(known)), known, lambda left, right: left + right)


class Partial(Generic[T]):
    """Adds up a rank's shards one by one, from left to right.

    It holds at most one sum per level of the tree. ``add`` may change its left argument.
    """

    def __init__(self, shards: int, add: Add[T]) -> None:
        self._add = add
        self._sums: list[tuple[Node, T]] = []
        self._siblings: dict[tuple[Node, Node], Node] = {}
        _collect(Node(0, shards), self._siblings)

    def push(self, shard: int, value: T) -> None:
        """Add the next shard's value."""
        node = Node(shard, shard + 1)
        while self._sums and (parent := self._siblings.get((self._sums[-1][0], node))) is not None:
            _, left = self._sums.pop()
            node, value = parent, self._add(left, value)
        self._sums.append((node, value))

    def take(self) -> list[tuple[Node, T]]:
        """Return the sums of the subtrees, and clear them."""
        sums, self._sums = self._sums, []
        return sums


def _collect(node: Node, siblings: dict[tuple[Node, Node], Node]) -> None:
    if node.end - node.start > 1:
        left, right = halves(node)
        siblings[left, right] = node
        _collect(left, siblings)
        _collect(right, siblings)


def add_gradients(left: Gradients, right: Gradients) -> Gradients:
    """Return left + right, in the memory of left. A missing gradient counts as zeros."""
    for place, (a, b) in enumerate(zip(left, right, strict=True)):
        # Zeros, not nothing: -0.0 + 0.0 is 0.0, as with zeros from another rank.
        if a is None and b is not None:
            left[place] = torch.zeros_like(b)
    both = zip(left, right, strict=True)
    pairs = [(a, torch.zeros_like(a) if b is None else b) for a, b in both if a is not None]
    if pairs:
        torch._foreach_add_([a for a, _ in pairs], [b for _, b in pairs])
    return left


class Means:
    """Averages the gradients of any parameters over all shards."""

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], *, count: int, ranks: int, rank: int
    ) -> None:
        groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, parameter in enumerate(parameters):
            groups.setdefault((parameter.dtype, parameter.device), []).append(index)
        self._parts = [
            (group, _Reduction([parameters[i] for i in group], count=count, ranks=ranks, rank=rank))
            for group in groups.values()
        ]

    def mean(self, sums: Sequence[tuple[Node, Gradients]]) -> Gradients:
        """Return the means from this rank's subtrees' sums; None where no shard has any.

        Every rank must call it. The next call reuses the result's memory.
        """
        found: dict[int, torch.Tensor | None] = {}
        for group, reduction in self._parts:
            chosen = [(node, [gradients[i] for i in group]) for node, gradients in sums]
            found.update(zip(group, reduction.mean(chosen), strict=True))
        return [found[index] for index in range(len(found))]


class _Reduction:
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
        self._nodes = [list(subtrees(root, owned(count, ranks, other))) for other in range(ranks)]
        self._mine = self._nodes[rank]
        align = max(1, _ALIGNMENT // self._parameters[0].element_size())
        ends = accumulate(-(-parameter.numel() // align) * align for parameter in self._parameters)
        *self._starts, self._end = [0, *ends]
        self._slice = -(-(self._end + len(self._parameters)) // ranks)
        self._sent: list[_Vector] = []
        self._received: list[torch.Tensor] = []

    def mean(self, sums: Sequence[tuple[Node, Gradients]]) -> Gradients:
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
        mine = tree_sum(root, self._exchange(), torch.Tensor.add_).div_(self._count)
        result = self._sent[0]
        _all_gather(result.whole, mine)
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
            _Vector(self._parameters[0].new_zeros(whole), self._parameters, self._starts, self._end)
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


class _Vector:
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
