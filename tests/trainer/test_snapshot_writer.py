"""Three ranks' writer threads: killed with their rank, failed and held up at every operation."""

import errno
import os
import re
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch._C._distributed_c10d import FileStore, HashStore, Store

from ddpjob_trainer.errors import HardwareError
from ddpjob_trainer.gpu import accelerator
from ddpjob_trainer.snapshot.manager import SnapshotManager
from ddpjob_trainer.snapshot.ondisk import disk, manifest
from ddpjob_trainer.snapshot.ondisk.files import SnapshotFiles
from ddpjob_trainer.snapshot.ondisk.manifest import DataFile
from ddpjob_trainer.snapshot.restore.load import Source, open_source
from ddpjob_trainer.snapshot.save import writer as writer_module
from ddpjob_trainer.snapshot.save.layout import Captured, Pool
from ddpjob_trainer.snapshot.save.parts import PartReports, ReadBack
from ddpjob_trainer.snapshot.save.writer import Outcome, SnapshotWriter, StagedPart
from ddpjob_trainer.state.codec import flatten
from support.patience import PATIENCE, wait_for
from support.sealed import board
from support.snapshots import error, flip, open_snapshots, state, step_of, whole

RANKS = 3
CPU = accelerator.of(torch.device("cpu"))
SOON = 0.005


def rank_of(path: Path) -> int:
    """Whose thread works on a file: rank 0's makes manifests."""
    name = path.name
    return int(name.rpartition("-")[2].partition(".")[0]) if ".safetensors" in name else 0


class Seam:
    """Does as ordered, once, before or after an operation on a rank's files; removals apart."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._order: tuple[int, int] | None = None
        self._action: Callable[[], None] = lambda: None
        self.counted: Counter[int] = Counter()  # by rank

    def give(self, rank: int, point: int, action: Callable[[], None]) -> None:
        with self._lock:
            self.counted.clear()
            self._order, self._action = (rank, point), action

    def __call__(self, operation: str, path: Path) -> None:
        if operation.endswith(("unlink", "rmtree")):
            return
        rank = rank_of(path)
        with self._lock:
            due = self._order == (rank, self.counted[rank])
            self.counted[rank] += 1
            self._order = None if due else self._order
        if due:
            self._action()


class Rank:
    """What a rank's training thread does, without training."""

    def __init__(self, rank: int, files: SnapshotFiles, told: Store) -> None:
        self._rank = rank
        reports = PartReports(board(told, rank), tuple(range(RANKS)))
        self.writer = SnapshotWriter(rank, files, reports, CPU, later=True)

    def begin(self, step: int) -> None:
        own = {f"rank/{self._rank}/own": torch.full((3,), self._rank)}
        captured = Captured(flatten(state(step)), frozenset({"model/w"}), own)
        self.writer.save(step, time.perf_counter(), captured, {})


class Ranks:
    def __init__(self, root: Path, attempt: int = 1) -> None:
        store, self.loaded = open_snapshots(root, attempt)
        self.files, self.directory = store.files, store.directory
        told = HashStore()
        self._ranks = [Rank(rank, self.files, told) for rank in range(RANKS)]
        self.writers = [rank.writer for rank in self._ranks]

    def begin(self, step: int) -> None:
        for rank in self._ranks:
            rank.begin(step)

    def settle(self) -> list[Outcome]:
        for writer in self.writers:
            writer.wait_written()
        self.writers[0].wait_settled()
        return self.writers[0].outcomes()

    def save(self, step: int) -> str:
        """Why it failed; empty: it is durable."""
        self.begin(step)
        outcome, *verified = self.settle()
        assert outcome.step == step
        assert [(o.step, o.verified) for o in verified] == [(step, True)] * (not outcome.text)
        return outcome.text or verified[0].text

    def close(self) -> None:
        for writer in self.writers:
            writer.close()


@pytest.fixture
def open_ranks() -> Iterator[Any]:
    opened: list[Ranks] = []

    def make(root: Path, attempt: int = 1) -> Ranks:
        opened.append(Ranks(root, attempt))
        return opened[-1]

    yield make
    for ranks in opened:
        ranks.close()


def check(source: Source | None, step: int) -> None:
    assert step_of(source) == step
    assert source is not None
    for rank in range(RANKS):
        assert whole(source).tensors[f"rank/{rank}/own"].tolist() == [rank] * 3


def check_listed(ranks: Ranks, step: int) -> None:
    """Compare the newest in their directory."""
    newest = manifest.listed(ranks.directory)[-1]
    check(open_source(ranks.directory, manifest.read(newest)), step)


def steps_of(ranks: Ranks) -> list[int]:
    return manifest.steps(disk.names(ranks.directory))


@pytest.fixture
def seam(monkeypatch: pytest.MonkeyPatch) -> Seam:
    found = Seam()
    monkeypatch.setattr(disk, "seam", found)
    return found


@pytest.fixture
def saving(tmp_path, open_ranks, seam):
    """Ranks whose threads follow orders, with one snapshot."""
    ranks = open_ranks(tmp_path / "root")
    assert ranks.save(1) == ""
    return ranks


def points_of_a_save(ranks: Ranks, seam: Seam) -> list[tuple[int, int]]:
    """Rank and number of each time before and after an operation; what is removed left aside."""
    seam.counted.clear()
    assert ranks.save(2) == ""
    counts = [seam.counted[rank] for rank in range(RANKS)]
    assert counts[0] > counts[1] == counts[2] >= 6, counts
    return [(rank, point) for rank in range(RANKS) for point in range(counts[rank])]


def wait_removed(ranks: Ranks, step: int) -> None:
    pattern = f"step-{step:012d}-{ranks.files.nonce}*"
    wait_for(lambda: not list(ranks.directory.glob(pattern)), f"{pattern} is removed", every=SOON)


@pytest.mark.fault("S1")
def test_a_rank_killed_at_any_operation_of_its_writer(gang, saving, seam, tmp_path):
    """The one before is loaded, or this one if its manifest had its name."""
    points = points_of_a_save(saving, seam)
    saving.close()
    root, newest, done = saving.files.root, 2, []
    for attempt, (victim, point) in enumerate(points, 2):
        store, loaded = open_snapshots(root, attempt)
        check(loaded, newest)

        def program(rank: int) -> None:
            seam.give(victim, point, lambda: os.kill(os.getpid(), signal.SIGKILL))  # noqa: B023
            told = FileStore(str(tmp_path / f"told-{attempt}"), RANKS)  # noqa: B023
            mine = Rank(rank, store.files, told)  # noqa: B023
            mine.begin(newest + 1)  # noqa: B023
            mine.writer.wait_written()
            if rank == victim == 0:  # noqa: B023
                mine.writer.wait_settled()
            # A process that ends while its thread writes to a FileStore leaves half a record there,
            # over which all others then read for ever.
            mine.writer.close()

        codes = gang.run(program)
        assert codes == {r: -9 if r == victim else 0 for r in range(RANKS)}, (victim, point)
        if (store.directory / manifest.file_name(newest + 1)).exists():
            newest += 1
            done.append((victim, point))
    assert done == [point for point in points if point[0] == 0][-3:], "after the rename"
    check(open_snapshots(root, len(points) + 2)[1], newest)


@pytest.mark.fault("S2")
def test_a_save_that_fails_anywhere_is_told_and_the_next_works(saving, seam):
    step = 2
    for rank, point in points_of_a_save(saving, seam):
        seam.give(rank, point, Mock(side_effect=error(errno.EIO)))
        why = f"rank {rank}: " * bool(rank) + os.strerror(errno.EIO)
        assert saving.save(step + 1) == why
        # Perhaps the rename was done; that counts only because all was durable before it.
        done = step + 1 in steps_of(saving)
        check_listed(saving, step + done)
        step += 2
        assert saving.save(step) == ""
        if not done:
            wait_removed(saving, step - 1)
    assert not list(saving.directory.glob("*.tmp"))
    check(open_snapshots(saving.files.root, 2)[1], step)


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize(
    ("place", "name"),
    [(StagedPart, "changed"), (SnapshotFiles, "write"), (SnapshotWriter, "_post")],
)
def test_an_error_beside_training_fails_the_save_or_is_raised_there(
    tmp_path, open_ranks, monkeypatch, place, name, odd
):
    real = getattr(place, name)

    def fails(*args: Any) -> Any:
        files = [one if isinstance(one, str) else getattr(one, "name", "") for one in args]
        if any(file.endswith(f"-{odd}.safetensors") for file in files):
            raise RuntimeError("odd")
        return real(*args)

    ranks = open_ranks(tmp_path)
    assert ranks.save(1) == ""
    monkeypatch.setattr(place, name, fails)
    if name == "_post":
        ranks.begin(2)
        for call in (ranks.writers[odd].wait_written, ranks.writers[odd].outcomes):
            with pytest.raises(RuntimeError, match="odd"):
                call()
        return
    assert ranks.save(2) == "rank 1: " * odd + "RuntimeError: odd"
    monkeypatch.undo()
    assert ranks.save(4) == ""
    check(open_snapshots(tmp_path, 2)[1], 4)


def test_neither_retention_nor_a_buffer_ends_a_thread(tmp_path, open_ranks, monkeypatch, capfd):
    for place, name in ((writer_module, "retain"), (Pool, "prepare")):
        monkeypatch.setattr(place, name, Mock(side_effect=LookupError("odd")))
    ranks = open_ranks(tmp_path)
    ranks.writers[0].prepare(Captured(flatten(state(1)), frozenset(), {}))
    assert [ranks.save(step) for step in (1, 2)] == ["", ""]
    assert "older snapshots were not removed: LookupError: odd" in capfd.readouterr().err


def test_what_three_ranks_save_is_loaded(tmp_path, open_ranks):
    ranks = open_ranks(tmp_path)
    main = ranks.writers[0]
    for step in range(1, 9):  # after each commit older ones are removed
        assert ranks.save(step) == ""
        assert main.mark(step, {"finished": step}) == ""
    assert f"{ranks.directory} is gone" in main.mark(9, {})
    sizes = [f.stat().st_size for f in ranks.directory.glob("step-000000000008-*.safetensors")]
    assert len(sizes) == RANKS
    assert max(sizes) - min(sizes) < 400, "equal shares, but for the headers and rank 0's own"
    loaded = open_snapshots(tmp_path, 2)[1]
    check(loaded, 8)
    assert loaded.manifest.config["finished"] == 8


def test_a_directory_that_is_gone_and_a_manifest_too_large_are_told(
    tmp_path, open_ranks, monkeypatch, capfd
):
    """Removed by hand, or by the retention of another job that began in it later."""
    ranks = open_ranks(tmp_path)
    assert ranks.save(1) == ""
    shutil.rmtree(ranks.directory)
    why = f"{ranks.directory} is gone: it was removed, or another job"
    assert ranks.save(2).startswith(why)
    SnapshotManager._failed(Mock(newest=1), 2, ranks.save(2))
    assert capfd.readouterr().err.endswith("gone with it; training goes on\n")
    ranks.directory.touch()
    assert ranks.save(3).startswith(why)
    ranks.directory.unlink()
    ranks.directory.mkdir()
    assert [ranks.save(step) for step in (4, 5)] == ["", ""]
    with monkeypatch.context() as patch:
        patch.setattr(disk, "MAX_JSON_BYTES", 1 << 10)
        assert ranks.save(6).startswith("names and numbers take "), "none could read it again"
    wait_removed(ranks, 6)
    assert ranks.save(7) == ""
    check_listed(ranks, 7)


def test_who_is_behind_has_no_buffer_and_nobody_waits(tmp_path, open_ranks, monkeypatch):
    """Nor does the copy of the second, which an update waits for, wait for the disk."""
    monkeypatch.setattr(writer_module, "_LONG_SECONDS", 0.0)
    ranks = open_ranks(tmp_path)
    assert ranks.save(1) == ""
    disks = [threading.Event() for _ in range(RANKS)]
    monkeypatch.setattr(disk, "seam", lambda _, path: disks[rank_of(path)].wait(PATIENCE))
    for step in (2, 3):
        ranks.begin(step)
    for writer in ranks.writers:
        writer.wait_copied()
    assert not any(writer.pool.free() for writer in ranks.writers)
    assert ranks.writers[0].pool.take(10) is None
    why = r"that of step 2 for \d+ s by rank 0\. Is its volume slow"
    assert re.search(why, ranks.writers[0].behind()), ranks.writers[0].behind()
    disks[0].set()
    main = ranks.writers[0]
    wait_for(
        lambda: "s by rank 1. Is its volume" in main.behind(), "rank 1 is waited for", every=SOON
    )
    for one in disks:
        one.set()
    done = ranks.settle()
    assert [(o.step, o.text) for o in done if not o.verified] == [(2, ""), (3, "")]
    assert (done[-1].step, done[-1].text, done[-1].verified) == (3, "", True)
    assert ranks.writers[0].behind() == ""
    assert all(writer.pool.free() for writer in ranks.writers)


# --- Read back --------------------------------------------------------------------------------


@pytest.mark.fault("S7")
@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("how", ["flipped", "gone"])
def test_what_was_never_read_back_takes_no_place_of_what_was(
    tmp_path, open_ranks, monkeypatch, rank, how
):
    """The disk loses what it has acknowledged, at each save after the first."""
    ranks = open_ranks(tmp_path)
    assert ranks.save(1) == ""
    commit = SnapshotFiles.commit

    def loses(files: SnapshotFiles, step: int, content: bytes) -> None:
        commit(files, step, content)
        (path,) = files.directory.glob(f"step-{step:012d}-*-{rank}.safetensors")
        (flip if how == "flipped" else Path.unlink)(path)

    with monkeypatch.context() as patch:
        patch.setattr(SnapshotFiles, "commit", loses)
        for step in range(2, 10):
            assert re.match(r"rank \d cannot read it back: step-0+\d-", ranks.save(step))
    check(open_snapshots(tmp_path, 2)[1], 1)
    assert steps_of(ranks)[0] == 1, "whatever keep says"
    if how == "flipped":
        assert steps_of(ranks) == [1, 7, 8, 9], "no disk is filled with what counts for nothing"


@pytest.mark.fault("S4")
@pytest.mark.parametrize("odd", range(RANKS))
def test_a_rank_that_alone_reads_wrong_bits_ends(tmp_path, open_ranks, monkeypatch, odd):
    """Its node's memory, say: the snapshot is good, and counts."""
    ranks = open_ranks(tmp_path)
    assert ranks.save(1) == ""
    read = ReadBack.read

    def wrong(self: ReadBack, file: DataFile) -> tuple[str, bool]:
        return ("it reads odd", True) if self._rank == odd else read(self, file)

    monkeypatch.setattr(ReadBack, "read", wrong)
    ranks.begin(2)
    with pytest.raises(HardwareError, match=f"rank {odd} cannot read .*: it reads odd. Either"):
        wait_for(lambda: ranks.writers[odd].outcomes() and False, "its error", every=SOON)
    for rank in set(range(RANKS)) - {odd}:
        ranks.writers[rank].wait_written()
    check(open_snapshots(tmp_path, 2)[1], 2)


def test_a_disk_that_fails_for_one_reader_costs_nothing(tmp_path, open_ranks, monkeypatch):
    ranks = open_ranks(tmp_path)
    opened = manifest.opened

    def fails(directory: Path, file: DataFile) -> Any:
        if file.name.endswith("-0.safetensors") and threading.current_thread() not in seen:
            seen.add(threading.current_thread())
            raise error(errno.EIO)
        return opened(directory, file)

    seen: set[threading.Thread] = set()
    monkeypatch.setattr(manifest, "opened", fails)
    assert ranks.save(1) == "rank 1 cannot read it back: [Errno 5] Input/output error"
    assert ranks.save(2) == ""


def test_who_falls_behind_leaves_older_ones_out(tmp_path, open_ranks, monkeypatch):
    ranks = open_ranks(tmp_path)
    read, go = ReadBack.read, threading.Event()

    def waits(self: ReadBack, file: DataFile) -> tuple[str, bool]:
        assert go.wait(PATIENCE)
        return read(self, file)

    monkeypatch.setattr(ReadBack, "read", waits)
    outcomes: list[Outcome] = []

    def decided() -> bool:
        outcomes.extend(ranks.writers[0].outcomes())
        return len(outcomes) == step

    for step in range(1, 12):
        ranks.begin(step)
        wait_for(decided, "its outcome", every=SOON)
    # The one that is being read, and so many as are kept; the writer removes after it has reported.
    wait_for(lambda: steps_of(ranks) == [1, 9, 10, 11], "older ones are removed", every=SOON)
    go.set()
    assert [(o.step, o.text) for o in ranks.settle() if o.verified] == [(1, ""), (11, "")]
    check(open_snapshots(tmp_path, 2)[1], 11)
