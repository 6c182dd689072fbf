"""What a loop carries in variables of its own is told of, and what it does not is not."""

from __future__ import annotations

import datetime
import dis
import io
import signal
import site
import sys
import sysconfig
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ddpjob_trainer.data import generators as own_generators
from ddpjob_trainer.training.variables import Variables, _at

NET = nn.Linear(2, 2)


class Watched:
    """Steps, as run.steps() yields them; ``said`` is what was told."""

    def __init__(self, kept: Any = (), hooks: Any = ()) -> None:
        self.said: list[str] = []
        self._variables = Variables(lambda: [NET, *kept], lambda: list(hooks), self.said.append)

    def steps(self, count: int = 4) -> Iterator[int]:
        for step in range(count):
            yield step
            self._variables.step_ended()

    @property
    def names(self) -> set[str]:
        """In quotes in what was told."""
        return {part for text in self.said for part in text.split("'")[1::2]}


class Trainer:
    def __init__(self) -> None:
        self.best, self.net, self.rate, self.ready = 9.0, NET, 0.1, False

    def fit(self, watched: Watched) -> None:
        for step in watched.steps():
            self.best -= step + 1
            self.ready = not self.ready


def numbers(watched: Watched) -> None:
    epsilon, best, bad, hidden = 1.0, 9.0, 0, None
    for step in watched.steps():
        epsilon *= 0.9
        if step < best:
            best = step
        else:
            bad += 1
        hidden = torch.zeros(2) if hidden is None else hidden + 1


def containers(watched: Watched) -> None:
    buffer, seen, last, logs = [], Counter(), deque([0.0] * 3, maxlen=3), {"loss": [0.5]}
    for step in watched.steps():
        buffer.append(torch.zeros(2))
        seen.update([step])
        last.append(step)
        logs["loss"].append(step)


def averages(watched: Watched) -> None:
    ema, counts = {"weight": torch.zeros(2)}, np.zeros(3)
    for step in watched.steps():
        ema["weight"].mul_(0.9).add_(step)
        counts[0] += 1


def generators(watched: Watched) -> None:
    noise, rng = torch.Generator().manual_seed(1), np.random.default_rng(1)
    for _ in watched.steps():
        torch.rand(2, generator=noise)
        rng.random()


def objects(watched: Watched) -> None:
    meter, data = SimpleNamespace(total=0.0), SimpleNamespace(level=0, size=5)
    for step in watched.steps():
        meter.total += step + 1
        data.level += 1


class Annealed(nn.Linear):
    beta = 0.0

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.beta = 0.0
        self.register_buffer("tau", torch.ones(()))
        self.drop = nn.Dropout(0.5)


def seldom(watched: Watched) -> None:
    data, net, seen = SimpleNamespace(level=0, size=5), Annealed(), SimpleNamespace(epoch=0)
    for step in watched.steps():
        if step > 1000:
            data.level += 1
            net.beta = min(1.0, net.beta + 0.1)
            net.tau = net.tau * 0.9  # a buffer
            net.drop.p = net.drop.p / 2  # torch's own
            seen.epoch = step  # not read


def iterators(watched: Watched) -> None:
    """As one over a second DataLoader, of unlabelled data say."""
    other, log = iter(range(99)), io.StringIO()
    for _ in watched.steps():
        log.write(str(next(other)))


def functions(watched: Watched) -> None:
    memory: list[int] = []

    def remember(value: int) -> None:
        memory.append(value)

    for step in watched.steps():
        remember(step)


@pytest.mark.parametrize(
    ("loop", "names"),
    [
        (numbers, {"epsilon", "best", "bad", "hidden"}),
        (containers, {"buffer", "seen", "last", "logs"}),
        (averages, {"ema", "counts"}),
        (generators, {"noise", "rng"}),
        (objects, {"meter.total", "data.level"}),
        (seldom, {"data.level", "net.beta"}),
        (iterators, {"other"}),
        (functions, {"memory"}),
        (Trainer().fit, {"self.best", "self.ready"}),
    ],
)
def test_what_the_loop_carries_is_told_once(
    loop: Callable[[Watched], None], names: set[str]
) -> None:
    watched = Watched()
    loop(watched)
    assert watched.names == names
    assert all(text.startswith("warning: the loop carries") for text in watched.said)
    assert all("run.register(name, dict)" in text for text in watched.said)


class EarlyStopping:
    def __init__(self) -> None:
        self.best, self.bad = 9.0, 0

    def __call__(self, loss: float) -> bool:
        self.bad += loss >= self.best
        self.best = min(self.best, loss)
        return self.bad > 3


def test_what_changes_at_an_epochs_end_only_is_told_of() -> None:
    """After steps 6, 12, 18: never between two steps of which both are looked at."""
    watched, stopper, epochs = Watched(), EarlyStopping(), list[int]()
    for step in watched.steps(16):
        if (step + 1) % 6 == 0:
            epochs.append(step)
            if stopper(step):
                break
    assert watched.names == {"stopper.best", "stopper.bad", "epochs"}


def test_what_it_makes_anew_in_each_step_is_no_state() -> None:
    watched = Watched()
    noise, scale, state, begun = torch.Generator(), torch.ones(2), NET.state_dict(), time.time()
    flags, parameters = {"warm": False}, list(NET.parameters())
    for step in watched.steps():
        noise.manual_seed(step)
        total = 0.0
        for part in range(3):
            total += part
        losses = [total]
        losses.append(float(torch.rand(2, generator=noise).sum()))
        squares = [part * part for part in losses]
        flags["warm"] = bool(squares)
        with torch.no_grad():
            state["weight"].add_(scale.sum())
            parameters[0].mul_(0.5)
        elapsed = time.time() - begun
        begun = time.time()
        assert elapsed >= 0
    assert not watched.said


def test_what_is_registered_is_kept_down_to_its_parts() -> None:
    mean, noise, rng = torch.zeros(2), torch.Generator(), np.random.default_rng(1)
    last: deque[float] = deque(maxlen=3)
    own = {"mean": mean, "last": last, "count": 0}
    meter = SimpleNamespace(total=0)  # one with a state_dict(), say
    watched = Watched(kept=[own, noise, rng, meter])
    for step in watched.steps():
        mean += 1
        last.append(step)
        own["count"] += 1
        meter.total += 1
        torch.rand(2, generator=noise)
        rng.random()
    assert not watched.said


def test_what_an_updates_hook_counts_is_told() -> None:
    class Clip:
        def __init__(self) -> None:
            self.norms: list[float] = []

        def __call__(self, parameters: object) -> None:
            self.norms.append(1.0)

    hook, shadow = Clip(), torch.zeros(2)

    def average(*_: object) -> None:
        shadow.add_(1)

    watched = Watched(hooks=[hook, average])
    for _ in watched.steps():
        hook({})
        average()
    assert {"Clip.norms", "shadow"} <= watched.names | {
        name.replace("hook.", "Clip.") for name in watched.names
    }


def test_a_loop_within_anothers_is_seen_and_no_loop_is_none() -> None:
    watched, count = Watched(), 0
    for _, step in enumerate(watched.steps()):
        count += step
    assert watched.names == {"count"}
    watched, steps = Watched(), 0
    iterator = watched.steps()
    while next(iterator, None) is not None:
        steps += 1
    assert not watched.said


def test_the_loop_of_an_installed_program_is_seen_through_what_wraps_its_steps() -> None:
    class Shown:
        def __init__(self, steps: Iterator[int]) -> None:
            self.steps = steps

        def __iter__(self) -> Iterator[int]:
            yield from self.steps

    class Handed(Shown):
        def __iter__(self) -> Any:
            return self

        def __next__(self) -> int:
            return next(self.steps)

    for wrapper in (Shown, Handed):
        watched = Watched()
        text = "for step in steps:\n    count += step\n"
        code = compile(text, f"{sysconfig.get_path('purelib')}/program.py", "exec")
        for _ in range(1):  # another loop around it
            exec(code, {"__name__": "program", "steps": wrapper(watched.steps()), "count": 0})
        assert watched.names == {"count"}


def test_nothing_of_a_step_is_held_longer_than_the_loop_does() -> None:
    watched, count, seen = Watched(), 0, []
    for _ in watched.steps(6):
        output = torch.ones(2)
        seen.append(weakref.ref(output))
        count += 1
    assert count == 6
    assert [ref() is not None for ref in seen] == [False] * 5 + [True]


def test_an_object_that_cannot_be_looked_at_ends_nothing_and_hides_no_other() -> None:
    class Odd(SimpleNamespace):
        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise OSError

    odd, seen, watched = Odd(), list[int](), Watched()
    for step in watched.steps():
        assert odd is not None
        seen.append(step)
    assert watched.names == {"seen"}


class Handler:
    """Of a signal: an object, its method, a function of its own, by how it is asked for."""

    def __call__(self, number: int, frame: Any) -> None:
        raise RuntimeError("a worker is killed")

    def method(self, number: int, frame: Any) -> None:
        self(number, frame)


@pytest.mark.parametrize("handler", [Handler(), Handler().method, Handler.__call__.__get__(1)])
def test_what_a_signals_handler_raises_meanwhile_is_not_lost(handler: Any) -> None:
    class Slow(SimpleNamespace):
        @property
        def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
            signal.raise_signal(signal.SIGUSR1)
            return {}

    def train() -> None:
        slow = Slow()
        for _ in Watched().steps():
            slow.unknown = 1

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(RuntimeError, match="a worker is killed"):
            train()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_the_dict_that_locals_has_given_stays_the_scripts() -> None:
    def train(watched: Watched, rate: float = 0.1) -> dict[str, Any]:
        config = locals()
        count = 0
        for step in watched.steps():
            count += step
        return config

    def held(watched: Watched, outer: list[Any]) -> None:
        count = 0
        outer.append(sys._getframe().f_locals)  # as a debugger or a logger does
        for step in watched.steps():
            count += step

    watched, outer = Watched(), list[Any]()
    assert {**train(watched), "watched": None} == {"watched": None, "rate": 0.1}
    held(watched, outer)
    assert {"watched", "outer"} <= {*outer[0]}


def test_what_is_registered_is_known_through_functions_and_methods_as_well() -> None:
    class Stopper:
        def __init__(self) -> None:
            self.bad = 0

        def look(self) -> None:
            self.bad += 1

    stopper, other = Stopper(), Stopper()
    look = other.look

    def check() -> None:
        stopper.look()

    watched = Watched(kept=[stopper, other])
    for _ in watched.steps():
        check()
        look()
    assert not watched.said


def test_what_only_looks_like_state_is_not_told() -> None:
    masks = dict.fromkeys(NET.parameters(), 1.0)
    shared, groups = torch.default_generator, [{"lr": 0.1}]
    watched = Watched(kept=[groups])
    steps, now, then = watched.steps(), time.time_ns(), datetime.datetime.now(datetime.UTC)
    own = SimpleNamespace(steps=steps)
    for step in own.steps:
        assert time.time_ns() >= now and datetime.datetime.now(datetime.UTC) >= then  # noqa: PT018
        assert masks and own  # noqa: PT018
        now, then = time.time_ns(), datetime.datetime.now(datetime.UTC)
        torch.rand(1, generator=shared)
        groups[0]["lr"] = 0.1 / (step + 1)
        with torch.no_grad():
            for parameter in masks:
                parameter.mul_(0.5)
    assert not watched.said


def test_attributes_that_the_body_sets_first_of_all_are_no_state() -> None:
    class Loop:
        def __init__(self) -> None:
            self.epoch, self.step, self.last, self.net = -1, -1, -1, NET

        def fit(self, steps: Iterator[int]) -> None:
            for step in steps:
                self.epoch = step // 2
                self.step = step
                self.net.training = self.net.training
                if self.step:
                    self.net(torch.zeros(2))
                self.last = step  # what has been called may have read it

    watched = Watched()
    Loop().fit(watched.steps(8))
    assert watched.names == {"self.last"}


def test_generators_of_a_dataset_that_are_seeded_for_each_sample_are_no_state() -> None:
    data = SimpleNamespace(rng=np.random.default_rng(0), other=np.random.default_rng(0))
    watched = Watched()
    for step in watched.steps():
        own_generators.seed([data.rng], step)
        assert [data.rng.random(), data.other.random()]
    assert watched.names == {"data.other"}


def test_what_a_user_has_installed_is_no_object_of_the_scripts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bars = ModuleType("bars")
    bars.__file__ = f"{site.getusersitepackages()}/bars.py"
    monkeypatch.setitem(sys.modules, "bars", bars)
    bar = type("Bar", (), {"__module__": "bars", "n": 0})()
    bar.n = 0
    watched = Watched()
    for _ in watched.steps():
        bar.n = bar.n + 1
    assert not watched.said


def test_only_so_much_of_a_value_is_looked_at() -> None:
    looked: list[int] = []

    class Row(list[int]):
        def __iter__(self) -> Iterator[int]:
            looked.append(1)
            return super().__iter__()

    table, watched = [[Row([1] * 100) for _ in range(100)] for _ in range(100)], Watched()
    for _ in watched.steps(1):
        assert table
    assert 0 < len(looked) <= 64


def test_a_frame_that_stands_in_an_instructions_cache_is_at_that_instruction() -> None:
    words = [dis.opmap[name] for name in ("RESUME", "FOR_ITER", "CACHE", "POP_TOP")]
    code = SimpleNamespace(co_code=bytes(byte for word in words for byte in (word, 0)))
    frames: list[Any] = [SimpleNamespace(f_code=code, f_lasti=at) for at in range(0, 8, 2)]
    assert [_at(frame) for frame in frames] == [0, 2, 2, 6]
