"""The studies at their shortest: the facts that claims.md tells, and what each file prints."""

import json
import re

import pytest

from support import benches
from support.loaded import load
from support.scripts import show

from findings import counted  # isort: skip

pytestmark = pytest.mark.tier("all")


def test_the_facts_of_the_claims(tmp_path):
    """Who holds, sends and calls what; the same counts see it where it is otherwise."""
    found = benches.quick("claims", tmp_path)
    facts = found["facts"]
    assert facts["ranks"] >= 3
    assert not counted.partitioned(facts)
    assert max(counted.held(facts, "FSDP", "parameters")) < 0.3
    assert counted.replicas_equal(facts)
    assert not counted.replicas_equal(facts, "with DataParallel")
    assert counted.even(facts)
    first, *others = (count for _, count in counted.traffic(facts, "over rank 0"))
    assert first > 0.99 * (facts["ranks"] - 1) * max(others)
    whole = facts["wire"]["bytes of gradients"]
    assert sum(sent for sent, _ in counted.traffic(facts, "DataParallel step")) < 0.01 * whole
    first, *others = (count for _, count in counted.traffic(facts, "construction"))
    assert first < 0.01 * whole < 0.99 * whole < min(others)
    assert counted.parts_of_dp_called(facts) == []
    shards = counted.held(facts, "DDP with ZeRO-1", "optimizer state")
    assert shards == pytest.approx([2.0 / facts["ranks"]] * facts["ranks"], rel=0.01)
    [measured] = found["ways"].values()
    assert set(measured["steps per second"]) == {"one", "dp", "ddp"}


def test_scaling_and_pictures(tmp_path):
    page = tmp_path / "page.md"
    [modes] = benches.quick("scaling", tmp_path, "--page", str(page))["steps"].values()
    for mode, share in (("weak", 1), ("strong", 2)):
        one, two = (modes[mode][world]["phases"]["samples"] for world in ("1", "2"))
        assert one == share * two, mode
    assert "8 †" in page.read_text()
    benches.quick("recordings", tmp_path, "--into", str(tmp_path))
    step = json.loads((tmp_path / "buckets.json").read_text())
    pictures = load(benches.ROOT / "studies/pictures.py")
    assert pictures.buckets(step).startswith("<svg")


@pytest.mark.parametrize(
    ("words", "nproc", "code", "printed"),
    [
        ("spawn --nproc 3", 0, 0, "^all_reduce over 3 processes: 6$"),
        ("send_recv", 3, 0, "^changed before wait.*: 1000 of 1000 numbers arrived as -1"),
        ("collectives", 3, 0, r"^all_reduce PRODUCT .*6000"),
        ("ring --numbers 100003", 3, 0, "sums of integers equal, number by number"),
        ("sgd --epochs 5", 4, 0, "^4 processes: loss"),
        ("reducer", 3, 0, "^step 2: gradients differ from DDP's by at most 0"),
        ("data_parallel", 0, 0, "^DataParallel.module.classes: 20$"),
        ("mismatch swapped order --timeout 20", 2, 1, "a = 11.0, b = 11.0; right are 2.0 and"),
        ("mismatch library --timeout 60", 2, 64, "so they would wait for each other"),
    ],
)
def test_mechanics(words, nproc, code, printed):
    name, *given = words.split()
    env = {"TORCH_DISTRIBUTED_DEBUG": "OFF"}
    out = show(f"../studies/mechanics/{name}.py", *given, nproc=nproc, code=code, env=env)
    assert re.search(printed, out, re.MULTILINE), out[-3000:]
