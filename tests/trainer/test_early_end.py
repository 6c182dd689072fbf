"""A loop that all ranks leave early is a finished run, as one that has done all its steps.

And what the ranks tell one another at each step, and when: losses, and that one must stop.
"""

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpjob_trainer as ddp
from ddpjob_trainer.snapshot.manager import SnapshotManager
from ddpjob_trainer.snapshot.reader import read_snapshot
from ddpjob_trainer.snapshot.save.layout import Buffer
from ddpjob_trainer.telemetry.event_log import read_events, read_losses
from ddpjob_trainer.training.run import Teardown
from support.snapshots import await_snapshot

DATA = TensorDataset(torch.randn(60, 4, generator=torch.Generator().manual_seed(1)))
TOTAL, END = 30, 23  # ten steps to an epoch: the end is in the midst of the third
SAID = (
    f"the run is finished, after step {END}: nothing is left to train. The loop's body does not run"
)

ALL_0 = dict.fromkeys(range(3), 0)

Each = Callable[[ddp.Run, Any, nn.Module, str], bool | None]


def train(
    directory: Path, each: Each, *, total: int = TOTAL, staging: str = "auto", every: int = 10
) -> Any:
    """``each`` is called in three places of every step; True: leave the loop."""

    def program(rank: int) -> None:
        kept = ddp.Snapshots(directory=directory, every=every, keep=9, staging=staging)
        logging = ddp.Logging(every=7, events=directory / "events")
        run = ddp.start(total_steps=total, global_batch=6, snapshots=kept, logging=logging)
        net = nn.Sequential(nn.Linear(4, 300), nn.Dropout(0.2), nn.Tanh(), nn.Linear(300, 2))
        optimizer = torch.optim.AdamW(net.parameters(), 0.01)
        model, _ = run.prepare(net, optimizer, bucket_cap_mb=0.001)
        trained = 0
        for step in run.steps(DATA):
            if each(run, step, net, "top"):
                break
            for (x,) in step.batches:
                step.backward(model(x).pow(2).mean())
            each(run, step, net, "before commit")
            step.commit()
            trained += 1
            if each(run, step, net, "after commit"):
                break
        print(f"trained {trained} steps, finished {run.finished_steps}")
        each(run, None, net, "after the loop")
        run.finish()
        (directory / f"sha-{rank}").write_text(f"{run.weights_sha256()} {run.state_sha256()}")

    directory.mkdir(exist_ok=True)
    return program


def hashes(directory: Path) -> set[str]:
    return {path.read_text() for path in directory.glob("sha-*")}


def never(run: ddp.Run, step: Any, net: nn.Module, place: str) -> None: ...


def leave(run: ddp.Run, step: Any, net: nn.Module, place: str) -> bool:
    return place == "after commit" and step.index == END - 1


def ask(run: ddp.Run, step: Any, net: nn.Module, place: str) -> None:
    if place == "before commit" and step.index == END - 1 and run.rank == 1:
        step.stop()


def await_20(run: ddp.Run) -> None:
    directory = run._process.snapshots._settings.directory
    await_snapshot(max(directory.glob("0*")), 20)


def killed(then: Each) -> Each:
    def each(run: ddp.Run, step: Any, net: nn.Module, place: str) -> bool | None:
        if place == "before commit" and step.index == 21 and run.rank == 2:
            await_20(run)
            os.kill(os.getpid(), signal.SIGKILL)
        return then(run, step, net, place)

    return each


@pytest.mark.parametrize("end", [leave, ask])
@pytest.mark.fault("T1")
def test_an_early_end_is_kept_and_final(gang, tmp_path, end):
    undisturbed, directory, whole = (tmp_path / name for name in ("undisturbed", "s", "whole"))
    assert gang.run(train(undisturbed, end)) == ALL_0, gang.log(0)
    assert gang.run(train(directory, killed(end))) == {0: 75, 1: 75, 2: -9}
    assert gang.run(train(directory, end)) == ALL_0, gang.log(0)
    assert "resuming after step 20" in gang.log(0)
    assert f"trained 3 steps, finished {END}" in gang.log(0)
    assert hashes(directory) == hashes(undisturbed)

    found = read_snapshot(directory, None)
    assert (found.step, found.config["finished"]) == (END, TOTAL)
    mine = hashes(directory)
    assert gang.run(train(directory, end)) == ALL_0, gang.log(0)
    assert SAID in gang.log(0)
    assert SAID not in gang.log(1)
    assert f"trained 0 steps, finished {END}" in gang.log(2)
    assert hashes(directory) == mine

    assert gang.run(train(directory, never, total=36)) == ALL_0, gang.log(0)
    assert f"trained {36 - END} steps, finished 36" in gang.log(1)
    assert gang.run(train(whole, never, total=36)) == ALL_0
    assert hashes(directory) == hashes(whole)


def test_a_loop_left_before_a_commit_ends_with_the_step_before(gang, tmp_path, monkeypatch):
    """Whose snapshot may be under way: it is marked, though the weights have changed since."""

    def slow(*arguments: Any) -> None:
        time.sleep(0.5)  # as long as the script below has to be too early
        copy(*arguments)

    copy = Buffer.copy
    monkeypatch.setattr(Buffer, "copy", slow)

    def at_the_top(run: ddp.Run, step: Any, net: nn.Module, place: str) -> bool:
        if place == "after the loop":
            with torch.no_grad():
                net[0].weight.zero_()  # type: ignore[operator, union-attr]
        return place == "top" and step.index == 20

    first = train(tmp_path / "s", at_the_top, staging="thread")
    assert gang.run(first) == ALL_0, gang.log(0)
    found = read_snapshot(tmp_path / "s", None)
    assert (found.step, found.config["finished"]) == (20, TOTAL)
    assert found.model["0.weight"].any()
    assert gang.run(train(tmp_path / "s", at_the_top)) == ALL_0, gang.log(0)
    assert "trained 0 steps, finished 20" in gang.log(1)
    # One that leaves before its first step: the snapshot that it came from is another's.
    assert gang.run(train(tmp_path / "s", at_the_top, total=40)) == ALL_0
    assert read_snapshot(tmp_path / "s", None).config["finished"] == 40


def test_ranks_that_have_changed_their_weights_since_keep_no_end(gang, tmp_path):
    def each(run: ddp.Run, step: Any, net: nn.Module, place: str) -> bool:
        if place == "after the loop" and run.is_main:
            with torch.no_grad():
                net[0].weight.zero_()  # type: ignore[operator, union-attr]
        return step is not None and leave(run, step, net, place)

    assert gang.run(train(tmp_path / "s", each)) == ALL_0, gang.log(0)
    assert "warning: the loop was left early" in gang.log(0)
    assert read_snapshot(tmp_path / "s", None).step == 20


@pytest.mark.parametrize("how", ["exit", "error", "caught", "no finish"])
def test_another_way_out_is_no_end(gang, tmp_path, monkeypatch, how):
    def each(run: ddp.Run, step: Any, net: nn.Module, place: str) -> None:
        if step is None or not leave(run, step, net, place):
            return
        await_20(run)
        if how == "caught":
            with contextlib.suppress(KeyError), run:
                raise KeyError("bug")
        elif how == "error":
            raise KeyError("bug")
        sys.exit(3 if how == "exit" else 0)

    def program(rank: int) -> None:
        try:
            train(tmp_path / "s", each)(rank)
        except SystemExit:
            for ending in endings:
                ending._at_exit()  # which a forked rank of this test does not come to
            raise

    endings: list[Teardown] = []
    made = Teardown.__init__
    monkeypatch.setattr(
        Teardown, "__init__", lambda self, process: (endings.append(self), made(self, process))[1]
    )
    code = {"exit": 3, "error": 1}.get(how, 0)
    assert gang.run(program, world=1) == {0: code}, gang.log(0)
    found = read_snapshot(tmp_path / "s", None)
    assert found.step == 20
    assert not found.config["finished"]
    assert (how != "error") == (f"left after step {END} without run.finish()" in gang.log(0))


def test_who_asks_after_a_commit_gets_one_step_more(gang, tmp_path):
    def each(run: ddp.Run, step: Any, net: nn.Module, place: str) -> None:
        if place == "after commit" and step.index == 4 and run.rank == 2:
            step.stop()

    assert gang.run(train(tmp_path / "s", each)) == ALL_0, gang.log(0)
    assert read_snapshot(tmp_path / "s", None).step == 6


def test_each_step_is_told_once_before_a_snapshot_holds_it(gang, tmp_path, monkeypatch):
    def told_before(snapshots: SnapshotManager, step: int, *args: Any, **kwargs: Any) -> None:
        directory = snapshots._settings.directory
        assert directory is not None
        if os.environ["RANK"] == "0":
            assert list(read_losses(directory / "events")) == list(range(1, step + 1))
        save(snapshots, step, *args, **kwargs)

    def terminate(run: ddp.Run, step: Any, net: nn.Module, place: str) -> None:
        if place == "after commit" and step.index == 9 and run.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)  # step 10 has told already: it comes with 11

    save = SnapshotManager.save
    monkeypatch.setattr(SnapshotManager, "save", told_before)
    whole, early, stopped = (tmp_path / name for name in ("whole", "early", "stopped"))
    assert gang.run(train(whole, never)) == ALL_0, gang.log(0)
    told = [event["step"] for event in read_events(whole / "events") if event["event"] == "step"]
    assert told == list(range(1, TOTAL + 1))
    losses = read_losses(whole / "events")
    assert gang.run(train(early, leave)) == ALL_0, gang.log(0)
    assert read_losses(early / "events") == {step: losses[step] for step in range(1, END + 1)}

    assert gang.run(train(stopped, terminate, every=10**6)) == {0: 75, 1: 143, 2: 75}
    for rank in range(3):
        assert re.search(r"stopped after step 11\b", gang.log(rank)), gang.log(rank)
    assert list(read_losses(stopped / "events")) == list(range(1, 12))
    assert gang.run(train(stopped, never, every=10**6)) == ALL_0, gang.log(0)
    assert read_losses(stopped / "events") == losses
    assert hashes(stopped) == hashes(whole)
