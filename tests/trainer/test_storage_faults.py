"""The campaign of docs/internals/storage-faults.md: each fault in one snapshot, most, and all.

Three ranks are killed in their third epoch, the disk is harmed, they start again. They end in the
bits of an undisturbed run, or with a clear refusal; they never begin anew.
"""

import contextlib
import errno
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpjob_trainer as ddp
from ddpjob_trainer.snapshot.ondisk import disk, lineage, manifest
from ddpjob_trainer.snapshot.ondisk.lineage import Start
from ddpjob_trainer.snapshot.restore import resume
from support.patience import wait_for
from support.snapshots import await_snapshot, error, flip
from support.tiers import some_in_gate

DATA = TensorDataset(torch.randn(60, 4, generator=torch.Generator().manual_seed(1)))
STEPS = (12, 16, 20)  # of the snapshots, as keep is 3; an epoch has 10 steps
KILLED, TOTAL = 22, 26
EXTENTS = {"newest": STEPS[-1:], "all but one": STEPS[1:], "all": STEPS}
ALL_WELL = {0: 0, 1: 0, 2: 0}
REFUSED = {0: 64, 1: 75, 2: 75}
Before = tuple[Path, list[str]]  # a directory, and what each rank of another one ends with


def program(directory: Path, harm: Callable[[int], object] = lambda rank: None) -> Any:
    """Train in ``directory``; of the first attempt all ranks are killed."""

    def train(rank: int) -> None:
        first = os.environ["DDPJOB_ATTEMPT"] == "1"
        os.environ["DDPJOB_SNAPSHOT_DIR"] = str(directory / "job")
        harm(rank)
        run = ddp.start(total_steps=TOTAL, global_batch=6, snapshots=ddp.Snapshots(every=4))
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 300), nn.Tanh(), nn.Dropout(0.1), nn.Linear(300, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        wrapped, _ = run.prepare(model, optimizer, bucket_cap_mb=0.001)
        for step in run.steps(DATA):
            if first and step.index % 4 == 2 and step.index > 4:
                await_snapshot(directory / "job/00000001", step.index - 2)
            if first and step.index == KILLED:  # the last was read back, so the fourth is gone
                fourth = directory / "job/00000001" / manifest.file_name(STEPS[0] - 4)
                wait_for(lambda path=fourth: not path.exists(), f"that {fourth} is removed")
                os.kill(os.getpid(), signal.SIGKILL)
            for (x,) in step.batches:
                step.backward(wrapped(x).pow(2).sum())
            step.commit()
        (directory / f"end-{rank}").write_text(f"{run.weights_sha256()} {run.state_sha256()}")
        run.finish()

    return train


def job(attempt: int) -> dict[str, str]:
    """What the operator says of it."""
    known = {"DDPJOB_SNAPSHOT_STEP": "20"} if attempt > 1 else {}
    return {"DDPJOB_UID": "u", "DDPJOB_ATTEMPT": str(attempt), "DDPJOB_SNAPSHOT_KEEP": "3"} | known


def ended(directory: Path) -> list[str]:
    """What each rank ends with: its weights, and its whole state."""
    return [path.read_text() for path in sorted(directory.glob("end-*"))]


@pytest.fixture(scope="module")
def before(tmp_path_factory, gang_in) -> Before:
    """A directory as the killed gang left it, and what an undisturbed one ends with."""
    found = {}
    for attempt in (1, 9):
        gang = gang_in(tmp_path_factory.mktemp("gang"))
        found[attempt] = tmp_path_factory.mktemp("job")
        env = job(1) | {"DDPJOB_ATTEMPT": str(attempt)}  # the ninth is not killed
        codes = gang.run(program(found[attempt]), env=env)
        assert set(codes.values()) <= ({-9, 75} if attempt == 1 else {0}), gang.last_words()
    steps = [manifest.step_of(p.name) for p in manifest.listed(found[1] / "job/00000001")]
    assert set(STEPS) <= set(steps)
    assert len(ended(found[9])) == 3
    return found[1], ended(found[9])


@pytest.fixture
def harmed(before: Before, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(before[0], tmp_path / "copy"))


def files(directory: Path, steps: tuple[int, ...]) -> Iterator[Path]:
    """Rank 1's."""
    for step in steps:
        yield from directory.glob(f"job/00000001/step-{step:012d}-*-1.safetensors")


def refused(gang: Any, directory: Path) -> None:
    assert gang.run(program(directory), env=job(2)) == REFUSED, gang.log(0)
    assert "status says that there was one of step 20" in gang.log(0)


def resumed(
    gang: Any, directory: Path, before: Before, run: Any = None, *, attempt: int = 2,
    after: int = 20, **env: str,
) -> None:  # fmt: skip
    """Run an attempt: it goes on after a step, and ends in equal bits."""
    run = run or program(directory)
    assert gang.run(run, env=job(attempt) | env) == ALL_WELL, gang.log(0)
    assert f"resuming after step {after}" in gang.log(0)
    assert ended(directory) == before[1]


DAMAGES: dict[str, Callable[[Path], object]] = {
    "file missing": Path.unlink,
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "flipped bit": lambda path: flip(path, path.stat().st_size // 2),
    "wrong size": lambda path: path.write_bytes(path.read_bytes() + b"more"),
    "flipped bit of the manifest": lambda path: flip(
        path.with_name(manifest.file_name(int(path.name[5:17]))), 300
    ),
}
SLOW = pytest.mark.tier("all")


@pytest.mark.fault("S3")
@pytest.mark.parametrize("extent", EXTENTS)
@pytest.mark.parametrize("fault", some_in_gate(DAMAGES, "flipped bit"))
def test_damaged(gang, before, harmed, fault, extent):
    for path in files(harmed, EXTENTS[extent]):
        DAMAGES[fault](path)
    there = sorted(harmed.glob("job/*/*"))
    if extent == "all":
        refused(gang, harmed)
        words = "the manifest" if "manifest" in fault else "step-000000000020-"
        assert f"What failed: 00000001/{manifest.file_name(20)}: {words}" in gang.log(0)
        assert there == sorted(harmed.glob("job/*/*"))
        return
    left = {"newest": 16, "all but one": 12}[extent]
    resumed(gang, harmed, before, after=left)
    assert f"the newest usable one is of step {left}" in gang.log(0)
    assert not list(harmed.glob("job/*/*.invalid"))


UNREADABLE = [
    pytest.param(
        odd, extent, how, marks=[] if (extent, how) == ("all", ("wrong bits", "EIO")[odd]) else SLOW
    )
    for odd in (0, 1)
    for extent in EXTENTS
    for how in ("wrong bits", "EIO")
]


@pytest.mark.fault("S4")
@pytest.mark.parametrize(("odd", "extent", "how"), UNREADABLE)
def test_unreadable_for_one_rank(gang, before, harmed, odd, extent, how):
    """That rank ends as a failed GPU does; nothing is renamed, and elsewhere all goes on."""

    def sick(rank: int) -> None:
        resume._RETRY_SECONDS = 0.5
        opened = manifest.opened
        suffix = tuple(f"{step:012d}" for step in EXTENTS[extent])

        def opens(directory: Path, file: manifest.DataFile) -> Any:
            if rank == odd and file.name[5:17] in suffix:
                if how == "EIO":
                    raise error(errno.EIO)
                file = manifest.DataFile(file.name, file.bytes + 1, file.crc32)
            return opened(directory, file)

        manifest.opened = opens

    codes = gang.run(program(harmed, sick), env=job(2))
    assert codes == {rank: 74 if rank == odd else 75 for rank in range(3)}, gang.log(0)
    assert f"rank {odd} cannot read a snapshot" in gang.log(odd)
    resumed(gang, harmed, before, attempt=3)


@pytest.mark.tier("all")
@pytest.mark.fault("S4")
def test_start_record_unreadable_for_rank_0(gang, before, harmed):
    """Else its snapshots would be passed over, and removed later."""

    def sick(rank: int) -> None:
        read = lineage.read_start

        def reads(folders: Any, number: int) -> Start:
            if rank == 0 and number == 1:
                raise ValueError("its bits are wrong")
            return read(folders, number)

        lineage.read_start = reads

    assert gang.run(program(harmed, sick), env=job(2)) == {0: 74, 1: 75, 2: 75}, gang.log(0)
    resumed(gang, harmed, before, attempt=3)


@pytest.mark.fault("S4")
@pytest.mark.parametrize("extent", [pytest.param("newest", marks=SLOW), "all"])
def test_listing_stale(gang, before, harmed, extent):
    """As rank 0's node has read it before the last snapshots were made."""

    def stale(rank: int) -> None:
        names = disk.names
        late = {manifest.file_name(step) for step in EXTENTS[extent]}
        disk.names = lambda path: [n for n in names(path) if rank or n not in late]

    resumed(gang, harmed, before, program(harmed, stale))


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A volume of 4 MiB."""
    where = tmp_path / "small"
    where.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(where)]
    if os.geteuid() or subprocess.run(mount, check=False).returncode:
        pytest.skip("mounting a small volume needs root")
    yield where
    subprocess.run(["umount", str(where)], check=True)


@pytest.mark.fault("S2")
def test_disk_full(gang, before, harmed, small):
    """A start needs some room: it takes what was kept for it. Saves fail, and training goes on."""
    shutil.copytree(harmed, small, dirs_exist_ok=True)
    assert disk.exists(small / "job" / disk.RESERVE)
    with (small / "fill").open("wb", buffering=0) as fill, contextlib.suppress(OSError):
        while fill.write(bytes(4096)):
            pass
    assert os.statvfs(small).f_bavail == 0
    assert gang.run(program(small), env=job(2)).keys() == {0, 1, 2}
    assert "resuming after step 20" in gang.log(0)
    (small / "fill").unlink()
    resumed(gang, small, before, attempt=3)
