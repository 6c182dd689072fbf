"""Short steps share an exchange: nobody may notice, but by the clock. 3 ranks."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpjob_trainer as ddp
from ddpjob_trainer.comm import exchange
from ddpjob_trainer.snapshot.manager import Snapshots
from ddpjob_trainer.telemetry.event_log import read_events, read_losses

TOTAL = 60


def train(
    events: Path,
    *,
    alone: bool = False,
    at: Callable[[ddp.Run, int], bool | None] = lambda run, step: None,
    poison: tuple[int, int] = (-1, -1),
    **start: Any,
) -> Callable[[int], None]:
    """``at`` is called after each commit and may end the loop. ``poison``: rank and step."""

    def program(rank: int) -> None:
        if alone:
            exchange.MOST_STEPS = 1  # type: ignore[misc]
        else:
            exchange.PATIENCE_SECONDS = 1e9  # type: ignore[misc]  # however busy the machine is
        options = {"total_steps": TOTAL, "global_batch": 12, "seed": 3, **start}
        run = ddp.start(**options, events=events, log_every=7)
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 2))
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), 0.02), bucket_cap_mb=0.001)
        data = TensorDataset(torch.randn(50, 6, generator=torch.Generator().manual_seed(1)))
        for step in run.steps(data):
            for (x,) in step.batches:
                loss = model(x).pow(2).mean()
                step.backward(loss * float("nan") if (rank, step.index) == poison else loss)
            step.commit()
            if at(run, step.index + 1):
                break
        run.finish()
        if rank == 0:
            events.with_suffix(".sha").write_text(run.weights_sha256())

    return program


def succeeded(gang) -> None:  # type: ignore[no-untyped-def]
    assert gang.wait() == {0: 0, 1: 0, 2: 0}, "\n".join(map(gang.log, range(3)))


@pytest.mark.parametrize("level", ["resume", "elastic"])
def test_losses_and_weights_are_those_of_steps_that_share_none(gang, tmp_path, level):  # type: ignore[no-untyped-def]
    found = []
    for alone in (False, True):
        path = tmp_path / f"alone-{alone}"
        gang.start(
            train(path, alone=alone, level=level, **({"shards": 6} if level != "resume" else {}))
        )
        succeeded(gang)
        found.append((read_losses(path), path.with_suffix(".sha").read_text()))
    assert found[0] == found[1]
    assert list(found[0][0]) == list(range(1, TOTAL + 1))


def test_leaving_the_loop_early_loses_no_loss(gang, tmp_path):  # type: ignore[no-untyped-def]
    """Step 50 is left after its commit(): it is not finished, those before are."""
    whole, early = tmp_path / "whole", tmp_path / "early"
    gang.start(train(whole))
    succeeded(gang)
    gang.start(train(early, at=lambda run, step: step == 50))
    succeeded(gang)
    losses = read_losses(whole)
    assert read_losses(early) == {step: losses[step] for step in range(1, 50)}


@pytest.mark.parametrize("every", [8, 20])  # 8: that of steps 4 to 7 is still under way
def test_a_snapshot_never_comes_before_the_losses_of_its_steps(gang, tmp_path, every):  # type: ignore[no-untyped-def]
    path = tmp_path / "events"
    training = train(path, snapshot_dir=tmp_path / "snapshots", snapshot_every=every)
    save = Snapshots.save

    def watched(snapshots: Snapshots, step: int, *args: Any, **kwargs: Any) -> None:
        if int(os.environ["RANK"]) == 0:
            assert list(read_losses(path)) == list(range(1, step + 1))
        save(snapshots, step, *args, **kwargs)

    def program(rank: int) -> None:
        Snapshots.save = watched  # type: ignore[method-assign]
        training(rank)

    gang.start(program)
    succeeded(gang)
    saved = [event["step"] for event in read_events(path) if event["event"] == "snapshot"]
    assert saved[-1] == TOTAL
    assert list(read_losses(path)) == list(range(1, TOTAL + 1))


def test_a_signal_in_the_midst_of_them_stops_all_ranks_after_one_step(gang, tmp_path):  # type: ignore[no-untyped-def]
    """Steps 32 to 47 share one, heard after 48. The snapshot of the stop holds all of them."""

    def at(run: ddp.Run, step: int) -> None:
        if step == 40 and run.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    path = tmp_path / "events"
    snapshots = {"snapshot_dir": tmp_path / "snapshots", "snapshot_every": 10**6}
    gang.start(train(path, at=at, **snapshots))
    assert gang.wait() == {0: 75, 1: 143, 2: 75}
    for rank in range(3):
        assert re.search(r"stopped after step 48\b", gang.log(rank)), gang.log(rank)
    assert list(read_losses(path)) == list(range(1, 49))
    gang.start(train(path, **snapshots))
    succeeded(gang)
    whole = tmp_path / "whole"
    gang.start(train(whole))
    succeeded(gang)
    assert read_losses(path) == read_losses(whole)
    assert path.with_suffix(".sha").read_text() == whole.with_suffix(".sha").read_text()


def test_when_steps_become_long_none_waits_for_another(gang, tmp_path):  # type: ignore[no-untyped-def]
    """What steps 32 to 47 share says so, and is heard after 48, which it does not tell of."""

    def at(run: ddp.Run, step: int) -> None:
        if step == 40:
            exchange.PATIENCE_SECONDS = 0  # type: ignore[misc]
        if step == 48 and run.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    gang.start(train(tmp_path / "events", at=at))
    assert gang.wait() == {0: 75, 1: 143, 2: 75}
    for rank in range(3):
        assert re.search(r"stopped after step 48\b", gang.log(rank)), gang.log(rank)


@pytest.mark.parametrize("policy", ["stop", "skip"])
@pytest.mark.parametrize("bad", [31, 39])  # 31: what steps 15 to 30 share is still under way
def test_a_loss_that_is_no_number_is_told_at_once_with_its_step_and_rank(  # type: ignore[no-untyped-def]
    gang, tmp_path, policy, bad
):
    path = tmp_path / "events"
    gang.start(train(path, poison=(2, bad), nan_policy=policy))
    codes = gang.wait()
    assert codes == dict.fromkeys(range(3), 70 if policy == "stop" else 0)
    assert f"step {bad}: gradients are not finite" in gang.log(0)
    assert "the loss of rank 2 is" in gang.log(0)
    told = bad if policy == "stop" else TOTAL
    assert list(read_losses(path)) == list(range(1, told + 1))
