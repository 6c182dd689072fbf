"""The loop API at its edges: misuse that would be silent, and state that must survive a kill."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import random
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpjob_trainer as ddp
from ddpjob_trainer.snapshot import manager
from ddpjob_trainer.snapshot.ondisk import disk, manifest
from ddpjob_trainer.snapshot.restore import load
from ddpjob_trainer.snapshot.save import staging
from ddpjob_trainer.state.codec import unflatten
from ddpjob_trainer.telemetry import progress
from ddpjob_trainer.training.leaving import shutdown
from support.patience import PATIENCE
from support.snapshots import await_snapshot

DATA = TensorDataset(torch.randn(60, 4, generator=torch.Generator().manual_seed(1)))


def prepared(run: ddp.Run, model: nn.Module | None = None) -> nn.Module:
    model = model or nn.Linear(4, 2)
    return run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))[0]


def test_a_loss_that_went_around_the_wrapper_is_refused(gang):  # type: ignore[no-untyped-def]
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
    [("seed", 7), ("samples", 57), ("total_steps", 3), ("snapshots", True), ("snapshot_every", 5)],
)
def test_what_differs_between_ranks_is_named(gang, tmp_path, name, value):  # type: ignore[no-untyped-def]
    def differs(rank: int) -> None:
        options: dict[str, Any] = {"total_steps": 2, "seed": 0}
        if name == "snapshot_every" or (name == "snapshots" and rank == 1):
            options["snapshot_dir"] = tmp_path / "s"
        data = DATA
        if rank == 1 and name == "samples":
            data = TensorDataset(DATA.tensors[0][:value])
        elif rank == 1 and name != "snapshots":
            options[name] = value
        run = ddp.start(global_batch=6, **options)
        wrapped = prepared(run)
        for step in run.steps(data):
            for (x,) in step.batches:
                step.backward(wrapped(x).sum())
            step.commit()

    # Without the comparison some of these wait for each other until a timeout.
    env = {"DDPJOB_HANG_STEP_SECONDS": "30", "DDPJOB_HANG_SNAPSHOT_SECONDS": "30"}
    assert gang.run(differs, world=2, env=env) == {0: 64, 1: 64}
    for rank in (0, 1):
        assert f"ConfigError: {name} is {value} on rank 1 and" in gang.log(rank)


def test_every_generator_is_equal_on_all_ranks_after_start(gang, tmp_path):  # type: ignore[no-untyped-def]
    def draw(rank: int) -> None:
        random.seed(rank)
        np.random.seed(rank)
        run = ddp.start(total_steps=1, global_batch=6, seed=2**40 + 3)
        drawn = (random.random(), np.random.rand(), float(torch.rand(())))
        (tmp_path / f"drawn-{rank}").write_text(str(drawn))
        # start() may be over on rank 0, which has the store, while another still joins by it.
        run.finish()

    assert gang.run(draw, world=2) == {0: 0, 1: 0}
    assert (tmp_path / "drawn-0").read_text() == (tmp_path / "drawn-1").read_text()


# --- State that must survive ----------------------------------------------------------------


class Counting(nn.Module):
    """Keeps a plain number in get_extra_state()."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        result: torch.Tensor = self.linear(x) * (1 + 0.01 * self.calls)
        return result

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Caching(nn.Module):
    """Makes a buffer in forward that is in no state_dict(), as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "cache"):
            self.register_buffer("cache", torch.full((4,), 0.5), persistent=False)
        result: torch.Tensor = self.linear(x * self.cache)
        return result


class Switching(nn.Module):
    """Freezes its normalisation on the way, once, as a fine-tuning loop does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(self.linear(x))
        if self.norm.num_batches_tracked == 3:  # type: ignore[operator]
            self.norm.eval()
        return result


def warm_then_drop(optimizer: torch.optim.Optimizer) -> Any:
    schedulers = torch.optim.lr_scheduler
    parts = [schedulers.LinearLR(optimizer, total_iters=5), schedulers.MultiStepLR(optimizer, [1])]
    return schedulers.SequentialLR(optimizer, parts, milestones=[5])


@dataclass
class Small:
    """A small training that can be killed."""

    directory: Path
    make: Callable[[], nn.Module]
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    die: int | None = None

    def __call__(self, rank: int) -> None:
        run = ddp.start(
            total_steps=8, global_batch=6, snapshot_dir=self.directory / "s", snapshot_every=2
        )
        model = self.make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = self.scheduler(optimizer) if self.scheduler else None
        wrapped, _ = run.prepare(model, optimizer, scheduler=scheduler)
        for step in run.steps(DATA):
            for (x,) in step.batches:
                step.backward(wrapped(x).pow(2).mean())
            if step.index == self.die:
                await_snapshot(self.directory / "s/00000001", 4)
                os.kill(os.getpid(), signal.SIGKILL)
            step.commit()
        run.evaluate(DATA, lambda net, batch: net(batch[0]).sum())
        (self.directory / "result").write_text(f"{run.weights_sha256()} {run.state_sha256()}")
        run.finish()


@pytest.mark.parametrize(
    ("make", "more"),
    [
        (Counting, {}),
        (Caching, {}),
        (Switching, {}),
        (lambda: nn.Linear(4, 2), {"scheduler": warm_then_drop}),
    ],
    ids=[
        "extra state",
        "lazy buffer",
        "eval",
        "sequential scheduler",
    ],
)
def test_a_kill_leaves_no_trace(gang, tmp_path, make, more):  # type: ignore[no-untyped-def]
    trainings = [Small(tmp_path / name, make, **more) for name in ("undisturbed", "disturbed")]
    for training in trainings:
        training.directory.mkdir()
    assert gang.run(trainings[0], world=1) == {0: 0}, gang.log(0)
    trainings[1].die = 5
    assert gang.run(trainings[1], world=1) == {0: -9}, gang.log(0)
    trainings[1].die = None
    assert gang.run(trainings[1], world=1) == {0: 0}, gang.log(0)
    assert "resuming after step 4" in gang.log(0)
    results = [(training.directory / "result").read_text() for training in trainings]
    assert results[0] == results[1]


def test_what_no_snapshot_could_hold_is_refused_before_the_first_step(gang, tmp_path):  # type: ignore[no-untyped-def]
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"names": {"a", "b"}}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def odd(rank: int) -> None:
        run = ddp.start(total_steps=8, global_batch=6, snapshot_dir=tmp_path / "s")
        prepared(run)
        run.register("odd", Odd())
        for _ in run.steps(DATA):
            raise AssertionError("a step began")

    assert gang.run(odd, world=2) == {0: 64, 1: 64}
    assert "ConfigError: no snapshot can be made: cannot store registered/odd/names: a set" in (
        gang.log(0)
    )


# --- Ends -----------------------------------------------------------------------------------


def test_finish_in_a_finally_does_not_wait_for_those_that_train_on(gang):  # type: ignore[no-untyped-def]
    def fails(rank: int) -> None:
        run = ddp.start(total_steps=6, global_batch=6)
        wrapped = prepared(run, nn.Sequential(nn.Linear(4, 300), nn.Linear(300, 2)))
        try:
            for step in run.steps(DATA):
                for (x,) in step.batches:
                    if rank == 1 and step.index == 2:
                        raise KeyError("bug")
                    step.backward(wrapped(x).sum())
                step.commit()
        finally:
            run.finish()

    env = {"DDPJOB_HANG_STEP_SECONDS": "30", "DDPJOB_HANG_SNAPSHOT_SECONDS": "30"}
    assert gang.run(fails, env=env) == {0: 75, 1: 1, 2: 75}
    assert "KeyError: 'bug'" in gang.log(1)
    assert "Traceback" not in gang.log(0)


@pytest.mark.parametrize("how", ["break", "break, snapshots", "no loop"])
def test_after_the_loop_nothing_is_watched(gang, tmp_path, how):  # type: ignore[no-untyped-def]
    """An export after early stopping may take longer than any deadline."""

    def program(rank: int) -> None:
        seen = []
        phase = progress.Progress.phase
        progress.Progress.phase = lambda self, name: (seen.append(name), phase(self, name))[1]  # type: ignore[method-assign,assignment,func-returns-value]
        directory = tmp_path / "s" if "snapshots" in how else None
        run = ddp.start(total_steps=6, global_batch=6, snapshot_dir=directory, snapshot_every=2)
        wrapped = prepared(run)
        if how == "no loop":
            run.evaluate(DATA, lambda net, batch: net(batch[0]).sum())
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
        if directory is not None:  # the disk has its own deadline, also then
            assert "snapshot" in seen[left:]

    assert gang.run(program, world=2) == {0: 0, 1: 0}, gang.log(0) + gang.log(1)


def test_who_leaves_the_loop_may_change_the_weights_at_once(gang, tmp_path):  # type: ignore[no-untyped-def]
    """Though a thread still copies the snapshot of the step before."""

    def program(rank: int) -> None:
        copy = staging.Buffer.copy

        def slow(*arguments: Any) -> None:
            time.sleep(0.5)  # as long as the script below has to be too early
            copy(*arguments)

        setattr(staging.Buffer, "copy", slow)  # noqa: B010
        run = ddp.start(
            total_steps=6, global_batch=6, snapshot_dir=tmp_path / "s", snapshot_every=2,
            snapshot_staging="thread",
        )  # fmt: skip
        wrapped = prepared(run)
        for step in run.steps(DATA):
            if step.index == 2:
                expected = wrapped.module.weight.detach().clone()
                break
            for (x,) in step.batches:
                step.backward(wrapped(x).sum())
            step.commit()
        with torch.no_grad():
            wrapped.module.weight.zero_()
        run.finish()
        [path] = (tmp_path / "s").glob("*/step-*.json")
        found = manifest.read(path)
        saved = unflatten(load.open_source(path.parent, found).flat())["model"]["weight"]
        assert torch.equal(saved, expected)

    assert gang.run(program, world=1) == {0: 0}, gang.log(0)


def test_an_error_does_not_wait_for_a_disk(gang, tmp_path, wait_until):  # type: ignore[no-untyped-def]
    """The others cannot know of it before this process has ended."""

    def program(rank: int) -> None:
        manager.END_SECONDS = 10 * PATIENCE  # what it would wait without an error
        stuck = threading.Event()

        def never_answers(operation: str, path: Path) -> None:
            if operation == "before fsync" and path.name.endswith(".safetensors"):
                stuck.set()
                threading.Event().wait()

        disk.seam = never_answers
        run = ddp.start(
            total_steps=6, global_batch=6, snapshot_dir=tmp_path / "s", snapshot_every=2
        )
        wrapped = prepared(run)
        for step in run.steps(DATA):
            for (x,) in step.batches:
                step.backward(wrapped(x).sum())
            step.commit()
            if step.index == 2:
                assert stuck.wait(PATIENCE)
                raise KeyError("bug")

    assert gang.run(program, world=1) == {0: 1}, gang.log(0)
    assert "KeyError: 'bug'" in gang.log(0)


def test_a_lost_peer_that_only_torch_noticed_leaves_a_traceback(gang, tmp_path):  # type: ignore[no-untyped-def]
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


def test_a_peer_that_dies_before_it_has_connected_is_a_lost_peer(gang, tmp_path):  # type: ignore[no-untyped-def]
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


def test_a_child_forked_in_the_loop_ends_on_sigterm(gang):  # type: ignore[no-untyped-def]
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


def test_sigterm_while_a_print_blocks_ends_the_process(gang, wait_until):  # type: ignore[no-untyped-def]
    read, write = os.pipe()

    def prints(rank: int) -> None:
        ddp.start(total_steps=1, global_batch=6)
        sys.stdout = os.fdopen(write, "w")
        while True:
            print("x" * 4000)

    gang.start(prints, world=1)
    os.close(write)
    pid = gang.pids[0]
    size = fcntl.fcntl(read, fcntl.F_GETPIPE_SZ)

    def full() -> bool:
        waiting = fcntl.ioctl(read, termios.FIONREAD, b"0000")
        sleeps = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"
        return sleeps and int.from_bytes(waiting, sys.byteorder) > size // 2

    wait_until(full, "the print blocks")
    os.kill(pid, signal.SIGTERM)
    assert gang.wait() == {0: 143}, gang.log(0)
    os.close(read)


# --- Leaving the loop -------------------------------------------------------------------------

LEAVE = "leave it on every rank in the same step, or on none."


def refused(gang: Any, program: Callable[[int], None], text: str) -> None:
    codes = gang.run(program)
    assert set(codes.values()) == {64, 75}, codes  # 75: lost one that has ended
    for rank, code in codes.items():
        assert code == 75 or text in gang.log(rank), gang.log(rank)


@pytest.mark.parametrize(
    ("how", "place", "level"),
    [
        ("at its top", "in step 3, before its commit()", "elastic"),
        ("before commit", "in step 3, before its commit()", "resume"),
        ("after commit", "in step 3, after its commit()", "elastic"),
        ("after the last commit", "in step 5, after its commit()", "resume"),
    ],
)
def test_a_rank_that_leaves_the_loop_alone_ends_the_run(gang, how, place, level):  # type: ignore[no-untyped-def]
    def leaves(rank: int) -> None:
        run = ddp.start(total_steps=6, global_batch=6, level=level, shards=3)
        wrapped = prepared(run, nn.Sequential(nn.Linear(4, 300), nn.Linear(300, 2)))
        for step in run.steps(DATA):
            mine = rank == 1 and step.index == 3
            if mine and how == "at its top":
                break
            for (x,) in step.batches:
                step.backward(wrapped(x).sum())
            if mine and how == "before commit":
                break
            step.commit()
            if rank == 0:
                print(step.loss)  # a rank may ask for it alone
            last = how == "after the last commit" and rank == 1 and step.index == 5
            if (mine and how == "after commit") or last:
                break
        run.evaluate(DATA, lambda net, batch: net(batch[0]).sum())
        run.finish()

    refused(gang, leaves, f"ConfigError: rank 1 left the loop {place}, and others went on: {LEAVE}")


def test_ranks_that_leave_the_loop_a_step_apart_are_refused(gang):  # type: ignore[no-untyped-def]
    def leaves(rank: int) -> None:
        run = ddp.start(total_steps=6, global_batch=6)
        wrapped = prepared(run)
        for step in run.steps(DATA):
            if step.index == 4:
                break
            for (x,) in step.batches:
                step.backward(wrapped(x).sum())
            step.commit()
            if rank == 1 and step.index == 3:
                break
        run.finish()

    refused(gang, leaves, LEAVE)


@pytest.mark.parametrize(("level", "first"), [("resume", 0), ("elastic", 2)])
def test_all_ranks_may_leave_the_loop_together(gang, level, first):  # type: ignore[no-untyped-def]
    """However long one of them takes to get there, and whatever its share of the shards."""

    def leaves(rank: int) -> None:
        run = ddp.start(total_steps=6, global_batch=24, level=level, shards=8)
        wrapped = prepared(run)
        for step in run.steps(DATA):
            for (x,) in step.batches:
                step.backward(wrapped(x).sum())
            if step.index == 3:
                if rank != first:  # that one has left
                    store = run._process.world.store
                    while not store.check(["left the loop"]):
                        time.sleep(0.01)
                    time.sleep(1.0)  # longer than anyone stands still before it looks
                break
            step.commit()
        run.sum(1.0)
        run.evaluate(DATA, lambda net, batch: net(batch[0]).sum())
        run.finish()

    assert gang.run(leaves) == dict.fromkeys(range(3), 0), gang.log(0) + gang.log(2)


def test_a_loop_that_a_variable_holds_is_over_with_finish(gang, tmp_path):  # type: ignore[no-untyped-def]
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
        steps = run.steps(DATA)
        for step in steps:
            for (x,) in step.batches:
                step.backward(wrapped(x).sum())
            step.commit()
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


# --- Logged means -----------------------------------------------------------------------------


def test_a_logged_mean_is_over_all_ranks(gang, tmp_path):  # type: ignore[no-untyped-def]
    def logs(rank: int) -> None:
        run = ddp.start(total_steps=3, global_batch=6, micro_batches=2, events=tmp_path / "events")
        wrapped = prepared(run)
        for step in run.steps(DATA):
            run.log({"rank": torch.tensor(float(rank)), "b": 2 * step.index}, reduce="mean")
            run.log({"mine": rank})
            for number, (x,) in enumerate(step.batches):
                run.log({"micro": 10.0 * number + rank}, reduce="mean")
                step.backward(wrapped(x).sum())
            if step.index != 1:  # names may differ from step to step
                run.log({"square": rank**2}, reduce="mean")
            step.commit()
        run.finish()

    assert gang.run(logs) == dict.fromkeys(range(3), 0), gang.log(0)
    told: dict[int, dict[str, float]] = {1: {}, 2: {}, 3: {}}
    for line in (tmp_path / "events").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "log":
            told[event["step"]] |= event["values"]
    assert told == {
        index + 1: {"rank": 1.0, "b": 2.0 * index, "mine": 0.0, "micro": 6.0}
        | ({"square": 5 / 3} if index != 1 else {})
        for index in range(3)
    }


def test_logged_means_of_other_names_are_refused(gang):  # type: ignore[no-untyped-def]
    def logs(rank: int) -> None:
        run = ddp.start(total_steps=3, global_batch=6)
        wrapped = prepared(run)
        for step in run.steps(DATA):
            if rank == 1 and step.index == 1:
                run.log({"b": 1.0, "a": 1.0}, reduce="mean")
            for (x,) in step.batches:
                step.backward(wrapped(x).sum())
            step.commit()

    assert gang.run(logs) == dict.fromkeys(range(3), 64)
    words = "ConfigError: step 1: run.log(reduce='mean') was given"
    assert f"{words} nothing here, and other names on another rank" in gang.log(0)
    assert f"{words} 'a', 'b' here, and other names on another rank" in gang.log(1)


# --- What is trained, changed after prepare() ----------------------------------------------------


@pytest.mark.parametrize(
    ("how", "level", "words"),
    [
        ("group", "resume", "SGD got other parameters after prepare()"),
        ("group", "elastic", "SGD got other parameters after prepare()"),
        ("thawed", "resume", "requires_grad of a parameter was changed after prepare()"),
        ("thawed", "elastic", "a parameter that was frozen when prepare() was called"),
    ],
)
def test_what_is_trained_does_not_change_after_prepare(gang, how, level, words):  # type: ignore[no-untyped-def]
    """Nobody would average it: the ranks would drift apart."""

    def program(rank: int) -> None:
        run = ddp.start(total_steps=3, global_batch=6, level=level, shards=3)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        model[0].requires_grad_(how == "group")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped, _ = run.prepare(model, optimizer)
        raw = nn.Parameter(torch.ones(4), requires_grad=how == "group")
        if how == "group":
            optimizer.add_param_group({"params": [raw]})
        for step in run.steps(DATA):
            if step.index == 1:
                model[0].requires_grad_(True)
            for (x,) in step.batches:
                step.backward(wrapped(x * raw).pow(2).mean())
            step.commit()

    assert gang.run(program) == dict.fromkeys(range(3), 64)
    assert words in gang.log(0)
