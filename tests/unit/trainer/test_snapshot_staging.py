"""A rank's part on its way to the disk: memory that it is staged in, and what the status names."""

import queue
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.distributed import TCPStore

from ddpjob_trainer.environment import SnapshotSettings
from ddpjob_trainer.gpu.accelerator import Accelerator
from ddpjob_trainer.snapshot import manager
from ddpjob_trainer.snapshot.manager import SnapshotManager
from ddpjob_trainer.snapshot.ondisk.files import SnapshotFiles
from ddpjob_trainer.snapshot.save import layout
from ddpjob_trainer.snapshot.save import writer as writer_module
from ddpjob_trainer.snapshot.save.layout import Captured, Pool
from ddpjob_trainer.snapshot.save.parts import PartReports, Report
from ddpjob_trainer.snapshot.save.writer import SnapshotWriter, StagedPart, versions_of
from ddpjob_trainer.state.codec import Flat
from support.patience import PATIENCE, wait_for
from support.sealed import board

EMPTY = Captured(Flat({}, {}), frozenset(), {})


class Pins(Accelerator):
    """Takes down what is asked of it. ``full``: nothing can be page-locked any more."""

    queues = True

    def __init__(self, *, full: bool = False) -> None:
        super().__init__(torch.device("cpu"))
        self.full = full
        self.pinned: list[int] = []
        self.waits: list[Any] = []
        self.calls: list[tuple[str, int]] = []

    def saving(self, ready: Any) -> Any:
        self.waits.append(ready)
        return super().saving(ready)

    def enter(self) -> None:
        self.calls.append(("enter", threading.get_ident()))

    def pin(self, memory: torch.Tensor) -> bool:
        self.calls.append(("pin", threading.get_ident()))
        if self.full:
            raise RuntimeError("CUDA error: out of memory (2)\nsee the documentation")
        self.pinned.append(memory.data_ptr())
        return True

    def unpin(self, memory: torch.Tensor) -> None:
        self.pinned.remove(memory.data_ptr())


def writing(root: Path, rank: int, device: Accelerator, reports: Any = None) -> SnapshotWriter:
    reports = reports or SimpleNamespace(writers=(0,), board=None)
    return SnapshotWriter(rank, SnapshotFiles(root, 1, "n", 2), reports, device)


def test_memory_is_reused_and_what_is_pinned_is_unpinned():
    device = Pins()
    pool, seen = Pool(device), {}
    pool.prepare(1 << 20)
    assert len(device.pinned) == 2
    for turn in range(20):  # a state that grows a little gets no new memory each time
        buffer = pool.take((1 << 20) + turn * 8192)
        seen[id(buffer.memory)] = buffer.memory
        buffer.busy = False
    pool.close()
    assert len(seen) <= 5
    assert device.pinned == []


def test_memory_that_cannot_be_pinned_is_used_and_named_once(monkeypatch, capfd):
    monkeypatch.setattr(layout, "_warned_unpinned", False)
    device = Pins(full=True)
    pool = Pool(device)
    pool.prepare(5000)
    buffer = pool.take(5000)
    buffer.copy([(8 + 4 * n, torch.tensor([float(n)])) for n in range(4)], device, "mark")
    assert buffer.memory[8:24].view(torch.float32).tolist() == [0, 1, 2, 3]
    assert device.waits == ["mark"], "once for all"
    buffer.busy = False
    pool.close()
    words = capfd.readouterr().err
    assert words.count("cannot be page-locked (CUDA error: out of memory (2))") == 1


def test_the_thread_names_its_gpu_before_it_asks_for_anything(tmp_path):
    """Else each rank's would make a context on the first."""
    device = Pins()
    writer = writing(tmp_path, 0, device)
    writer.prepare(EMPTY)
    wait_for(lambda: len(device.calls) >= 3, "its calls", every=0.005)
    writer.close()
    calls = [name for name, thread in device.calls if thread != threading.get_ident()]
    assert calls == ["enter", "pin", "pin"]


def test_what_changes_while_it_is_copied_is_no_snapshot(tmp_path):
    """Half of it might be of the next step: Embedding(max_norm=...) writes in its forward."""
    posted: queue.Queue[tuple[int, Report]] = queue.Queue()
    reports = SimpleNamespace(writers=(0,), board=None, post=lambda *found: posted.put(found))
    writer = writing(tmp_path, 1, Pins(), reports)
    weight = torch.nn.Parameter(torch.ones(4))
    buffer = writer.pool.take(16)
    assert buffer is not None
    later = ((0, weight.detach()[2:]),)
    part = StagedPart(
        3, 0.0, "file", buffer, later, "mark", versions_of(later), Report(1, 16), None
    )
    assert not part.changed()
    with torch.no_grad():
        weight.mul_(0.5)
    writer.submit(part)
    try:
        step, report = posted.get(timeout=PATIENCE)
    finally:
        writer.close()
    assert step == 3
    assert "was changed before the next update while it was copied" in report.text


def test_a_wait_is_said_again_each_time_that_it_has_doubled(tmp_path, monkeypatch):
    reports = PartReports(board(), (0, 2))
    monkeypatch.setattr(writer_module.threading.Thread, "start", lambda _: None)
    writer = writing(tmp_path, 0, Accelerator(torch.device("cpu")), reports)
    monkeypatch.setattr(writer.pool, "take", Mock(side_effect=MemoryError))

    def at(seconds: float) -> str:
        monkeypatch.setattr(writer_module.time, "perf_counter", lambda: seconds)
        return writer.behind()

    assert at(100) == "", "nothing is being written"
    writer.save(8, 0.0, EMPTY, {})
    assert [s for s in range(5, 1000, 5) if at(s)] == [60, 120, 240, 480, 960]
    writer.save(9, 0.0, EMPTY, {})  # the one before is no longer in its way
    assert "that of step 8 for 70 s by rank 2. Is its volume slow, or stuck?" in at(70)
    reports.post(8, Report(2))
    assert reports.complete(8)  # rank 0 is writing the manifest
    assert "by rank 0." in at(140)


def test_more_than_the_store_takes_is_a_failed_snapshot():
    """torch's own would cut the rank off, at this snapshot and after each restart at the next."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    other = TCPStore("localhost", store.port, is_master=False, wait_for_workers=False)
    mine, theirs = (PartReports(board(one), (0, 1)) for one in (store, other))
    own = tuple((f"rank/1/tensor/objects/history/{n:08}", "F32", (1,)) for n in range(150_000))
    theirs.post(4, Report(1, 9, 9, own=own))
    mine.post(4, Report(0, 9, 9))
    found = mine.complete(4)
    assert found[0].text == ""
    assert "takes 8 MiB, more than 7: register fewer tensors with per_rank" in found[1].text


@pytest.mark.parametrize(
    ("ends", "url", "named"),
    [
        pytest.param(False, "", [50], id="read back"),
        pytest.param(False, "s3://x", [50], id="read back, and uploaded later"),
        pytest.param(True, "s3://x", [25, 50], id="ends with its pod: uploaded"),
        pytest.param(True, "", [50], id="ends with its pod, and nothing is uploaded"),
    ],
)
def test_the_status_names_what_was_read_back_or_uploaded(tmp_path, ends, url, named):
    settings = SnapshotSettings(tmp_path, 25, 2, resume=True, upload=url, ends_with_pod=ends)
    progress = Mock()
    snapshots = SnapshotManager(settings, Mock(rank=1), progress)
    snapshots.receive([51.0, 26.0, 51.0, 0.0, 0.0])  # step 50 was read back, 25 was uploaded
    assert snapshots.newest == 50
    snapshots.receive([51.0, 51.0, 51.0, 0.0, 0.0])
    assert [call.args[0] for call in progress.saved.call_args_list] == named


@pytest.mark.parametrize(("rescued", "named"), [({}, 11), ({"rank": 1, "newest": 8}, 8)])
def test_a_rescue_is_no_progress(monkeypatch, tmp_path, rescued, named):
    """Else a failure at the same step would be met for ever."""
    manifest: Any = SimpleNamespace(config={"rescued": rescued} if rescued else {})
    found: Any = SimpleNamespace(source=SimpleNamespace(step=11, manifest=manifest))
    monkeypatch.setattr(manager, "resume", lambda *_: found)
    monkeypatch.setattr(manager, "compare_configs", Mock())
    monkeypatch.setattr(SnapshotManager, "_open", Mock())
    progress = Mock()
    settings = SnapshotSettings(tmp_path, 25, 2, resume=True)
    snapshots = SnapshotManager(settings, Mock(rank=1), progress)
    assert snapshots.restore(Mock(), {}, 1) == (11, manifest.config)
    progress.saved.assert_called_once_with(named)
    assert (snapshots.made, snapshots.newest) == (11, named)
