"""State in plain attributes, where no snapshot looks: what is refused, and what is only told."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.optim.update import Clip, Unit, Updater
from ddpjob_trainer.snapshot.training_state import TrainingState
from ddpjob_trainer.training.hidden import Hidden
from ddpjob_trainer.training.unsaved import Guard


class Net(nn.Module):
    """Changes one of its attributes in each step, or none."""

    def __init__(self, change: Callable[[Any], None] = lambda net: None) -> None:
        super().__init__()
        self.part = nn.Linear(2, 2)
        self.change = change
        self.count, self.rate, self.on = 0, float("nan"), False
        self.queue = [torch.zeros(2)]
        self.draws = torch.Generator()
        self.loss = torch.zeros(())


class Plain(torch.optim.SGD):
    """Not torch's own."""


class Counting(Plain):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.updates, self.means = 0, {0: torch.zeros(2)}


class Saving(Counting):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "updates": self.updates}


class Watched:
    def __init__(
        self,
        net: Net | None = None,
        kind: Callable[[Any], torch.optim.Optimizer] = Plain,
        scheduler: Any = None,
    ) -> None:
        self.net = net or Net()
        self.optimizer = kind(self.net.parameters())
        self.updater = Updater()
        self.updater.units.append(Unit(self.optimizer, scheduler, Clip(None, [])))
        self.known: list[object] = []
        self.said: list[str] = []
        self.registered: list[object] = []
        self.hidden = Hidden(
            self.net,
            self.updater,
            lambda obj: any(obj is k for k in self.known),
            self.said.append,
            lambda obj: any(obj is k for k in self.registered),
        )

    def step(self, count: int = 3, change: Callable[[], object] = lambda: None) -> None:
        for _ in range(count):
            self.net.change(self.net)
            change()
            self.hidden.step_ended()


def count(net: Any) -> None:
    net.count += 1


def carry(net: Any) -> None:
    net.queue = [torch.ones(2), *net.queue][:1]


def carry_in_place(net: Any) -> None:
    net.queue[0].add_(1)


def carry_past_its_version(net: Any) -> None:
    net.queue[0].data.add_(1)


def draw(net: Any) -> None:
    torch.rand((), generator=net.draws)


def keep_loss(net: Any) -> None:
    net.loss, net.on = net.part(torch.ones(2)).sum(), not net.on


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (count, "count"),
        (carry, "queue"),
        (carry_in_place, "queue"),
        (carry_past_its_version, "queue"),
        (draw, "draws"),
    ],
)
def test_what_a_module_carries_from_step_to_step_is_told_once(
    change: Callable[[Any], None], name: str
) -> None:
    watched = Watched(Net(change))
    watched.step(5)
    (said,) = watched.said
    assert said.startswith(f"warning: the model changes {name!r} in the loop")
    assert "register_buffer()" in said
    assert "run.register(" in said


@pytest.mark.parametrize("change", [lambda net: None, keep_loss])
def test_what_cannot_be_carried_is_not_told_of(change: Callable[[Any], None]) -> None:
    watched = Watched(Net(change))
    watched.step()
    assert not watched.said


def test_a_constant_for_each_parameter_stays_one_when_the_parameters_change() -> None:
    class Scaled(Plain):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1)
            self.scales = {p: 0.5 for group in self.param_groups for p in group["params"]}

    def learn(net: Any) -> None:
        with torch.no_grad():
            net.part.weight.mul_(0.5)

    watched = Watched(Net(learn), Scaled)
    watched.net.masks = dict.fromkeys(watched.net.parameters(), 1)
    watched.step()
    assert not watched.said


@pytest.mark.parametrize("name", ["updates", "means"])
def test_an_optimizer_that_counts_beside_its_state_is_refused(name: str) -> None:
    watched = Watched(kind=Counting)

    def advance(net: Any) -> None:
        optimizer: Any = watched.optimizer
        if name == "updates":
            optimizer.updates += 1
        else:
            optimizer.means[0] += 1

    watched.net.change = advance
    watched.step(1)
    with pytest.raises(ConfigError, match=rf"Counting\.{name} changes.*state_dict\(\)"):
        watched.step(1)
    watched = Watched(kind=Saving)  # it says itself what counts
    watched.net.change = advance
    watched.step()


def test_what_an_optimizer_only_writes_is_a_log() -> None:
    class Logging(Plain):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1)
            self.norm, self.history, self.updates, self.rate = 0.0, [0.0], 0, 1.0

        def step(self, closure: Any = None) -> Any:
            self.norm = self.norm_of_gradients()
            self.history = [self.norm_of_gradients()]
            return super().step(closure)

        def norm_of_gradients(self) -> float:
            return float(torch.rand(()))

    class Reading(Logging):
        def step(self, closure: Any = None) -> Any:
            done = super().step(closure)
            for group in self.param_groups:
                group["lr"] = 0.1 / (1 + sum(norm for norm in self.history))
            return done

    def advance(watched: Watched) -> Callable[[Any], None]:
        return lambda net: watched.optimizer.step()

    watched = Watched(kind=Logging)
    watched.net.change = advance(watched)
    watched.step()
    assert not watched.said
    watched = Watched(kind=Reading)
    watched.net.change = advance(watched)
    with pytest.raises(ConfigError, match=r"Reading\.history changes"):
        watched.step()


class FromFirstBatch(nn.Module):
    """An ActNorm: its parameters are set from the first batch."""

    def __init__(self, *, buffer: bool = False, empty: bool = False) -> None:
        super().__init__()
        self.weight = None if empty else nn.Parameter(torch.ones(2))
        if buffer:
            self.register_buffer("done", torch.tensor(False))
        else:
            self.done = False  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("part", "told"),
    [
        (FromFirstBatch(), True),
        (FromFirstBatch(buffer=True), False),
        (FromFirstBatch(empty=True), False),
    ],
)
def test_what_is_done_in_the_first_step_only_is_told(part: Any, told: bool) -> None:
    def begin(net: Any) -> None:
        part.done = torch.tensor(True) if isinstance(part.done, torch.Tensor) else True

    net = Net(begin)
    net.part = part if not told else nn.Sequential(part)  # type: ignore[assignment]
    if not list(net.parameters()):
        net.other = nn.Linear(2, 2)  # type: ignore[assignment]
    watched = Watched(net)
    watched.step(5)
    assert [("'part.0.done'" in text, "register_buffer(" in text) for text in watched.said] == [
        (True, True)
    ] * told


class Around(Plain):
    """Lookahead, SAM: another optimizer does the work, whose state is in no state_dict()."""

    def __init__(self, params: Any) -> None:
        self.inner = torch.optim.Adam(params)
        super().__init__([p for group in self.inner.param_groups for p in group["params"]], lr=0.1)
        self.param_groups = self.inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def test_the_state_of_an_optimizer_within_another_must_be_kept() -> None:
    def watched(*, kept: bool, shared: bool = False) -> Watched:
        found = Watched(kind=Around)
        optimizer: Any = found.optimizer
        if kept:
            found.registered.append(optimizer.inner)
        if shared:
            optimizer.state = optimizer.inner.state
        for parameter in found.net.parameters():
            parameter.grad = torch.ones_like(parameter)
        found.net.change = lambda net: optimizer.step()
        return found

    with pytest.raises(ConfigError, match=r"Around\.inner\.state changes.*run\.register"):
        watched(kept=False).step()
    watched(kept=True).step()
    watched(kept=False, shared=True).step()


@pytest.mark.parametrize("within", [False, True])
def test_a_schedulers_function_keeps_nothing_of_its_own(*, within: bool) -> None:
    def begun(function: Callable[[int], float]) -> Watched:
        optimizer = Plain(Net().parameters())
        scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, function)
        if within:
            scheduler = torch.optim.lr_scheduler.ChainedScheduler([scheduler], optimizer)
        watched = Watched(scheduler=scheduler)

        def advance(net: Any) -> None:
            function(1)

        watched.net.change = advance
        return watched

    class Kept:
        """torch's schedulers keep its attributes."""

        factor = 1.0

        def __call__(self, step: int) -> float:
            self.factor *= 0.9
            return self.factor

    factor, end = 1.0, 9

    def counts(step: int) -> float:
        nonlocal factor
        factor *= 0.9
        return factor

    with pytest.raises(ConfigError, match=r"changes 'factor' from step to step"):
        begun(counts).step()
    begun(lambda step: step / end).step()
    begun(Kept()).step()


def test_what_begins_late_is_found_a_little_later() -> None:
    watched = Watched()
    watched.step(5)
    watched.net.change = count
    watched.step(2)
    assert not watched.said
    watched.step(1)
    assert "'count'" in watched.said[0]
    watched.step(64)
    assert len(watched.said) == 1


def test_what_changes_at_an_epochs_end_only_is_told_of() -> None:
    """After steps 6, 12, 18: never between two steps of which both are looked at."""
    watched = Watched()
    for step in range(1, 17):
        watched.step(1, lambda last=step % 6 == 0: count(watched.net) if last else None)
    assert ["'count'" in text for text in watched.said] == [True]


def test_a_tensor_that_a_module_keeps_for_a_step_is_not_held_longer() -> None:
    net = Net()
    seen, watched = weakref.ref(net.queue[0]), Watched(net)
    watched.step(1)
    net.queue = []
    assert seen() is None


class Decay:
    """As timm's and other libraries' schedulers are."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.count = 0

    def step(self) -> None:
        self.count += 1
        self.optimizer.param_groups[0]["lr"] = 0.1 / self.count


def test_a_scheduler_of_another_library_must_be_kept() -> None:
    watched = Watched()
    scheduler = Decay(watched.optimizer)
    watched.step(3)
    watched.step(1, scheduler.step)
    with pytest.raises(ConfigError, match=r"Decay changes the learning rate.*run\.register"):
        watched.step(1, scheduler.step)
    watched.known.append(scheduler)
    watched.step(1, scheduler.step)


def test_a_rate_that_is_computed_from_the_step_is_nobodys_state() -> None:
    watched = Watched()
    scheduler = Decay(watched.optimizer)  # not used
    trainer = SimpleNamespace(optimizer=watched.optimizer, model=watched.net, seen=0)
    group = watched.optimizer.param_groups[0]
    for index in range(4):
        group["lr"] = 1 / (1 + index)
        trainer.seen += 1
        watched.step(1)
    assert scheduler.count == 0


def test_what_is_registered_may_be_an_attribute_or_a_variable() -> None:
    """As the warning of a module's attributes advises."""
    net, kept, own = Net(), {"factor": 1.0}, {"seen": 0}
    optimizer = Plain(net.parameters())
    setattr(net, "own", own)  # noqa: B010
    setattr(optimizer, "own", own)  # noqa: B010
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: kept["factor"])
    updater, state, said = Updater(), TrainingState(net), list[str]()
    updater.units.append(Unit(optimizer, scheduler, Clip(None, [])))
    state.register("kept", kept)
    state.register("draws", net.draws)
    state.register("own", own, per_rank=True)
    guard = Guard(state, updater, [], modules=False, say=said.append)
    for _ in range(3):
        draw(net)
        kept["factor"] *= 0.9
        own["seen"] += 1
        guard.step_ended()
    guard.stop()
    assert not said
