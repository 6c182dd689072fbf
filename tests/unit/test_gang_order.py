"""dev/bench/gangs.py tells an order that has a reason from one that has none."""

from collections.abc import Iterable

from support import benches

from harness.gang_order import Gang, Look, Order, Pod, halves, placed  # isort: skip

assert benches  # it has put dev/bench/ on the path
NODES = {"one": 4, "two": 4}


def gang(name: str, replicas: int, slots: int = 1, priority: int = 0) -> Gang:
    return Gang(name, replicas, slots, priority, at=0, seconds=1)


def pods(of: Gang, nodes: Iterable[str] = (), nominated: str = "") -> list[Pod]:
    """All pods of a gang: the first of them on these nodes, the others wait."""
    places = [*nodes, *[""] * of.replicas][: of.replicas]
    return [
        Pod(of.name, f"{of.name}-{n}", n, 1, node, "" if node else nominated, "Running")
        for n, node in enumerate(places)
    ]


def looks(*each: list[Pod], every: float = 1.0) -> list[Look]:
    return [Look(n * every, tuple(one)) for n, one in enumerate(each)]


def order(gangs: list[Gang], seen: list[Look]) -> Order:
    """They were applied in the order given."""
    return Order(gangs, {one.name: n * 0.1 for n, one in enumerate(gangs)}, NODES, seen)


FULL, EARLY, LATE = gang("full", 2, 2), gang("early", 3, 2), gang("late", 2)
BUSY = pods(FULL, ["one", "two"])


def test_a_smaller_gang_may_go_before_one_that_has_no_room():
    before = [*BUSY, *pods(EARLY), *pods(LATE)]
    after = [*BUSY, *pods(EARLY), *pods(LATE, ["one", "two"])]
    (found,) = order([FULL, EARLY, LATE], looks(before, after)).inversions()
    assert (found.earlier, found.later, found.explained) == ("early", "late", True)
    assert (found.free, found.need) == (4, 6)
    assert found.reason == "room for 2 of 3 pods of 2"


def test_who_had_room_for_long_should_have_been_first():
    waiting, on = pods(EARLY) + pods(LATE), pods(EARLY) + pods(LATE, ["one", "two"])
    (short,) = order([FULL, EARLY, LATE], looks(BUSY + waiting, waiting, on)).inversions()
    assert (short.explained, short.reason) == (
        True,
        "there was room, for 2.0 s: within its pause between tries",
    )
    (long,) = order([FULL, EARLY, LATE], looks(BUSY + waiting, *[waiting] * 20, on)).inversions()
    assert (long.explained, long.reason) == (False, "there was room, for 21.0 s")


def test_a_start_in_parts_is_measured_and_a_replacement_is_none():
    job = {"early": 1}
    some, every = pods(EARLY, ["one"]), pods(EARLY, ["one", "one", "two"])
    seen = [Look(float(n), tuple(one), job) for n, one in enumerate((some, some, every, some))]
    assert halves(EARLY, seen) == [(1, 0.0, 2.0)]
    assert placed(EARLY, seen) == 2
    newcomer = Pod("early", "new", 2, 2, "", "", "Pending")
    seen = [Look(0.0, tuple(every), job), Look(1.0, (*every[:2], newcomer), job)]
    assert halves(EARLY, seen) == []
    assert halves(EARLY, [Look(float(n), tuple(some), job) for n in range(9)]) == [(1, 0.0, 8.0)]
