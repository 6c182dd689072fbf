"""A state on its way back: in place, piece by piece, nothing shared, all or nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.optim.ema import make_ema
from ddpjob_trainer.snapshot.ondisk import manifest
from ddpjob_trainer.snapshot.restore import load
from ddpjob_trainer.snapshot.training_state import TrainingState
from ddpjob_trainer.state.codec import Flat
from support.snapshots import memory_source, open_snapshots, stored


class Tied(nn.Module):
    def __init__(self, seed: int, *, tie: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(33, 7)
        self.head = nn.Linear(7, 33, bias=False)
        if tie:
            self.head.weight = self.embed.weight
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.wave = nn.Parameter(torch.randn(9, dtype=torch.complex64))
        self.register_buffer("calls", torch.tensor(seed))

    def get_extra_state(self) -> Any:
        return {"seen": torch.arange(3), "name": "x"}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


class Keeps:
    def __init__(self, model: Tied) -> None:
        self.state = {"a": torch.arange(5.0), "weights": model.embed.weight}
        self.state["b"] = self.state["a"]

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def training(
    seed: int, *, tie: bool = True, keeps: bool = False
) -> tuple[TrainingState, Tied, torch.optim.Optimizer]:
    model = Tied(seed, tie=tie)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = TrainingState(model)
    state.register("optimizer", optimizer)
    if keeps:
        state.register("keeps", Keeps(model))
        state.register("own", Keeps(model), per_rank=True)
    return state, model, optimizer


def train(model: Tied, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    out = model.head(model.embed(torch.arange(33))).pow(2).mean()
    out = out + model.conv(torch.ones(1, 3, 4, 4)).pow(2).mean() + model.wave.abs().pow(2).sum()
    out.backward()
    optimizer.step()


@pytest.mark.parametrize("window", [64, 200, 1 << 20])
def test_all_comes_back_and_trains_on_equally(monkeypatch, window):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(load, "_WINDOW_BYTES", window)
    (first, *one), (second, *two) = training(1), training(2)
    train(*one)
    places = [parameter.data_ptr() for parameter in two[0].parameters()]
    second.restore(memory_source(stored(first)), 0)
    for pair in (one, one, two, two):
        train(*pair)
    assert first.sha256(0) == second.sha256(0)
    assert places == [parameter.data_ptr() for parameter in two[0].parameters()]
    assert second.module.head.weight is second.module.embed.weight


def test_what_comes_back_shares_memory_within_an_object_only():  # type: ignore[no-untyped-def]
    (first, *_), (second, model, _) = training(1, keeps=True), training(2, keeps=True)
    second.restore(memory_source(stored(first)), 0)
    objects = (second.registered["keeps"], second.per_rank["own"])
    for keeps in objects:
        assert isinstance(keeps, Keeps)
        assert keeps.state["a"] is keeps.state["b"]
        assert torch.equal(keeps.state["a"], torch.arange(5.0))
        assert torch.equal(keeps.state["weights"], first.module.embed.weight)  # type: ignore[arg-type]
    live = [*model.parameters(), *(o.state[n] for o in objects for n in ("a", "weights"))]  # type: ignore[attr-defined]
    assert len({tensor.untyped_storage().data_ptr() for tensor in live}) == len(live) == 4 + 4


def test_tied_in_the_snapshot_only_or_in_the_model_only():  # type: ignore[no-untyped-def]
    (tied, *_), (apart, *_) = training(1), training(2, tie=False)
    with torch.no_grad():
        apart.module.head.weight.copy_(apart.module.embed.weight)
    flat, other = stored(tied), stored(apart)
    for one in (apart.registered, tied.registered, *(f.tree["registered"] for f in (flat, other))):
        del one["optimizer"]
    apart.restore(memory_source(flat), 0)
    assert torch.equal(apart.module.head.weight, tied.module.embed.weight)
    assert torch.equal(apart.module.embed.weight, tied.module.embed.weight)
    tied.restore(memory_source(other), 0)
    assert torch.equal(tied.module.embed.weight, other.tensors["model/embed.weight"])


CHANGES: dict[str, Callable[[Flat], object]] = {
    "a name": lambda f: f.tree["model"].update(other=f.tree["model"].pop("conv.bias")),
    "a shape": lambda f: f.tensors.update({"model/conv.bias": torch.zeros(6)}),
    "a type": lambda f: f.tensors.update({"model/conv.bias": torch.zeros(5, dtype=torch.float64)}),
    "an object": lambda f: f.tree["registered"].update(more={}),
    "no model": lambda f: f.tree.update(model=[]),
    "no objects": lambda f: f.tree.pop("registered"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_does_not_fit_overwrites_nothing(change):  # type: ignore[no-untyped-def]
    (first, *_), (second, *_) = training(1), training(2)
    flat, before = stored(first), second.sha256(0)
    CHANGES[change](flat)
    with pytest.raises(ConfigError):
        second.restore(memory_source(flat), 0)
    assert second.sha256(0) == before


def test_an_optimizers_state_is_read_where_its_parameters_are(monkeypatch):  # type: ignore[no-untyped-def]
    """Meta stands for a GPU: eight of them need not fit into their host's memory at once."""
    (first, *one), (second, model, optimizer) = training(1), training(2)
    train(*one)
    model.to("meta")
    model.head.weight = model.embed.weight
    optimizer.param_groups[0]["params"] = list(model.parameters())
    asked: dict[str, torch.Tensor] = {}
    empty = load.Source.empty

    def seen(*args: Any) -> Any:
        asked.update(found := empty(*args))
        return found

    monkeypatch.setattr(load.Source, "empty", seen)
    second.restore(memory_source(stored(first)), 0)
    states = {name: one for name, one in asked.items() if "state" in name}
    kinds = {name.rpartition("/")[2]: one.device.type for name, one in states.items()}
    assert kinds == {"step": "cpu", "exp_avg": "meta", "exp_avg_sq": "meta"}


def test_an_average_is_divided_among_the_ranks_and_read_in_place():  # type: ignore[no-untyped-def]
    (first, one, _), (second, two, _) = training(1), training(2)
    for state, model in ((first, one), (second, two)):
        average = make_ema(model, 0.9)
        assert average is not None
        average.update_parameters(model)
        state.register("ema", average)
        assert not {n for n in state.capture(0).shared if n.startswith("registered/ema/")}
        state.averages.add("ema")
    # Only updates change it, from parameters that are equal; its buffers are each rank's own.
    shared = first.capture(0).shared
    assert "registered/ema/module.conv.weight" in shared
    assert not {"registered/ema/module.calls", "registered/ema/n_averaged"} & shared
    source = memory_source(stored(first))
    targets: dict[str, int] = {}
    read = source.read

    def seen(names: Any, into: Any) -> None:
        targets.update({name: tensor.data_ptr() for name, tensor in into.items()})
        read(names, into)

    source.read = seen  # type: ignore[method-assign]
    second.restore(source, 0)
    assert first.sha256(0) == second.sha256(0)
    for name, parameter in average.named_parameters():
        if not parameter.is_complex():  # those are stored as pairs
            assert targets.get(f"registered/ema/{name}") == parameter.data_ptr(), name


def test_no_second_copy_is_held(tmp_path: Path):  # type: ignore[no-untyped-def]
    """What is read at a time is bounded, whatever the size of the state."""
    store, _ = open_snapshots(tmp_path)
    flat = Flat({"$tensor": "w"}, {"w": torch.arange(20.0 * (1 << 20))})  # 80 MiB
    store.save(1, flat, {})
    path = manifest.listed(store.directory)[0]
    source = load.open_source(path.parent, manifest.read(path))
    sizes = []
    fetch = source._fetch
    source._fetch = lambda *one: (sizes.append(len(one[2])), fetch(*one))[1]
    target = torch.empty(20 << 20)
    source.read(lambda name: name == "w", {"w": target})
    assert torch.equal(target, flat.tensors["w"])
    assert max(sizes) <= 16 << 20
    assert len(source._buffer) <= 16 << 20
