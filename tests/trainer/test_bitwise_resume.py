"""Kills at any place of a step, at 3 ranks and more than one bucket: equal bits at the end."""

import errno
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import ddpjob_trainer as ddp
from ddpjob_trainer.gradients import determinism
from ddpjob_trainer.snapshot import interval
from ddpjob_trainer.snapshot.ondisk import disk
from support.busy import busy_machine
from support.snapshots import await_snapshot

STEPS = 14
EVERY = 4


class Checkpointed(nn.Sequential):
    """Computes its forward again in each backward, also in that of the warm-up."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = checkpoint(super().forward, x, use_reentrant=False)
        assert isinstance(result, torch.Tensor)
        return result


@dataclass
class Training:
    """One small training, with a place where it can be told to die."""

    directory: Path
    level: str = "resume"
    momentum: bool = True
    steps: int = STEPS
    die: tuple[int, int, str] | None = None  # rank, step, place
    at: Callable[[ddp.Run, int], None] | None = None  # called in the middle of each step
    seam: Callable[[str, str, Path], None] | None = None  # (operation, step, path) of a write
    durable: int = 0  # the snapshot of this step must be durable before anybody dies
    staging: str = "auto"
    every: int | str = EVERY

    def __call__(self, rank: int) -> None:
        if self.seam is not None:
            disk.seam = partial(_seam, self.seam)
        torch.manual_seed(3)
        inputs, targets = torch.randn(200, 48), torch.randint(0, 10, (200,))
        place = self.directory / "snapshots"
        if self.every == "Auto":
            interval.FIRST_SECONDS = interval.LEAST_SECONDS = 0.0  # the whole run is over in one
        kept = ddp.Snapshots(directory=place, every=self.every, staging=self.staging)
        run = ddp.start(
            total_steps=self.steps, global_batch=24, seed=5, level=self.level, snapshots=kept
        )
        model = nn.Sequential(
            nn.Linear(48, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.3),
            Checkpointed(nn.Linear(256, 256), nn.BatchNorm1d(256)), nn.ReLU(), nn.Linear(256, 10),
        )  # fmt: skip
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: grad + 1e-3 * torch.randn_like(grad))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        wrapped, _ = run.prepare(model, optimizer, scheduler=scheduler, bucket_cap_mb=0.05)
        mean: dict[str, Any] = {"values": [p.detach().clone() for p in model.parameters()]}
        run.register("mean", mean)
        losses = (self.directory / f"losses-{rank}").open("a", buffering=1)
        for step in run.steps(TensorDataset(inputs, targets)):
            for x, y in step.batches:
                loss = nn.functional.cross_entropy(wrapped(x), y)
                self._maybe_die(rank, step.index, "before backward")
                step.backward(loss)
            if self.level == "resume":  # without the warm-up the buckets are not final yet
                assert len(determinism.buckets(wrapped)) > 1
            if self.at is not None:
                self.at(run, step.index)
            self._maybe_die(rank, step.index, "before commit")
            step.commit()
            for value, parameter in zip(mean["values"], model.parameters(), strict=True):
                value.lerp_(parameter.detach(), 0.1)
            losses.write(f"{step.index} {loss.item().hex()}\n")
        run.finish()
        result = f"{run.weights_sha256()} {run.state_sha256()}"
        (self.directory / f"result-{rank}").write_text(result)

    def _maybe_die(self, rank: int, step: int, place: str) -> None:
        if self.die == (rank, step, place):
            if self.durable:
                newest = max((self.directory / "snapshots").glob("0*"))
                await_snapshot(newest, self.durable)
            os.kill(os.getpid(), signal.SIGKILL)

    def outcome(self) -> list[tuple[str, dict[int, str]]]:
        """Per rank: hashes, and the loss of each step, which must be equal when replayed."""
        found = []
        for rank in range(3):
            losses: dict[int, str] = {}
            for line in (self.directory / f"losses-{rank}").read_text().splitlines():
                index, value = line.split()
                losses.setdefault(int(index), value)
                assert losses[int(index)] == value, f"step {index} was replayed differently"
            assert sorted(losses) == list(range(self.steps))
            found.append(((self.directory / f"result-{rank}").read_text(), losses))
        return found


def fresh(path: Path, **options: object) -> Training:
    path.mkdir()
    return Training(path, **options)  # type: ignore[arg-type]


ALL_0 = {0: 0, 1: 0, 2: 0}


@pytest.fixture(scope="module")
def undisturbed():  # type: ignore[no-untyped-def]
    """Return what a run ends with that nothing disturbs: made once, it is always the same."""
    made: list[object] = []

    def outcome(gang: Any, tmp_path: Path) -> object:
        if not made:
            training = fresh(tmp_path / "undisturbed")
            assert gang.run(training) == ALL_0
            made.append(training.outcome())
        return made[0]

    return outcome


def resumes(gang: Any, training: Training, step: int) -> None:
    """Run it to its end beside another load, from the snapshot of this step."""
    training.die = training.seam = training.at = None
    with busy_machine():
        assert gang.run(training) == ALL_0
    assert f"resuming after step {step}" in gang.log(0)


def _seam(body: Callable[[str, str, Path], None], operation: str, path: Path) -> None:
    step = path.name.split("-")[1].partition(".")[0].lstrip("0") if "-" in path.name else ""
    body(operation, step, path)


@pytest.mark.fault("T1")
def test_killed_at_every_rank_and_place_equals_undisturbed(gang, tmp_path, undisturbed):
    def dies_in_commit(operation: str, step: str, _: Path) -> None:
        if (operation, step) == ("before rename", "8"):
            os.kill(os.getpid(), signal.SIGKILL)

    wanted, disturbed = undisturbed(gang, tmp_path), fresh(tmp_path / "disturbed")
    for die in (
        (2, 1, "before commit"),  # before any snapshot: from the start again
        (1, 5, "before backward"),
        (0, 6, "before commit"),
        (0, 7, "in its commit"),
        (2, 8, "before backward"),
        (1, 11, "before commit"),
        (0, 13, "before backward"),
    ):
        disturbed.die, disturbed.staging = die, "inline" if die[1] % 2 else "thread"
        disturbed.seam = dies_in_commit if die[2].startswith("in") else None
        disturbed.durable = 12 if die[1] > 12 else 0  # the last one resumes from there
        codes = gang.run(disturbed)
        killed = die[0]
        assert codes == {r: -9 if r == killed else 75 for r in range(3)}, gang.log(killed)
    resumes(gang, disturbed, 12)
    assert disturbed.outcome() == wanted
    assert "lost a peer after step" in gang.log(1)


@pytest.mark.fault("T1")
def test_where_rank_0_chooses_when_to_save_the_bits_are_the_same(gang, tmp_path, undisturbed):
    wanted = undisturbed(gang, tmp_path)
    dies = (1, 9, "before commit")
    disturbed = fresh(tmp_path / "disturbed", every="Auto", die=dies, durable=interval.LEAST_STEPS)
    assert gang.run(disturbed) == {0: 75, 1: -9, 2: 75}, gang.log(1)
    disturbed.die = None
    assert gang.run(disturbed) == ALL_0
    assert "resuming after step" in gang.log(0)
    assert disturbed.outcome() == wanted


@pytest.mark.tier("all")
def test_without_the_warm_up_the_same_test_sees_a_difference(gang, tmp_path):
    """Proves that the comparison can fail: level off skips the warm-up and nothing else."""
    plain = fresh(tmp_path / "plain", level="off")
    assert gang.run(plain) == ALL_0
    disturbed = fresh(tmp_path / "disturbed", level="off", die=(1, 5, "before commit"), durable=4)
    assert gang.run(disturbed)[1] == -9
    resumes(gang, disturbed, 4)
    weights = [(t.directory / "result-0").read_text().split()[0] for t in (plain, disturbed)]
    assert weights[0] != weights[1]


@pytest.mark.fault("T4")
def test_sigterm_to_one_rank_stops_all_at_one_step_with_a_snapshot(gang, tmp_path, undisturbed):
    wanted = undisturbed(gang, tmp_path)

    def terminate_rank_1(run: ddp.Run, index: int) -> None:
        if run.rank == 1 and index == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    disturbed = fresh(tmp_path / "disturbed", at=terminate_rank_1)
    assert gang.run(disturbed) == {0: 75, 1: 143, 2: 75}
    for rank in range(3):  # it came before commit(), which told it
        assert re.findall(r"stopped after step (\d+)", gang.log(rank))[0] == "6"
    resumes(gang, disturbed, 6)
    assert disturbed.outcome() == wanted


@pytest.mark.fault("S2")
def test_a_full_disk_does_not_stop_training(gang, tmp_path):
    """Rank 2 is slow: that step 8 has failed on rank 0 is known before step 4 can be committed."""
    failed = tmp_path / "failed"

    def full(operation: str, step: str, path: Path) -> None:
        if operation == "before write" and step in ("8", "12"):
            if path.name.endswith("-0.safetensors"):
                failed.touch()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if (operation, step, path.name[-14:]) == ("before write", "4", "-2.safetensors"):
            while not failed.exists():
                time.sleep(0.01)

    training = fresh(tmp_path / "t", seam=full)
    assert gang.run(training) == ALL_0
    log = gang.log(0)
    assert "snapshot after step 8 failed: No space left on device" in log
    assert re.search("the newest that was read back is (none yet|that of step 4)\n", log)
    left = {p.name.split("-")[1].split(".")[0].lstrip("0")
            for p in (tmp_path / "t/snapshots").glob("*/step-*")}  # fmt: skip
    assert left == {"4", "14"}


def test_resume_never_starts_anew_and_its_chain_is_followed_afterwards(gang, tmp_path):
    training = fresh(tmp_path / "t", die=(1, 9, "before commit"), durable=8)
    gang.run(training)
    for rank in range(3):
        (tmp_path / f"t/losses-{rank}").unlink()
    training.die, training.durable = (1, 5, "before commit"), 4
    gang.run(training, env={"DDPJOB_SNAPSHOT_RESUME": "Never"})
    assert "resuming" not in gang.log(0)
    resumes(gang, training, 4)
