"""Level elastic: one hash at worlds 1, 2, 3, 4, 5 and 8, and over changes between them."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpjob_trainer as ddp
from ddpjob_trainer.telemetry.progress import Progress
from support.busy import busy_machine
from support.snapshots import await_snapshot
from support.stand import Stand

STEPS = 10
SEEDS = (2, 15, 38)  # drawn are kills at steps 1 5 9, 0 0 3 and 6 6 8


class Net(nn.Module):
    """Dropout, a parameter that only some shards use, one that none uses, and a frozen one."""

    def __init__(self, *, plain: bool) -> None:
        super().__init__()
        self.plain = plain
        self.first = nn.Linear(48, 128)
        self.norm = nn.LayerNorm(128)
        self.second = nn.Linear(128, 96)
        self.sometimes = nn.Linear(96, 96)
        self.never = nn.Linear(3, 3).requires_grad_(not plain)
        self.frozen = nn.Linear(96, 96).requires_grad_(False)
        self.last = nn.Linear(96, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        if self.plain:
            x = torch.relu(self.second(x))
            return self.last(x + self.sometimes(x))
        x = torch.relu(self.second(nn.functional.dropout(x, 0.3, self.training)))
        if float(x.detach().sum()) * 1e4 % 1 < 0.4:
            x = x + self.sometimes(x)
        return self.last(x + self.frozen(x))


_draw = torch.Generator().manual_seed(3)
DATA = TensorDataset(
    torch.randn(200, 48, generator=_draw), torch.randint(0, 10, (200,), generator=_draw)
)


@dataclass(kw_only=True)
class Training(Stand, total_steps=STEPS, global_batch=48, level="elastic", shards=8):
    bf16: bool = False
    plain: bool = False  # nothing but the order of additions can make a difference

    def train(self, run: ddp.Run) -> None:
        self._record_losses(run.rank)
        model = Net(plain=self.plain)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        wrapped, _ = run.prepare(model, optimizer, scheduler=scheduler, clip_grad_norm=0.5)
        for step in run.steps(DATA):
            if step.index and step.index % 2 == 0:
                await_snapshot(max((self.directory / "snapshots").glob("0*")), step.index)
            before = torch.rand(())  # what is drawn outside of shards is equal on all ranks, too
            for x, y in step.batches:
                with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
                    loss = nn.functional.cross_entropy(wrapped(x).float(), y)
                step.backward(loss)
            self.may_die(run, step.index)
            step.commit()
            with torch.no_grad():  # at another level the ranks would drift apart
                model.first.bias += (0 if self.plain else 1e-3) * (before + torch.randn(()))
            assert model.never.weight.grad is None

    def _record_losses(self, rank: int) -> None:
        """The step's loss as the run itself gives it out."""
        file = (self.directory / f"losses-{rank}").open("a", buffering=1)
        original = Progress.stepped

        def stepped(self: Progress, step: int, loss: float) -> None:
            file.write(f"{step} {loss.hex()}\n")
            original(self, step, loss)

        Progress.stepped = stepped  # type: ignore[method-assign]


def result(gang, training: Training, world: int) -> tuple[str, dict[str, str]]:  # type: ignore[no-untyped-def]
    """Hashes and losses, equal on all ranks."""
    codes = gang.run(training, world=world)
    assert codes == dict.fromkeys(range(world), 0), "\n".join(map(gang.log, range(world)))
    hashes = set(training.results(world))
    assert len(hashes) == 1, f"the ranks of a world of {world} disagree"
    losses: dict[str, str] = {}
    for path in training.directory.glob("losses-*"):
        for line in path.read_text().splitlines():
            step, loss = line.split()
            assert losses.setdefault(step, loss) == loss, f"step {step} has two losses"
    assert len(losses) == STEPS
    return hashes.pop(), losses


@pytest.mark.parametrize(
    ("worlds", "options"),
    [
        pytest.param((1, 2, 3, 4, 5, 8), {}, marks=pytest.mark.tier("all")),
        ((1, 4, 5), {"start": {"shards": 6, "micro_batches": 2}, "bf16": True}),
    ],
)
@pytest.mark.fault("T9")
def test_one_hash_at_any_world_size(gang, tmp_path, worlds, options):
    found = {w: result(gang, Training(tmp_path / f"w{w}", **options), w) for w in worlds}
    assert all(one == found[worlds[0]] for one in found.values()), found


@pytest.mark.parametrize(("level", "weights"), [("resume", 3), ("elastic", 1)])
def test_the_order_of_additions_alone_makes_a_difference(gang, tmp_path, level, weights):
    """Proves that the comparison above can fail."""
    found = set()
    for world in (1, 3, 4):
        training = Training(tmp_path / f"w{world}", {"level": level}, plain=True)
        gang.run(training, world=world)
        found |= {one.split()[0] for one in training.results(world)}
    assert len(found) == weights


@pytest.mark.fault("T9")
def test_from_4_to_3_to_1_to_4_ranks_equals_undisturbed(gang, tmp_path):
    """Each is killed at any step that it makes, the first and the last included."""
    undisturbed = result(gang, Training(tmp_path / "undisturbed"), 3)
    for seed in SEEDS:
        draw = random.Random(seed)
        training = Training(tmp_path / f"disturbed-{seed}")
        gang.directory = training.directory  # logs of its own
        resumed, told = 0, ""
        for world in (4, 3, 1):
            victim = draw.randrange(world)
            at = draw.randint(resumed, STEPS - 1)
            training.die = (victim, at)
            codes = gang.run(training, world=world)
            assert codes == {r: -9 if r == victim else 75 for r in range(world)}, gang.log(0)
            told += f"resuming after step {resumed};" * (resumed > 0)
            assert ";".join([*re.findall("resuming after step \\d+", gang.log(0)), ""]) == told
            resumed = at // 2 * 2
        training.die = None
        with busy_machine():
            assert result(gang, training, 4) == undisturbed, f"seed {seed}"
        assert "warning" not in gang.log(0)


def toy(*layers: nn.Module, collect: str = "") -> Callable[[int], None]:
    """``collect``: losses of all forwards, then their backwards; or batches before any forward."""

    def program(rank: int) -> None:
        run = ddp.start(total_steps=2, global_batch=8, seed=1, level="elastic", shards=4)
        model = nn.Sequential(nn.Linear(4, 4), *layers)
        wrapped, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in run.steps(TensorDataset(torch.ones(16, 4))):
            batches = list(step.batches) if collect == "batches" else step.batches
            losses = (wrapped(x).sum() for (x,) in batches)
            for loss in list(losses) if collect else losses:
                step.backward(loss)
            step.commit()
        print(f"weights={run.weights_sha256()}")

    return program


def test_losses_may_be_collected_and_batches_are_refused_at_any_world_size(gang):
    """All would draw from the last batch's random numbers, and which is that ranks decide."""
    for collect, code in (("losses", 0), ("batches", 64)):
        for world in (1, 3, 4):
            codes = gang.run(toy(nn.Dropout(0.5), collect=collect), world=world)
            assert codes == dict.fromkeys(range(world), code), gang.log(0)
            assert ("as by list(step.batches)" in gang.log(0)) == (collect == "batches")
    assert len(set(re.findall("weights=.*", gang.log(0)))) == 1


class Odd(nn.Module):
    """Counts in a buffer, or has sparse gradients."""

    def __init__(self, *, counts: bool) -> None:
        super().__init__()
        self.table = None if counts else nn.Embedding(9, 4, sparse=True)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is not None:
            return x + self.table(torch.tensor(3))
        self.seen += 1
        return x


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (nn.BatchNorm1d(4), "statistics of 1 (BatchNorm1d)"),
        (nn.InstanceNorm1d(4, track_running_stats=True), "use GroupNorm or LayerNorm"),
        (Odd(counts=True), "the forward changes the buffer '1.seen'"),
        (Odd(counts=False), "cannot average sparse gradients"),
    ],
)
def test_what_cannot_be_elastic_is_refused(gang, layer, words):
    assert gang.run(toy(layer)) == {0: 64, 1: 64, 2: 64}, gang.log(0)
    assert words in gang.log(0)


def test_another_number_of_shards_is_another_run(gang, tmp_path):
    result(gang, Training(tmp_path / "t"), 1)
    other = Training(tmp_path / "t", {"shards": 4})
    assert gang.run(other) == {0: 64, 1: 64, 2: 64}
    assert "made with shards=8, now it is 4" in gang.log(0)
