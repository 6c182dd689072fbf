"""Snapshots as the training loop makes them: states that change, ranks and disks that are lost."""

import contextlib
import errno
import itertools
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpjob_trainer as ddp
from ddpjob_trainer.snapshot import manager
from ddpjob_trainer.snapshot.ondisk import disk, manifest
from ddpjob_trainer.snapshot.restore import load
from ddpjob_trainer.snapshot.save import layout
from ddpjob_trainer.snapshot.save.parts import PartReports, Report
from ddpjob_trainer.state.codec import unflatten
from support.patience import PATIENCE, wait_for
from support.snapshots import await_snapshot, error, flip, whole

DATA = TensorDataset(torch.randn(60, 4, generator=torch.Generator().manual_seed(1)))


def begin(directory: Path, total: int = 6, events: Any = None, **kept: Any) -> tuple[ddp.Run, Any]:
    snapshots = ddp.Snapshots(**{"directory": directory, "every": 2} | kept)
    logging = ddp.Logging(events=events)
    run = ddp.start(total_steps=total, global_batch=6, snapshots=snapshots, logging=logging)
    model = nn.Sequential(nn.Linear(4, 300), nn.Tanh(), nn.Dropout(0.1), nn.Linear(300, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return run, run.prepare(model, optimizer, bucket_cap_mb=0.001)[0]


def train(run: ddp.Run, wrapped: nn.Module, each: Callable[[int], None] = lambda _: None) -> None:
    """``each`` is called with the finished steps at the start of a step."""
    for step in run.steps(DATA):
        each(step.index)
        for (x,) in step.batches:
            step.backward(wrapped(x).pow(2).sum())
        step.commit()


def stored(directory: Path) -> dict[int, Any]:
    found = {}
    for path in sorted(directory.glob("*/step-*.json")):
        content = manifest.read(path)
        found[content.step] = unflatten(whole(load.open_source(path.parent, content)))
    return found


class Notes:
    def __init__(self) -> None:
        self.value: Any = 0
        self.calls = 0

    def state_dict(self) -> dict[str, Any]:
        self.calls += 1
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def spoil(what: str, notes: Notes, mine: dict[str, Any]) -> None:
    if what == "shape":
        mine["mine"] = torch.full((5,), 7.0)
    else:
        notes.value = {1} if what == "a set" else "x" * 30_000


A_SET = "cannot store registered/notes/value: a set"
TOO_LARGE = "names and numbers take 30"
UNLIKE = "rank {} holds parameters or optimizer state of other names or shapes"
ALL = (0, 1, 2)
#: What cannot be stored; from which step, on which ranks; where the run ends; by whom, and how the
#: others end.
NEVER = [
    pytest.param("a set", -1, ALL, 0, 0, A_SET, {64}, id="at the start"),
    pytest.param("too large", -1, ALL, 0, 0, TOO_LARGE, {64}, id="too large at the start"),
    pytest.param("a set", 0, ALL, 2, 0, A_SET, {64, 75}, id="with the first step"),
    pytest.param("a set", 3, (0,), 40, 0, A_SET, {75}, id="later on rank 0"),
    pytest.param("a set", 3, (1,), 40, 1, A_SET, {75}, id="later on rank 1"),
    # Divided between them, parts would not belong together.
    pytest.param("shape", 3, (1,), 40, 0, UNLIKE.format(1), {75}, id="another shape on rank 1"),
    pytest.param("shape", 3, (2,), 40, 0, UNLIKE.format(2), {75}, id="another shape on rank 2"),
]


@pytest.mark.parametrize(("what", "since", "odd", "end", "named", "why", "others"), NEVER)
def test_what_can_never_be_stored_ends_the_run(
    gang, tmp_path, what, since, odd, end, named, why, others
):
    """It would train to its end without a snapshot, and say so each time."""

    def program(rank: int) -> None:
        if what == "too large":
            disk.MAX_JSON_BYTES = 20_000
        every = 2 if since == 3 else 50
        run, wrapped = begin(tmp_path / "snapshots", 60, every=every)
        run.register("notes", notes := Notes())
        if since < 0:
            spoil(what, notes, {})

        def each(step: int) -> None:
            assert step < end
            if rank in odd and step >= since:
                optimizer = run._ready("the test").state.registered["optimizer"]
                spoil(what, notes, optimizer.state[next(wrapped.parameters())])

        train(run, wrapped, each)

    codes = gang.run(program)
    assert f"ConfigError: no snapshot can be made: {why}" in gang.log(named)
    assert codes.pop(named) == 64, gang.log(0)
    assert set(codes.values()) <= others, gang.log(0)
    assert list(stored(tmp_path / "snapshots")) == [2] * (since == 3)


def test_a_script_may_change_its_directory(gang, tmp_path, monkeypatch):
    """Read here, written there: each restart would begin at step 0."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)

    def program(total: int, rank: int) -> None:
        run, wrapped = begin(Path("snapshots"), total, events="events")
        os.chdir("elsewhere")
        train(run, wrapped)
        run.finish()

    assert gang.run(partial(program, 4)) == {0: 0, 1: 0, 2: 0}, gang.log(0)
    assert gang.run(partial(program, 6)) == {0: 0, 1: 0, 2: 0}, gang.log(0)
    assert "resuming after step 4" in gang.log(0)
    assert not list((tmp_path / "elsewhere").iterdir())


OUT_OF_MEMORY = "rank 2: no memory to stage it in: Cannot allocate memory; training goes on"


@pytest.mark.parametrize(
    ("what", "odd", "why"),
    [
        ("memory", 2, OUT_OF_MEMORY),
        ("room", 1, ""),  # skipped, and no alarm yet
        ("error", 1, "ValueError: odd"),  # others may wait for this rank in there: it must end
    ],
)
def test_what_fails_on_one_rank_costs_one_snapshot(gang, tmp_path, what, odd, why):
    def program(rank: int) -> None:
        run, wrapped = begin(tmp_path / "snapshots", keep=9)
        notes = Notes()
        run.register("notes", notes)
        take, free, calls = layout.Pool.take, layout.Pool.free, []

        def each(step: int) -> None:
            notes.value, bad = step, rank == odd and step == 3
            calls.append(notes.calls)
            if what == "error" and bad:
                notes.state_dict = Mock(side_effect=ValueError("odd"))  # type: ignore[method-assign]
            if what == "room":
                layout.Pool.free = (lambda _: False) if bad else free
            if what == "memory":
                layout.Pool.take = Mock(side_effect=error(errno.ENOMEM)) if bad else take

        train(run, wrapped, each)
        collected = [after > before for before, after in itertools.pairwise(calls)]
        assert collected[1]
        assert collected[3] == (what != "room"), "a state_dict() may take a while"
        run.finish()

    codes = gang.run(program)
    if what == "error":
        assert codes == {0: 75, 1: 1, 2: 75}, gang.log(0)
        assert why in gang.log(1)
        return
    assert codes == {0: 0, 1: 0, 2: 0}, gang.log(0)
    assert list(stored(tmp_path / "snapshots")) == [2, 6]
    assert (f"snapshot after step 4 failed: {why}" in gang.log(0)) == bool(why)
    assert "no snapshot after step 4" not in gang.log(0)
    assert not list(tmp_path.glob("snapshots/*/step-000000000004-*"))


def stepping(directory: Path, unseen: int | None = None) -> Callable[[int], None]:
    """A program of 8 steps. ``unseen``: the rank with a disk of its own."""

    def program(rank: int) -> None:
        place = directory / ("elsewhere" if rank == unseen else "snapshots")
        snapshots = ddp.Snapshots(directory=place, every=2, staging="thread")
        run = ddp.start(total_steps=8, global_batch=6, snapshots=snapshots)
        model = nn.Sequential(nn.Linear(4, 300), nn.Tanh(), nn.Linear(300, 2))
        groups: Any = [{"params": [*model[0].parameters()]},
                       {"params": [*model[2].parameters()], "lr": 0.03}]  # fmt: skip
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        wrapped, _ = run.prepare(model, optimizer, bucket_cap_mb=0.001)

        def each(step: int) -> None:
            if step in (3, 5):  # so that none up to 6 is left out
                await_snapshot(max((directory / "snapshots").glob("0*")), step - 1)

        train(run, wrapped, each)
        (directory / f"end-{rank}").write_text(f"{run.weights_sha256()} {run.state_sha256()}")
        run.finish()

    return program


def test_a_rank_that_dies_within_a_snapshot_costs_only_that(gang, tmp_path):
    """Its part is on disk and nobody was told; of the one before, another's part is torn."""
    calm, wild = tmp_path / "calm", tmp_path / "wild"
    for directory in (calm, wild):
        directory.mkdir()
    assert gang.run(stepping(calm)) == {0: 0, 1: 0, 2: 0}, gang.log(0)

    def killed(rank: int) -> None:
        post = PartReports.post

        def dies(self: PartReports, step: int, report: Report) -> None:
            if rank == 1 and step == 6:
                assert report.bytes > 0, "its part is durable"
                os.kill(os.getpid(), signal.SIGKILL)
            post(self, step, report)

        PartReports.post = dies  # type: ignore[method-assign]
        stepping(wild)(rank)

    assert gang.run(killed) == {0: 75, 1: -9, 2: 75}, gang.log(0)
    assert list(stored(wild / "snapshots")) == [2, 4]
    (part,) = wild.glob("snapshots/*/step-000000000004-*-2.safetensors")
    flip(part, -3)
    assert gang.run(stepping(wild)) == {0: 0, 1: 0, 2: 0}, gang.log(0)
    assert "resuming after step 2" in gang.log(0)
    for rank in range(3):
        assert (wild / f"end-{rank}").read_text() == (calm / f"end-{rank}").read_text()


def test_a_rank_that_does_not_see_the_directory_writes_nothing(gang, tmp_path):
    assert gang.run(stepping(tmp_path, unseen=2)) == {0: 0, 1: 0, 2: 0}, gang.log(0)
    assert "1 of 3 ranks do not see rank 0's snapshot directory" in gang.log(0)
    found = stored(tmp_path / "snapshots")[8]["registered"]["optimizer"]["state"]
    assert [sorted(entry) for entry in found.values()] == [["exp_avg", "exp_avg_sq", "step"]] * 4
    assert gang.run(stepping(tmp_path, unseen=2)) == {0: 0, 1: 0, 2: 0}, gang.log(0)
    assert "resuming after step 8" in gang.log(0)


@pytest.mark.fault("S5", "N7")
def test_a_stopped_gang_that_wakes_up_later_hurts_nobody(gang, tmp_path, wait_until):
    """All ranks of attempt 1, in the midst of a step, while attempt 2 trains on."""
    root, go = tmp_path / "snapshots", tmp_path / "go"
    total = 12

    def program(rank: int) -> None:
        attempt = os.environ["DDPJOB_ATTEMPT"]
        run, wrapped = begin(root, total, keep=9)

        def each(step: int) -> None:
            if attempt == "1" and step == 5:
                (tmp_path / f"there-{rank}").touch()
                while not go.exists():
                    time.sleep(0.01)
            if attempt == "2" and step == 9:
                await_snapshot(root / "00000002", 8)
                os.kill(os.getpid(), signal.SIGKILL)

        train(run, wrapped, each)
        (tmp_path / f"result-{attempt}-{rank}").write_text(run.weights_sha256())
        run.finish()

    def env(attempt: int) -> dict[str, str]:
        return {"DDPJOB_UID": "u", "DDPJOB_ATTEMPT": str(attempt)}

    zombies = type(gang)(tmp_path / "zombies")
    zombies.directory.mkdir()
    try:
        zombies.start(program, env=env(1))
        wait_until(lambda: len(list(tmp_path.glob("there-*"))) == 3, "attempt 1 in step 5")
        await_snapshot(root / "00000001", 4)
        stopped = list(zombies.pids.values())
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        go.touch()
        assert set(gang.run(program, env=env(2)).values()) <= {-signal.SIGKILL, 75}, gang.log(0)
        taken_over = sorted(path.name for path in (root / "00000002").iterdir())
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        assert zombies.wait() == {0: 0, 1: 0, 2: 0}, zombies.log(0)
    finally:
        zombies.end()
    await_snapshot(root / "00000001", total)
    assert sorted(path.name for path in (root / "00000002").iterdir()) == taken_over
    assert gang.run(program, env=env(3)) == {0: 0, 1: 0, 2: 0}, gang.log(0)
    assert "resuming after step 4" in gang.log(0)
    assert "resuming after step 8" in gang.log(0)
    results = {path.read_text() for path in tmp_path.glob("result-*")}
    assert len(results) == 1


# --- An object store --------------------------------------------------------------------------


def wait_for_upload(store: Path, each: Callable[[], object]) -> None:
    def arrived() -> bool:
        each()  # as further steps would
        # A manifest may have its name before its content.
        with contextlib.suppress(manifest.InvalidSnapshotError, FileNotFoundError):
            whole = [manifest.read(path) for path in store.glob("*/step-*.json")]
            return bool(whole and [*store.glob("*/start.json")])
        return False

    wait_for(arrived, "an upload", every=0.01)


@pytest.mark.fault("S6")
@pytest.mark.parametrize("disks", ["one", "one each"])
def test_a_gang_whose_disk_is_lost_goes_on_from_the_store(gang, tmp_path, disks, monkeypatch):
    """A disk for all ranks, or an emptyDir in each pod, which nobody else sees."""
    store = tmp_path / "store"
    monkeypatch.setattr(manager, "_LAST_UPLOAD_SECONDS", PATIENCE)  # the last is looked for below

    def program(disk: str, rank: int, *, lost: bool = False) -> None:
        place = tmp_path / f"{disk}{'' if disks == 'one' else rank}"
        run, wrapped = begin(place, 8, upload="" if disk == "undisturbed" else f"file://{store}")

        def each(step: int) -> None:
            if lost and step == 5:
                wait_for_upload(store, run._process.snapshots.report)
                os._exit(9)

        train(run, wrapped, each)
        hashes = run.weights_sha256() + run.state_sha256()
        (tmp_path / f"hash-{disk}-{rank}").write_text(hashes)
        run.finish()

    assert gang.run(partial(program, "undisturbed")) == {0: 0, 1: 0, 2: 0}
    assert gang.run(partial(program, "first", lost=True)) == {0: 9, 1: 9, 2: 9}, gang.log(0)
    assert gang.run(partial(program, "second")) == {0: 0, 1: 0, 2: 0}, gang.log(0)
    assert "fetched the snapshot of step" in gang.log(0)
    assert "resuming after step" in gang.log(0)
    missed = gang.log(0).count("Give all pods one shared volume")
    assert missed == (disks == "one each"), "without a store, once; with one it is not missed"
    hashes = [(tmp_path / f"hash-{disk}-0").read_text() for disk in ("undisturbed", "second")]
    assert hashes[0] == hashes[1]
    assert len(list(store.glob("*/step-000000000008.json"))) == 1  # before the end
