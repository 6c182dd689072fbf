"""What prepare() takes: one or several, by which names, on which device, whose scheduler."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as kinds
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.gpu import accelerator
from ddpjob_trainer.optim.update import (
    Clip,
    Unit,
    Updater,
    check_parameters,
    match_schedulers,
)
from ddpjob_trainer.training.models.prepare import (
    keep_bits,
    move_to,
    named,
    place_state,
    shaped_like,
)

CPU, META = torch.device("cpu"), torch.device("meta")  # meta stands for an accelerator


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), 0.1)


def test_a_model_moves_unless_its_user_has_put_some_of_it_elsewhere():
    apart = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device=META))
    move_to(apart, META)
    move_to(apart, CPU)
    assert [layer.weight.device for layer in apart] == [CPU, META]
    norm = nn.BatchNorm1d(2)
    norm.running_mean = torch.zeros(2, device=META)  # a buffer counts
    move_to(norm, META)
    assert norm.weight.device == CPU
    model = nn.BatchNorm1d(2)
    move_to(model, META)
    assert {t.device for t in (*model.parameters(), *model.buffers())} == {META}


def test_names_go_on_over_several_calls():
    one, two = nn.Linear(1, 1), nn.Linear(1, 1)
    assert list(named(one, nn.Module, "model", 0)) == ["model"]
    assert list(named([one, two], nn.Module, "model", 0)) == ["model", "model2"]
    assert list(named((one, two), nn.Module, "model", 2)) == ["model3", "model4"]
    assert named({"g": one}, nn.Module, "model", 5) == {"g": one}
    assert list(named(nn.ModuleList([one]), nn.Module, "model", 0)) == ["model"]


def test_what_is_none_is_refused():
    for value, words in (
        ([], "needs a torch Module"), (None, "not NoneType"), ("net", "not str"),
        ([nn.Linear(1, 1), 3], "got a int"), ({"a.b": nn.Linear(1, 1)}, "'a.b' is no name"),
        ({1: nn.Linear(1, 1)}, "1 is no name"), ([nn.Identity()] * 2, "the same model twice"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            named(value, nn.Module, "model", 0)


def test_results_come_back_in_the_shape_that_was_given():
    given: Any = nn.Linear(1, 1)
    assert shaped_like(given, [7]) == 7
    assert shaped_like([given], [7]) == [7]
    assert shaped_like((given, given), [7, 8]) == [7, 8]
    assert shaped_like({"a": given, "b": given}, [7, 8]) == {"a": 7, "b": 8}


class Timed:
    """As schedulers of other libraries: the caller counts."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, epoch: int, metric: float | None = None) -> None: ...


def test_a_scheduler_belongs_to_its_optimizer_wherever_it_stands():
    optimizers = [sgd(nn.Linear(1, 1)) for _ in range(3)]
    last, first = StepLR(optimizers[2], 1), StepLR(optimizers[0], 1)
    assert match_schedulers(optimizers, [last, first]) == [first, None, last]
    assert match_schedulers(optimizers, [None]) == [None] * 3
    own = object()  # says nothing of an optimizer
    assert match_schedulers(optimizers, [None, own, last]) == [None, own, last]
    for wrong, words in (
        ([StepLR(sgd(nn.Linear(1, 1)), 1)], "another optimizer"),
        ([own], "another optimizer"),
        ([Timed(optimizers[0])], r"Timed\): commit\(\) calls its step\(\) without.*register"),
        ([ReduceLROnPlateau(optimizers[0])], "needs a metric"),
        ([first, StepLR(optimizers[0], 1)], "two schedulers for one optimizer"),
    ):
        with pytest.raises(ConfigError, match=words):
            match_schedulers(optimizers, wrong)


def schedules(make: Any, every: str | None = None) -> Updater:
    updater, optimizer = Updater(), sgd(nn.Linear(1, 1))
    updater.units.append(Unit(optimizer, make(optimizer), Clip(None, []), every))
    return updater


@pytest.mark.parametrize(
    ("make", "length"),
    [
        (lambda o: kinds.StepLR(o, 3), 3),
        (lambda o: kinds.MultiStepLR(o, [2, 9]), 9),
        (lambda o: kinds.CosineAnnealingLR(o, 10), 10),
        (lambda o: kinds.LinearLR(o, total_iters=4), 4),
        (lambda o: kinds.OneCycleLR(o, 0.1, total_steps=10), 10),
        (lambda o: kinds.CosineAnnealingWarmRestarts(o, 5), 5),
        (lambda o: kinds.SequentialLR(o, [kinds.LinearLR(o), kinds.ConstantLR(o)], [8]), 8),
        (lambda o: kinds.ChainedScheduler([kinds.LinearLR(o), kinds.StepLR(o, 7)]), 7),
    ],
)
def test_a_schedule_that_fits_the_epochs_and_not_the_steps_is_warned_of(make, length):
    (text,) = schedules(make).check_schedules(40, 400)  # ten epochs
    assert f"the length {length}: that fits the 10 epochs of this run and not its 400 st" in text
    assert "scheduler_every='epoch'" in text
    for chosen in ("step", "epoch"):
        assert not schedules(make, chosen).check_schedules(40, 400)
    (text,) = schedules(make).check_schedules(None, 400)  # a stream
    assert "advances at every step, 400 times in this run; by the epoch, keep it with" in text
    assert not schedules(make).check_schedules(400, 400)  # one epoch
    assert not schedules(make).check_schedules(1, 10)  # an epoch is a step


def test_a_schedule_that_may_count_epochs_is_named_with_both_counts():
    for make in (
        lambda o: kinds.LambdaLR(o, lambda count: 0.9**count),
        lambda o: kinds.ExponentialLR(o, 0.9),
        lambda o: type("OwnLR", (), {"T_max": 3})(),  # nobody knows what its number means
        lambda o: kinds.StepLR(o, 30),
        lambda o: kinds.MultiStepLR(o, [30, 60]),
        lambda o: kinds.CosineAnnealingLR(o, 90),
    ):
        (text,) = schedules(make).check_schedules(40, 400)
        assert "LR advances at every step, 400 times in this run; by the epoch, 10 times" in text
        assert not schedules(make, "step").check_schedules(40, 400)


def test_a_schedule_of_steps_is_not():
    for make in (
        lambda o: kinds.CosineAnnealingLR(o, 400),
        lambda o: kinds.SequentialLR(
            o, [kinds.LinearLR(o, total_iters=5), kinds.CosineAnnealingLR(o, 395)], [5]
        ),
        lambda o: None,
    ):
        assert not schedules(make).check_schedules(40, 400)


def test_a_scheduler_by_epochs_needs_them():
    with pytest.raises(ConfigError, match=r"a stream does not say.*run\.register"):
        schedules(lambda o: kinds.StepLR(o, 3), "epoch").check_schedules(None, 400)


@pytest.mark.parametrize(
    ("defaults", "shown"),
    [({"lr": None}, []), ({}, []), ({"lr": print}, []), ({"lr": torch.tensor(0.5)}, [0.5])],
)
def test_an_optimizer_without_a_rate_shows_none(defaults, shown):
    updater = Updater()
    optimizer = Optimizer(nn.Linear(1, 1).parameters(), defaults)  # as Adafactor and Prodigy
    updater.units.append(Unit(optimizer, None, Clip(None, [])))
    assert list(updater.readings(accelerator.of(CPU)).values()) == shown


def test_every_parameter_has_an_optimizer_and_every_optimizer_a_model():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    parts = [sgd(part) for part in model]
    check_parameters(dict(model.named_parameters()), parts)
    with pytest.raises(ConfigError, match=r"no optimizer .* holds the parameter '1\.weight'"):
        check_parameters(dict(model.named_parameters()), parts[:1])
    model[1].requires_grad_(False)
    check_parameters(dict(model.named_parameters()), parts[:1])
    with pytest.raises(ConfigError, match="not the model's"):
        check_parameters(dict(model[0].named_parameters()), parts)
    # What models share has the optimizer of an earlier call.
    second = nn.Sequential(nn.Linear(2, 2), shared := nn.Linear(2, 2))
    check_parameters(dict(second.named_parameters()), [sgd(second[0])], [sgd(shared)])
    # Who asks for the loss again is refused, though a scheduler puts another step() before it.
    model = nn.Linear(2, 2)
    optimizer, usual = torch.optim.LBFGS(model.parameters()), sgd(model)
    for one in (optimizer, usual):
        StepLR(one, 1)
    check_parameters(dict(model.named_parameters()), [usual])
    with pytest.raises(ConfigError, match=r"LBFGS\.step\(\) needs a closure.*AdamW"):
        check_parameters(dict(model.named_parameters()), [optimizer])


def test_state_that_an_optimizer_has_made_already_follows_its_parameters():
    """The counter stays where torch keeps it, unless a kernel reads it."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)  # makes its own at once
    before = list(model.parameters())
    move_to(model, META)
    # On a GPU these are the same objects; torch makes new ones on meta only.
    moved = dict(zip(before, model.parameters(), strict=True))
    optimizer.param_groups[0]["params"] = list(moved.values())
    for parameter, now in moved.items():
        optimizer.state[now] = optimizer.state.pop(parameter)
    place_state(optimizer)
    assert optimizer.state
    for state in optimizer.state.values():
        found = {name: value.device for name, value in state.items()}
        assert found.pop("step") == CPU
        assert set(found.values()) == {META}
    optimizer.param_groups[0]["capturable"] = True
    place_state(optimizer)
    assert {state["step"].device for state in optimizer.state.values()} == {META}


def test_inductor_chooses_no_kernel_by_its_time_where_bits_are_kept(monkeypatch):
    """Whoever compiles. On the CPU it would measure nothing: what it compiles stays as it is."""
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    for config, name in ((inductor, "deterministic"), (functorch, "donated_buffer")):
        monkeypatch.setattr(config, name, name == "donated_buffer")
    torch.compile(nn.Linear(1, 1))
    keep_bits("off", META)
    assert functorch.donated_buffer
    keep_bits("resume", CPU)
    assert (inductor.deterministic, functorch.donated_buffer) == (False, False)
    keep_bits("resume", META)
    assert inductor.deterministic
