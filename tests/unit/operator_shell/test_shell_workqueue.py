"""The work queue: once in line, one worker per key, delays and back-off."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from ddpjob_operator.shell.reconciler import WorkQueue

pytestmark = [pytest.mark.looptime]


@contextlib.asynccontextmanager
async def working(
    queue: WorkQueue[str], work: Callable[[str], Awaitable[None]], workers: int = 4
) -> AsyncIterator[None]:
    task = asyncio.create_task(queue.run(workers, work))
    yield
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_a_key_is_never_worked_on_twice_at_once_and_comes_back_once():
    queue: WorkQueue[str] = WorkQueue()
    inside: Counter[str] = Counter()
    most: Counter[str] = Counter()
    rounds: Counter[str] = Counter()

    async def work(key: str) -> None:
        inside[key] += 1
        most[key] = max(most[key], inside[key])
        rounds[key] += 1
        if rounds[key] == 1:
            for _ in range(3):  # asked for again while at work
                queue.add(key)
        await asyncio.sleep(1)
        inside[key] -= 1

    async with working(queue, work):
        for key in "aab":
            queue.add(key)
        assert len(queue) == 2
        await asyncio.sleep(1.5)
        assert inside == {"a": 1, "b": 1}, "different keys are worked on side by side"
        await asyncio.sleep(10)
    assert most == {"a": 1, "b": 1}
    assert rounds == {"a": 2, "b": 2}


async def test_idle_keys_wait_for_all_others_and_none_is_lost():
    queue: WorkQueue[str] = WorkQueue()
    done: list[str] = []

    async def work(key: str) -> None:
        done.append(key)
        if key == "lost pod" and done.count(key) == 1:
            queue.add(key)  # there is more to do
        await asyncio.sleep(1)

    for key in ("idle 1", "idle 2", "lost pod"):
        queue.add_idle(key)
    queue.add("lost pod")
    async with working(queue, work, workers=1):
        await asyncio.sleep(10)
    assert done == ["lost pod", "lost pod", "idle 1", "idle 2"]


async def test_an_idle_key_rests_too():
    queue: WorkQueue[str] = WorkQueue()
    loop = asyncio.get_running_loop()
    times: list[float] = []

    async def work(key: str) -> None:
        times.append(loop.time())

    queue.rest("large", 50)
    queue.add_idle("large")
    began = loop.time()
    async with working(queue, work):
        await asyncio.sleep(100)
    assert [round(at - began) for at in times] == [50]


async def test_idle_keys_leave_a_worker_to_a_group_that_comes():
    queue: WorkQueue[str] = WorkQueue(group=lambda key: key)
    began: list[str] = []

    async def work(key: str) -> None:
        began.append(key)
        await asyncio.sleep(1000)

    for number in range(5):
        queue.add_idle(f"idle {number}")
    async with working(queue, work, workers=3):
        await asyncio.sleep(1)
        queue.add("lost pod")
        await asyncio.sleep(1)
    assert began == ["idle 0", "idle 1", "lost pod"]


async def test_the_earliest_of_several_delays_counts():
    queue: WorkQueue[str] = WorkQueue()
    loop = asyncio.get_running_loop()
    times: list[float] = []

    async def work(key: str) -> None:
        times.append(loop.time())

    began = loop.time()
    queue.add_after("a", 50)
    queue.add_after("a", 10)
    queue.add_after("a", 30)
    async with working(queue, work):
        await asyncio.sleep(100)
    assert [round(at - began) for at in times] == [10]


async def test_failures_in_a_row_double_the_delay_until_forgiven():
    queue: WorkQueue[str] = WorkQueue()
    delays = [queue.add_failed("a") for _ in range(12)]
    assert 0.08 <= delays[0] <= 0.12
    assert 0.16 <= delays[1] <= 0.24
    assert 24 <= delays[-1] <= 36, "bounded"
    assert queue.add_failed("b") <= 0.12, "each key has its own"
    queue.forgive("a")
    assert queue.add_failed("a") <= 0.12
    assert queue.add_failed("a", at_least=77) == 77, "the server's Retry-After is honoured"
    queue.forget("a")
    queue.forget("b")


async def test_work_that_waits_for_nothing_lets_others_have_their_turn():
    queue: WorkQueue[str] = WorkQueue()
    turns: list[int] = []
    done = 0

    async def work(_: str) -> None:
        nonlocal done
        done += 1

    for number in range(50):
        queue.add(str(number))
    async with working(queue, work, workers=1):
        while done < 50:
            turns.append(done)
            await asyncio.sleep(0)
    assert len(set(turns)) > 40, "about one key between two turns of others"


async def test_a_key_that_rests_is_worked_on_once_when_the_rest_is_over():
    queue: WorkQueue[str] = WorkQueue()
    times: list[float] = []

    async def work(key: str) -> None:
        times.append(asyncio.get_running_loop().time())
        if len(times) == 1:
            queue.add(key)  # an event of the very moment
            queue.rest(key, 5)

    began = asyncio.get_running_loop().time()
    queue.add("a")
    async with working(queue, work):
        await asyncio.sleep(1)
        for delay in (0.0, 0.5, 60.0):
            queue.add_after("a", delay)
        await asyncio.sleep(9)
        assert [at - began for at in times] == [pytest.approx(0), pytest.approx(5)]
        queue.add("a")
        await asyncio.sleep(1)
        assert len(times) == 3, "after a rest at once"


async def test_groups_take_turns_however_long_the_line_of_one_is():
    """One namespace with hundreds of jobs that crash is not to make another's gang wait."""
    queue: WorkQueue[str] = WorkQueue(group=lambda key: key[0])
    order: list[str] = []

    async def work(key: str) -> None:
        order.append(key)
        await asyncio.sleep(1)
        if len(order) == 2:
            queue.add("b2")
        if key != "b1":
            queue.add(key)  # comes back and back

    for number in range(100):
        queue.add(f"a{number}")
    queue.add("b1")
    async with working(queue, work, workers=1):
        await asyncio.sleep(5)
    assert order[:5] == ["a0", "b1", "a1", "b2", "a2"]


async def test_work_of_one_group_that_hangs_leaves_a_worker_to_each_other():
    """A webhook that hangs in one namespace is not to hold up the gangs of others."""
    queue: WorkQueue[str] = WorkQueue(group=lambda key: key[0])
    begun: list[str] = []
    go_on = asyncio.Event()

    async def work(key: str) -> None:
        begun.append(key)
        if key[0] == "a":
            await go_on.wait()

    for number in range(40):
        queue.add(f"a{number}")
    async with working(queue, work, workers=8):
        await asyncio.sleep(1)
        assert begun == [f"a{number}" for number in range(7)], "all but one"
        for key in ("b0", "c0", "b1", "c1", "b0"):
            queue.add(key)
            await asyncio.sleep(0.01)
            assert begun[-1] == key
        go_on.set()
        await asyncio.sleep(1)
    assert sorted(begun) == sorted([*(f"a{n}" for n in range(40)), "b0", "b0", "b1", "c0", "c1"])


async def test_a_worker_goes_to_the_group_that_has_fewest():
    queue: WorkQueue[str] = WorkQueue(group=lambda key: key[0])
    inside: Counter[str] = Counter()

    async def work(key: str) -> None:
        inside[key[0]] += 1
        await asyncio.sleep(10 if key[0] == "a" else 1)
        inside[key[0]] -= 1

    for number in range(40):
        queue.add(f"a{number}")
    async with working(queue, work, workers=8):
        await asyncio.sleep(1)
        for number in range(400):
            queue.add(f"b{number}")
        await asyncio.sleep(50.5)
        assert inside["b"] >= 3, "each that ended made room for b, up to a half"


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
async def test_no_key_is_left_in_line_while_a_worker_may_take_it(workers):
    """Whatever the order of adding, ending and coming back: nobody misses being woken."""
    draw = random.Random(workers)
    queue: WorkQueue[tuple[int, int]] = WorkQueue(group=lambda key: key[0])
    inside: Counter[int] = Counter()
    waiting: set[tuple[int, int]] = set()

    async def work(key: tuple[int, int]) -> None:
        waiting.discard(key)
        inside[key[0]] += 1
        assert inside.total() <= workers
        await asyncio.sleep(draw.choice([0, 0, 1, 10, 100]))
        inside[key[0]] -= 1

    async with working(queue, work, workers=workers):
        for _ in range(500):
            key = (min(draw.randrange(12), draw.randrange(12)), draw.randrange(5))
            waiting.add(key)
            queue.add(key)
            await asyncio.sleep(draw.choice([0, 0, 0, 0.001, 5, 50]))
            await asyncio.sleep(0.0001)
            new = [key for key in waiting if not inside[key[0]]]
            assert not new or inside.total() == workers, "a worker is free for a group without one"
        await asyncio.sleep(100_000)
    assert not waiting
    assert len(queue) == 0
