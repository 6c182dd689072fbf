"""The verdicts of claims.md that are facts: who holds, sends and calls what. No timings.

Scaling and the recordings for the pictures run, too, at their shortest.
"""

import json
from typing import Any

import pytest
import torch
from torch import nn

from support import benches
from support.loaded import load

from findings import counted  # isort: skip
from replicas import ByHand  # isort: skip

pytestmark = pytest.mark.tier("all")

Found = dict[str, Any]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return benches.quick("claims", tmp_path_factory.mktemp("claims"))


@pytest.fixture(scope="module")
def facts(found: Found) -> Found:
    counted: Found = found["facts"]
    assert counted["ranks"] >= 3
    assert counted["wire"]["buckets"] > 1
    return counted


def test_ddp_partitions_no_parameters(facts):
    assert not counted.partitioned(facts)
    assert counted.held(facts, "DDP", "parameters") == [1.0] * facts["ranks"]
    # The same count of what does partition them.
    assert max(counted.held(facts, "FSDP", "parameters")) < 0.3


def test_replicas_are_equal_because_gradients_are_averaged(facts):
    assert counted.replicas_equal(facts)
    for how in ("without averaging", "with DataParallel"):
        assert len(set(facts["replicas"][how]["digests"])) == facts["ranks"], how


def test_gradients_go_round_a_ring_and_not_to_rank_0(facts):
    assert counted.even(facts)
    sent = facts["wire"]["DDP step"]
    share = counted.ring_share(facts)
    for row in sent:  # all but gloo's acknowledgements goes to one neighbour
        *others, most = sorted(row)
        assert most > 0.99 * share
        assert max(others) < 0.01 * share
    # The same counting sees it where all gradients do go to rank 0.
    received = [count for _, count in counted.traffic(facts, "over rank 0")]
    assert received[0] > 0.99 * (facts["ranks"] - 1) * max(received[1:])


def test_data_parallel_sends_nothing_to_other_processes(facts):
    bytes_sent = sum(sent for sent, _ in counted.traffic(facts, "DataParallel step"))
    assert bytes_sent < 0.01 * facts["wire"]["bytes of gradients"]
    assert facts["calls"]["DataParallel's devices here"] == torch.cuda.device_count()


def test_parameters_travel_once_when_ddp_is_constructed(facts):
    received = [count for _, count in counted.traffic(facts, "construction")]
    whole = facts["wire"]["bytes of gradients"]
    assert received[0] < 0.01 * whole
    assert min(received[1:]) > 0.99 * whole


def test_ddp_calls_nothing_that_data_parallel_is_made_of(facts):
    assert counted.parts_of_dp_called(facts) == []
    calls = facts["calls"]
    assert "distributed.py:forward" in calls["of DDP"]
    assert "data_parallel.py:forward" in calls["of DataParallel"]  # the trace sees such calls
    assert len(calls["made to raise"]) == 6
    assert not calls["DDP is a subclass"]


def test_zero_shards_the_optimizers_state_only(facts):
    ranks = facts["ranks"]
    for what in ("parameters", "gradients", "buckets"):
        assert counted.held(facts, "DDP with ZeRO-1", what) == counted.held(facts, "DDP", what)
    assert counted.held(facts, "DDP", "optimizer state") == pytest.approx([2.0] * ranks, rel=0.01)
    shards = counted.held(facts, "DDP with ZeRO-1", "optimizer state")
    assert shards == pytest.approx([2.0 / ranks] * ranks, rel=0.01)
    # Buckets cost as much as the gradients, unless these are views.
    assert counted.held(facts, "DDP", "buckets") == [1.0] * facts["ranks"]
    assert counted.held(facts, "DDP, gradient_as_bucket_view", "buckets") == [0.0] * facts["ranks"]


def test_the_steps_by_hand_make_the_gradients_of_one_process():
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.GRUCell(16, 4))
    inputs, targets = torch.randn(12, 8), torch.randint(0, 4, (12,))
    nn.functional.cross_entropy(net(inputs), targets).backward()
    expected = [parameter.grad.clone() for parameter in net.parameters()]
    by_hand = ByHand(net, 3)
    by_hand.step(inputs, targets, nn.functional.cross_entropy)
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    whole = sum(parameter.nbytes for parameter in net.parameters())
    assert by_hand.made == 3
    assert by_hand.received[0]["gradients"] == 2 * whole
    assert [one["parameters"] for one in by_hand.received] == [0, whole, whole]


def test_the_bench_measures_each_way(found):
    [measured] = found["ways"].values()
    assert set(measured["steps per second"]) == {"one", "dp", "ddp"}
    assert min(measured["dp's phases"].values()) > 0
    assert measured["replicas made per step"] == found["replicas"]
    first, *others = measured["held"]
    assert "optimizer state" in first
    assert all("optimizer state" not in one for one in others)
    assert len(found["weights"]["elastic"]["1"]) == 64


def test_scaling(tmp_path):
    page = tmp_path / "page.md"
    found = benches.quick("scaling", tmp_path, "--page", str(page))
    [modes] = found["steps"].values()
    for mode, share in (("weak", 1), ("strong", 2)):
        one, two = (modes[mode][world]["phases"] for world in ("1", "2"))
        assert one["samples"] == share * two["samples"], mode
        assert min(two[phase] for phase in ("forward", "backward", "exposed", "optimizer")) > 0
    [said] = found["model"].values()
    assert set(said["weak"]) == {"1", "2", "8"}
    assert "8 †" in page.read_text()


def test_pictures(tmp_path):
    benches.quick("recordings", tmp_path, "--into", str(tmp_path))
    pictures = load(benches.ROOT / "studies/pictures.py")
    ring = json.loads((tmp_path / "ring.json").read_text())
    assert ring["equal to torch's all_reduce"]
    assert all(len(of) == ring["ranks"] for of in pictures.states(ring)[-1].values())
    step = json.loads((tmp_path / "buckets.json").read_text())
    assert len(step["buckets"]) > 1
    assert step["gradients"][0]["name"] == "head.bias"  # the last layer's come first
    assert pictures.buckets(step).startswith("<svg")
