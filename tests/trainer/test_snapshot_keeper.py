"""Three ranks' keepers as real processes: killed, failed and orphaned at every operation."""

from __future__ import annotations

import errno
import gc
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from ddpjob_trainer.gpu import accelerator
from ddpjob_trainer.snapshot import load
from ddpjob_trainer.snapshot import writer as writer_module
from ddpjob_trainer.snapshot.keeper import client
from ddpjob_trainer.snapshot.keeper.writer import data_name
from ddpjob_trainer.snapshot.layout import Captured, Draft, Shares, lay_out
from ddpjob_trainer.snapshot.load import Source
from ddpjob_trainer.snapshot.ondisk import checked_json, lineage, manifest
from ddpjob_trainer.snapshot.part_reports import PartReports, Report
from ddpjob_trainer.snapshot.writer import (
    BackpressureLog,
    Outcome,
    Part,
    Place,
    SnapshotWriter,
    versions_of,
)
from ddpjob_trainer.state.codec import DTYPES, flatten, unflatten
from support.launching import PATHS
from support.patience import PATIENCE
from support.snapshots import open_snapshots

RANKS = 3
CPU = accelerator.of(torch.device("cpu"))
#: Every keeper asks a file what to do at which of its operations, before and after each.
SEAM = """
import json, os, signal, time
from ddpjob_trainer.snapshot.ondisk import disk
asked, count = None, 0
def seam(operation, path):
    global asked, count
    try:
        order = json.load(open({orders!r}))
    except FileNotFoundError:
        return
    name = path.name
    rank = int(name.rpartition("-")[2].partition(".")[0]) if name.endswith(".safetensors") else 0
    removes = operation.endswith(("unlink", "rmtree"))
    with open({orders!r} + ".log", "a") as log:
        print(rank, int(removes), file=log)
    if order["removes"] != removes or (rank != order["rank"] and not removes):
        return
    count = count + 1 if order == asked else 1
    asked = order
    if count - 1 == order["point"]:
        os.unlink({orders!r})
        exec(order["body"])
disk.seam = seam
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"


@dataclass(frozen=True)
class Orders:
    """What keepers are told to do; each order is followed once."""

    path: Path

    def give(self, rank: int, point: int, body: str, *, removes: bool = False) -> None:
        """At the ``point``th time before or after an operation, by rank's keeper.

        ``removes``: of what rank 0's keeper removes after a commit only.
        """
        client.prelude = SEAM.format(orders=str(self.path))
        draft = self.path.with_suffix(".new")
        order = {"rank": rank, "point": point, "body": body, "removes": removes}
        draft.write_text(json.dumps(order))
        draft.replace(self.path)

    def counted(self) -> Counter[tuple[int, bool]]:
        """How often keepers would have followed an order since the first: by rank, and removing."""
        lines = self.path.with_name(self.path.name + ".log").read_text().splitlines()
        return Counter((int(rank), removes == "1") for rank, removes in map(str.split, lines))

    def removals(self) -> int:
        """The latter of all ranks' files."""
        return sum(count for (_, removes), count in self.counted().items() if removes)


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((3000,), float(step)), "n": step, "m": torch.arange(step)}


class Ranks:
    """What three ranks' training threads do, without training."""

    def __init__(self, root: Path, attempt: int = 1) -> None:
        self.store, self.loaded = open_snapshots(root, attempt)
        nonce = f"{self.store.sequence:08x}"
        self.place = Place(root, self.store.sequence, nonce, 3, tuple(range(RANKS)))
        self.told = HashStore()
        self.writers = [
            SnapshotWriter(rank, self.place, PartReports(self.told, self.place.writers), CPU)
            for rank in range(RANKS)
        ]

    def begin(self, step: int, *, late: bool = False) -> None:
        flat = flatten(state(step))
        all_captured = [
            Captured(flat, frozenset({"w"}), {f"rank/{rank}/own": torch.full((3,), rank)})
            for rank in range(RANKS)
        ]
        shares = Shares.plan(all_captured[0], RANKS, all_captured[0].main_bytes())
        for rank, (writer, captured) in enumerate(zip(self.writers, all_captured, strict=True)):
            image = lay_out(captured, shares, rank)
            buffer = writer.pool.take(image.bytes)
            assert buffer is not None
            buffer.write(0, image.header)
            buffer.copy(image.copies(captured)[0], CPU, None)
            if not late:
                buffer.copy(image.copies(captured)[1], CPU, None)
            own = tuple((n, DTYPES[t.dtype], tuple(t.shape)) for n, t in captured.own.items())
            nonce = self.place.nonce
            draft = Draft.of(step, captured, shares, {}, nonce) if rank == 0 else None
            name = data_name(step, self.place.nonce, rank)
            later = image.copies(captured)[1] if late else ()
            now = time.perf_counter()
            report = Report(rank, own=own, fingerprint=captured.structure.fingerprint)
            writer.submit(
                Part(
                    step, now, name, image.bytes, buffer, later, None, versions_of(later), report,
                    draft,
                )
            )  # fmt: skip

    def settle(self) -> list[Outcome]:
        for writer in self.writers:
            writer.wait_written()
        self.writers[0].wait_settled()
        return self.writers[0].outcomes()

    def save(self, step: int) -> str:
        """Why it failed; empty: it is durable."""
        self.begin(step)
        (outcome,) = self.settle()
        assert outcome.step == step
        return outcome.text

    def keepers(self) -> list[int]:
        found = [writer._keeper for writer in self.writers]
        return [keeper.pid for keeper in found if keeper is not None]

    def why(self) -> str:
        """What is said where a snapshot is skipped."""
        reports = PartReports(self.told, self.place.writers)
        return BackpressureLog().why(self.writers[0].oldest(), reports)

    def close(self) -> None:
        for writer in self.writers:
            writer.close()

    @property
    def directory(self) -> Path:
        return lineage.directory(self.place.root, self.place.sequence)


@pytest.fixture
def open_ranks() -> Iterator[Any]:
    opened: list[Ranks] = []

    def make(root: Path, attempt: int = 1) -> Ranks:
        opened.append(Ranks(root, attempt))
        return opened[-1]

    yield make
    client.prelude = ""
    for ranks in opened:
        ranks.close()


def check(loaded: Source | None, step: int) -> None:
    assert loaded is not None
    assert loaded.step == step
    flat = loaded.flat()
    found = unflatten(flat)
    assert torch.equal(found["w"], state(step)["w"])
    assert torch.equal(found["m"], state(step)["m"])
    for rank in range(RANKS):
        assert flat.tensors[f"rank/{rank}/own"].tolist() == [rank] * 3


def test_a_keeper_never_imports_torch():  # type: ignore[no-untyped-def]
    code = (
        "import sys; sys.path[:0] = sys.argv[1].split(':');"
        "import ddpjob_trainer.snapshot.keeper.process;"
        "print({'torch', 'numpy', 'safetensors'} & set(sys.modules))"
    )
    command = [sys.executable, "-I", "-S", "-c", code, PATHS]
    assert subprocess.check_output(command, text=True).strip() == "set()"


def test_what_three_ranks_save_is_loaded(tmp_path, open_ranks):  # type: ignore[no-untyped-def]
    ranks = open_ranks(tmp_path)
    assert [ranks.save(step) for step in (1, 2, 3)] == ["", "", ""]
    keepers = ranks.keepers()
    assert len(set(keepers)) == RANKS, "one keeper per rank, kept"
    ranks.begin(4, late=True)  # copied by the thread
    for writer in ranks.writers:
        writer.wait_copied()
    assert [outcome.text for outcome in ranks.settle()] == [""]
    assert ranks.keepers() == keepers
    check(open_snapshots(tmp_path, 2)[1], 4)
    sizes = [f.stat().st_size for f in ranks.directory.glob("step-000000000004-*.safetensors")]
    assert len(sizes) == RANKS
    assert max(sizes) - min(sizes) < 400, "equal shares, but for the headers"


@pytest.fixture
def orders(tmp_path: Path) -> Orders:
    return Orders(tmp_path / "orders")


@pytest.fixture
def saving(tmp_path, open_ranks, orders):  # type: ignore[no-untyped-def]
    """Ranks whose keepers follow orders, with one snapshot."""
    client.prelude = SEAM.format(orders=str(orders.path))
    ranks = open_ranks(tmp_path / "root")
    assert ranks.save(1) == ""
    return ranks


def points_of_a_save(ranks: Ranks, orders: Orders) -> list[tuple[int, int]]:
    """Rank and number of each time before and after an operation; what is removed left aside.

    Rank 0's keeper also makes the manifest, and the directory durable.
    """
    orders.give(0, -1, "")
    assert ranks.save(2) == ""
    counted = orders.counted()
    assert counted[0, False] > counted[1, False] == counted[2, False] >= 6, counted
    return [(rank, point) for rank in range(RANKS) for point in range(counted[rank, False])]


def fail_and_go_on(ranks: Ranks, step: int, older: int, why: str, rank: int) -> None:
    """This save fails, what was there before stands, and the next save works."""
    assert ranks.save(step) == (f"rank {rank}: " if rank else "") + why
    # Perhaps the rename was done; that counts only because all was durable before it.
    done = (ranks.directory / manifest.file_name(step)).exists()
    newest = manifest.listed(ranks.directory)[-1]
    found = manifest.read(newest)
    check(load.open_source(newest.parent, found), step if done else older)
    assert ranks.save(step + 1) == ""
    if not done:
        wait_for(lambda: not leftovers(ranks, step))


def leftovers(ranks: Ranks, step: int) -> list[Path]:
    return list(ranks.directory.glob(f"step-{step:012d}-{ranks.place.nonce}*"))


@pytest.mark.fault("S1")
def test_a_keeper_killed_at_any_operation(saving, orders):  # type: ignore[no-untyped-def]
    step = 2
    for rank, point in points_of_a_save(saving, orders):
        orders.give(rank, point, KILL)
        fail_and_go_on(saving, step + 1, step, "its writer process ended", rank)
        step += 2
    check(open_snapshots(saving.place.root, 2)[1], step)


@pytest.mark.fault("S1")
def test_a_keeper_killed_while_it_removes_older_snapshots(saving, orders):  # type: ignore[no-untyped-def]
    assert [saving.save(step) for step in (2, 3)] == ["", ""]  # so many are kept
    orders.give(0, -1, "", removes=True)
    assert saving.save(4) == ""
    # Before and after the removal of the manifest and of each rank's part.
    count = 2 * (1 + RANKS)
    wait_for(lambda: orders.removals() >= count)
    assert saving.save(5) == ""
    wait_for(lambda: orders.removals() >= 2 * count)
    assert orders.removals() == 2 * count
    for point in range(count):
        orders.give(0, point, KILL, removes=True)
        step = 6 + 3 * point
        assert saving.save(step) == ""
        wait_for(lambda: not orders.path.exists())
        assert saving.save(step + 1) in ("", "its writer process ended")
        assert saving.save(step + 2) == ""
        wait_for(lambda: len(manifest.listed(saving.directory)) == 3)
        wait_for(lambda: len(list(saving.directory.glob("*.safetensors"))) == 3 * RANKS)
    check(open_snapshots(saving.place.root, 2)[1], step + 2)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.fault("S2")
def test_a_save_that_fails_anywhere_is_told_and_the_next_works(saving, orders, code):  # type: ignore[no-untyped-def]
    step, keepers = 2, saving.keepers()
    for rank, point in points_of_a_save(saving, orders):
        orders.give(rank, point, f"raise OSError({code}, os.strerror({code}))")
        fail_and_go_on(saving, step + 1, step, os.strerror(code), rank)
        step += 2
    assert saving.keepers() == keepers, "they work on"
    assert not list(saving.directory.glob("*.tmp"))
    check(open_snapshots(saving.place.root, 2)[1], step)


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("where", ["_tell_write", "_hear"])
def test_any_error_of_a_rank_beside_training_fails_the_save_alone(  # type: ignore[no-untyped-def]
    tmp_path, open_ranks, monkeypatch, where, odd
):
    ranks = open_ranks(tmp_path)
    assert ranks.save(1) == ""

    def fails(*_: Any) -> None:
        raise RuntimeError("odd")

    writer, why = ranks.writers[odd], "rank 1: " * odd + "RuntimeError: odd"
    monkeypatch.setattr(writer, where, fails)
    assert ranks.save(2) == why
    monkeypatch.undo()
    assert writer.broken == (where == "_hear"), "then training makes another"
    if writer.broken:
        assert ranks.save(3) == why, "it broke after it was asked"
        writer.close()
        board = PartReports(ranks.told, ranks.place.writers)
        ranks.writers[odd] = SnapshotWriter(odd, ranks.place, board, CPU)
    assert ranks.save(4) == ""
    check(open_snapshots(tmp_path, 2)[1], 4)


def test_a_keeper_that_died_while_idle_costs_no_snapshot(tmp_path, open_ranks):  # type: ignore[no-untyped-def]
    ranks = open_ranks(tmp_path)
    assert ranks.save(1) == ""
    keeper = ranks.writers[0]._keeper
    keeper.answers = list  # its end is noticed only when it is told to write
    os.kill(keeper.pid, signal.SIGKILL)
    keeper._process.wait()
    assert ranks.save(2) == ""
    check(open_snapshots(tmp_path, 2)[1], 2)


def test_a_durable_one_is_marked_by_the_keeper_that_cleans_up(tmp_path, open_ranks):  # type: ignore[no-untyped-def]
    ranks = open_ranks(tmp_path)
    main = ranks.writers[0]
    for step in range(1, 9):  # each commit has the keeper remove older ones
        assert ranks.save(step) == ""
        main.mark(step, {"finished": step})
        assert [(one.step, one.text) for one in ranks.settle()] == [(step, "")]
    main.mark(9, {})
    (absent,) = ranks.settle()
    assert absent.text == "No such file or directory"
    loaded = open_snapshots(tmp_path, 2)[1]
    check(loaded, 8)
    assert loaded.config["finished"] == 8


def test_a_directory_that_is_gone_is_told(tmp_path, open_ranks):  # type: ignore[no-untyped-def]
    """Removed by hand, or by the retention of another job that began in it later."""
    ranks = open_ranks(tmp_path)
    assert ranks.save(1) == ""
    shutil.rmtree(ranks.directory)
    why = f"{ranks.directory} is gone: it was removed, or another job"
    assert ranks.save(2).startswith(why)
    ranks.directory.touch()
    assert ranks.save(3).startswith(why)
    ranks.directory.unlink()
    ranks.directory.mkdir()
    assert ranks.save(4) == ""


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_what_is_closed_holds_nothing(tmp_path, open_ranks):  # type: ignore[no-untyped-def]
    gc.collect()  # what earlier tests left open
    before = descriptors()
    ranks = Ranks(tmp_path)
    assert ranks.save(1) == ""
    assert descriptors() > before
    for writer in ranks.writers:
        writer.close(PATIENCE)
    assert descriptors() == before


def test_a_snapshot_too_large_to_be_read_again_is_a_failed_one(  # type: ignore[no-untyped-def]
    tmp_path, open_ranks, monkeypatch
):
    ranks = open_ranks(tmp_path)
    assert [ranks.save(step) for step in (1, 2)] == ["", ""]
    with monkeypatch.context() as patch:
        patch.setattr(checked_json, "MAX_BYTES", 1 << 10)
        assert ranks.save(3).startswith("names and numbers take ")
    wait_for(lambda: not leftovers(ranks, 3))
    assert ranks.save(4) == ""
    check(open_snapshots(tmp_path, 2)[1], 4)


def test_a_keeper_whose_rank_died_removes_its_half_file(saving, orders, tmp_path):  # type: ignore[no-untyped-def]
    go = tmp_path / "go"
    wait = f"while not os.path.exists({str(go)!r}): time.sleep(0.005)"
    orders.give(1, 3, wait)  # after the write
    saving.begin(2)
    wait_for(lambda: list(saving.directory.glob("step-000000000002-*-1.safetensors")))
    wait_for(lambda: not orders.path.exists())
    keeper = saving.writers[1]._keeper
    keeper.channel.shutdown(socket.SHUT_RDWR)  # as the kernel does when the rank dies
    go.touch()
    keeper._process.wait(PATIENCE)
    assert not list(saving.directory.glob("step-000000000002-*-1.safetensors"))
    assert (saving.directory / manifest.file_name(1)).exists()
    assert not (saving.directory / manifest.file_name(2)).exists()


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_who_is_behind_has_no_buffer_and_nobody_waits(tmp_path, open_ranks, monkeypatch):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(writer_module, "_LONG_SECONDS", 0.0)
    ranks = open_ranks(tmp_path)
    assert ranks.save(1) == ""
    for pid in ranks.keepers():
        os.kill(pid, signal.SIGSTOP)
    try:
        for step in (2, 3):
            ranks.begin(step)
        assert not any(writer.pool.free() for writer in ranks.writers)
        assert ranks.writers[0].pool.take(10) is None
        why = r"that of step 2 for \d+ s by rank 0\. Is its volume slow"
        assert re.search(why, ranks.why()), ranks.why()
        os.kill(ranks.keepers()[0], signal.SIGCONT)
        deadline = time.monotonic() + PATIENCE
        while "s by rank 1. Is its volume" not in ranks.why():
            assert time.monotonic() < deadline
            time.sleep(0.005)
    finally:
        for pid in ranks.keepers():
            os.kill(pid, signal.SIGCONT)
    assert [(o.step, o.text) for o in ranks.settle()] == [(2, ""), (3, "")]
    assert ranks.why() == ""
    assert all(writer.pool.free() for writer in ranks.writers)


@pytest.mark.fault("S5")
def test_keepers_of_an_earlier_attempt_cannot_hurt_when_they_wake_up(tmp_path, open_ranks):  # type: ignore[no-untyped-def]
    zombie = open_ranks(tmp_path, 1)
    assert zombie.save(10) == ""
    for pid in zombie.keepers():
        os.kill(pid, signal.SIGSTOP)
    zombie.begin(20)  # unfinished while the next attempt runs
    live = open_ranks(tmp_path, 2)
    check(live.loaded, 10)
    assert live.save(15) == ""
    for pid in zombie.keepers():
        os.kill(pid, signal.SIGCONT)
    outcomes = [(outcome.step, outcome.text) for outcome in zombie.settle()]
    assert outcomes in ([(20, "")], [(20, "No such file or directory")])
    for step in (30, 40, 50):
        zombie.begin(step)
        zombie.settle()
    check(open_snapshots(tmp_path, 3)[1], 15)
    assert live.save(18) == ""
    check(open_snapshots(tmp_path, 4)[1], 15), "attempt 3 took over from 15; 18 came too late"
