"""Micro-batches, tails, precision, averages and evaluation: what they compute. 3 ranks."""

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpjob_trainer as ddp

INPUTS = torch.randn(50, 6, generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(INPUTS)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 2))


def quadratic(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model(x).pow(2).mean()
    return result


def train(
    path: Path, *, spoil: Callable[[torch.Tensor], torch.Tensor] | None = None, **start: Any
) -> Callable[[int], None]:
    """A program that writes rank 0's final weights. ``spoil``: losses of weight 0."""

    def program(rank: int) -> None:
        options = {"total_steps": 5, "global_batch": 12, "seed": 3, **start}
        run = ddp.start(**options)
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        wrapped, _ = run.prepare(model, optimizer, bucket_cap_mb=0.001)
        for step in run.steps(DATA):
            for part, (x,) in zip(step.parts, step.batches, strict=True):
                loss = quadratic(wrapped, x)
                if spoil is None:
                    step.backward(loss)
                else:
                    counts = part.positions[0] % 5 != 0
                    step.backward(loss if counts else spoil(loss), weight=float(counts))
            step.commit()
        if rank == 0:
            torch.save([p.detach() for p in model.parameters()], path)
        run.finish()

    return program


def weights(path: Path) -> list[torch.Tensor]:
    loaded: list[torch.Tensor] = torch.load(path, weights_only=True)
    return loaded


def test_however_a_step_is_cut_its_gradient_is_the_mean_over_its_samples(gang, tmp_path):
    """50 samples by 12: ten of the fifth step's are the first ones again."""
    found = []
    for world, micro in ((1, 1), (3, 1), (3, 2)):
        path = tmp_path / f"{world}-{micro}"
        program = train(path, tail="pad", micro_batches=micro)
        assert gang.run(program, world=world) == dict.fromkeys(range(world), 0), gang.log(0)
        found.append(weights(path))
    assert "loss" in gang.log(0)
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b)
    dropped = tmp_path / "drop"
    assert gang.run(train(dropped), world=1) == {0: 0}
    assert not torch.allclose(weights(dropped)[0], found[0][0])


@pytest.mark.parametrize("spoil", [lambda loss: loss * math.nan, lambda loss: (loss * 0).sqrt()])
def test_a_loss_of_weight_0_that_is_no_number_harms_nobody(gang, tmp_path, spoil):
    """Neither loss nor gradients count."""
    found = []
    for name, what in (("spoilt", spoil), ("whole", lambda loss: loss)):
        events = tmp_path / f"{name}.events"
        logging = ddp.Logging(events=events)
        program = train(tmp_path / name, spoil=what, logging=logging, micro_batches=4)
        assert gang.run(program) == {0: 0, 1: 0, 2: 0}, gang.log(0)
        lines = events.read_text().splitlines()
        found.append([json.loads(line)["loss"] for line in lines if '"loss"' in line])
    assert len(found[0]) == 5
    assert found[0] == found[1]
    for a, b in zip(weights(tmp_path / "spoilt"), weights(tmp_path / "whole"), strict=True):
        assert torch.equal(a, b)


class Normaliser(nn.Module):
    """By the mean of all that it has seen, in evaluations as well; and how often."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        self.mean += (x.mean(0) - self.mean) / self.seen
        return x - self.mean


def test_evaluation_leaves_training_as_it_is(gang, tmp_path):
    """Dropout in the model, draws in the metric: equal hashes with and without."""

    def program(name: str) -> Callable[[int], None]:
        def run_it(rank: int) -> None:
            run = ddp.start(total_steps=6, global_batch=12, seed=3)
            model = nn.Sequential(
                Normaliser(), nn.Linear(6, 300), nn.BatchNorm1d(300), nn.Dropout(0.5),
                nn.Linear(300, 2),
            )  # fmt: skip
            optimizer = torch.optim.AdamW(model.parameters())
            wrapped, _ = run.prepare(model, optimizer, bucket_cap_mb=0.001, ema=0.9)
            expected: list[torch.Tensor] = []
            for step in run.steps(DATA):
                for index, (x,) in enumerate(step.batches):
                    if name == "evaluated" and step.index == 3 and index == 0:
                        run.evaluate(DATA, noisy)  # also in the middle of a step
                    step.backward(quadratic(wrapped, x))
                step.commit()
                if name == "evaluated":
                    run.evaluate(DATA, noisy, batch_size=7, ema=step.index % 2 == 1)
                    # A batch for two of three ranks, of samples that are collated otherwise.
                    found = run.evaluate(
                        list(INPUTS), lambda m, x: {"ones": (x * 0 + 1).mean(), "rows": len(x)},
                        batch_size=25, collate=torch.stack, reduce="mean",
                    )  # fmt: skip
                    assert found == {"ones": 1.0, "rows": 25.0}
                    with run.evaluating() as bare:
                        bare(torch.rand(3, 6))
                    now = [p.detach().clone() for p in model.parameters()]
                    pairs = zip(expected or now, now, strict=True)
                    expected = [mean.lerp(value, 0.1) for mean, value in pairs]
                    with run.evaluating(ema=True) as average:
                        torch.testing.assert_close([*average.parameters()], expected)
                    if step.index == 4:  # the next update takes the model's again
                        with run.evaluating(ema=True) as average:
                            average[2].running_mean.fill_(7.0)
                        with run.evaluating(ema=True) as average:
                            assert average[2].running_mean[0] == 7.0, "as by update_bn()"
            (tmp_path / f"{name}-{rank}").write_text(f"{run.weights_sha256()} {run.state_sha256()}")
            run.finish()

        return run_it

    def noisy(model: nn.Module, batch: Any) -> torch.Tensor:
        assert not model.training
        return (model(batch[0]) + torch.randn(2)).sum()

    for name in ("evaluated", "plain"):
        assert gang.run(program(name)) == {0: 0, 1: 0, 2: 0}, gang.log(0)
    # Rank 0's buffers are those that count; an evaluation gives them to the other ranks.
    found = [(tmp_path / f"{name}-0").read_text() for name in ("evaluated", "plain")]
    assert found[0] == found[1]


def test_an_overflow_of_fp16_skips_update_scheduler_and_ema_on_all_ranks(gang, tmp_path):
    def program(rank: int) -> None:
        run = ddp.start(total_steps=6, global_batch=12, precision="fp16")
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, backoff_factor=2**-10)
        wrapped, _ = run.prepare(
            model, optimizer, scheduler=scheduler, ema=0.5, grad_scaler=scaler,
            clip_grad_norm=0.01,
        )  # fmt: skip
        before = copy.deepcopy(model)
        seen = []
        for step in run.steps(DATA):
            for (x,) in step.batches:
                # The gradients of one rank overflow, its loss does not.
                factor = 1e9 if step.index == 2 and rank == 1 else 1.0
                inner = wrapped.module[0](x)
                assert inner.dtype == torch.float32  # autocast is the model's, not its parts'
                out = wrapped(x)
                assert out.dtype == torch.float32
                step.backward(out.pow(2).mean() * factor)
            step.commit()
            changed = any(
                not torch.equal(a, b)
                for a, b in zip(model.parameters(), before.parameters(), strict=True)
            )
            before = copy.deepcopy(model)
            seen.append((changed, scheduler.last_epoch))
        (tmp_path / f"seen-{rank}").write_text(json.dumps(seen))

    assert gang.run(program) == {0: 0, 1: 0, 2: 0}, gang.log(1)
    seen = [json.loads((tmp_path / f"seen-{rank}").read_text()) for rank in range(3)]
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][0] == [False, 0]  # 2**24 is too much
    assert seen[0][1] == [True, 1]
    assert seen[0][2] == [False, 1]
    assert [changed for changed, _ in seen[0][3:]].count(True) >= 2


@pytest.mark.parametrize(
    ("directories", "steps", "code"),
    [(("a", "a"), (4, 4), 64), (("a", "b"), (4, 4), 0), (("a", "a"), (4, 6), 0)],
)
def test_a_second_run_in_a_process_does_not_begin_where_the_first_ended(
    gang, tmp_path, directories, steps, code
):
    """As one for each fold: it would train nothing, and its weights be the first's."""

    def folds(rank: int) -> None:
        for name, total in zip(directories, steps, strict=True):
            snapshots = ddp.Snapshots(directory=tmp_path / name)
            train(tmp_path / "weights", total_steps=total, snapshots=snapshots)(rank)
            print(name, "trained")

    assert gang.run(folds, world=1) == {0: code}, gang.log(0)
    said = gang.log(0)
    assert said.count(" trained\n") == (1 if code else 2)
    assert ("Give each run its own directory" in said) == bool(code)


@pytest.mark.parametrize(
    ("how", "warned"),
    [
        ("left", True),
        ("put back", False),
        ("evaluating", False),
        ("a part", False),
        ("all parts", True),
        ("never", False),
    ],
)
def test_a_model_that_an_evaluation_has_left_in_eval_mode_is_warned_of(gang, how, warned):
    def program(rank: int) -> None:
        run = ddp.start(total_steps=6, global_batch=6)
        net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        if how == "never":  # in train mode: as the script wants it
            net.eval()
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
        for step in run.steps(torch.randn(18, 4)):
            for x in step.batches:
                step.backward(model(x).sum())
            step.commit()
            if step.ends_epoch and how == "a part":
                model.module[1].eval()
            elif step.ends_epoch and how == "all parts":
                for part in model.module:
                    part.eval()
            elif step.ends_epoch and how == "evaluating":
                with run.evaluating() as bare:
                    bare(torch.zeros(2, 4))
            elif step.ends_epoch and how != "never":
                model.eval()
                model(torch.zeros(2, 4))
            if how == "put back":
                model.train()

    assert gang.run(program, world=1) == {0: 0}, gang.log(0)
    text = "warning: the model trains in eval mode since step 3, and was in train mode before"
    assert gang.log(0).count(text) == warned
    assert gang.log(0).count("eval mode") == warned
