"""SIGTERM at the worst moments: a flag only, one step for all ranks, a snapshot, exit 143."""

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ddpjob_trainer as ddp


class Data:
    """Samples; ``before`` is called with the number of samples that this rank has fetched."""

    def __init__(self, before: Any) -> None:
        self._before = before
        self._fetched = 0

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._before(self._fetched)
        self._fetched += 1
        return torch.full((8,), float(index)), torch.tensor([float(index)])


class Hook:
    """Registered state; ``call`` happens while a snapshot of it is taken."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def state_dict(self) -> dict[str, Any]:
        self._call()
        return {"nothing": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def train(
    directory: Path, *, before: Any = lambda fetched: None, saving: Any = None, every: int = 10**6
) -> None:
    snapshots = ddp.Snapshots(directory=directory, every=every)
    run = ddp.start(total_steps=2000, global_batch=12, snapshots=snapshots)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    model, _ = run.prepare(model, optimizer, bucket_cap_mb=0.001)
    if saving is not None:
        run.register("hook", Hook(saving))
    for step in run.steps(Data(before)):
        for x, y in step.batches:
            step.backward(((model(x) - y) ** 2).mean())
        step.commit()


def stopped_after(gang) -> set[int]:  # type: ignore[no-untyped-def]
    found = set()
    for rank in range(3):
        match = re.search(r"stopped after step (\d+)", gang.log(rank))
        assert match, gang.log(rank)
        found.add(int(match[1]))
    return found


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.fault("T4")
def test_in_a_collective_that_is_blocked(gang, tmp_path, wait_until, times):
    """Two ranks wait for the third, which loads data: nobody ends before the step is whole."""
    waiting, go = tmp_path / "waiting", tmp_path / "go"

    def program(rank: int) -> None:
        def before(fetched: int) -> None:
            # Three are made at the start, to be compared over the ranks.
            if rank == 1 and fetched == 3 + 4 * 6:
                waiting.touch()
                while not go.exists():
                    time.sleep(0.01)

        train(tmp_path / "s", before=before)

    gang.start(program)
    wait_until(waiting.exists, "rank 1 loads data")
    for _ in range(times):
        for pid in gang.pids.values():
            os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not pending(gang.pids.values()), "all have taken the signal")
    assert all(os.waitpid(pid, os.WNOHANG) == (0, 0) for pid in gang.pids.values())
    go.touch()
    assert gang.wait() == {0: 143, 1: 143, 2: 143}, gang.log(0)
    assert stopped_after(gang) == {7}
    assert resumed_after(gang, tmp_path) == 7


def pending(pids: Any) -> bool:
    """Whether a signal has not yet been delivered to one of them."""
    for pid in pids:
        status = Path(f"/proc/{pid}/status").read_text()
        masks = re.findall(r"^(?:Sig|Shd)Pnd:\s*(\w+)$", status, re.MULTILINE)
        if any(int(mask, 16) for mask in masks):
            return True
    return False


def resumed_after(gang, tmp_path: Path, saving: Any = None) -> int:  # type: ignore[no-untyped-def]
    """Step of the snapshot that the next start takes."""
    for rank in range(3):
        gang.log_path(rank).unlink()

    def program(rank: int) -> None:
        def end(fetched: int) -> None:
            os._exit(9)

        train(tmp_path / "s", before=end, saving=saving)

    gang.run(program)
    match = re.search(r"resuming after step (\d+)", gang.log(0))
    assert match, gang.log(0)
    return int(match[1])


@pytest.mark.fault("T4")
def test_while_a_snapshot_is_taken(gang, tmp_path):
    def program(rank: int) -> None:
        calls = []

        def saving() -> None:
            calls.append(1)
            if rank == 0 and len(calls) == 3:  # the first ones are the checks before the loop
                os.kill(os.getpid(), signal.SIGTERM)

        train(tmp_path / "s", saving=saving, every=2)

    codes = gang.run(program)
    assert codes == {0: 143, 1: 75, 2: 75}, gang.log(0)
    steps = stopped_after(gang)
    assert len(steps) == 1
    assert resumed_after(gang, tmp_path, lambda: None) == steps.pop()


@pytest.mark.fault("T4")
def test_when_a_peer_is_dead_nothing_is_waited_for(gang, tmp_path):
    def program(rank: int) -> None:
        def before(fetched: int) -> None:
            if fetched == 4 * 6:
                os.kill(os.getpid(), signal.SIGKILL if rank == 1 else signal.SIGTERM)

        train(tmp_path / "s", before=before)

    codes = gang.run(program)
    assert codes == {0: 75, 1: -9, 2: 75}


@pytest.mark.parametrize("how", ["last step", "break", "error"])
def test_when_no_step_comes_any_more_to_agree_on(gang, how):
    """After the last exchange, and before the loop is left early; an error tells more than it."""

    def program(rank: int) -> None:
        run = ddp.start(total_steps=3, global_batch=6)
        model = nn.Linear(8, 1)
        wrapped, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4))
        for step in run.steps(Data(lambda fetched: None)):
            for x, _ in step.batches:
                step.backward(wrapped(x).mean())
            step.commit()
            if step.index == (2 if how == "last step" else 1):
                if rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                    if how == "error":
                        raise ValueError("more than the signal says")
                if how == "break":
                    break
        if rank == 1:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:  # what a script may have to do, unheard
                pass
        run.finish()

    assert gang.run(program) == {0: 75, 1: 1 if how == "error" else 143, 2: 75}, gang.log(1)


def test_a_handler_that_is_replaced_is_told_of(gang, tmp_path):
    """Once, and not where Python's own was set."""

    def program(rank: int) -> None:
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for part in ("first", "second"):  # whose handlers are those of the first
            snapshots = ddp.Snapshots(directory=tmp_path / part)
            ddp.start(total_steps=1, global_batch=6, snapshots=snapshots).finish()

    assert gang.run(program, world=1) == {0: 0}, gang.log(0)
    assert gang.log(0).count("script's handler of SIGTERM is replaced") == 1
    assert gang.log(0).count("is replaced") == 1
