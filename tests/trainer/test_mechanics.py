"""studies/mechanics: each file as its reader starts it, and what it is there to show."""

import re

import pytest

from support.scripts import TORCHRUN, numbers, show

pytestmark = pytest.mark.tier("all")


def test_spawn_does_what_a_launcher_does():
    out = show("../studies/mechanics/spawn.py", "--nproc", "3", nproc=0)
    found = [numbers(rf"rank {rank} is process", out) for rank in range(3)]
    assert len({pid for pid, *_ in found}) == 3
    assert numbers("all_reduce over 3 processes:", out) == [6]


def test_send_and_recv():
    out = show("../studies/mechanics/send_recv.py", nproc=3, launcher=TORCHRUN[:-1])
    assert numbers("blocking: the sum that came round is", out) == [3]
    assert numbers("immediate: my left neighbour sent", out) == [2, 2, 2, 2]
    assert "changed before wait(): 1000 of 1000 numbers arrived as -1, sent as 1" in out
    assert "read before wait(): 0 of 1000 ones, after it 1000" in out


def test_collectives():
    out = show("../studies/mechanics/collectives.py", nproc=3)
    expected = {
        "all_reduce SUM": [6, 60],
        "all_reduce PRODUCT": [6, 6000],
        "all_reduce MIN": [1, 10],
        "all_reduce MAX": [3, 30],
        "reduce": [6, 60, 0],
        "broadcast": [1, 10],
        "scatter": [0, 0, 0, 1, 2],
        "gather": [1, 10, 2, 20, 3, 30, 0],
        "all_gather": [1, 10, 2, 20, 3, 30],
        "reduce_scatter": [0, 6, 60, 1],
        "all_to_all": [0, 0, 1, 2, 0, 10, 20],
        "all_reduce, group": [4, 40, 0, 2],
    }
    assert {name: numbers(f"{name} +(?=rank|\\[)", out) for name in expected} == expected
    assert len(numbers("barrier", out)) == 3


def test_a_ring_by_hand_sends_what_the_library_sends():
    count = 100_003  # no multiple of 3
    out = show("../studies/mechanics/ring.py", "--numbers", str(count), nproc=3)
    assert "sums of integers equal, number by number" in out
    formula = 2 * 4 * count * 2 / 3
    assert numbers(r"2 N \(W-1\) / W", out) == [round(formula)]
    counted = numbers("sent by the ring, by rank", out)
    assert sum(counted) == 2 * 2 * 4 * count, "each chunk goes round twice, but for its last hop"
    assert all(abs(sent - formula) <= 24 for sent in counted)
    if "cannot be measured" in out:
        pytest.skip("this kernel does not count what a connection has sent")
    for how in ("the same, by the kernel", "all_reduce, by the kernel"):
        assert all(formula - 24 <= sent < 1.02 * formula for sent in numbers(how, out)), how


def test_hand_averaged_sgd_has_one_loss_for_1_2_and_4_processes():
    out = show("../studies/mechanics/sgd.py", "--epochs", "5", nproc=4)
    found = [numbers(f"{processes} processes: loss", out) for processes in (1, 2, 4)]
    losses, off = zip(*found, strict=True)
    assert losses[0] < 0.5 * 2.303, "ln 10 is what knowing nothing costs"
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    assert max(off) < 1e-4


def test_the_miniature_reducer_has_ddps_map_and_gradients():
    out = show("../studies/mechanics/reducer.py", nproc=3)

    def after(name: str) -> str:
        return re.findall(rf"^{name} *: (.*)$", out, re.MULTILINE)[0]

    mine = after("this Reducer's map")
    assert mine.count("|") == 2
    assert mine == after("DDP, after the rebuild")
    assert "|" not in after("DDP, its first backward")
    assert len(numbers("DDP's own log: rebuilt :", out)) == 3
    for step in (1, 2):  # the same buckets: the same sums
        assert numbers(f"step {step}: gradients differ from DDP's by at most", out) == [0]
    events = after("one backward")
    assert events.index("[bucket 0 leaves]") < events.index("2.weight"), "beside backward"
    assert events.endswith("[bucket 2 leaves] [backward has ended]")
    assert after("the wrong way round").endswith(
        "0.weight [bucket 0 leaves] [bucket 1 leaves] [bucket 2 leaves] [backward has ended]"
    )


SWAPPED = "a = 11.0, b = 11.0; right are 2.0 and 20.0"
BOTH = ("OpType=ALLREDUCE", "OpType=BROADCAST", "Detected mismatch between collectives on ranks")


LIBRARY = ("run.evaluate()", "step 0", "so they would wait for each other", "exit code 64")


# ``seconds`` bound also how much later than the other one of the two may come.
@pytest.mark.parametrize(
    ("kinds", "detail", "seconds", "code", "words"),
    [
        ("swapped order", "OFF", 20, 1, (SWAPPED, "Timed out waiting 20000ms")),
        ("swapped order", "DETAIL", 60, 1, (SWAPPED, *BOTH)),
        ("count", "OFF", 60, 1, (" by peer", "rank 0 ended first, with exit code 1")),
        ("late", "OFF", 20, 1, ("Rank 1 failed to pass monitoredBarrier in 20000 ms",)),
        ("size", "OFF", 60, 134, ("Received data size doesn't match", "with signal 6")),
        ("library", "OFF", 60, 64, LIBRARY),
    ],
)
def test_calls_that_differ_end_soon_and_with_words(kinds, detail, seconds, code, words):
    command = ("../studies/mechanics/mismatch.py", *kinds.split(), "--timeout", str(seconds))
    out = show(*command, nproc=2, code=code, env={"TORCH_DISTRIBUTED_DEBUG": detail})
    assert [word for word in words if word not in out] == [], out[-3000:]


def test_data_parallel_step_by_step():
    out = show("../studies/mechanics/data_parallel.py", nproc=0)
    assert max(numbers("output and gradients are those of one call, within", out)) < 1e-6
    for name in ("DataParallel", "DistributedDataParallel"):
        assert f"{name}.classes: '{name}' object has no attribute 'classes'" in out
        assert numbers(f"{name}.module.classes:", out) == [20]
