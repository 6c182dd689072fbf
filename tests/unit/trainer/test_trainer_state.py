"""The training state in memory: captured, put back into a new process's objects, trained on."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.optim.update import begin_ema, make_ema
from ddpjob_trainer.snapshot.save.layout import Captured, fingerprint, lay_out
from ddpjob_trainer.snapshot.training_state import TrainingState
from ddpjob_trainer.state.codec import Flat
from ddpjob_trainer.state.stateful import Modes
from support.snapshots import memory_source, stored

MAKES: list[Callable[..., torch.optim.Optimizer]] = [
    partial(torch.optim.AdamW, lr=0.1, fused=True),
    partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    partial(torch.optim.AdamW, lr=0.1, amsgrad=True, foreach=True),
]


def images() -> nn.Module:
    """Its weights lie in memory in another order than their elements."""
    return nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(2, 3, 6, 6, generator=generator).to(memory_format=torch.channels_last)
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()


def resumed(before: Any, after: Any, *, per_rank: bool = False) -> list[TrainingState]:
    states = [TrainingState(nn.Linear(2, 2)) for _ in range(2)]
    for state, mine in zip(states, (before, after), strict=True):
        state.register("mine", mine, per_rank=per_rank)
    states[1].restore(memory_source(stored(states[0])), 0)
    return states


def test_a_structure_that_changes_is_divided_and_laid_out_anew():
    def drawn(*sizes: int, own: int = 3, names: str = "vw") -> object:
        pairs = zip(names, sizes, strict=False)
        tensors = {name: torch.arange(float(size)) for name, size in pairs}
        flat = Flat(None, {**tensors, "mine": torch.zeros(5)})
        captured = Captured(flat, frozenset(tensors), {"rank/0/own": torch.zeros(own)})
        images = [lay_out(captured.structure, 2, writer) for writer in range(2)]
        return fingerprint(captured.structure), [
            (image.header, [(at, t.tolist()) for at, t in sum(image.copies(captured), ())])
            for image in images
        ]

    first = drawn(10, 7)
    assert drawn(10, 7) == first
    others = [drawn(10, 8), drawn(10), drawn(10, 7, own=4), drawn(7, 10, names="wv")]
    assert first not in others
    assert drawn(10, 7) == first


@pytest.mark.parametrize("make", MAKES)
def test_tensors_in_another_order_than_c_train_on_as_if_nothing_had_been(make):
    made = []
    for _ in range(2):
        model = images()
        optimizer = make(model.parameters())
        state = TrainingState(model)
        state.register("optimizer", optimizer)
        made.append((state, model, optimizer))
    (first, *one), (second, *other) = made
    train(*one, range(3))
    second.restore(memory_source(stored(first)), 0)
    for each in (one, other):
        train(*each, range(3, 6))
    assert first.sha256(0) == second.sha256(0)


def test_an_optimizers_groups_and_state_stay_the_objects_that_others_hold():
    """A loop that sets the rate of a group, an optimizer within another."""
    made = []
    for rate in (0.5, 0.1):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
        state = TrainingState(model)
        state.register("optimizer", optimizer)
        made.append((state, optimizer, optimizer.param_groups, optimizer.state))
        model(torch.ones(2)).sum().backward()
    made[0][1].step()
    groups, group = made[1][2], made[1][2][0]
    made[1][0].restore(memory_source(stored(made[0][0])), 0)
    optimizer = made[1][1]
    assert optimizer.param_groups[0] is groups[0] is group
    assert optimizer.state is made[1][3]
    assert (group["lr"], len(optimizer.state)) == (0.5, 2)
    wanted = [state["momentum_buffer"] for state in made[0][3].values()]
    for parameter, buffer in zip(group["params"], wanted, strict=True):
        assert torch.equal(optimizer.state[parameter]["momentum_buffer"], buffer)


def test_a_model_that_was_compiled_before_prepare_and_is_not_is_told_apart():
    plain, other = nn.Linear(2, 2), nn.Linear(2, 3)
    compiled: nn.Module = torch.compile(nn.Linear(2, 2))
    for before, after in ((plain, compiled), (compiled, plain)):
        with pytest.raises(ConfigError, match=r"torch.compile\(\) was given otherwise.*Compile as"):
            TrainingState(after).restore(memory_source(stored(TrainingState(before))), 0)
    wider = nn.Sequential(other)
    with pytest.raises(ConfigError, match="belongs to another model"):
        TrainingState(wider).restore(memory_source(stored(TrainingState(plain))), 0)


class Lookahead(torch.optim.Optimizer):
    """Of one inner optimizer, or several, whose groups are its own. ``loads``: how it does."""

    def __init__(self, *inner: torch.optim.Optimizer, loads: str) -> None:
        one = inner[0]
        super().__init__(one.param_groups, {})
        self.inner, self.loads = [*inner], loads
        self.base = one if len(inner) == 1 else None
        self.param_groups = one.param_groups
        if len(inner) > 1:
            self.param_groups = [group for part in inner for group in part.param_groups]

    def state_dict(self) -> dict[str, Any]:
        parts = [one.state_dict() for one in self.inner]
        mine = {"state": {}, "param_groups": parts[0]["param_groups"]}
        return {"mine": mine, "inner": parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.loads == "both":
            super().load_state_dict(state["mine"])
        for one, part in zip(self.inner, state["inner"], strict=True):
            one.load_state_dict(part)


@pytest.mark.parametrize(("count", "loads"), [(1, "both"), (1, "inner"), (2, "inner")])
def test_groups_that_two_optimizers_share_are_shared_after_a_resume(count, loads):
    """Else a schedule changes the rate of the outer one, and the inner one goes on with its own."""
    made = []
    for rate in (0.5, 0.1):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        parts = [model] if count == 1 else [*model]
        inner = [torch.optim.SGD(part.parameters(), lr=rate, momentum=0.9) for part in parts]
        outer = Lookahead(*inner, loads=loads)
        state = TrainingState(model)
        state.register("optimizer", outer)
        made.append((state, outer, inner))
        model(torch.ones(2)).sum().backward()
    for one in made[0][2]:
        one.step()
    made[1][0].restore(memory_source(stored(made[0][0])), 0)
    _, outer, inner = made[1]
    assert [group["lr"] for group in outer.param_groups] == [0.5] * count
    assert [id(g) for one in inner for g in one.param_groups] == [*map(id, outer.param_groups)]
    assert (inner[0].param_groups is outer.param_groups) == (count == 1)
    assert all(len(one.state) for one in inner)


class Shows(torch.optim.SGD):
    """As wrappers of optimizers do: what it shows is another's, and cannot be assigned."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    param_groups = property(lambda self: self.inner.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.inner.state)  # type: ignore[assignment]

    def state_dict(self) -> dict[str, object]:  # type: ignore[override]
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, object]) -> None:  # type: ignore[override]
        self.inner.load_state_dict(state)


def test_an_optimizer_that_shows_anothers_groups_comes_back():
    inners = []
    for rate in (0.5, 0.1):
        model = nn.Linear(2, 2)
        inners.append(torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9))
        model(torch.ones(2)).sum().backward()
    inners[0].step()
    group = inners[1].param_groups[0]
    resumed(*map(Shows, inners))
    assert inners[1].param_groups[0] is group
    assert (group["lr"], len(inners[1].state)) == (0.5, 2)


@pytest.mark.parametrize("per_rank", [False, True])
def test_a_generator_goes_on_where_it_was(per_rank):
    before, after = (torch.Generator().manual_seed(seed) for seed in (1, 50))
    torch.rand(5, generator=before)
    resumed(before, after, per_rank=per_rank)
    assert torch.equal(torch.rand(4, generator=after), torch.rand(4, generator=before))


def _own(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


WRONG: dict[str, Callable[[Flat], object]] = {
    "the model": lambda s: s.tree["model"].update(weight="text"),
    "the model ": lambda s: s.tree.update(transient=5),
    "'optimizer'": lambda s: s.tree["registered"]["optimizer"].update(param_groups="x"),
    "'optimizer' ": lambda s: s.tree["registered"].update(optimizer=[1, 2]),
    "rank 0's own": lambda s: s.tensors.update({"rank/0/tree": _own("{")}),
    "rank 0's own ": lambda s: s.tensors.update(
        {"rank/0/tree": _own('[{"rng": {"torch": 5}}, {}]')}
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_state_of_other_types_is_refused(what):
    """Its checksums are right: it is another program's, or forged."""
    model = nn.Linear(2, 2)
    state = TrainingState(model)
    state.register("optimizer", torch.optim.Adam(model.parameters()))
    snapshot = stored(state)
    WRONG[what](snapshot)
    words = f"as {what.strip()} does not fit (.|\n)*use the code that wrote it, or start over"
    with pytest.raises(ConfigError, match=words):
        state.restore(memory_source(snapshot), 0)


def test_an_average_may_come_and_go_if_asked_for():
    model = nn.Linear(2, 2)
    plain, averaged = TrainingState(model), TrainingState(nn.Linear(2, 2))
    ema = make_ema(averaged.module, 0.9)
    assert ema is not None
    averaged.register("ema", ema)
    with pytest.raises(ConfigError, match=r"or snapshots=ddp.Snapshots\(allow_changes='ema'\)"):
        averaged.restore(memory_source(stored(plain)), 0)
    averaged.restore(memory_source(stored(plain)), 0, ema_may_differ=True)
    begin_ema(averaged.module, ema)
    assert torch.equal(ema.module.weight, model.weight)
    ema.update_parameters(averaged.module)
    averaged.module.weight.data.zero_()
    begin_ema(averaged.module, ema)
    assert torch.equal(ema.module.weight, model.weight), "it has begun already"
    with pytest.raises(ConfigError, match="register the same names"):
        plain.restore(memory_source(stored(averaged)), 0)
    plain.restore(memory_source(stored(averaged)), 0, ema_may_differ=True)
    assert not model.weight.any()
    plain.register("other", torch.Generator())
    with pytest.raises(ConfigError, match=r"register the same names$"):
        plain.restore(memory_source(stored(averaged)), 0, ema_may_differ=True)


def test_a_dict_is_kept_and_stays_the_same_object():
    memory, again = {"best": 0.5, "bad": 2, 7: torch.ones(2)}, {"best": 9.0, "gone": 1}
    resumed(memory, again)
    memory["best"] = 0.1
    assert again.keys() == memory.keys()
    assert (again["best"], again["bad"]) == (0.5, 2)
    assert torch.equal(again[7], torch.ones(2))


@pytest.mark.parametrize("per_rank", [False, True])
def test_a_hash_does_not_depend_on_which_tensors_share_memory(per_rank):
    """After a resume none of a script's do, and the bits are the same."""
    mean = torch.ones(3)
    values = {"now": mean, "best": mean, "last": [mean]}
    states = resumed(values, {}, per_rank=per_rank)
    hashes = [state.sha256(0) for state in states]
    assert hashes[0] == hashes[1]
    values["best"] = torch.zeros(3)
    assert states[0].sha256(0) != hashes[0]


def test_a_registered_module_comes_back_if_it_is_of_the_same_structure():
    teachers = [nn.Linear(3, 3), nn.Linear(3, 3)]
    for teacher in teachers:
        teacher.register_buffer("graph", torch.eye(3).to_sparse(), persistent=False)
    resumed(*teachers)
    assert teachers[0].weight.equal(teachers[1].weight)
    with pytest.raises(ConfigError, match=r"'mine' does not fit(.|\n)*size mismatch"):
        resumed(nn.Linear(3, 3), nn.Linear(4, 4))


def test_a_registered_dict_never_writes_into_what_is_not_its_own():
    """Its best weights may begin as the model's own, and as those that are the newest."""
    states = []
    for number in (1.0, 0.0):
        model = nn.Linear(2, 2)
        nn.init.constant_(model.weight, number)
        begun = torch.full((2,), number)
        values = {"weights": model.state_dict(), "now": begun, "best": begun}
        states.append((TrainingState(model), values))
        states[-1][0].register("best", values)
    first, again = (values for _, values in states)
    first["weights"] = {n: t + 5 for n, t in first["weights"].items()}  # type: ignore[attr-defined]
    first["best"] = first["best"] + 8  # type: ignore[operator]
    states[1][0].restore(memory_source(stored(states[0][0])), 0)
    assert states[1][0].module.weight.eq(1).all()
    assert again["weights"]["weight"].eq(6).all()  # type: ignore[index]
    assert (*again["now"].tolist(), *again["best"].tolist()) == (1.0, 1.0, 9.0, 9.0)  # type: ignore[attr-defined]


def test_a_model_that_gets_other_tensors_on_the_way_is_refused():
    model = nn.Linear(2, 2)
    model.register_buffer("queue", torch.zeros(0, 2))
    model.register_buffer("cache", torch.zeros(1), persistent=False)
    state = TrainingState(model)
    state.capture(0)  # as state_sha256() before the loop
    model.register_buffer("late", None)
    state.begin()
    model.queue, model.cache = torch.ones(0, 2), torch.zeros(3)
    state.capture(0)
    for name, value in (("queue", torch.zeros(1, 2)), ("late", torch.zeros(3))):
        before = getattr(model, name)
        setattr(model, name, value)
        with pytest.raises(ConfigError, match=f"another '{name}' in the loop.*before prepare"):
            state.capture(0)
        setattr(model, name, before)
    state.capture(0)


def test_switches_come_back_as_far_as_the_loop_has_changed_them():
    nets = [nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(2)]
    nets[1][0].bias.requires_grad_(False)  # another version of the script
    modes = [Modes({"model": net}) for net in nets]
    nets[0][1].eval()
    nets[0][0].weight.requires_grad_(False)
    kept = json.loads(json.dumps(modes[0].changed()))
    wanted = {"training": {"model.1": False}, "requires_grad": {"model.0.weight": False}}
    assert kept == wanted
    kept["training"]["gone"] = True
    modes[1].put_back(kept)
    assert [part.training for part in nets[1].modules()] == [True, True, False]
    learning = [parameter.requires_grad for parameter in nets[1].parameters()]
    assert learning == [False, False, True, True]
    nets[0][1].train()
    assert modes[0].changed()["training"] == {}
