"""A rank that makes other calls than the rest: an end with a line that names it, and no freeze."""

from __future__ import annotations

import atexit
import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

import ddpjob_trainer as ddp
from ddpjob_trainer.training.leaving.call_mismatch import CallMismatch

DATA = torch.randn(60, 4, generator=torch.Generator().manual_seed(1))


def total(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).sum()


def train(run: ddp.Run, odd: str) -> None:
    model = nn.Linear(4, 2)
    wrapped, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if odd != "loop" or run.is_main:
        for step in run.steps(DATA):
            for batch in step.batches:
                step.backward(wrapped(batch).pow(2).mean())
            step.commit()
            if odd == "evaluate" and run.is_main and step.index == 1:
                run.evaluate(DATA, total)
            if odd == "sum" and run.is_main and step.index == 1:
                run.sum(1.0)
            if (odd == "all" or (odd == "error" and run.rank == 1)) and step.index == 1:
                raise KeyError("mine")
    if odd == "loop":
        run.evaluate(DATA, total)
    run.finish()


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ("loop", "is in run.evaluate() and rank 0 in the start of run.steps()"),
        ("finish", "rank 1 is in run.finish()"),
        ("evaluate", "in step 1"),
        ("sum", "in run.sum()"),
    ],
)
def test_a_call_on_one_rank_only_is_refused(gang, odd, words):  # type: ignore[no-untyped-def]
    def program(rank: int) -> None:
        run = ddp.start(total_steps=6, global_batch=6)
        if odd == "finish" and rank == 1:
            run.finish()
        train(run, odd)

    codes = gang.run(program)
    logs = "".join(map(gang.log, range(3)))
    assert set(codes.values()) <= {64, 75}, logs
    assert 64 in codes.values(), logs
    assert words in logs or (odd == "finish" and "rank 1 in run.finish()" in logs)
    if odd in ("evaluate", "sum"):  # who is named first is who has looked first
        assert f"rank 0 is in run.{odd}()" in logs or f"rank 0 in run.{odd}()" in logs


@pytest.mark.parametrize("after", ["finish", "evaluate", "handler", "goes up", "nothing", "all"])
def test_an_error_that_one_rank_swallows_is_a_break_on_one_rank(gang, after):  # type: ignore[no-untyped-def]
    """Nothing holds it any more when the script goes on; finish() in its handler does nothing."""

    def program(rank: int) -> None:
        run = ddp.start(total_steps=6, global_batch=6)
        with contextlib.suppress(*[KeyError] * (after != "goes up")):
            try:
                train(run, "all" if after == "all" else "error")
            finally:
                if after in ("handler", "goes up"):  # waits for nobody
                    run.finish()
        if after == "evaluate":
            run.evaluate(DATA, total)
        if after in ("finish", "all"):
            run.finish()
        atexit._run_exitfuncs()

    codes = gang.run(program)
    logs = "".join(map(gang.log, range(3)))
    if after == "goes up":
        assert codes == {0: 75, 1: 1, 2: 75}, logs
        assert "KeyError: 'mine'" in gang.log(1)
        return
    if after in ("handler", "nothing", "all"):
        assert codes == dict.fromkeys(range(3), 0 if after == "all" else 75) | {1: 0}, logs
        return
    assert set(codes.values()) <= {64, 75}, logs
    assert 64 in codes.values(), logs
    assert "in the end of the loop, left in step 1, after its commit()" in logs
    assert "nor an error that one rank's script catches" in logs


def test_calls_of_a_run_before_in_this_process_are_no_others() -> None:
    """torchrun's agent keeps one store for all of them."""
    store = HashStore()
    for calls in ([(1, "step 0")], [(1, "step 1")]):
        run = CallMismatch(SimpleNamespace(rank=0, size=1), SimpleNamespace(calls=calls))  # type: ignore[arg-type]
        run._look(store)  # refuses by what SimpleNamespace lacks
