"""A stranger at torch's store: what it forges decides nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from ddpjob_trainer.snapshot.save.part_reports import PartReports, Report
from support.sealed import OWN, board, seal

WRONG = json.dumps(
    {"rank": 1, "bytes": 9, "crc32": 1, "own": [], "fingerprint": 0, "text": "", "parts": {}}
)
REAL = [Report(0, 9, 9), Report(1, 9, 9)]


@pytest.fixture
def store() -> TCPStore:
    """That of rank 0."""
    patience = timedelta(seconds=2)  # of get(), which must wait for nothing
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=patience)


@pytest.fixture
def stranger(store: TCPStore) -> Any:
    """Who only reaches the port."""
    return TCPStore("localhost", store.port, is_master=False, wait_for_workers=False)


def keys(store: Any, word: str) -> list[str]:
    return [key for key in store.list_keys() if word in key]


def pretends(stranger: Store) -> None:
    """As in the days when anybody could: the report, and the count."""
    for where in (seal().prefix, OWN.key):
        there: Any = PrefixStore(where, stranger)
        there.set("snapshot/150/1", WRONG)
        there.add("snapshot/150", 2)


def seals_with_another_token(stranger: Store) -> None:
    there: Any = PrefixStore(seal().prefix, stranger)
    there.set("snapshot/150/1", seal("gue55").close("snapshot/150/1", 1, WRONG.encode()))


def says_it_again(stranger: Store) -> None:
    """Reports that were real in another place: another rank's, step's, kind's, round's, run's."""
    there: Any = PrefixStore(seal().prefix, stranger)
    data = WRONG.encode()
    again = [
        seal().close("snapshot/150/1", 0, data),
        seal().close("snapshot/100/1", 1, data),
        seal().close("read-back/150/1", 1, data),
        seal(run=1).close("snapshot/150/1", 1, data),
        seal(own=OWN.__class__(OWN.uid, 2, 1, unique=True)).close("snapshot/150/1", 1, data),
        seal(own=OWN.__class__("other", 2, 0, unique=True)).close("snapshot/150/1", 1, data),
    ]
    reports = PartReports(board(stranger), (1,))
    for note in again:
        there.set("snapshot/150/1", note)
        assert reports.complete(150) is None


def writes_much(stranger: Store) -> None:
    there: Any = PrefixStore(seal().prefix, stranger)
    for _ in range(3):  # of what it sends at once, the store takes 8 MiB
        there.append("snapshot/150/1", "x" * (6 << 20))


@pytest.mark.parametrize("attack", [pretends, seals_with_another_token, says_it_again, writes_much])
@pytest.mark.fault("T6")
def test_a_forged_report_commits_no_snapshot(
    store: TCPStore,
    stranger: Any,
    attack: Callable[[Store], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    mine, theirs = PartReports(board(store), (0, 1)), PartReports(board(stranger, 1), (0, 1))
    mine.post(150, REAL[0])
    attack(stranger)
    stranger.num_keys()  # it has its answer, so the store has the rest
    assert mine.complete(150) is None
    assert mine.first_missing(150) == 1
    theirs.post(150, REAL[1])
    assert mine.complete(150) == REAL
    assert capsys.readouterr().err.count("ignored a forged snapshot/150/1 in torch's store") == 1


@pytest.mark.fault("T6")
def test_who_removes_reports_makes_nobody_wait(store: TCPStore, stranger: Any) -> None:
    """get() would wait for hours; and no report is lost that was read before."""
    mine, theirs = PartReports(board(store), (0, 1)), PartReports(board(stranger, 1), (0, 1))
    mine.post(150, REAL[0])
    assert mine.complete(150) is None
    for key in keys(stranger, "snapshot"):
        stranger.delete_key(key)
    theirs.post(150, REAL[1])
    assert mine.complete(150) == REAL
    assert not keys(stranger, "snapshot")


def test_the_first_call_that_a_rank_has_written_counts(
    store: TCPStore, stranger: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    PrefixStore(seal().prefix, stranger).set("call/3", json.dumps([2, "run.save()"]))
    first, second = board(store), board(stranger, 1)
    assert first.first("call", 3, 0, b"run.steps()") == (0, b"run.steps()")
    assert "ignored a forged call/3 in torch's store" in capsys.readouterr().err
    assert second.first("call", 3, 1, b"run.evaluate()") == (0, b"run.steps()")


def test_no_key_and_no_note_holds_the_jobs_uid(store: TCPStore, stranger: Any) -> None:
    board(store).post("snapshot", 150, 0, b"{}")
    for key in stranger.list_keys():
        assert OWN.uid not in key
        assert OWN.uid.encode() not in stranger.get(key)
