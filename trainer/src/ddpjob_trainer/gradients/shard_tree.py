"""Sum the logical shards of a global batch in one tree.

elastic.py and tree_reduce.py use it. Floating-point addition is not associative, so a sum that must
not depend on the number of ranks needs an order independent of ranks. The shards, fixed in number
for the whole run, are the leaves of one binary tree; a rank owns a contiguous range of them, adds
up the subtrees within its range, and the total adds up those of all ranks in the same tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Generic, NamedTuple, TypeVar

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
