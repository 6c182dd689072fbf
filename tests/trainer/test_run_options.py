"""Each option of start() and prepare() resumes bit for bit: 3 ranks, more than one bucket.

What is compared with the undisturbed run runs on a busy machine: the two may differ in nothing.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpjob_trainer as ddp
from ddpjob_trainer.gradients import determinism
from support.stand import ALL_0, Stand
from support.tiers import some_in_gate

STEPS = 8
EVERY = 3
SAMPLES = 110  # three whole batches of 36, and two samples more: too few for three ranks


def adamw(model: nn.Module, *, fused: bool | None = None) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)


def convolutions() -> nn.Module:
    """Weights that lie in memory in another order than their elements."""
    return nn.Sequential(
        nn.Unflatten(1, (3, 4, 4)), nn.Conv2d(3, 64, 3), nn.Conv2d(64, 64, 2), nn.Flatten(),
        nn.Dropout(0.3), nn.Linear(64, 10),
    ).to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]  # fmt: skip


def linears(width: int = 256) -> nn.Module:
    return nn.Sequential(
        nn.Linear(48, width), nn.LayerNorm(width), nn.ReLU(), nn.Dropout(0.3),
        nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10),
    )  # fmt: skip


class Counting(nn.Module):
    """Counts in get_extra_state(), and freezes its normalisation on the way, as fine-tuners do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(256)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3:
            self.norm.eval()
        result: torch.Tensor = self.norm(x * (1 + 0.01 * self.calls))
        return result

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def counting() -> nn.Module:
    return nn.Sequential(
        nn.Linear(48, 256), Counting(), nn.Linear(256, 256), nn.Linear(256, 10)
    )  # fmt: skip


def wide() -> nn.Module:
    """More than one bucket of 1 MB, the least that goes with compile."""
    return linears(640)


def noise(named: Mapping[str, nn.Parameter]) -> None:
    """Drawn anew in each step, equal on all ranks."""
    for parameter in named.values():
        parameter.grad.add_(torch.randn_like(parameter.grad), alpha=0.01)


def scaler() -> torch.amp.GradScaler:
    """Overflows at once, and grows again soon."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=2, backoff_factor=2**-9)


class Learned:
    """A sampler by the losses. The order of an epoch that has been read is kept."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {"weights": torch.ones(SAMPLES), "orders": {}}

    def __call__(self, epoch: int) -> Any:
        orders, weights = self.kept["orders"], self.kept["weights"]
        if epoch not in orders:
            orders[epoch] = torch.multinomial(weights, 72, replacement=True)
        return orders[epoch]


_draw = torch.Generator().manual_seed(3)
DATA = TensorDataset(
    torch.randn(SAMPLES, 48, generator=_draw), torch.randint(0, 10, (SAMPLES,), generator=_draw)
)


@dataclass(kw_only=True)
class Training(Stand, every=EVERY, total_steps=STEPS, global_batch=36):
    prepare: dict[str, Any] = field(default_factory=dict)
    net: Callable[[], nn.Module] = linears
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    bucket_cap_mb: float = 0.05
    weights: bool = False
    learned: int | None = None  # a sampler by the losses, with so many workers

    def train(self, run: ddp.Run) -> None:
        model = self.net()
        optimizer = self.optimizer(model)
        prepare = dict(self.prepare)
        if prepare.get("grad_scaler") is scaler:
            prepare["grad_scaler"] = scaler()
        kinds = torch.optim.lr_scheduler
        parts = [kinds.LinearLR(optimizer, total_iters=5), kinds.MultiStepLR(optimizer, [1])]
        scheduler = kinds.SequentialLR(optimizer, parts, milestones=[5])
        wrapped, _ = run.prepare(
            model, optimizer, scheduler=scheduler, bucket_cap_mb=self.bucket_cap_mb, **prepare
        )
        losses = (self.directory / f"losses-{run.rank}").open("a", buffering=1)
        sampler, given = Learned(), dict[str, Any]()
        if self.learned is not None:  # two steps an epoch: the snapshot is amid the second
            run.register("sampler", sampler.kept)
            given = {"sampler": sampler, "workers": self.learned}
        for step in run.steps(DATA, **given):
            values = []
            for x, y in step.batches:
                loss = nn.functional.cross_entropy(wrapped(x), y)
                assert loss.dtype == torch.float32
                if values:  # between micro-batches
                    self.may_die(run, step.index)
                step.backward(loss, weight=y.sum() if self.weights else None)
                values.append(loss.item().hex())
            if run.options.level == "resume":
                assert len(determinism.buckets(wrapped)) > 1
            step.commit()
            if self.learned is not None:
                sampler.kept["weights"][step.index :: STEPS] += step.loss
            losses.write(f"{step.index} {' '.join(values)}\n")
        if "compile" in self.prepare:
            assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing is compiled"

    def outcome(self, world: int = 3) -> list[list[str]]:
        names = "result", "losses"
        return [[(self.directory / f"{n}-{r}").read_text() for n in names] for r in range(world)]

    def forget_after(self, step: int) -> None:
        """Leave things as a kill of all ranks between two snapshots does."""
        for path in (self.directory / "snapshots").glob("*/step-*.json"):
            if int(path.stem.split("-")[1]) > step:
                path.unlink()
        for path in self.directory.glob("losses-*"):
            path.write_text("\n".join(path.read_text().splitlines()[:step]) + "\n")
        for path in self.directory.glob("result-*"):
            path.unlink()


CASES: dict[str, dict[str, Any]] = {
    "micro_batches": {
        "start": {"micro_batches": 3}, "prepare": {"clip_grad_norm": 0.5, "ema": 0.9},
    },
    "micro_batches, bucket view, before_update": {
        "start": {"micro_batches": 2},
        "prepare": {"gradient_as_bucket_view": True, "before_update": noise},
    },
    "weights, micro_batches": {
        "start": {"micro_batches": 2}, "prepare": {"clip_grad_norm": 0.5}, "weights": True,
    },
    "weights, elastic": {
        "start": {"level": "elastic", "shards": 6}, "weights": True,
        "prepare": {"before_update": noise},
    },
    "static_graph, bucket view": {
        "prepare": {"static_graph": True, "gradient_as_bucket_view": True}
    },
    "find_unused_parameters, channels_last, fused": {
        "prepare": {"find_unused_parameters": True}, "net": convolutions,
        "optimizer": partial(adamw, fused=True),
    },
    "extra state, frozen on the way": {"net": counting},
    "bf16, ema": {"start": {"precision": "bf16"}, "prepare": {"ema": 0.9}},
    "fp16 with overflows": {
        "start": {"precision": "fp16", "micro_batches": 2},
        "prepare": {"grad_scaler": scaler, "clip_grad_norm": 0.5},
    },
    "sampler that learns, workers": {"learned": 2},
    "fp16 hook": {"prepare": {"comm_hook": "fp16"}, "start": {"micro_batches": 2}},
    "tail pad, scheduler_every": {
        "start": {"tail": "pad"}, "prepare": {"scheduler_every": "epoch"},
    },
    "elastic, fp16, ema, tail pad": {
        "start": {"level": "elastic", "shards": 6, "precision": "fp16", "tail": "pad"},
        "prepare": {"grad_scaler": scaler, "ema": 0.9},
    },
    "elastic, compile": {
        "start": {"level": "elastic", "shards": 6, "micro_batches": 2},
        "prepare": {"compile": "aot_eager"},
    },
    "compile": {
        "start": {"micro_batches": 2}, "prepare": {"compile": "aot_eager"},
        "net": wide, "bucket_cap_mb": 1.0,
    },
    "compile by inductor": {
        "start": {"micro_batches": 2}, "prepare": {"compile": True},
        "net": wide, "bucket_cap_mb": 1.0,
    },
}  # fmt: skip


#: Killed between micro-batches: rank, step. Others are ended between snapshots.
DIE = {"micro_batches": (2, 4)}
IN_GATE = (
    "micro_batches", "extra state, frozen on the way", "bf16, ema", "fp16 with overflows",
    "sampler that learns, workers", "elastic, fp16, ema, tail pad",
)  # fmt: skip


def both(
    gang: Any, tmp_path: Path, options: dict[str, Any], *, world: int = 3,
    die: tuple[int, int] | None = None,
) -> list[Training]:  # fmt: skip
    """Run one undisturbed, and one that goes on with what a kill of all would leave of it."""
    undisturbed, disturbed = (Training(tmp_path / name, **options) for name in ("one", "other"))
    assert gang.run(undisturbed) == ALL_0, gang.log(0)
    shutil.copytree(undisturbed.directory, disturbed.directory, dirs_exist_ok=True)
    disturbed.forget_after(EVERY)
    if die is not None:
        disturbed.die = die
        assert gang.run(disturbed) == {0: 75, 1: 75, 2: -9}
        disturbed.forget_after(EVERY)
        disturbed.die = None
    assert set(gang.run(disturbed, world=world).values()) == {0}, gang.log(0)
    assert f"resuming after step {EVERY}" in gang.log(0)
    return [undisturbed, disturbed]


@pytest.mark.parametrize("case", some_in_gate(CASES, *IN_GATE))
def test_an_option_resumes_bit_for_bit(gang, tmp_path, case):
    undisturbed, disturbed = both(gang, tmp_path, CASES[case], die=DIE.get(case))
    assert disturbed.outcome() == undisturbed.outcome()
    assert len({result.split()[0] for result, _ in undisturbed.outcome()}) == 1
