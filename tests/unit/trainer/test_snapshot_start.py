"""Which snapshot a start goes on from: of its own job, the newest that can be read, or none.

Neither late, stopped, deleted or other jobs nor strangers, bad disks and newer programs lose one:
training never begins from nothing by accident.
"""

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO
from unittest.mock import Mock

import pytest

from ddpjob_trainer import cli
from ddpjob_trainer.environment import SnapshotSettings
from ddpjob_trainer.errors import ConfigError, PeerLostError
from ddpjob_trainer.options import Snapshots
from ddpjob_trainer.snapshot.ondisk import disk, lineage, manifest
from ddpjob_trainer.snapshot.ondisk.disk import seal, unseal
from ddpjob_trainer.snapshot.ondisk.files import retain
from ddpjob_trainer.snapshot.ondisk.lineage import Start
from ddpjob_trainer.snapshot.restore.resume import resume
from ddpjob_trainer.training.start import _snapshot_settings
from support.snapshots import (
    Clock,
    Store,
    error,
    flip,
    loaded_step,
    open_snapshots,
    save,
    saved,
    step_of,
    steps_in,
)

# --- Whose ------------------------------------------------------------------------------------

SECRET = b"secret of the job".hex()
STALE = "of this job has already started"


def play(root: Path, story: str, stranger: Start | None = None) -> None:
    """Play sentences such as "u2 from 10 saves 15 20" with a job's letter and its attempt.

    from: it begins, and goes on from this step (0: from none). stale: it is refused, as a later one
    has begun. late: it stopped after its check, and begins only now. never: with resume: Never.
    blind: it began as the others did, and has not seen them. signed: the job has a secret.
    """
    stores: dict[str, Store] = {}
    for who, *words in map(str.split, story.split(", ")):
        if who == "stranger":
            lineage.directory(root, stranger.sequence).mkdir()
            lineage.write_start(root, stranger)
            continue
        begins, _, steps = " ".join(words).partition("saves")
        uid, attempt = who[0], int(who[1:])
        options: dict[str, Any] = {
            "uid": uid, "resume": "never" not in words, "keep": 2,
            "secret": SECRET if "signed" in words else "",
        }  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            if "blind" in words:
                patch.setattr(lineage, "read_starts", lambda *_, **__: {})
            if "late" in words:
                number = lineage.claim(root)
                lineage.write_start(root, Start(number, uid, attempt, 0))
                stores[who] = Store(root, number, 2, 3)
            elif "stale" in words:
                with pytest.raises(PeerLostError, match=STALE):
                    open_snapshots(root, attempt, **options)
            elif begins:
                stores[who], source = open_snapshots(root, attempt, **options)
                assert step_of(source) == (int(begins.split()[-1]) or None), (story, who)
        save(stores[who], *map(int, steps.split())) if steps else None


STORIES = {
    "a zombie's snapshots and its retention": (
        "u1 from 0 saves 10, u2 from 10, u1 saves 20 30 40 50 60, u3 from 10"
    ),
    "a zombie beside one that saves": (
        "u1 from 0 saves 10, u2 from 10, u1 saves 20 30 40 50 60, u2 saves 15, u3 from 15"
    ),
    "a zombie that begins late": "u2 from 0 saves 5, u1 stale, u1 late saves 99, u3 from 5",
    "resume: Never is for the job, not for each attempt": (
        "o1 from 0 saves 50, u1 never from 0, u2 never from 0, u3 never from 0 saves 5,"
        " u4 never from 5"
    ),
    "a zombie of a deleted job goes on alone": (
        "d1 from 0 saves 5, u1 from 5 saves 10 11 12, u2 from 12 saves 20 21 22,"
        " u3 from 22 saves 30 31 32, d2 from 5 saves 90 91 92 93 94, d3 late saves 99,"
        " u4 from 32, v1 from 32"
    ),
    # By its number alone the second's snapshots are the newest.
    "two that began in one moment": (
        "a1 from 0, b1 blind from 0, a1 saves 5, b1 saves 3, a2 from 5, b2 from 3, a3 from 5,"
        " b3 from 3"
    ),
    "a chain without any snapshot": "a1 from 0 saves 5, b1 never from 0, c1 from 5",
    "what an older version has left unsigned": (
        "u1 from 0 saves 5, u2 signed from 5 saves 6, u3 signed from 6"
    ),
    # resume: Never is how one trains anew, and looks at the weights of before once more.
    "the newest of other jobs stay": (
        "a1 from 0 saves 400 450 500, b1 never from 0 saves 1 2, c1 never from 0 saves 10 11 12 13,"
        " c2 never from 13 saves 20 21 22, c3 never from 22 saves 30 31 32 33, a2 from 500"
    ),
}


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
@pytest.mark.fault("S8")
def test_each_job_goes_on_from_its_own_newest(tmp_path, story):
    play(tmp_path, story)


FIRST = "u1 signed from 0 saves 5, stranger, u2 signed from 5, u3 signed from 5, u2 signed stale"
SECOND = "u1 signed from 0 saves 1, u2 signed from 1 saves 2, stranger, u3 signed from 2"
FORGED = {
    "a later attempt": (Start(7, "u", 10**9, 0), FIRST),
    "a later round": (Start(7, "u", 1, 10**6), FIRST),
    "a later round of a later attempt": (Start(7, "u", 2, 10**6), SECOND),
    "a successor": (Start(7, "v", 1, 0, predecessors=("u",)), FIRST),
    "of the highest number": (Start(999_999_999, "v", 1, 0, predecessors=("u",)), FIRST),
}


@pytest.mark.parametrize(("start", "story"), FORGED.values(), ids=FORGED)
@pytest.mark.fault("S3")
def test_a_record_that_the_job_has_not_signed_ends_nobody(tmp_path, capsys, start, story):
    play(tmp_path, story, start)
    assert ("forged" in capsys.readouterr().err) == (start.uid == "u")


def test_another_namespaces_snapshots_are_not_gone_on_from(tmp_path):
    one: dict[str, Any] = {"namespace": "one"}
    save(saved(tmp_path, uid="a", **one), 5, **one)
    other: dict[str, Any] = {"uid": "b", "namespace": "two"}
    with pytest.raises(ConfigError, match=r"namespace 'one'.*'two'\. Give this job its own"):
        open_snapshots(tmp_path, 1, **other)
    assert loaded_step(tmp_path, 1, **other, allow_changes=frozenset({"namespace"})) == 5
    assert loaded_step(tmp_path, 2, uid="a", **one) == 5
    save(saved(tmp_path, uid="d", namespace="two", resume=False), 7, namespace="two")
    assert loaded_step(tmp_path, 1, uid="c", **one) == 5, "applied again, it finds its own"


# --- Names and numbers ------------------------------------------------------------------------

ODD_DIRECTORIES = [
    "0000000²", "٠٠٠٠٠٠٠٩", "00000009\n", "-0000009", "0000000000009", "000000009", "1e000000",
    "step", "0000009 ", "00000000",
]  # fmt: skip
ODD_FILES = [
    "step-2.json", "step-00000000002².json", "step-000000000009.json\n", "step-٣.json", "step-",
    "step-²-n-0.safetensors", "step-9999999999999999.json", "step--1.json", ".json",
]  # fmt: skip


def odd_directories(root: Path) -> None:
    """With a record that would end the job."""
    for name in ODD_DIRECTORIES:
        (root / name).mkdir()
        (root / name / lineage.START).write_bytes(seal(asdict(Start(9, "u", 9, 9))))
    assert lineage.sequences(root) == [0, 1]


def odd_files(root: Path) -> None:
    for name in ODD_FILES:
        (root / "00000001" / name).write_bytes(b"{}")
    assert [manifest.step_of(path.name) for path in manifest.listed(root / "00000001")] == [4, 5]


def empty_manifests(root: Path) -> None:
    for step in range(100, 110):
        (root / "00000001" / manifest.file_name(step)).touch()


def under_another_step(root: Path) -> None:
    path = root / "00000001" / manifest.file_name(5)
    path.with_name(manifest.file_name(6)).write_bytes(path.read_bytes())


#: What lies there, and whether it is said to be foreign.
NAMES: dict[str, tuple[Callable[[Path], object], bool]] = {
    "255 digits": (lambda root: (root / ("9" * 255)).mkdir(), True),
    "20 digits": (lambda root: (root / ("9" * 20)).mkdir(), True),
    "10 digits": (lambda root: (root / ("9" * 10)).mkdir(), True),
    "the highest": (lambda root: (root / "999999999").mkdir(), False),
    "files": (lambda root: [(root / f"{n:08d}").touch() for n in range(2, 1002)], True),
    "links": (lambda root: [(root / f"{n:08d}").symlink_to("/") for n in range(2, 12)], True),
    "odd directories": (odd_directories, True),
    "odd files": (odd_files, False),
    "empty manifests": (empty_manifests, False),
    "a manifest under another step": (under_another_step, False),
}


@pytest.mark.parametrize(("put", "said"), NAMES.values(), ids=NAMES)
@pytest.mark.fault("S3")
def test_names_of_strangers_neither_block_nor_hide_anything(tmp_path, capsys, put, said):
    saved(tmp_path, 4, 5)
    put(tmp_path)
    retain(tmp_path, 1, 2, {4, 5})
    assert {4, 5} <= steps_in(tmp_path)
    for attempt in (2, 3, 4):
        store, source = open_snapshots(tmp_path, attempt)
        assert step_of(source) == 5 * (attempt - 1)
        save(store, 5 * attempt)
    words = capsys.readouterr().err
    assert words.count("foreign entries, such as") == 3 * said
    assert max(map(len, words.splitlines()), default=0) < 300


def test_numbers_of_more_digits_go_on_counting(tmp_path):
    saved(tmp_path, 2)
    for number in (99_999_999, 100_000_000):
        lineage.directory(tmp_path, number).mkdir()
        lineage.write_start(tmp_path, Start(number, "before", 1, 0))
    assert lineage.claim(tmp_path) == 100_000_001
    assert [loaded_step(tmp_path, attempt) for attempt in (2, 3)] == [2, 2]


def test_parents_in_a_circle_end(tmp_path):
    saved(tmp_path, 2)
    for number, parent in ((7, 7), (8, 9), (9, 8)):
        lineage.directory(tmp_path, number).mkdir()
        lineage.write_start(tmp_path, Start(number, "u", 1, number, parent, 5))
    with pytest.raises(ConfigError, match="00000009 went on from one of step 5"):
        loaded_step(tmp_path)
    assert cli.main(["snapshot", "ls", str(tmp_path)]) == 0


MANIFEST = f"00000001/{manifest.file_name(5)}"
START = f"00000001/{lineage.START}"
Patch = pytest.MonkeyPatch


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where an attempt has saved step 5."""
    saved(tmp_path / "volume/job", 5)
    return tmp_path / "volume/job"


# --- Refused ----------------------------------------------------------------------------------


def make_newer(path: Path) -> None:
    more = {"more": 1} if path.name == lineage.START else {"version": manifest.VERSION + 1}
    path.write_bytes(seal(unseal(path.read_bytes()) | more))


def newer(name: str, root: Path, _: Patch) -> None:
    make_newer(root / name)


def replaced(make: Callable[[Path], object], root: Path, _: Patch) -> None:
    shutil.rmtree(root)
    make(root)


def unwritable(place: object, name: str, code: int, _: Path, patch: Patch) -> None:
    def refuses(path: Path, *_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code), str(path))

    patch.setattr(place, name, refuses)


def without_links(patch: Patch) -> None:
    patch.setattr(os, "link", Mock(side_effect=error(errno.EPERM)))


def full(code: int, _: Path, patch: Patch) -> None:
    def fails(operation: str, path: Path) -> None:
        if operation == "before write" and path.name.endswith("-2.safetensors"):
            raise error(code)  # which knows no path

    without_links(patch)
    patch.setattr(disk, "seam", fails)


def unreadable(
    words: str, code: int, _: Path, patch: Patch, healthy: Callable[[], bool] = lambda: False
) -> None:
    opened = disk.open_file

    def opens(path: Path) -> BinaryIO:
        if words in path.name and not healthy():
            raise error(code)
        return opened(path)

    patch.setattr(disk, "open_file", opens)


def without_record(root: Path, _: Patch) -> None:
    (root / START).unlink()


def damaged(root: Path, _: Patch) -> None:
    for path in root.glob("*/*-1.safetensors"):
        flip(path, 9)


def empty(root: Path, _: Patch) -> None:
    shutil.rmtree(root)
    root.mkdir()


def row(name: str, harm: object, words: str, kind: object = ConfigError, asked: int = 0) -> Any:
    """``asked``: a job that asks for it may begin from nothing."""
    return pytest.param(harm, kind, words, asked, id=name)


EIO, DENIED = errno.EIO, {"EACCES": errno.EACCES, "EPERM": errno.EPERM}
NO_DIRECTORY = "made at {root}.* is no directory. Remove it, or"
NOT_WRITABLE = r"cannot write to .*runAsUser or fsGroup"
NOT_READABLE = r"there are snapshots, and none can be read: .*{root}/00000001.*runAsUser or fsGroup"
NEWER = r"none can be read: .* newer ddpjob-trainer; use that"
LOST = "status says that there was one of step 40. Put the files back.*resume: Never"
FULL = {
    errno.ENOSPC: "No space left.*Free some space or enlarge the volume; all snapshots",
    errno.EDQUOT: ".*quota exceeded.*Free some space",
    errno.EROFS: "Read-only file system.*Mount the volume for writing; all snapshots",
}
REFUSED = [
    row("a file", partial(replaced, Path.touch), NO_DIRECTORY),
    row("a link to nowhere", partial(replaced, lambda p: p.symlink_to("no")), NO_DIRECTORY),
    row("below a file", lambda root, _: replaced(Path.touch, root.parent, _), NO_DIRECTORY),
    *(row(f"{name} {why}", partial(unwritable, place, name, code), NOT_WRITABLE)
      for place, name in ((Path, "mkdir"), (disk, "make_directory"))
      for why, code in DENIED.items()),
    *(row(words[:9], partial(full, code), rf"\[Errno {code}\] {words}.*'{{root}}'$", OSError)
      for code, words in FULL.items()),
    *(row(f"{name} {why}", partial(unreadable, name, code), NOT_READABLE)
      for name in (lineage.START, ".safetensors", "step-")
      for why, code in DENIED.items()),
    row("EIO of records", partial(unreadable, "start", EIO), "Input/output", OSError, asked=1),
    row("EIO of data", partial(unreadable, "-00000", EIO), "Input/output", OSError, asked=1),
    # After a rollback of the image: else training began anew, and the next upgrade as well.
    row("a manifest of a newer program", partial(newer, MANIFEST), NEWER, asked=1),
    row("a start record of a newer program", partial(newer, START), NEWER, asked=1),
    row("damaged", damaged, r"00000001 holds 1\..*header is wrong.*start over", asked=1),
    row("without its start record", without_record, "00000001 holds one of step 5", asked=1),
    row("emptied, as the status knows", empty, LOST, asked=1),
]  # fmt: skip


@pytest.mark.parametrize(("harm", "kind", "words", "asked"), REFUSED)
def test_a_start_that_would_lose_snapshots_is_refused(root, monkeypatch, harm, kind, words, asked):
    """Nothing is left of it: else each try would leave less room for the next."""
    known: dict[str, Any] = {"known_step": 40} if harm is empty else {}
    volume, kept = root.parent, root.parent.with_name("kept")
    shutil.copytree(volume, kept)
    with monkeypatch.context() as patch:
        harm(root, patch)
        there = sorted(volume.rglob("*"))
        for job in ({"attempt": 2}, {"attempt": 3}, {"uid": "another"}):
            with pytest.raises(kind, match=words.format(root=root)):
                open_snapshots(root, **job, **known)
        assert sorted(volume.rglob("*")) == there
        if asked:
            assert loaded_step(root, 1, uid="never", resume=False) is None
    volume.rename(volume.with_name("harmed"))
    kept.rename(volume)
    assert loaded_step(root, **known) == 5


# --- From an older one ------------------------------------------------------------------------


def test_where_an_older_one_can_be_read_a_newer_format_stays(root, capsys):
    saved(root, 6, attempt=2)
    make_newer(root / "00000002" / manifest.file_name(6))
    assert loaded_step(root, 3) == 5
    words = "000000000006.json is not usable, and left as it is: format version 3"
    assert words in capsys.readouterr().err
    assert not list(root.glob("*/*.invalid"))


TRYING, PASSED_OVER = "trying again for 15 s", "cannot be read: [Errno"
#: Of steps 5, 10 and 15: what cannot be read, why, how long; which is loaded, when, what is said.
FAILING = [
    *(
        pytest.param(
            words, code, 4, 15, 7.75, TRYING, id=f"{words} {errno.errorcode[code]}, passing"
        )
        for words in ("-000000000015-", "000000000015.json", "start.json")
        for code in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
    ),
    pytest.param("-000000000015-", errno.ESTALE, 99, 10, 15, PASSED_OVER, id="stale"),
    pytest.param("-000000000015-", errno.EACCES, 99, 10, 0, PASSED_OVER, id="denied"),
    pytest.param("-00000000001", errno.EIO, 99, 5, 15, TRYING, id="two of them, 15 s in all"),
]


@pytest.mark.parametrize(("words", "code", "seconds", "step", "waited", "said"), FAILING)
def test_a_disk_is_waited_for_before_an_older_one_is_taken(
    root, monkeypatch, capsys, words, code, seconds, step, waited, said
):
    clock = Clock()
    saved(root, 10, 15, attempt=2)
    unreadable(words, code, root, monkeypatch, healthy=lambda: clock.now >= seconds)
    assert loaded_step(root, 3, clock=clock) == step
    assert clock.now == waited
    assert capsys.readouterr().err.count(said) == 1
    assert not list(root.glob("*/*.invalid"))  # another node may be able to read it


def test_a_rank_that_may_not_look_leaves_the_reading_to_others(root, monkeypatch):
    start = lineage.read_start(lineage.Disk(root), 1)
    orders = iter(
        [
            b"candidate 00000001 " + (root / MANIFEST).read_bytes(),
            json.dumps(asdict(start)).encode(),
        ]
    )
    said: list[bytes] = []

    def gather(_: str, answer: bytes) -> list[bytes]:
        said.append(answer)
        return [answer if answer == b"{}" else b"1", answer]  # rank 0 reads what is asked of it

    monkeypatch.setattr(disk, "exists", Mock(side_effect=error(errno.EACCES)))
    world: Any = SimpleNamespace(
        rank=1, size=2, broadcast_bytes=lambda _: next(orders), gather_bytes=gather
    )
    resumed = resume(root, world, SnapshotSettings(root, 1, 2, resume=True))
    assert (resumed.start, resumed.source and resumed.source.step) == (start, 5)
    assert said == [b"0", b"{}", b"1"]


def test_a_directory_may_vanish_while_it_is_read(root, monkeypatch):
    lineage.directory(root, 5).mkdir()
    lineage.write_start(root, Start(5, "u", 1, 5, 1, 5))
    real, gone = disk.names, threading.Event()

    def names(directory: Path) -> list[str]:
        if directory.name == "00000005" and not gone.is_set():
            gone.set()
            shutil.rmtree(directory)
        return real(directory)

    monkeypatch.setattr(disk, "names", names)
    assert loaded_step(root) == 5
    assert gone.is_set()


# --- From nothing -----------------------------------------------------------------------------


def test_an_attempt_that_finds_nothing_to_go_on_from_says_so(tmp_path, capsys):
    """The volume is another one than before, or somebody has emptied it."""
    (tmp_path / "00000005").mkdir()
    (tmp_path / "00000005" / manifest.file_name(1)).touch()  # a stranger's: no snapshot is lost
    assert loaded_step(tmp_path, 1) is None
    assert "starts over" not in capsys.readouterr().err
    assert loaded_step(tmp_path, 2) is None
    assert f"{tmp_path} holds no snapshot to go on from" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ends", "url", "directory", "known"),
    [
        pytest.param(False, None, None, 40, id="a volume"),
        pytest.param(False, None, "fold-2", 0, id="another directory than the job's"),
        pytest.param(True, None, None, 0, id="a disk that ended with the pod"),
        pytest.param(True, "memory://x", None, 40, id="its copy in a store"),
    ],
)
def test_what_a_run_is_known_to_have_had(tmp_path, ends, url, directory, known):
    given = SnapshotSettings(
        tmp_path, 1, 2, resume=True, upload="", ends_with_pod=ends, known_step=40
    )
    asked = Snapshots(upload=url, directory=directory)
    assert _snapshot_settings(given, asked).known_step == known
