"""What the ranks tell one another at each step, and when: losses, and that one must stop."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpjob_trainer as ddp
from ddpjob_trainer.snapshot.manager import Snapshots
from ddpjob_trainer.telemetry.event_log import read_events, read_losses

TOTAL = 20


def train(
    events: Path,
    *,
    after: Callable[[ddp.Run, int], bool | None] = lambda run, step: None,
    every: int = 6,
) -> Callable[[int], None]:
    """``after`` is called after each commit and may end the loop."""
    save = Snapshots.save

    def told_before(snapshots: Snapshots, step: int, *args: Any, **kwargs: Any) -> None:
        if int(os.environ["RANK"]) == 0:
            assert list(read_losses(events)) == list(range(1, step + 1))
        save(snapshots, step, *args, **kwargs)

    def program(rank: int) -> None:
        Snapshots.save = told_before  # type: ignore[method-assign]
        run = ddp.start(
            total_steps=TOTAL, global_batch=12, seed=3, events=events, log_every=7,
            snapshot_dir=events.with_suffix(".snapshots"), snapshot_every=every,
        )  # fmt: skip
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 2))
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), 0.02), bucket_cap_mb=0.001)
        data = TensorDataset(torch.randn(50, 6, generator=torch.Generator().manual_seed(1)))
        for step in run.steps(data):
            for (x,) in step.batches:
                step.backward(model(x).pow(2).mean())
            step.commit()
            if after(run, step.index + 1):
                break
        run.finish()
        if rank == 0:
            events.with_suffix(".sha").write_text(run.weights_sha256())

    return program


def succeeded(gang) -> None:  # type: ignore[no-untyped-def]
    assert gang.wait() == {0: 0, 1: 0, 2: 0}, "\n".join(map(gang.log, range(3)))


def test_each_step_is_told_once_before_a_snapshot_holds_it(gang, tmp_path):  # type: ignore[no-untyped-def]
    whole, early, stopped = (tmp_path / name for name in ("whole", "early", "stopped"))
    gang.start(train(whole))
    succeeded(gang)
    told = [event["step"] for event in read_events(whole) if event["event"] == "step"]
    assert told == list(range(1, TOTAL + 1))
    losses = read_losses(whole)

    # The loop is left after the commit() of step 14, which is the last one then.
    gang.start(train(early, after=lambda run, step: step == 14))
    succeeded(gang)
    assert read_losses(early) == {step: losses[step] for step in range(1, 15)}

    def terminate(run: ddp.Run, step: int) -> None:
        if step == 10 and run.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)  # step 10 has told already: it comes with 11

    gang.start(train(stopped, after=terminate, every=10**6))
    assert gang.wait() == {0: 75, 1: 143, 2: 75}
    for rank in range(3):
        assert re.search(r"stopped after step 11\b", gang.log(rank)), gang.log(rank)
    assert list(read_losses(stopped)) == list(range(1, 12))
    gang.start(train(stopped, every=10**6))
    succeeded(gang)
    assert read_losses(stopped) == losses
    assert stopped.with_suffix(".sha").read_text() == whole.with_suffix(".sha").read_text()
