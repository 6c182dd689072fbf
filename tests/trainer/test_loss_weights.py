"""Loss weights, the step's loss, the hook before an update: what they compute. 3 ranks."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpjob_trainer as ddp
from ddpjob_trainer.telemetry.event_log import read_losses

SAMPLES, LENGTH, STEPS = 50, 9, 5
_draw = torch.Generator().manual_seed(2)
INPUTS = torch.randn(SAMPLES, LENGTH, 4, generator=_draw)
#: Tokens of each sample: very different ones, and some have none.
TOKENS = torch.randint(0, LENGTH + 1, (SAMPLES,), generator=_draw)
TOKENS[::7] = 0
DATA = TensorDataset(INPUTS, TOKENS)


def net() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(4, 200), nn.Tanh(), nn.Linear(200, 1))


def per_token(model: nn.Module, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The mean over the tokens that count; without any it is NaN, as cross_entropy's is."""
    counted = torch.arange(LENGTH) < tokens[:, None]
    loss = (model(x)[..., 0] - x[..., 0]).pow(2)
    result: torch.Tensor = (loss * counted).sum() / counted.sum()
    return result


def train(directory: Path, *, world: int = 3, **start: Any) -> Callable[[int], None]:
    directory.mkdir()

    def program(rank: int) -> None:
        clip = start.pop("clip", None)
        scaler = None
        if "precision" in start:  # weights are large: it would overflow at first
            scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        given = {"total_steps": STEPS, "global_batch": 12, "seed": 3, "check_every": 1, **start}
        run = ddp.start(**given, logging=ddp.Logging(events=directory / "events"))
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        wrapped, _ = run.prepare(
            model, optimizer, bucket_cap_mb=0.001, clip_grad_norm=clip, grad_scaler=scaler
        )
        seen, told = [], []
        for step in run.steps(DATA):
            for x, tokens in step.batches:
                seen.append([step.index, x.tolist(), tokens.tolist()])
                step.backward(per_token(wrapped, x, tokens), weight=tokens.sum())
            with pytest.raises(ddp.ConfigError, match=r"is known after step\.commit"):
                _ = step.loss
            step.commit()
            told.append(step.loss)
            assert step.loss == told[-1]
        (directory / f"seen-{rank}").write_text(json.dumps([seen, told]))
        if rank == 0:
            torch.save(model.state_dict(), directory / "weights")
        run.finish()

    return program


def one_big_batch(directory: Path, world: int, clip: float | None) -> tuple[list[float], Any]:
    """What plain torch makes of the same samples, each step as a single batch."""
    found = [json.loads((directory / f"seen-{rank}").read_text())[0] for rank in range(world)]
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for index in range(STEPS):
        parts = [part for seen in found for part in seen if part[0] == index]
        x = torch.cat([torch.tensor(part[1]) for part in parts])
        tokens = torch.cat([torch.tensor(part[2]) for part in parts])
        optimizer.zero_grad()
        loss = per_token(model, x, tokens)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


CASES: dict[str, dict[str, Any]] = {
    "resume": {"micro_batches": 4, "clip": 0.1},  # some parts have no token
    "fp16": {"precision": "fp16", "clip": 0.1},
    "elastic": {"level": "elastic", "shards": 6, "micro_batches": 2, "clip": 0.1},
}


@pytest.mark.parametrize("case", CASES)
def test_weighted_losses_are_those_of_one_big_batch(gang, tmp_path, case):
    options = CASES[case]
    program = train(tmp_path / "run", **options)
    assert gang.run(program) == {0: 0, 1: 0, 2: 0}, gang.log(0)
    losses, weights = one_big_batch(tmp_path / "run", 3, options.get("clip"))
    told = read_losses(tmp_path / "run" / "events")
    near: dict[str, Any] = {"rel": 1e-2} if case == "fp16" else {"rel": 1e-5}
    assert [told[step] for step in sorted(told)] == pytest.approx(losses, **near)
    for rank in range(3):
        seen = json.loads((tmp_path / "run" / f"seen-{rank}").read_text())
        assert seen[1] == [told[step] for step in sorted(told)]
    found = torch.load(tmp_path / "run" / "weights", weights_only=True)
    if case == "fp16":
        return  # rounding in the forward; the losses have shown it
    for name, value in weights.items():
        torch.testing.assert_close(found[name], value)
    if case == "elastic":
        assert gang.run(train(tmp_path / "two", **options), world=2) == {0: 0, 1: 0}
        other = torch.load(tmp_path / "two" / "weights", weights_only=True)
        assert all(torch.equal(found[name], other[name]) for name in found)


def spoil(named: Mapping[str, torch.nn.Parameter]) -> None:
    for parameter in named.values():
        parameter.grad.fill_(math.nan)


@pytest.mark.parametrize(
    ("weight", "hook", "code", "words"),
    [
        (
            lambda rank: 1.0 if rank == 1 else None,
            None,
            64,
            "1 of 3 ranks have given step.backward",
        ),
        (lambda rank: 0, None, 64, "add up to 0 over all batches and ranks"),
        (lambda rank: None, spoil, 70, "gradients are not finite"),
    ],
)
def test_what_cannot_be_applied_ends_all_ranks(gang, weight, hook, code, words):
    def program(rank: int) -> None:
        run = ddp.start(total_steps=3, global_batch=12)
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped, _ = run.prepare(model, optimizer, before_update=hook)
        for step in run.steps(DATA):
            for x, _ in step.batches:
                step.backward(wrapped(x).pow(2).mean(), weight=weight(rank))
            step.commit()

    assert gang.run(program) == dict.fromkeys(range(3), code), gang.log(0)
    assert all(words in gang.log(rank) for rank in range(3))


# --- The hook before an update ----------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"level": "elastic", "shards": 6}, {"precision": "fp16"}, {"micro_batches": 2}],
    ids=str,
)
def test_the_hook_sees_the_mean_unscaled_and_what_it_changes_is_clipped(gang, tmp_path, options):
    def program(rank: int) -> None:
        run = ddp.start(total_steps=STEPS, global_batch=12, seed=3, check_every=1, **options)
        model = net()
        before: list[dict[str, torch.Tensor]] = []
        draws = []

        def hook(named: Mapping[str, torch.nn.Parameter]) -> None:
            assert list(named) == [name for name, _ in model.named_parameters()]
            draws.append(torch.rand(()).item())
            seen = {}
            for name, parameter in named.items():
                seen[name] = parameter.grad.clone()
                parameter.grad.add_(torch.randn_like(parameter.grad), alpha=100.0)
            before.append(seen)

        wrapped, _ = run.prepare(
            model, torch.optim.SGD(model.parameters(), lr=1.0), bucket_cap_mb=0.001,
            clip_grad_norm=0.5, before_update=hook,
        )  # fmt: skip
        for step in run.steps(TensorDataset(INPUTS)):
            start = {n: p.detach().clone() for n, p in model.named_parameters()}
            for (x,) in step.batches:
                step.backward(wrapped(x).pow(2).mean())
            step.commit()
            drawn = torch.rand(()).item()  # not what the hook drew
            assert drawn != draws[-1]
            moved = [start[n] - p for n, p in model.named_parameters()]
            assert float(nn.utils.get_total_norm(moved)) == pytest.approx(0.5, rel=1e-3)
        assert len(set(draws)) == len(draws) == STEPS
        found = [{name: value.norm().item() for name, value in seen.items()} for seen in before]
        (tmp_path / f"seen-{rank}").write_text(json.dumps([found[0], draws]))
        run.finish()

    assert gang.run(program) == {0: 0, 1: 0, 2: 0}, gang.log(0)
    seen = [json.loads((tmp_path / f"seen-{rank}").read_text()) for rank in range(3)]
    assert seen[0] == seen[1] == seen[2]
    order = [int(i) for i in _first_batch()]
    model = net()
    model(INPUTS[order]).pow(2).mean().backward()
    near = 2e-2 if "precision" in options else 1e-4
    for name, parameter in model.named_parameters():
        assert seen[0][0][name] == pytest.approx(parameter.grad.norm().item(), rel=near)


def _first_batch() -> list[int]:
    from ddpjob_trainer.data.order import DataOrder, Shuffled

    order = DataOrder(Shuffled(3, SAMPLES), 12, "drop")
    return list(order.samples(order.batch(0)))
