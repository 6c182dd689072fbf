"""Three ranks whose disk is lost with them: the object store has what they go on from."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import ddpjob_trainer as ddp
from ddpjob_trainer.snapshot import manager
from ddpjob_trainer.snapshot.ondisk import manifest
from support.patience import PATIENCE

DATA = torch.utils.data.TensorDataset(torch.arange(240.0).reshape(60, 4) / 240)


@pytest.mark.fault("S6")
@pytest.mark.parametrize("disks", ["one", "one each"])
def test_a_gang_whose_disk_is_lost_goes_on_from_the_store(gang, tmp_path, disks, monkeypatch):  # type: ignore[no-untyped-def]
    """A disk for all ranks, or an emptyDir in each pod, which nobody else sees."""
    store = tmp_path / "store"
    monkeypatch.setattr(manager, "_LAST_UPLOAD_SECONDS", PATIENCE)  # the last is looked for below

    def program(disk: str, *, lost: bool) -> None:
        own = "" if disks == "one" else os.environ["RANK"]
        run = ddp.start(
            total_steps=8, global_batch=6, snapshot_dir=tmp_path / f"{disk}{own}", snapshot_every=2,
            snapshot_upload="" if disk == "undisturbed" else f"file://{store}",
        )  # fmt: skip
        model = nn.Sequential(nn.Linear(4, 300), nn.Dropout(0.1), nn.Linear(300, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        wrapped, _ = run.prepare(model, optimizer, bucket_cap_mb=0.001)
        for step in run.steps(DATA):
            if lost and step.index == 5:
                wait_for_step(store, run._process.snapshots.report)
                os._exit(9)
            for (x,) in step.batches:
                step.backward(wrapped(x).pow(2).sum())
            step.commit()
        if run.is_main:
            (tmp_path / f"hash-{disk}").write_text(run.weights_sha256() + run.state_sha256())
        else:
            run.state_sha256()
        run.finish()

    assert gang.run(lambda rank: program("undisturbed", lost=False)) == {0: 0, 1: 0, 2: 0}
    assert gang.run(lambda rank: program("first", lost=True)) == {0: 9, 1: 9, 2: 9}, gang.log(0)
    assert gang.run(lambda rank: program("second", lost=False)) == {0: 0, 1: 0, 2: 0}, gang.log(0)
    assert "fetched the snapshot of step" in gang.log(0)
    assert "resuming after step" in gang.log(0)
    missed = gang.log(0).count("Give all pods one shared volume")
    assert missed == (disks == "one each"), "without a store, once; with one it is not missed"
    hashes = [(tmp_path / f"hash-{disk}").read_text() for disk in ("undisturbed", "second")]
    assert hashes[0] == hashes[1]
    assert len(list(store.glob("*/step-000000000008.json"))) == 1  # before the end


def whole(store: Path) -> bool:
    """Whether there is a manifest that can be read; it may have its name before its content."""
    for path in store.glob("*/step-*.json"):
        with contextlib.suppress(manifest.InvalidSnapshotError):
            manifest.read(path)
            return True
    return False


def wait_for_step(store: Path, each: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not whole(store) or not list(store.glob("*/start.json")):
        assert time.monotonic() < deadline, "nothing was uploaded"
        each()  # as further steps would
        time.sleep(0.01)
