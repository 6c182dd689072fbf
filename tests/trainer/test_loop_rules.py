"""The loop API at its edges: misuse that would be silent, and state that must survive a kill."""

import atexit
import contextlib
import json
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed import HashStore
from torch.utils.data import TensorDataset

import ddpjob_trainer as ddp
from ddpjob_trainer.snapshot import manager
from ddpjob_trainer.snapshot.ondisk import disk
from ddpjob_trainer.telemetry import progress
from ddpjob_trainer.training import shutdown
from ddpjob_trainer.training.shutdown import CallMismatch
from support.patience import PATIENCE
from support.sealed import board

DATA = TensorDataset(torch.randn(60, 4, generator=torch.Generator().manual_seed(1)))


def prepared(run: ddp.Run, model: nn.Module | None = None) -> nn.Module:
    model = model or nn.Linear(4, 2)
    return run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))[0]


def trained(run: ddp.Run, wrapped: nn.Module, data: Any = DATA) -> Iterator[ddp.Step]:
    """Train, and yield each step after its commit()."""
    for step in run.steps(data):
        for (x,) in step.batches:
            step.backward(wrapped(x).sum())
        step.commit()
        yield step


def total(model: nn.Module, batch: Any) -> torch.Tensor:
    result: torch.Tensor = model(batch[0]).sum()
    return result


def test_a_loss_that_went_around_the_wrapper_is_refused(gang):
    def around(rank: int) -> None:
        run = ddp.start(total_steps=2, global_batch=6)
        model = nn.Linear(4, 2)
        wrapped = prepared(run, model)
        for step in run.steps(DATA):
            for (x,) in step.batches:
                with torch.no_grad():
                    wrapped(x)  # not one that a backward could use
                step.backward(model(x).sum())
            step.commit()

    assert gang.run(around, world=1) == {0: 64}
    assert "not computed through the model that prepare() returned" in gang.log(0)


@pytest.mark.parametrize(
    ("name", "value"),
    [("seed", 7), ("samples", 57), ("total_steps", 3), ("snapshots", True), ("snapshots.every", 5)],
)
def test_what_differs_between_ranks_is_named(gang, tmp_path, name, value):
    def differs(rank: int) -> None:
        options: dict[str, Any] = {"total_steps": 2, "seed": 0}
        if name == "snapshots.every" or (name == "snapshots" and rank == 1):
            options["snapshots"] = ddp.Snapshots(directory=tmp_path / "s", every=(None, 5)[rank])
        data = DATA
        if rank == 1 and name == "samples":
            data = TensorDataset(DATA.tensors[0][:value])
        elif rank == 1 and not name.startswith("snapshots"):
            options[name] = value
        run = ddp.start(global_batch=6, **options)
        wrapped = prepared(run)
        for _ in trained(run, wrapped, data):
            pass

    # Without the comparison some of these wait for each other until a timeout.
    env = {"DDPJOB_HANG_STEP_SECONDS": "30", "DDPJOB_HANG_SNAPSHOT_SECONDS": "30"}
    assert gang.run(differs, world=2, env=env) == {0: 64, 1: 64}
    for rank in (0, 1):
        assert f"ConfigError: {name} is {value} on rank 1 and" in gang.log(rank)


# --- Ends -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["break", "break, snapshots", "no loop"])
def test_after_the_loop_nothing_is_watched(gang, tmp_path, how):
    """An export after early stopping may take longer than any deadline."""

    def program(rank: int) -> None:
        seen = []
        phase = progress.Progress.phase
        progress.Progress.phase = lambda self, name: (seen.append(name), phase(self, name))[1]  # type: ignore[method-assign,assignment,func-returns-value]
        snapshots = ddp.Snapshots(directory=tmp_path / "s" if "snapshots" in how else None, every=2)
        run = ddp.start(total_steps=6, global_batch=6, snapshots=snapshots)
        wrapped = prepared(run)
        if how == "no loop":
            run.evaluate(DATA, total)
        else:
            for step in run.steps(DATA):
                if step.index == 4:
                    break
                for (x,) in step.batches:
                    step.backward(wrapped(x).sum())
                step.commit()
            assert seen[-1] == "done"
        left = len(seen)
        run.finish()
        assert seen[-1] == "done"
        if "snapshots" in how:  # the disk has its own deadline, also then
            assert "snapshot" in seen[left:]

    assert gang.run(program, world=2) == {0: 0, 1: 0}, gang.log(0) + gang.log(1)


def test_an_error_does_not_wait_for_a_disk_and_is_watched_to_its_end(gang, tmp_path):
    """The others cannot know of it before this process has ended."""

    def program(rank: int) -> None:
        manager.END_SECONDS = 10 * PATIENCE  # what it would wait without an error
        stuck = threading.Event()

        def never_answers(operation: str, path: Path) -> None:
            if operation == "before fsync" and path.name.endswith(".safetensors"):
                stuck.set()
                threading.Event().wait()

        disk.seam = never_answers
        snapshots = ddp.Snapshots(directory=tmp_path / "s", every=2)
        run = ddp.start(total_steps=6, global_batch=6, snapshots=snapshots)
        ending = run._process.shutdown
        hook = ending._hook
        ending._hook = lambda *error: (print(f"phase {ending._state.state.phase}"), hook(*error))  # type: ignore[func-returns-value]
        wrapped = prepared(run)
        for step in trained(run, wrapped):
            if step.index == 2:
                assert stuck.wait(PATIENCE)
                raise KeyError("bug")

    assert gang.run(program, world=1) == {0: 1}, gang.log(0)
    assert "phase step\n" in gang.log(0)
    assert "KeyError: 'bug'" in gang.log(0)


def test_a_lost_peer_that_only_torch_noticed_leaves_a_traceback(gang, tmp_path):
    started = tmp_path / "started"

    def lost(rank: int) -> None:
        ddp.start(total_steps=1, global_batch=6)
        if rank == 1:
            while not started.exists():  # else it is start() that has lost a peer
                time.sleep(0.01)
            os._exit(9)
        started.touch()
        torch.distributed.barrier()

    codes = gang.run(lost, world=2)
    assert codes == {0: 75, 1: 9}
    assert "Traceback" in gang.log(0)
    assert "lost a peer" in gang.log(0)


def test_a_peer_that_dies_before_it_has_connected_is_a_lost_peer(gang, tmp_path):
    def dies(rank: int) -> None:
        from ddpjob_trainer.comm import rendezvous

        rendezvous._CONNECT_SECONDS = 1.0  # type: ignore[attr-defined]
        dead = tmp_path / "dead"
        connect = torch.distributed.init_process_group

        def dies_or_waits(*arguments: Any, **options: Any) -> None:
            if rank == 1:
                dead.touch()
                os._exit(9)
            while not dead.exists():  # it has met the others by now
                time.sleep(0.01)
            connect(*arguments, **options)

        torch.distributed.init_process_group = dies_or_waits
        ddp.start(total_steps=1, global_batch=6)

    env = {"DDPJOB_HANG_STEP_SECONDS": "30", "DDPJOB_HANG_SNAPSHOT_SECONDS": "30"}
    assert gang.run(dies, env=env) == {0: 75, 1: 9, 2: 75}


def test_a_child_forked_in_the_loop_ends_on_sigterm(gang):
    def forks(rank: int) -> None:
        run = ddp.start(total_steps=1, global_batch=6)
        wrapped = prepared(run)
        for step in run.steps(DATA):
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(3600,))
            child.start()
            child.terminate()
            child.join(PATIENCE)
            code = child.exitcode
            child.kill()
            assert code == -signal.SIGTERM
            for (x,) in step.batches:
                step.backward(wrapped(x).sum())
            step.commit()

    assert gang.run(forks, world=1) == {0: 0}, gang.log(0)


# --- Leaving the loop -------------------------------------------------------------------------

LEAVE = "step.stop() ends the loop on all ranks; a `break` on one does not"


@pytest.mark.parametrize(
    ("how", "place", "level"),
    [
        ("at its top", "in step 3, before its commit()", "elastic"),
        ("before commit", "in step 3, before its commit()", "resume"),
        ("before commit, all ask", "in step 3, before its commit()", "resume"),
        ("after commit", "in step 3, after its commit()", "elastic"),
        ("after the last commit", "in step 5, after its commit()", "resume"),
        ("a step apart", "in step 3, after its commit()", "resume"),
    ],
)
def test_a_rank_that_leaves_the_loop_alone_ends_the_run(gang, how, place, level):
    def leaves(rank: int) -> None:
        run = ddp.start(total_steps=6, global_batch=6, level=level, shards=3)
        wrapped = prepared(run, nn.Sequential(nn.Linear(4, 300), nn.Linear(300, 2)))
        at_top = 4 if how == "a step apart" else -1
        for step in run.steps(DATA):
            mine = rank == 1 and step.index == 3
            if (mine and how == "at its top") or (rank != 1 and step.index == at_top):
                break
            for (x,) in step.batches:
                step.backward(wrapped(x).sum())
            if mine and how.startswith("before commit"):
                break
            step.commit()
            if rank == 0 or "all ask" in how:
                print(step.loss)  # a rank may ask for it alone
            last = how == "after the last commit" and rank == 1 and step.index == 5
            if (mine and how in ("after commit", "a step apart")) or last:
                break
        run.evaluate(DATA, total)
        run.finish()

    codes = gang.run(leaves)
    assert set(codes.values()) <= {64, 75}, codes  # 75: lost one that has ended
    assert 64 in codes.values(), codes
    for rank, code in codes.items():
        log = gang.log(rank)
        assert code == 75 or (f"in the end of the loop, left {place}" in log and LEAVE in log), log


@pytest.mark.parametrize(("level", "first"), [("resume", 0), ("elastic", 2)])
def test_all_ranks_may_leave_the_loop_together(gang, tmp_path, level, first):
    """However long one of them takes to get there, and whatever its share of the shards."""
    left = tmp_path / "left"

    def leaves(rank: int) -> None:
        run = ddp.start(total_steps=6, global_batch=24, level=level, shards=8)
        wrapped = prepared(run)
        for step in run.steps(DATA):
            for (x,) in step.batches:
                step.backward(wrapped(x).sum())
            if step.index == 3:
                if rank == first:
                    left.touch()
                while not left.exists():
                    time.sleep(0.01)
                if rank != first:
                    time.sleep(1.0)  # longer than anyone stands still before it looks
                break
            step.commit()
        run.sum(1.0)
        run.evaluate(DATA, total)
        run.finish()

    assert gang.run(leaves) == dict.fromkeys(range(3), 0), gang.log(0) + gang.log(2)


def test_a_loop_that_a_variable_holds_is_over_with_finish(gang, tmp_path):
    """As in `for step in tqdm(run.steps(data))`: after a break nobody closes the generator."""

    def leaves(rank: int) -> None:
        over = threading.Event()

        class Timer(threading.Timer):
            """Its time begins when finish() is over: that may take longer."""

            def run(self) -> None:
                over.wait()
                super().run()

        shutdown.threading.Timer = Timer  # type: ignore[misc]
        run = ddp.start(total_steps=6, global_batch=6)
        wrapped = prepared(run)
        steps = trained(run, wrapped)
        for step in steps:
            if step.index == 2:
                break
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        run.finish()
        (tmp_path / f"finished-{rank}").touch()
        over.set()
        while rank == 1:
            time.sleep(0.01)

    assert gang.run(leaves) == {0: 0, 1: 143, 2: 0}, gang.log(1)
    assert len(list(tmp_path.glob("finished-*"))) == 3


# --- Other calls on one rank than on the rest ---------------------------------------------------


def calls(run: ddp.Run, odd: str) -> None:
    wrapped = prepared(run)
    if odd != "loop" or run.is_main:
        for step in run.steps(DATA):
            for (x,) in step.batches:
                step.backward(wrapped(x).pow(2).mean())
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
def test_a_call_on_one_rank_only_is_refused(gang, odd, words):
    def program(rank: int) -> None:
        run = ddp.start(total_steps=6, global_batch=6)
        if odd == "finish" and rank == 1:
            run.finish()
        calls(run, odd)

    codes = gang.run(program)
    logs = "".join(map(gang.log, range(3)))
    assert set(codes.values()) <= {64, 75}, logs
    assert 64 in codes.values(), logs
    assert words in logs or (odd == "finish" and "rank 1 in run.finish()" in logs)
    if odd in ("evaluate", "sum"):  # who is named first is who has looked first
        assert f"rank 0 is in run.{odd}()" in logs or f"rank 0 in run.{odd}()" in logs


@pytest.mark.parametrize("after", ["finish", "evaluate", "handler", "goes up", "nothing", "all"])
def test_an_error_that_one_rank_swallows_is_a_break_on_one_rank(gang, after):
    """Nothing holds it any more when the script goes on; finish() in its handler does nothing."""

    def program(rank: int) -> None:
        run = ddp.start(total_steps=6, global_batch=6)
        with contextlib.suppress(*[KeyError] * (after != "goes up")):
            try:
                calls(run, "all" if after == "all" else "error")
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


def test_calls_of_a_run_before_in_this_process_are_no_others():
    """torchrun's agent keeps one store for all of them."""
    store = HashStore()
    for number, before in enumerate(([(1, "step 0")], [(1, "step 1")])):
        run = CallMismatch(SimpleNamespace(rank=0, size=1), SimpleNamespace(calls=before))  # type: ignore[arg-type]
        run._look(board(store, run=number))  # refuses by what SimpleNamespace lacks


# --- What is logged ---------------------------------------------------------------------------


def test_all_draw_alike_after_start_and_a_sum_over_the_ranks_is_logged(gang, tmp_path):
    """As docs/reference/metrics.md has it."""

    def logs(rank: int) -> None:
        random.seed(rank)
        np.random.seed(rank)
        logging = ddp.Logging(events=tmp_path / "events")
        run = ddp.start(total_steps=4, global_batch=6, micro_batches=2, logging=logging)
        drawn = random.random() + float(np.random.rand()) + float(torch.rand(()))
        assert run.sum(drawn) == pytest.approx(3 * drawn), "start() seeds all ranks alike"
        wrapped = prepared(run)
        seen = run.state("seen", right=0.0, count=0.0)
        for step in run.steps(DATA):
            right, count = 0.0, 0
            for number, (x,) in enumerate(step.batches):
                right, count = right + 10.0 * number + rank, count + 1
                step.backward(wrapped(x).sum())
            step.commit()
            run.log({"mine": rank})
            seen.right, seen.count = seen.right + run.sum(right), seen.count + run.sum(count)
            if step.index % 2:
                run.log({"micro": seen.right / seen.count})
                seen.right = seen.count = 0.0
        run.finish()

    assert gang.run(logs) == dict.fromkeys(range(3), 0), gang.log(0)
    told: dict[int, dict[str, float]] = {step: {} for step in range(1, 5)}
    for line in (tmp_path / "events").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "log":
            told[event["step"]] |= event["values"]
    both = {"mine": 0.0, "micro": 6.0}
    assert told == {1: {"mine": 0.0}, 2: both, 3: {"mine": 0.0}, 4: both}


# --- What is trained, changed after prepare() ----------------------------------------------------


@pytest.mark.parametrize(
    ("how", "level", "words"),
    [
        ("group", "resume", "SGD got other parameters after prepare()"),
        ("group", "elastic", "SGD got other parameters after prepare()"),
        ("thawed", "resume", "requires_grad of a parameter was changed after prepare()"),
        ("frozen", "resume", "not yet frozen: run.prepare([first, second]"),
        ("thawed", "elastic", "a parameter that was frozen when prepare() was called"),
    ],
)
def test_what_is_trained_does_not_change_after_prepare(gang, how, level, words):
    """Nobody would average it: the ranks would drift apart."""

    def program(rank: int) -> None:
        run = ddp.start(total_steps=3, global_batch=6, level=level, shards=3)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        model[0].requires_grad_(how != "thawed")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped, _ = run.prepare(model, optimizer)
        raw = nn.Parameter(torch.ones(4), requires_grad=how == "group")
        if how == "group":
            optimizer.add_param_group({"params": [raw]})
        for step in run.steps(DATA):
            if step.index == 1:
                model[0].requires_grad_(how != "frozen")
            for (x,) in step.batches:
                step.backward(wrapped(x * raw).pow(2).mean())
            step.commit()

    assert gang.run(program) == dict.fromkeys(range(3), 64)
    assert words in gang.log(0)
