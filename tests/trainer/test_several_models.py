"""Several models, several optimizers, several losses: the mean over all ranks, and exact resume."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpjob_trainer as ddp
from ddpjob_trainer.gradients import determinism
from support.stand import ALL_0, Stand, resumed
from support.tiers import some_in_gate

EVERY = 3
bce = nn.functional.binary_cross_entropy_with_logits

#: One step, from a batch on: what a script writes within its loop.
Body = Callable[[ddp.Step], None]


def small(*sizes: int, norm: bool = False) -> nn.Module:
    layers: list[nn.Module] = []
    for number, (into, out) in enumerate(pairwise(sizes)):
        layers += [nn.BatchNorm1d(into)] if norm and number else []
        layers += [nn.Linear(into, out), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.5, 0.9))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Gradients that are too large by a factor show, as they do not with Adam."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


def gan(
    run: ddp.Run,
    *,
    norm: bool = True,
    make: Callable[[nn.Module], torch.optim.Optimizer] = adam,
    **options: Any,
) -> tuple[Body, list[nn.Module]]:
    """The usual one: D by turns with G, which is updated at every second step only."""
    g, d = small(8, 96, 96, 16, norm=norm), small(16, 96, 96, 1, norm=norm)
    both = [make(g), make(d)]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.9) for o in reversed(both)]
    (wg, wd), (og, od) = run.prepare(
        [g, d], both, scheduler=schedulers, bucket_cap_mb=0.01, ema=0.9, **options
    )

    def body(step: ddp.Step) -> None:
        # Who is not updated does not advance.
        of_d, of_g = (scheduler.last_epoch for scheduler in schedulers)
        assert (of_d, of_g) == (
            step.index,
            (step.index + 1) // 2,
        ) or run.options.precision != "fp32"
        batches = list(step.batches)
        d.requires_grad_(True)
        for (x,) in batches:
            wg.train(not norm)  # BatchNorm's statistics, which rank 0 gives to all, then count
            with torch.no_grad():
                fake = wg(x[:, :8])
            wg.train()
            real = bce(wd(x), torch.ones(len(x), 1))
            step.backward((real + bce(wd(fake), torch.zeros(len(x), 1))) / 2)
        assert all(p.grad is None for p in g.parameters())
        step.update(od)
        if step.index % 2 == 0:
            d.requires_grad_(False)  # as many scripts do, to save time
            for (x,) in batches:
                step.backward(bce(wd(wg(x[:, :8])), torch.ones(len(x), 1)))
            step.update(og)
        assert all(p.grad is None for net in (g, d) for p in net.parameters())

    assert [s.last_epoch for s in schedulers] == [0, 0]
    return body, [g, d]


def muon(run: ddp.Run) -> tuple[Body, list[nn.Module]]:
    net = small(16, 96, 96, 4)
    matrices = [p for p in net.parameters() if p.ndim == 2]
    rest = [p for p in net.parameters() if p.ndim != 2]
    optimizers = [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 3, 0.5) for o in optimizers]
    model, _ = run.prepare(
        net, optimizers, scheduler=schedulers, bucket_cap_mb=0.01, clip_grad_norm=0.5, ema=0.9
    )

    def body(step: ddp.Step) -> None:
        for (x,) in step.batches:
            step.backward(model(x).pow(2).mean())
        if run.options.level == "resume" and run.world_size > 1:
            assert len(determinism.buckets(model)) > 1, "DDP averages it, beside backward"

    return body, [net]


def one_by_one(run: ddp.Run) -> tuple[Body, list[nn.Module]]:
    """Two models that never meet, prepared in two calls, updated together by commit()."""
    first, second = small(16, 96, 4), small(16, 96, 4)
    a, _ = run.prepare(first, adam(first), ema=0.9, bucket_cap_mb=0.01)
    other = adam(second)
    scheduler = torch.optim.lr_scheduler.StepLR(other, 1, 0.9)
    b, _ = run.prepare(second, other, scheduler=scheduler, clip_grad_norm=0.1)

    def body(step: ddp.Step) -> None:
        assert scheduler.last_epoch == step.index // 2
        for (x,) in step.batches:
            step.backward(a(x).pow(2).mean())
            if step.index % 2:  # else nothing reaches the second: it does not advance
                step.backward(b(x).pow(2).mean())

    return body, [first, second]


def unfrozen_later(run: ddp.Run) -> tuple[Body, list[nn.Module]]:
    """A backbone that learns from the fifth step on: a resume before knows that it does not."""
    backbone, head = small(16, 96, 8), small(8, 4)
    (a, b), _ = run.prepare([backbone, head], [adam(backbone), adam(head)], bucket_cap_mb=0.01)

    def body(step: ddp.Step) -> None:
        if step.index in (0, 4):
            backbone.requires_grad_(step.index == 4)
        for (x,) in step.batches:
            step.backward(b(a(x)).pow(2).mean())
        assert (backbone[0].weight.grad is None) == (step.index < 4)

    return body, [backbone, head]


def losses(kind: str) -> Callable[[ddp.Run], tuple[Body, list[nn.Module]]]:
    def two(run: ddp.Run) -> tuple[Body, list[nn.Module]]:
        net = small(16, 96, 96, 4)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), 0.1), bucket_cap_mb=0.01)

        def parts(x: torch.Tensor) -> Iterator[torch.Tensor]:
            out = model(x)
            yield out.pow(2).mean()
            if kind == "two forwards by turns":
                out = model(x)
            yield (out - x[:, :4]).pow(2).mean()

        def body(step: ddp.Step) -> None:
            for (x,) in step.batches:
                if kind == "sum":
                    step.backward(sum(parts(x)))  # type: ignore[arg-type]
                elif kind == "two forwards":
                    step.backward(model(x).pow(2).mean() + 0 * model(x).sum())
                    step.backward((model(x) - x[:, :4]).pow(2).mean())
                else:
                    for number, loss in enumerate(parts(x)):
                        step.backward(loss, retain_graph=not number)

        return body, [net]

    return two


DATA = TensorDataset(torch.randn(110, 16, generator=torch.Generator().manual_seed(3)))


@dataclass(kw_only=True)
class Training(Stand, every=EVERY, total_steps=8, global_batch=36, check_every=1):
    """The ranks hold the same parameters after each step."""

    make: Callable[[ddp.Run], tuple[Body, list[nn.Module]]]

    def train(self, run: ddp.Run) -> None:
        body, models = self.make(run)
        for step in run.steps(DATA):
            self.may_die(run, step.index)
            body(step)
            step.commit()
        torch.save([net.state_dict() for net in models], self.directory / f"weights-{run.rank}")


CASES: dict[str, dict[str, Any]] = {
    "gan": {"make": gan},
    "gan, fp16, accumulated": {
        "make": lambda run: gan(run, norm=False, clip_grad_norm=0.5),
        "start": {"precision": "fp16", "micro_batches": 2},
    },
    "muon": {"make": muon},
    "muon, elastic": {"make": muon, "start": {"level": "elastic", "shards": 6}},
    "one by one": {"make": one_by_one},
    "unfrozen later": {"make": unfrozen_later},
    "two losses": {"make": losses("two backwards")},
    "two losses, elastic": {
        "make": losses("two backwards"), "start": {"level": "elastic", "shards": 6},
    },
}  # fmt: skip


@pytest.mark.parametrize("case", some_in_gate(CASES, "gan", "muon, elastic"))
def test_killed_and_resumed_is_undisturbed_bit_for_bit(gang, tmp_path, case):
    undisturbed, disturbed = (Training(tmp_path / name, **CASES[case]) for name in "ab")
    assert gang.run(undisturbed) == ALL_0, gang.log(0)
    assert resumed(gang, disturbed, (1, 5), EVERY) == undisturbed.results()


@pytest.mark.parametrize(
    ("make", "same"),
    [
        (lambda run: gan(run, norm=False, make=sgd), None),
        (losses("two backwards"), losses("sum")),
        (losses("two forwards"), losses("sum")),
        (losses("two forwards by turns"), losses("sum")),
    ],
)
@pytest.mark.parametrize("micro", some_in_gate([1, 2], 2))
def test_it_is_the_mean_over_all_samples(gang, tmp_path, make, same, micro):
    """Three ranks, accumulating, and one rank at once hold the same weights, but for rounding.

    ``same``: the same losses said otherwise.
    """
    found = []
    for world, made, count in ((3, make, micro), (1, same or make, 1)):
        training = Training(tmp_path / str(world), {"micro_batches": count}, make=made)
        assert gang.run(training, world=world) == dict.fromkeys(range(world), 0), gang.log(0)
        found.append(torch.load(training.directory / "weights-0"))
    for three, one in zip(*found, strict=True):
        for name, tensor in three.items():
            torch.testing.assert_close(tensor, one[name], rtol=1e-3, atol=1e-4)


def test_what_would_train_nothing_or_apart_is_refused_with_the_cure(gang):
    def refuse(rank: int) -> None:
        run = ddp.start(total_steps=9, global_batch=6)
        g, d, frozen = small(16, 4), small(4, 1), small(16, 4).requires_grad_(False)
        with refused(r"parameter 'model2\.0\.weight'.*run\.prepare\(model, \[first, second\]\)"):
            run.prepare([g, d], adam(g))
        with refused("parameters that are not the model's"):
            run.prepare(g, adam(d))
        with refused("no parameter that requires a gradient"):
            run.prepare(frozen, adam(g))
        wg, og = run.prepare(g, adam(g))
        with refused("the same model twice"):
            run.prepare(g, adam(g))
        wd, od = run.prepare(d, adam(d))
        run.register("late", nn.Linear(1, 1))
        with refused("several models: say which one"), run.evaluating():
            pass
        with run.evaluating(model=wd) as module:
            assert module is d
        other = adam(g)
        steps = iter(run.steps(TensorDataset(torch.randn(24, 16))))
        with refused("prepare all models before it"):
            step = next(steps)
            run.prepare(small(1, 1), adam(frozen))
        with refused(r"steps\(\) was called twice; it counts all epochs itself"):
            next(run.steps(TensorDataset(torch.randn(24, 16))))
        for per_rank in (False, True):
            with refused(r"register\('later'\) was called after steps.*before run\.steps"):
                run.register("later", {"n": 0}, per_rank=per_rank)
        with refused(r"update\(\) was called before"):
            step.update(og)
        (batch,) = next(step.batches)
        with refused("needs a scalar loss"):
            step.backward(wg(batch))
        step.backward(wg(batch).mean())
        with refused("was given an optimizer, Adam, that prepare"):
            step.update(other)
        with refused("no gradient has reached the parameters of the Adam"):
            step.update(od)
        step.backward(wg(torch.ones(2, 16)).mean())
        step.update(og, og)
        step.backward(wd(torch.ones(2, 4)).mean())
        with refused("whose gradients nothing would apply: call step\\.update"):
            step.commit()
        step.update()  # with all; G has none now
        step.commit()

    assert gang.run(refuse, world=1) == {0: 0}, gang.log(0)


def refused(words: str) -> Any:
    return pytest.raises(ddp.ConfigError, match=words)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(16, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, heads: str = "ab") -> tuple[torch.Tensor, ...]:
        seen = self.trunk(x)
        return tuple(getattr(self, head)(seen) for head in heads)


PART = r"parameters, not b\.weight, b\.bias, and.*step\.backward\(first \+ second\).*find_unused_"


@pytest.mark.parametrize(
    ("how", "option", "words"),
    [
        # DDP would apply what has not travelled, and tell of it one step later, or never.
        ("a part at 0", "", PART),
        ("a part at 2", "", PART),
        ("two backwards", "find_unused", "=True each batch's forward is followed by one"),
        ("two forwards", "find_unused", "DDP met a parameter twice in one backward"),
        ("by turns", "static", "excludes: use find_unused_parameters=True in its place"),
    ],
)
def test_what_the_reducer_cannot_follow_is_refused_with_the_cure(gang, how, option, words):
    """Torch ends with its own tracebacks, some of them a step late."""
    options = {"static": "static_graph", "find_unused": "find_unused_parameters"}

    def program(rank: int) -> None:
        run = ddp.start(total_steps=3, global_batch=6)
        net = TwoHeads()
        model, _ = run.prepare(net, adam(net), **({options[option]: True} if option else {}))
        for step in run.steps(TensorDataset(torch.randn(24, 16))):
            for (x,) in step.batches:
                if how == "by turns":
                    step.backward(model(x, heads="ab"[step.index % 2])[0].mean())
                elif "part" in how:
                    one, other = (out.pow(2).mean() for out in model(x))
                    step.backward(one if how[-1] == str(step.index) else one + other)
                else:
                    first = model(x, heads="a" if how == "two forwards" else "ab")
                    more = first[1:] if how == "two backwards" else model(x, heads="b")
                    step.backward(first[0].mean(), retain_graph=True)
                    step.backward(more[0].mean())
            step.commit()

    assert gang.run(program, world=2) == {0: 64, 1: 64}, gang.log(0)
    assert re.search(words, gang.log(0)), gang.log(0)
