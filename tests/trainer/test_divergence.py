"""Ranks that hold different parameters are found out, and no snapshot is made of them."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import ddpjob_trainer as ddp
from support.snapshots import await_snapshot

ALL_70 = {0: 70, 1: 70, 2: 70}


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(32, 96), nn.ReLU(), nn.Linear(96, 96), nn.Linear(96, 8))
        self.register_buffer("table", torch.arange(9.0))


@dataclass
class Training:
    """Pokes one element of one rank after the update of one step."""

    directory: Path
    rank: int
    poke: str = "2.bias"
    at: int = 3  # index of a step, from 0
    bit: int = 0
    level: str = "resume"
    check_every: int = 100
    snapshots: bool = True

    def __call__(self, rank: int) -> None:
        torch.manual_seed(3)
        run = ddp.start(
            total_steps=6, global_batch=24, level=self.level, check_every=self.check_every,
            snapshots=ddp.Snapshots(directory=self.directory if self.snapshots else None, every=2),
        )  # fmt: skip
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        wrapped, _ = run.prepare(model, optimizer, bucket_cap_mb=0.01)
        data = TensorDataset(torch.randn(96, 32), torch.randint(0, 8, (96,)))
        for step in run.steps(data):
            if self.snapshots and step.index == 2:
                await_snapshot(max(self.directory.glob("0*")), 2)
            for x, y in step.batches:
                step.backward(nn.functional.cross_entropy(wrapped(x), y))
            step.commit()
            if (rank, step.index) == (self.rank, self.at):
                with torch.no_grad():
                    tensor = model.get_parameter(self.poke) if "." in self.poke else model.table
                    tensor.view(-1).view(torch.int32)[-1] ^= 1 << self.bit
        run.finish()

    def steps(self) -> list[str]:
        """Steps of which there is a snapshot."""
        return sorted(
            path.stem.split("-")[1].lstrip("0") for path in self.directory.glob("*/step-*.json")
        )


@pytest.mark.parametrize("level", ["resume", "elastic"])
@pytest.mark.fault("T7")
def test_one_flipped_bit_stops_all_before_the_snapshot(gang, tmp_path, level):
    training = Training(tmp_path / "s", rank=2, level=level)
    assert gang.run(training) == ALL_70
    for rank in range(3):
        assert "after step 4: rank 2 differs from rank 0, first in '2.bias'" in gang.log(rank)
    assert training.steps() == ["2"]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"check_every": 3}, "step 3: ranks [1, 2] differ from rank 0, first in '0.weight'"),
        # The last step is looked at in any case.
        ({"check_every": 100}, "step 6: ranks [1, 2] differ from rank 0, first in '0.weight'"),
        ({"poke": "table", "level": "elastic"}, "step 2: ranks [1, 2] differ from rank 0"),
        ({"poke": "table", "rank": 1}, ""),  # DDP gives every rank rank 0's before the next forward
    ],
)
@pytest.mark.fault("T7")
def test_all_that_must_be_equal_is_looked_at(gang, tmp_path, changed, words):
    usual = {"rank": 0, "poke": "0.weight", "bit": 20, "at": 1, "check_every": 1}
    training = Training(tmp_path, snapshots=False, **usual | changed)
    assert gang.run(training) == (ALL_70 if words else {0: 0, 1: 0, 2: 0})
    assert f"after {words}" in gang.log(1) or not words


class Caching(nn.Module):
    """A cache as long as what this rank has seen at once, as rotary embeddings have."""

    def __init__(self, *, table: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 8)
        self.register_buffer("table", torch.ones(8) if table else None)
        self.register_buffer("cache", torch.ones(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(x) * self.cache[0]
        return result if self.table is None else result * self.table


@pytest.mark.parametrize(
    ("level", "shorter", "table"),
    [("elastic", 1, True), ("resume", 1, True), ("resume", 0, True), ("resume", 1, False)],
)
def test_caches_may_differ(gang, level, shorter, table):
    """In the comparison, and when a forward or an evaluation shares rank 0's buffers."""

    def program(rank: int) -> None:
        run = ddp.start(total_steps=3, global_batch=24, level=level, check_every=1)
        model = Caching(table=table)
        wrapped, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-2))
        model.cache = torch.full((1000 - shorter * rank,), 1.0 + rank)
        for step in run.steps(TensorDataset(torch.randn(96, 32))):
            for (x,) in step.batches:
                step.backward(wrapped(x).pow(2).mean())
            assert model.cache[0] == 1 + rank, "rank 0's"
            step.commit()
        run.evaluate(TensorDataset(torch.randn(96, 32)), lambda net, batch: net(batch[0]).sum())
        run.finish()

    assert gang.run(program) == {0: 0, 1: 0, 2: 0}, gang.log(0)


@pytest.mark.parametrize("case", ["second model", "average", "teacher", "object", "per rank"])
def test_all_that_is_kept_once_for_all_is_compared(gang, case):
    def program(rank: int) -> None:
        run = ddp.start(total_steps=3, global_batch=12, check_every=1)
        nets = [nn.Linear(4, 2) for _ in range(2)]
        wrapped, _ = run.prepare(
            nets, torch.optim.SGD([p for net in nets for p in net.parameters()], lr=0.1), ema=0.9
        )
        teacher = nn.Linear(4, 2).requires_grad_(False)
        queue = {"rows": torch.zeros(3), "note": "text"}  # as MoCo's keys
        run.register("teacher", teacher)
        run.register("queue", queue, per_rank=case == "per rank")
        for step in run.steps(TensorDataset(torch.randn(48, 4))):
            for (x,) in step.batches:
                step.backward(sum(net(x).pow(2).mean() for net in wrapped))
            step.commit()
            if (rank, step.index) == (1, 1):
                average = run._trained.models[0].ema
                found = {
                    "second model": nets[1].bias, "average": average.module.bias,
                    "teacher": teacher.bias,
                }.get(case, queue["rows"])  # fmt: skip
                with torch.no_grad():
                    found.view(-1)[1] += 1
        run.finish()

    codes = gang.run(program)
    if case == "per rank":
        assert codes == {0: 0, 1: 0, 2: 0}, gang.log(0)
        return
    assert codes == ALL_70, gang.log(0)
    name = {
        "second model": "model2.bias", "average": "ema.bias", "teacher": "teacher.bias",
        "object": "queue.values.rows",
    }[case]  # fmt: skip
    assert f"after step 2: rank 1 differs from rank 0, first in '{name}'" in gang.log(2)


class ByOwner(torch.optim.SGD):
    """Momentum that only the owner of a parameter updates, as distributed Muon's."""

    lazy = False

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for index, parameter in enumerate(self.param_groups[0]["params"]):
            owner = index % dist.get_world_size()
            if not self.lazy or owner == dist.get_rank():
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
            if owner == dist.get_rank():
                momentum.mul_(0.9).add_(parameter.grad)
                parameter.sub_(momentum, alpha=self.param_groups[0]["lr"])
            dist.broadcast(parameter.detach(), owner)


@pytest.mark.parametrize(
    ("lazy", "first"), [(False, "optimizer/state/0/momentum"), (True, "optimizer")]
)
def test_an_optimizers_state_by_rank_is_refused_at_the_first_snapshot(gang, tmp_path, lazy, first):
    """Each rank would go on with parts of the others', and no comparison of parameters tells."""

    def program(rank: int) -> None:
        settings = ddp.Snapshots(directory=tmp_path, every=2)
        run = ddp.start(total_steps=9, global_batch=24, snapshots=settings)
        model = Net()
        optimizer = ByOwner(model.parameters(), lr=1e-2)
        optimizer.lazy = lazy
        wrapped, _ = run.prepare(model, optimizer, bucket_cap_mb=0.01)
        for step in run.steps(torch.randn(96, 32)):
            for x in step.batches:
                step.backward(wrapped(x).pow(2).mean())
            step.commit()

    assert gang.run(program) == {0: 64, 1: 64, 2: 64}, gang.log(0)
    text = "the state of an optimizer is not the same on all ranks: ranks [1, 2] differ from rank 0"
    assert f"{text}, first in {first!r}. A snapshot" in gang.log(0)
    assert not list(tmp_path.glob("*/step-*.json"))


@pytest.mark.parametrize("mine", ["a number", "a tensor as well", "equal"])
def test_registered_values_by_rank_are_named_at_the_first_snapshot(gang, tmp_path, mine):
    """Rank 0's come back to every rank: right for a mean that it prints, wrong for a decision."""

    def program(rank: int) -> None:
        settings = ddp.Snapshots(directory=tmp_path, every=2)
        run = ddp.start(total_steps=9, global_batch=24, snapshots=settings)
        model = Net()
        wrapped, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-2))
        mean = run.state("mean", loss=0.0)
        run.register("seen", seen := {"samples": 0, "rows": torch.zeros(2)})
        for step in run.steps(torch.randn(96, 32)):
            for x in step.batches:
                loss = wrapped(x).pow(2).mean()
                step.backward(loss)
                mean.loss = loss.item() if mine == "a number" else 0.5
                seen["samples"] += rank if mine == "a tensor as well" else 1
            step.commit()
        run.finish()

    assert gang.run(program) == {0: 0, 1: 0, 2: 0}, gang.log(0)
    first = {"a number": "'mean'", "a tensor as well": "'seen'"}.get(mine)
    words = f"ranks [1, 2] differ from rank 0, first in {first}. A restart gives every rank those"
    log = "".join(gang.log(rank) for rank in range(3))
    assert log.count(words) == log.count("registered values are not") == (1 if first else 0)
