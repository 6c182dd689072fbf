"""A loop around the loop over the steps is found, whatever it is, and nothing else is."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ddpjob_trainer.training import enclosing
from ddpjob_trainer.training.enclosing import find_enclosing
from ddpjob_trainer.training.variables import frame_of_the_script


class Run:
    """Looks when a step has ended, as the library does."""

    def __init__(self) -> None:
        self.found: list[int | None] = []

    def steps(self, count: int = 6) -> Iterator[int]:
        for step in range(count):
            yield step
            self.found.append(find_enclosing(frame_of_the_script()))


def in_one_loop(run: Run) -> None:
    for step in run.steps():
        for _ in range(2):
            if step:
                continue


def in_one_long_loop(run: Run) -> None:
    body = "\n".join(f"    a{n} = step + {n}; b{n} = [a{n}] * 3" for n in range(300))
    exec(f"for step in run.steps():\n{body}", {"__name__": "program", "run": run})


def in_each_fold(run: Run) -> None:
    for _ in range(2):
        steps = run.steps()
        for _ in steps:
            pass


def in_a_function_of_its_own(run: Run) -> None:
    for _ in range(2):
        in_one_loop(run)


def in_slices(run: Run) -> None:
    steps = run.steps()
    for _ in range(3):
        for _ in itertools.islice(steps, 2):
            pass


def in_slices_while(run: Run) -> None:
    steps, epoch = run.steps(), 0
    while epoch < 3:
        for _ in itertools.islice(steps, 2):
            pass
        epoch += 1


def in_an_epochs_function(run: Run) -> None:
    def train(steps: Iterator[int]) -> None:
        for step in steps:
            if step % 2:
                break

    steps = run.steps()
    for _ in range(3):
        train(steps)


class Trainer:
    def __init__(self, run: Run) -> None:
        self.steps = run.steps()

    def fit(self) -> None:
        for _ in range(3):
            self.epoch()

    def epoch(self) -> None:
        for _ in itertools.islice(self.steps, 2):
            pass


def in_a_trainers_method(run: Run) -> None:
    Trainer(run).fit()


@pytest.mark.parametrize(
    "loop", [in_one_loop, in_one_long_loop, in_each_fold, in_a_function_of_its_own]
)
def test_the_loop_itself_is_none_nor_one_that_begins_the_steps(loop: Callable[[Run], None]) -> None:
    run = Run()
    loop(run)
    assert {*run.found} == {None}


@pytest.mark.parametrize(
    ("loop", "line"),
    [(in_slices, 2), (in_slices_while, 2), (in_an_epochs_function, 7)],
)
def test_a_loop_over_epochs_is_found_with_its_line(loop: Any, line: int) -> None:
    run = Run()
    loop(run)
    assert run.found[0] is not None
    # Of a while it may be that of its body.
    assert run.found[0] - loop.__code__.co_firstlineno in (line, line + 1)
    assert f"in line {run.found[0]}," in enclosing.warning(run.found[0])


def test_a_loop_over_a_method_is_found() -> None:
    run = Run()
    in_a_trainers_method(run)
    assert run.found[0] == Trainer.fit.__code__.co_firstlineno + 1
    assert find_enclosing(None) is None
    assert find_enclosing(sys._getframe()) is None


# --- How the loop is left ---------------------------------------------------------------------


class Left:
    """Looks as its generator is closed, as the library does."""

    found: bool | None = None

    def steps(self) -> Iterator[int]:
        try:
            yield from range(6)
        except GeneratorExit:
            self.found = enclosing.is_unwound()
            raise


def passed_on(steps: Iterator[int]) -> Iterator[int]:
    yield from steps


def by_a_break(left: Left) -> None:
    for _ in left.steps():
        break


def by_a_return(left: Left) -> int:
    for step in passed_on(left.steps()):
        for _ in range(2):
            return abs(step)
    return 0


def by_an_error(left: Left) -> None:
    for _ in passed_on(left.steps()):
        {}["missing"]


def by_a_callees_error(left: Left) -> None:
    with contextlib.suppress(KeyError):
        for step in left.steps():
            if step == 3:
                by_an_error(Left())


@pytest.mark.parametrize(
    ("leave", "unwound"),
    [(by_a_break, False), (by_a_return, False), (by_an_error, True), (by_a_callees_error, True)],
)
def test_an_error_that_leaves_the_loop_is_told_from_a_break(
    leave: Callable[[Left], object], unwound: bool
) -> None:
    left = Left()
    with contextlib.suppress(KeyError):
        leave(left)
    assert left.found is unwound
