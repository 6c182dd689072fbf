"""What launchers keep beside the snapshots: bounds, retention, strangers, who failed first."""

import errno
import gzip
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ddpjob_contract.evidence import EVIDENCE_MAX_BYTES, Evidence
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.evidence import commands, folder
from ddpjob_trainer.evidence.folder import MAX_ROUNDS, Entry, Flight, Writer
from ddpjob_trainer.snapshot.remote.transfer import EvidenceCopy, fetched
from support.patience import PATIENCE, wait_for

AT = "2026-01-01T12:00:00Z"


def rank(number: int, end: str = "stopped", **more: Any) -> dict[str, Any]:
    return {"rank": number, "end": end, "log": [f"last of {number}"], **more}


def body(replica: int = 0, *ranks: Mapping[str, Any], **more: Any) -> Evidence:
    found: Any = {
        "version": 1, "uid": "u", "attempt": 1, "round": 0, "replica": replica, "nproc": 1,
        "pod": f"j-{replica}", "state": "over", "began": AT, "at": AT,
        "ranks": list(ranks) or [rank(replica)], **more,
    }  # fmt: skip
    return found  # type: ignore[no-any-return]


def kept(root: Path, *bodies: Evidence) -> None:
    root.mkdir(exist_ok=True)
    for one in bodies:
        at = folder.round_folder(one["uid"], one["attempt"], one["round"])
        with folder.opened(root, at.name, make=True) as fd:
            folder.write(fd, f"replica-{one['replica']}.json", json.dumps(one).encode())


def read(root: Path) -> Any:
    (found,) = commands.rounds(root)
    return commands.incident(found)


# --- Bounds -------------------------------------------------------------------------------------


def test_last_lines_are_the_newest_that_fit():
    lines = [f"{n}\x1b[2J" for n in range(1000)]
    shown = folder.newest_lines(lines, 500)
    assert shown == lines[-len(shown) :]
    assert 300 < len(json.dumps(shown, separators=(",", ":"))) <= 502
    assert folder.newest_lines(["x" * 1000], 500) == []


@pytest.mark.parametrize(("world", "nproc"), [(1, 1), (64, 64), (1024, 8), (10_000 * 8, 8)])
def test_a_round_of_any_gang_is_bounded(world, nproc):
    share = folder.log_share(world, nproc)
    assert share * nproc <= 256 << 10
    assert share * world <= max(8 << 20, world * (2 << 10))
    assert folder.flight_share(world) * world <= 32 << 20


def test_a_file_that_is_too_large_keeps_the_log_of_what_failed():
    long = ["x" * 1000] * 25
    ranks = [rank(n, "failed" if n == 3 else "stopped", log=long) for n in range(64)]
    data = folder.encode(body(0, *ranks))
    assert len(data) <= folder.MOST_FILE
    logs = {one["rank"]: one.get("log") for one in json.loads(data)["ranks"]}
    assert logs[3] == long
    assert logs[4] is None
    everywhere = [rank(n, "failed", log=long) for n in range(64)]
    assert len(folder.encode(body(0, *everywhere))) <= folder.MOST_FILE


# --- Folders ------------------------------------------------------------------------------------


@pytest.mark.parametrize("planted", ["evidence", "round"])
def test_no_link_is_followed(tmp_path, planted):
    root, elsewhere = tmp_path / "snapshots", tmp_path / "elsewhere"
    root.mkdir()
    elsewhere.mkdir()
    at = root / "evidence"
    if planted == "round":
        at.mkdir()
        at /= folder.round_folder("u", 1, 0).name
    at.symlink_to(elsewhere)
    with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
        kept(root, body())
    assert list(elsewhere.iterdir()) == []


def test_what_a_killed_launcher_left_or_a_stranger_planted_is_no_obstacle(tmp_path):
    kept(tmp_path, body())
    (where,) = (tmp_path / "evidence").iterdir()
    (where / ".replica-0.json").symlink_to("/dev/full")
    kept(tmp_path, body(why="again"))
    assert read(tmp_path)["why"] == "again"


def age(root: Path, one: Evidence, seconds: int) -> None:
    path = root / "evidence" / folder.round_folder(one["uid"], one["attempt"], one["round"]).name
    os.utime(path, ns=(seconds * 10**9, seconds * 10**9))


def names(root: Path) -> set[str]:
    return {path.name for path in (root / "evidence").iterdir()}


def test_the_newest_rounds_are_kept_and_nobody_prunes_a_later_one(tmp_path):
    rounds = [body(uid="u", round=n) for n in range(30)]
    kept(tmp_path, *rounds)
    for n, one in enumerate(rounds):
        age(tmp_path, one, n + 1)
    (tmp_path / "evidence" / "mine").mkdir()
    before = names(tmp_path)
    folder.prune(tmp_path, folder.round_folder("u", 1, 5), since=0)  # a zombie
    assert before - names(tmp_path) == {folder.round_folder("u", 1, n).name for n in range(5)}
    folder.prune(tmp_path, folder.round_folder("u", 1, 29), since=0)
    assert names(tmp_path) == {
        "mine",
        *(folder.round_folder("u", 1, n).name for n in range(10, 30)),
    }


def test_of_another_job_only_what_was_over_before_is_pruned(tmp_path):
    others = [body(uid="other", round=n) for n in range(30)]
    kept(tmp_path, body(), *others)
    for n, one in enumerate(others):
        age(tmp_path, one, n + 1)
    folder.prune(tmp_path, folder.round_folder("u", 1, 0), since=6 * 10**9)
    gone = {folder.round_folder("other", 1, n).name for n in range(5)}
    assert not gone & names(tmp_path)
    assert len(names(tmp_path)) == 1 + 25


def test_bytes_are_bounded_too(tmp_path, monkeypatch):
    rounds = [body(round=n) for n in range(5)]
    kept(tmp_path, *rounds)
    for n, one in enumerate(rounds):
        age(tmp_path, one, n + 1)
    size = folder.find(tmp_path)[0].size
    monkeypatch.setattr(folder, "MAX_BYTES", 3 * size)
    folder.prune(tmp_path, folder.round_folder("u", 1, 4), since=0)
    assert len(names(tmp_path)) == 3


def test_on_a_full_disk_the_old_file_stays_and_nothing_else(tmp_path, monkeypatch):
    kept(tmp_path, body(why="before"))

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        kept(tmp_path, body(why="after"))
    (where,) = (tmp_path / "evidence").iterdir()
    assert [path.name for path in where.iterdir()] == ["replica-0.json"]
    assert read(tmp_path)["why"] == "before"


# --- The writer ---------------------------------------------------------------------------------


def entry(one: Evidence, **more: Any) -> Entry:
    at = folder.round_folder(one["uid"], one["attempt"], one["round"])
    return Entry(at, f"replica-{one['replica']}.json", one, **more)


def test_a_disk_that_hangs_holds_up_nobody_and_takes_the_newest_later(tmp_path, monkeypatch):
    answers, came, in_time = threading.Event(), threading.Event(), list[bool]()
    write = folder.write

    def hangs(*args: Any) -> None:
        came.set()
        in_time.append(answers.wait(PATIENCE))
        write(*args)

    monkeypatch.setattr(folder, "write", hangs)
    monkeypatch.setattr(folder, "_SLOW_SECONDS", -1.0)
    found = Writer(tmp_path, print)
    found.put(entry(body()))
    assert came.wait(PATIENCE)
    for n in range(100):
        found.put(entry(body(round=n)))
        found.put(entry(body(round=n, why="newer")))
    found.flush(PATIENCE)  # it was slow already: nobody waits for it
    assert not answers.is_set()
    answers.set()
    wait_for(lambda: len(names(tmp_path)) == 5, "the newest to be written")
    monkeypatch.setattr(folder, "_SLOW_SECONDS", PATIENCE)
    found.flush(PATIENCE)
    whys = {one.seen.folder.round: one.files[0].get("why") for one in commands.rounds(tmp_path)}
    assert all(in_time), "it was waited for until the disk answered"
    assert whys == {0: None, 96: "newer", 97: "newer", 98: "newer", 99: "newer"}


def test_why_nothing_is_kept_is_said_once(tmp_path):
    said: list[str] = []
    (tmp_path / "evidence").touch()  # a file in its place
    found = Writer(tmp_path, said.append)
    for n in range(3):
        found.put(entry(body(round=n)))
    found.flush(PATIENCE)
    assert said == [f"last lines and stacks are not kept in {tmp_path}/evidence: Not a directory"]
    (tmp_path / "evidence").unlink()
    found.put(entry(body(round=4)))
    found.flush(PATIENCE)
    assert read(tmp_path)["round"] == 4


def test_a_folder_that_is_deleted_meanwhile_is_made_again(tmp_path):
    found = Writer(tmp_path, pytest.fail)
    for turn in range(2):
        found.put(entry(body()))
        found.flush(PATIENCE)
        (where,) = (tmp_path / "evidence").iterdir()
        (where / "replica-0.json").unlink()
        where.rmdir()
        if turn:
            (tmp_path / "evidence").rmdir()


def test_flight_recorders_are_copied_bounded(tmp_path):
    small, large = tmp_path / "trace_0", tmp_path / "trace_1"
    small.write_bytes(b"dump" * 1000)
    large.write_bytes(os.urandom(5000))
    (tmp_path / "trace_2").symlink_to(small)
    flights = tuple(Flight(n, tmp_path / f"trace_{n}", 4096) for n in range(3))
    found = Writer(tmp_path, pytest.fail)
    found.put(entry(body(), flights=flights))
    found.flush(PATIENCE)
    assert read(tmp_path)["flight"] == ["rank-0.nccl.gz"]
    (where,) = (tmp_path / "evidence").iterdir()
    assert gzip.decompress((where / "rank-0.nccl.gz").read_bytes()) == b"dump" * 1000
    told = next(commands.rounds(tmp_path)).files[0]["flight"]
    assert [line.partition(":")[0] for line in told] == ["rank-0.nccl.gz", "rank 1", "rank 2"]


# --- Object stores ------------------------------------------------------------------------------


def test_evidence_is_uploaded_pruned_and_fetched(tmp_path):
    root, store = tmp_path / "snapshots", tmp_path / "store"
    url = f"file://{store}"
    rounds = [body(round=n) for n in range(MAX_ROUNDS)]
    kept(root, *rounds, body(1, round=3))
    (folder_of_3,) = (root / "evidence").glob("attempt-1-round-3-*")
    (folder_of_3 / "secret").touch()
    kept(store, body(uid="another job"), body(attempt=2))  # a younger round
    EvidenceCopy(url, root, frozenset({"replica-1.json"})).copy()
    with fetched(url) as there:
        assert {path.name for path in there.rglob("*.json")} == {"replica-0.json", "replica-1.json"}
        assert len(list(commands.rounds(there))) == 3
    copy = EvidenceCopy(url, root)
    copy.copy()
    kept(root, body(round=3, why="later"), body(round=MAX_ROUNDS))
    age(root, body(round=0), 1)
    copy.copy()
    with fetched(url) as there:
        found = {one.seen.folder.round: one for one in commands.rounds(there, "u", attempt=1)}
        assert list(commands.rounds(there, "u", attempt=2)), "a younger round was pruned"
        assert list(commands.rounds(there, "another job"))
        assert found[3].files[0]["why"] == "later"
        assert "secret" not in found[3].names
    assert 0 not in found
    assert MAX_ROUNDS in found
    younger = [body(attempt=2, round=n) for n in range(MAX_ROUNDS + 5)]
    kept(store, *younger)
    copy.copy()  # a zombie's
    names_there = names(store)
    assert {folder.round_folder("u", 2, n).name for n in range(MAX_ROUNDS + 5)} <= names_there
    assert not there.exists()


# --- Reading ------------------------------------------------------------------------------------


def test_files_of_strangers_and_other_jobs_are_no_evidence(tmp_path):
    kept(tmp_path, body(0), body(1))
    (where,) = (tmp_path / "evidence").iterdir()
    alien: list[Any] = [
        body(2, uid="another"), {**body(3), "version": 2}, [], 7, {**body(4), "ranks": {}},
        {**body(5), "nproc": 0}, {**body(6), "attempt": True},
    ]  # fmt: skip
    for n, one in enumerate(alien):
        (where / f"replica-{100 + n}.json").write_text(json.dumps(one))
    (where / "replica-200.json").write_bytes(b"x" * (folder.MOST_FILE + 1))
    (where / "replica-201.json").write_text("[" * 100_000)
    os.mkfifo(where / "replica-202.json")
    (where / "replica-203.json").symlink_to("/etc/passwd")
    odd = [{"rank": "7", "end": "failed"}, "no", {"rank": 7, "end": "failed", "code": "x"}]
    (where / "replica-7.json").write_text(json.dumps({**body(7), "ranks": odd, "lost": 5}))
    found = read(tmp_path)
    assert found["pods"] == {"j-0": 0, "j-1": 1, "j-7": 7}
    assert (found["failed"], found["stopped"]) == ([7], [0, 1])


def test_two_jobs_of_one_name_are_told_apart(tmp_path, capsys):
    kept(tmp_path, body(uid="old", why="long ago"), body(uid="new"))
    assert len(names(tmp_path)) == 2
    commands.show(tmp_path, "old", attempt=1, rank=0)
    assert "long ago" in capsys.readouterr().out
    commands.ls(tmp_path, "new", as_json=True)
    (one,) = json.loads(capsys.readouterr().out)["incidents"]
    assert one["uid"] == "new"
    with pytest.raises(ConfigError, match="no evidence of the job with uid third of attempt 2"):
        commands.show(tmp_path, "third", attempt=2)


def test_an_attempt_that_replaced_pods_has_the_rounds_of_its_hub(tmp_path, capsys):
    kept(
        tmp_path,
        body(made=1, why="first"), body(round=1, made=2, why="second"),
        body(round=2, made=4, why="fourth"), body(attempt=5, made=5, why="fifth"),
    )  # fmt: skip
    wanted = {1: "first", 2: "second", 3: "second", 4: "fourth", 5: "fifth", 9: "fifth"}
    for attempt, why in wanted.items():
        commands.show(tmp_path, attempt=attempt)
        out = capsys.readouterr().out
        assert f"    {why}\n" in out
        assert (f"by the number {attempt}" in out) == (attempt not in (1, 5)), out
    commands.show(tmp_path, attempt=4, round_=1)
    assert "second" in capsys.readouterr().out


def test_who_failed_first_is_the_hubs_word(tmp_path):
    cause = {"round": 0, "rank": 2, "replica": 2, "kind": "signal", "snapshotStep": 8}
    kept(
        tmp_path,
        body(0, rank(0, "failed", code=1), cause=cause),
        body(1, rank(1, "followed", code=75), cause=cause),
        body(2, rank(2, "failed", code=137, signal=9, step=11, snapshotStep=8)),
    )
    found = read(tmp_path)
    assert (found["first"]["rank"], found["firstPod"]) == (2, "j-2")
    assert (found["failed"], found["followed"]) == ([0, 2], [1])
    assert found["snapshotStep"] == 8


def test_without_the_hub_it_is_who_failed_by_itself(tmp_path):
    later = "2026-01-01T12:00:09Z"
    kept(
        tmp_path,
        body(0, rank(0, "followed", code=75)),
        body(1, rank(1, "failed", code=1), at=later),
        body(2, rank(2, "failed", code=1)),
    )
    assert read(tmp_path)["first"]["rank"] == 2


def test_who_only_followed_is_not_first_whatever_one_launcher_says(tmp_path):
    """Without rounds each launcher hears itself alone."""
    kept(
        tmp_path,
        body(0, rank(0, "followed", code=75), cause={"rank": 0, "replica": 0}),
        body(1, rank(1, "failed", code=3)),
    )
    assert read(tmp_path)["first"]["rank"] == 1


def test_a_lost_pod_is_first_and_has_its_last_lines(tmp_path):
    lost, cause = {"1": "was lost", "2": "was lost"}, {"kind": "lost", "replica": 1}
    kept(
        tmp_path,
        body(0, rank(0, "stopped"), lost=lost, cause=cause),
        body(1, rank(1, "running"), state="running"),
        body(2, rank(2, "running"), state="running"),
    )
    found = read(tmp_path)
    assert (found["first"]["rank"], found["lost"]) == (1, lost)
    assert found["silent"] == {"j-1": AT, "j-2": AT}
    assert list(found["tails"]) == ["j-1", "j-2", "j-0"]
    assert found["tails"]["j-2"] == ["last of 2"]


def test_a_gang_that_is_gone_as_a_whole_has_nobody_first(tmp_path):
    kept(tmp_path, *(body(n, rank(n, "running"), state="running") for n in range(3)))
    found = read(tmp_path)
    assert "first" not in found
    assert found["running"] == [0, 1, 2]
    assert set(found["tails"]) == {"j-0", "j-1", "j-2"}


def test_what_is_shown_moves_no_cursor_and_is_bounded(tmp_path, capsys):
    lines = ["\x1b[2J\x07red"] * 5000
    many = [body(n, rank(n, "failed", log=lines, exception="no\x1bway"), round=r)
            for n in range(30) for r in range(20)]  # fmt: skip
    kept(tmp_path, *many)
    assert commands.ls(tmp_path) == 0
    assert commands.show(tmp_path, attempt=1, round_=3, rank=2) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert out.count("?[2J?red") == 5000
    commands.ls(tmp_path, as_json=True)
    assert len(capsys.readouterr().out) <= EVIDENCE_MAX_BYTES + 1


def test_no_evidence_is_said_with_the_reason(tmp_path):
    with pytest.raises(ConfigError, match="no such directory: name the job's"):
        commands.ls(tmp_path / "absent")
    with pytest.raises(ConfigError, match="has no evidence of attempt 3 round 1: launchers write"):
        commands.show(tmp_path, attempt=3, round_=1)
    (tmp_path / "evidence").touch()
    with pytest.raises(ConfigError, match="cannot be read: Not a directory"):
        commands.ls(tmp_path)
