"""Two hubs of one job, the newer one with the lower directory: neither's record may be lost.

An old hub that was cut off claims its directory late and begins first. Its retention looks, the
newer hub writes its start record, retention removes: at every operation of the old one, the newer
one goes on.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpjob_trainer.snapshot.ondisk import disk, lineage
from ddpjob_trainer.snapshot.ondisk.lineage import Start
from ddpjob_trainer.state.codec import flatten
from support.snapshots import Store, open_snapshots

KEEP = 2


def save(store: Store, step: int) -> None:
    store.save(step, flatten({"w": torch.full((9,), float(step))}), {})


def play(root: Path, point: int) -> tuple[bool, int | None]:
    """Let the newer hub begin before an operation of the old one.

    Return whether there was such an operation, and after which step the next start goes on.
    """
    first, _ = open_snapshots(root, 1, keep=KEEP)
    for step in (1, 2, 3):
        save(first, step)
    newer = lineage.claim(root)
    disk.make_directory(lineage.directory(root, newer + 1))  # claimed before newer has a record
    seen = 0

    def begins(operation: str, path: Path) -> None:
        nonlocal seen
        if seen == point:
            disk.seam = None
            lineage.write_start(root, Start(newer, "u", 3, 0, 1, 3))
            save(Store(root, newer, KEEP, 3), 7)
        seen += 1

    disk.seam = begins
    lineage.write_start(root, Start(newer + 1, "u", 2, 0, 1, 3))
    old = Store(root, newer + 1, KEEP, 3)
    for step in (4, 5, 6):
        save(old, step)
    done, disk.seam = disk.seam is None, None
    found = open_snapshots(root, 4, keep=KEEP)[1]
    return done, None if found is None else found.step


@pytest.fixture(autouse=True)
def _no_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "seam", None)


def lost(tmp_path: Path) -> list[int]:
    """At which operations the newer hub's snapshot is lost."""
    found, point, there = [], 0, True
    while there:
        try:
            there, step = play(tmp_path / str(point), point)
        except FileNotFoundError:  # its directory is gone as it writes
            there, step = True, None
        if there and step != 7:
            found.append(point)
        point += 1
    assert point > 60
    return found


def test_a_record_that_is_written_between_look_and_removal_stays(tmp_path):
    assert lost(tmp_path) == []


def test_retention_that_takes_a_claim_for_abandoned_is_found_out(tmp_path, monkeypatch):
    right = lineage.unneeded

    def wrong(
        starts: dict[int, Start], taken: Collection[int], own: int, *rest: Any
    ) -> Collection[int]:
        claims = {n for n in taken if n not in starts and n < own}
        return {*right(starts, taken, own, *rest), *claims}

    monkeypatch.setattr(lineage, "unneeded", wrong)
    assert lost(tmp_path)
