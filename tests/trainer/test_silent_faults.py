"""What a script keeps where no snapshot sees it: who tells it, and with which words.

docs/guides/determinism.md has the table. Args, flags, teachers and counters are in test_replay.py,
an average's counter and early stopping, which act on no loss, in test_chaos.py.
"""

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
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import ddpjob_trainer as ddp
from ddpjob_trainer.environment import REPLAY_DIR
from ddpjob_trainer.gradients import determinism
from support.snapshots import await_snapshot

SAMPLES, GLOBAL_BATCH, STEPS, EVERY = 100, 24, 18, 6  # 4 steps in an epoch
KILLED, SNAPSHOT = 15, 12  # in the midst of an epoch

DATA = TensorDataset(
    torch.randn(SAMPLES, 12, generator=torch.Generator().manual_seed(1)),
    torch.arange(SAMPLES) % 5,
)


class Remembering(nn.Sequential):
    """Keeps a running mean in a buffer that is in no state_dict(), and computes with it."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__(*parts)
        self.register_buffer("mean", torch.zeros(12), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        result: torch.Tensor = super().forward(x - self.mean)
        return result


class Script:
    """What it does beside training: nothing. ``ended``: after a step's commit()."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net

    def begins(self) -> None: ...

    def ended(self, step: ddp.Step) -> None: ...

    def batch_done(self) -> None: ...


class Swapping(Script):
    """Leaves the average's weights in the model at an epoch's end, and takes them out later."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.mine: list[torch.Tensor] | None = None
        self.average = self.weights()

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.net.parameters()]

    def put(self, weights: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.net.parameters(), weights, strict=True):
                parameter.copy_(value)

    def begins(self) -> None:
        if self.mine is not None:
            self.put(self.mine)
            self.mine = None

    def ended(self, step: ddp.Step) -> None:
        for mean, now in zip(self.average, self.weights(), strict=True):
            mean.lerp_(now, 0.1)
        if step.ends_epoch:
            self.mine = self.weights()
            self.put(self.average)


class Clipping(Script):
    def batch_done(self) -> None:
        nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)


def train(
    directory: Path, make: Callable[[nn.Module], Script], *, die: int | None = None, **start: Any
) -> Callable[[int], None]:
    """``die``: in the step of this index rank 2 kills itself."""

    def program(rank: int) -> None:
        run = ddp.start(
            total_steps=STEPS, global_batch=GLOBAL_BATCH, seed=4, snapshot_dir=directory / "s",
            snapshot_every=EVERY, **start,
        )  # fmt: skip
        net = Remembering(
            nn.Linear(12, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.Linear(64, 5)
        )
        optimizer = torch.optim.AdamW(net.parameters(), 0.01)
        model, _ = run.prepare(net, optimizer, bucket_cap_mb=0.005)
        script = make(net)
        for step in run.steps(DATA):
            script.begins()
            for x, y in step.batches:
                step.backward(cross_entropy(model(x), y))
                script.batch_done()
            assert len(determinism.buckets(model)) > 1
            if rank == 2 and step.index == die:
                await_snapshot(max((directory / "s").glob("0*")), SNAPSHOT)
                os.kill(os.getpid(), signal.SIGKILL)
            step.commit()
            script.ended(step)
        (directory / f"result-{rank}").write_text(f"{run.weights_sha256()} {run.state_sha256()}")
        run.finish()

    directory.mkdir(exist_ok=True)
    return program


@pytest.fixture
def restarted(gang, tmp_path):  # type: ignore[no-untyped-def]
    """Return what rank 0 says of a restart."""

    def run(make: Callable[[nn.Module], Script]) -> str:
        env = {REPLAY_DIR: str(tmp_path / "replay")}
        assert gang.run(train(tmp_path / "killed", make, die=KILLED), env=env)[2] == -9
        gang.log_path(0).unlink()
        codes = gang.run(train(tmp_path / "killed", make), env=env)
        assert codes == dict.fromkeys(range(3), 0), gang.last_words()
        told: str = gang.log(0)
        assert f"resuming after step {SNAPSHOT}" in told
        return told

    return run


@pytest.mark.fault("T1")
def test_a_buffer_that_is_not_persistent_is_shared_and_kept(restarted, gang, tmp_path):  # type: ignore[no-untyped-def]
    """As plain DDP shares it; so a restart changes no bit."""
    assert "restart proven: steps 13 to " in restarted(Script)
    assert gang.run(train(tmp_path / "calm", Script)) == dict.fromkeys(range(3), 0)
    for rank in range(3):
        calm, killed = (tmp_path / name / f"result-{rank}" for name in ("calm", "killed"))
        assert calm.read_text() == killed.read_text()


@pytest.mark.tier("all")
@pytest.mark.fault("T14")
def test_an_average_in_the_model_while_a_snapshot_is_made_is_told(restarted):  # type: ignore[no-untyped-def]
    told = restarted(Swapping)
    (found,) = re.findall(r"restart not proven: step (\d+), .* in its ([a-z ]+)[,.]", told)
    assert found == (str(SNAPSHOT + 1), "loss")
    assert "run.register(name, " in told


@pytest.mark.tier("all")
def test_a_clip_between_micro_batches_is_refused_at_once(gang, tmp_path):  # type: ignore[no-untyped-def]
    codes = gang.run(train(tmp_path / "s", Clipping, micro_batches=2))
    assert 64 in codes.values()
    assert "gradients were changed or dropped between two batches of a step" in gang.log(0)
