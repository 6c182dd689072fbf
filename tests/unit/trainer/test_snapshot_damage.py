"""Files that are damaged, odd or made to do harm give way to an older snapshot.

Their checksums may be right: nothing runs, memory stays bounded, nothing outside is touched.
"""

import contextlib
import errno
import hashlib
import io
import json
import os
import pickle
import resource
import socket
import stat
import struct
import zlib
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from ddpjob_trainer import cli
from ddpjob_trainer.snapshot.ondisk import disk, lineage, manifest
from ddpjob_trainer.snapshot.ondisk.disk import seal, unseal
from ddpjob_trainer.snapshot.ondisk.files import data_name, retain
from ddpjob_trainer.snapshot.ondisk.lineage import Start
from ddpjob_trainer.snapshot.restore.load import open_source
from support.snapshots import error, exit_code, loaded_step, newest_manifest, saved, whole

HUGE = 10**9
ALLOWED_BYTES = 1 << 29  # more than any honest load needs here


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The directory of an attempt that has saved steps 1 and 2."""
    saved(tmp_path / "job", 1, 2)
    return tmp_path / "job"


# --- Files that lie ---------------------------------------------------------------------------


class Trap:
    """What shows that it was unpickled."""

    def __init__(self, root: Path) -> None:
        self.path = root.with_name("ran")

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def saved_by_torch(trap: Trap) -> bytes:
    torch.save({"w": trap}, found := io.BytesIO())
    return found.getvalue()


def with_file(root: Path, **changed: Any) -> None:
    """Let the newest manifest say something else of its first data file."""
    found = manifest.read(path := newest_manifest(root))
    files = (replace(found.files[0], **changed), *found.files[1:])
    path.write_bytes(replace(found, files=files).encode())


def first_file(root: Path) -> Path:
    path = newest_manifest(root)
    return path.parent / manifest.read(path).files[0].name


def with_data(root: Path, change: Callable[[bytes], bytes]) -> None:
    file = first_file(root)
    data = change(file.read_bytes())
    file.unlink()
    file.write_bytes(data)
    with_file(root, bytes=len(data), crc32=zlib.crc32(data))


def with_header(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    def rewrite(data: bytes) -> bytes:
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + length :]

    with_data(root, rewrite)


def with_manifest(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = newest_manifest(root)
    change(body := unseal(path.read_bytes()))
    path.write_bytes(seal(body))


def sealed(body: bytes) -> bytes:
    """Whatever text it is, with its right checksum."""
    return body[:-1] + b',"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}'


def first(header: dict[str, Any]) -> dict[str, Any]:
    return header[min(key for key in header if key.startswith("model/w@"))]  # type: ignore[no-any-return]


HEADERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a million dimensions": lambda h: first(h).update(shape=[1] * 10**6),
    "a huge size": lambda h: first(h).update(shape=[HUGE**3]),
    "overlapping": lambda h: [entry.update(data_offsets=[0, 8]) for entry in h.values()],
    "beyond the end": lambda h: first(h).update(data_offsets=[0, HUGE]),
    "negative": lambda h: first(h).update(shape=[-4], data_offsets=[0, -16]),
    "another type": lambda h: first(h).update(dtype="I32"),
    "an unknown type": lambda h: first(h).update(dtype="PICKLE"),
    "text": lambda h: first(h).update(shape=["x"], data_offsets=["a", "b"]),
    "a key missing": lambda h: first(h).pop("shape"),
    "nothing": lambda h: h.clear(),
}
MANIFESTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "huge tensor": lambda m: m["tensors"].update({"model/w": ["F32", [HUGE, HUGE]]}),
    "tensor without chunks": lambda m: m["tensors"].update(x=["F32", [HUGE]]),
    "many dimensions": lambda m: m["tensors"].update({"model/w": ["F32", [1] * 100_000]}),
    "negative shape": lambda m: m["tensors"].update({"model/w": ["F32", [-64]]}),
    "negative start": lambda m: m["chunks"][0].update(start=-1),
    "huge count": lambda m: m["chunks"][0].update(count=HUGE**2),
    "the same chunk twice": lambda m: m["chunks"].append(m["chunks"][0]),
    "outside": lambda m: m["files"][0].update(name="../../secret"),
    "no such file": lambda m: m["files"][0].update(name="other.safetensors"),
    "the same file twice": lambda m: m["files"].append(m["files"][0]),
    "huge file": lambda m: m["files"][0].update(bytes=HUGE**2),
    "future version": lambda m: m.update(version=manifest.VERSION + 1),
    "another format": lambda m: m.update(format="pickle"),
    "a mark that is not known": lambda m: m.update(tree={"$eval": "1"}),
    "a tensor that is not there": lambda m: m.update(tree={"$tensor": "x"}),
    "a mapping of nothing": lambda m: m.update(tree={"$mapping": []}),
    "a number that is no float": lambda m: m.update(tree={"$float": 10**400}),
    "empty, with huge strides": lambda m: m["tensors"].update(w0=["F32", [0, 2**62, 2**62]]),
    "empty, and too many": lambda m: m["tensors"].update(w0=["F32", [2**62, 2**62, 0]]),
    "a number of no type": lambda m: m.update(tree={"$generic": ["O", "AAAAAAAAAAA="]}),
    "a number of nothing": lambda m: m.update(tree={"$generic": ["<f8", ""]}),
    "a tree of another kind": lambda m: m.update(tree={"$mapping": 5}),
    "an alias of nothing": lambda m: m["aliases"].update(x="y"),
    "chunks of another kind": lambda m: m.update(chunks={"a": 1}),
    "step": lambda m: m.update(step=-1),
    **{
        f"a file named {name[:9]!a}": lambda m, name=name: m["files"][0].update(name=name)
        for name in ("x" * 300, "a\0b", "\ud800", "start.json", "step-1.json", ".")
    },
}


def as_manifest(make: Callable[[], bytes], root: Path) -> None:
    newest_manifest(root).write_bytes(sealed(make()))


def many_names() -> bytes:
    """As many as may be."""
    half = (2 << 20) // 2
    with pytest.raises(ValueError, match="names and numbers, at most"):
        disk.check_json(b"[]," * (half + 1))
    names = ",".join(f'"{number:x}":[]' for number in range(half - 10))
    disk.check_json(sealed(text := ('{"tree":{' + names + "}}").encode()))
    return text


#: Small in the file: empty lists and dicts; and letters, each as wide as the widest.
MEMORY: dict[str, Callable[[], bytes]] = {
    "[],": lambda: b'{"tree":[%b0]}' % (b"[]," * (20 << 20)),
    "{},": lambda: b'{"tree":[%b0]}' % (b"{}," * (20 << 20)),
    "a": lambda: b'{"tree":["%b%b"]}' % (b"a" * (60 << 20), "\N{GRINNING FACE}".encode()),
    "depth": lambda: b'{"format":"ddpjob-snapshot","tree":%b}' % (b"[" * 200_000 + b"]" * 200_000),
}


def of_a_terabyte(root: Path) -> None:
    os.truncate(first_file(root), 1 << 40)


def as_its_manifest_says(root: Path) -> None:
    of_a_terabyte(root)
    with_manifest(root, lambda m: m["files"][0].update(bytes=1 << 40))


def a_larger_header(root: Path) -> None:
    file, size = first_file(root), 200 << 20
    file.unlink()
    file.write_bytes(struct.pack("<Q", size - 8))
    crc = zlib.crc32(bytes(size - 8), zlib.crc32(file.read_bytes()))
    os.truncate(file, size)
    with_file(root, bytes=size, crc32=crc)


def with_trap(make: Callable[[Trap], bytes], root: Path, *, manifest: bool = False) -> None:
    content = make(Trap(root))
    if manifest:
        newest_manifest(root).write_bytes(content)
    else:
        with_data(root, lambda _: content)


PICKLES: dict[str, Callable[[Trap], bytes]] = {"pickle": pickle.dumps, "torch.save": saved_by_torch}
LIES: dict[str, Callable[[Path], object]] = {
    **{f"header: {name}": partial(with_header, change=lie) for name, lie in HEADERS.items()},
    **{f"manifest: {name}": partial(with_manifest, change=lie) for name, lie in MANIFESTS.items()},
    **{
        f"a header of {n} bytes": partial(
            with_data, change=lambda data, n=n: struct.pack("<Q", n) + data[8:]
        )
        for n in (2**64 - 1, 2**63, 10**12, 0, 1)
    },
    **{f"much memory: {name}": partial(as_manifest, make) for name, make in MEMORY.items()},
    **{f"data: {name}": partial(with_trap, make) for name, make in PICKLES.items()},
    **{
        f"manifest: {name}": partial(with_trap, make, manifest=True)
        for name, make in PICKLES.items()
    },
    "a terabyte of nothing": of_a_terabyte,
    "a terabyte, as its manifest says": as_its_manifest_says,
    "a larger header": a_larger_header,
}
LARGEST = pytest.param(
    partial(as_manifest, many_names), id="as many names as may be", marks=pytest.mark.tier("gate")
)


def load_older(root: Path) -> None:
    """With little memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + ALLOWED_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    assert loaded_step(root) == 1


@pytest.mark.parametrize("lie", [*(pytest.param(lie, id=n) for n, lie in LIES.items()), LARGEST])
def test_a_file_that_lies_runs_nothing_and_gives_way_to_the_older(root, capfd, lie):
    lie(root)
    assert exit_code(partial(load_older, root)) == 0
    assert "is not usable" in capfd.readouterr().err
    assert not root.with_name("ran").exists()


@pytest.mark.parametrize("suffix", ["-0.safetensors", "-1.safetensors", "-2.safetensors", ".json"])
def test_any_flipped_or_missing_byte_gives_way_to_the_older(root, suffix, capsys):
    def readable() -> list[int]:
        good = []
        for path in manifest.listed(newest.parent):
            with contextlib.suppress(manifest.InvalidSnapshotError):
                whole(open_source(path.parent, found := manifest.read(path)))
                good.append(found.step)
        return good

    (newest,) = root.glob(f"*/step-000000000002*{suffix}")
    data = newest.read_bytes()
    for place in range(0, len(data), max(1, len(data) // 40)):
        for damaged in (data[:place], data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]):
            newest.unlink()
            newest.write_bytes(damaged)
            assert readable() == [1], (place, len(damaged))
    newest.write_bytes(data)
    assert readable() == [1, 2]
    newest.write_bytes(data[:-1])
    assert loaded_step(root) == 1
    assert "is not usable" in capsys.readouterr().err
    assert newest.exists(), "one reader's word"


# --- Odd things where files should be -----------------------------------------------------------


def bound_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's name must be short
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(path.name)
    os.chdir(here)


def device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # zeros without end
    except PermissionError:
        pytest.skip("making devices needs root")


THINGS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "socket": bound_socket,
    "device": device,
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to nowhere": lambda path: path.symlink_to(path.parent / "nowhere"),
    "directory": Path.mkdir,
    "empty": Path.touch,
    "huge": lambda path: path.touch() or os.truncate(path, 1 << 42),
}
GOOD = asdict(Start(7, "v", 1, 0, 1, 2))
#: One bit would put another's step on the chain.
CHANGED = seal(asdict(Start(2, "u", 2, 0, 1, 2))).replace(b'"parent_step":2', b'"parent_step":3')
RECORDS: dict[str, Any] = {
    "a list": b"[]",
    "endless": b'{"a":' + b"[" * 30_000 + b"]" * 30_000 + b"}",
    "no number": b'{"sequence":NaN}',
    "many digits": b'{"sequence":' + b"9" * 5000 + b"}",
    "half a letter": b'{"uid":"\\ud800"}',
    "no text": b"\xff\xfe",
    "nothing": b"",
    "a field more": GOOD | {"more": 1},
    "text for a number": GOOD | {"attempt": "1"},
    "a bool": GOOD | {"round": True},
    "negative": GOOD | {"attempt": -1},
    "too large": GOOD | {"attempt": 10**30},
    "no uid": GOOD | {"uid": None},
    "a long uid": GOOD | {"uid": "x" * 10_000},
    "a number for a list": GOOD | {"predecessors": 7},
    "a text for a list": GOOD | {"predecessors": "ab"},
    "many": GOOD | {"predecessors": ["x"] * 1000},
    "deep": GOOD | {"predecessors": [json.loads("[" * 400 + "]" * 400)]},
}


def recording(record: Any) -> Callable[[Path], object]:
    text = record if isinstance(record, bytes) else json.dumps(record).encode()
    return lambda path: path.write_bytes(sealed(text))


MANIFEST, DATA = manifest.file_name(2), data_name(2, "00000001", 1)
STRANGERS = f"00000007/{lineage.START}"
#: Attempt 2 went on from step 2. What is replaced then, and the step that attempt 3 goes on from.
PLACES: dict[str, tuple[list[str], int]] = {
    "the newest manifest": ([f"00000002/{MANIFEST}"], 2),  # that of attempt 1 is taken
    "each manifest": ([f"00000001/{MANIFEST}", f"00000002/{MANIFEST}"], 1),
    "the newest data file": ([f"00000002/{DATA}"], 2),
    "each data file": ([f"00000001/{DATA}", f"00000002/{DATA}"], 1),
    "the first start record": ([f"00000001/{lineage.START}"], 2),
    "the newest start record": ([f"00000002/{lineage.START}"], 2),
    "a stranger's start record": ([STRANGERS], 2),
    "a directory": (["00000003"], 2),
}
ODD = [
    *(
        pytest.param(*place, thing, id=f"{name} in place of {where}")
        for where, place in PLACES.items()
        for name, thing in THINGS.items()
    ),
    *(pytest.param([STRANGERS], 2, recording(r), id=f"record: {n}") for n, r in RECORDS.items()),
    pytest.param(
        [f"00000002/{lineage.START}"], 2, lambda path: path.write_bytes(CHANGED), id="a changed bit"
    ),
]


@pytest.mark.parametrize(("names", "step", "thing"), ODD)
@pytest.mark.fault("S3")
def test_an_odd_thing_in_place_of_a_file_is_left_out(root, capsys, names, step, thing):
    assert loaded_step(root) == 2
    for path in map(root.joinpath, names):
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        thing(path)
    assert loaded_step(root, 3) == step
    said = f"{names[0]} is not usable" in capsys.readouterr().err
    assert said or not names[0].endswith(lineage.START)


@pytest.mark.parametrize("thing", THINGS.values(), ids=THINGS)
def test_the_tool_names_odd_things_and_reads_what_is_left(root, tmp_path, capsys, thing):
    (root / "00000001" / MANIFEST).unlink()
    for name in (f"00000001/{MANIFEST}", f"00000001/{manifest.file_name(3)}", "00000002"):
        thing(root / name)
    assert cli.main(["snapshot", "ls", str(root)]) == 0
    assert capsys.readouterr().out.count("invalid: ") == 2
    assert cli.main(["snapshot", "verify", str(root)]) == 1
    assert capsys.readouterr().out.count("DAMAGED") == 2
    (tmp_path / "out.tmp").symlink_to(tmp_path / "precious")
    assert cli.main(["snapshot", "export", str(root), str(tmp_path / "out")]) == 0
    assert not (tmp_path / "precious").exists()


# --- Links ------------------------------------------------------------------------------------

SECRET = b"a secret of the trainer"


@pytest.mark.parametrize("links", [True, False], ids=["hard links", "copies"])
@pytest.mark.fault("S3")
def test_no_byte_from_outside_comes_into_the_volume(root, tmp_path, monkeypatch, links):
    """A link is named like a data file; making hard links may be forbidden."""
    file, secret = first_file(root), tmp_path / "secret"
    secret.write_bytes(SECRET.ljust(file.stat().st_size))
    file.unlink()
    file.symlink_to(secret)
    if not links:
        monkeypatch.setattr(os, "link", Mock(side_effect=error(errno.EPERM)))
    assert loaded_step(root) == 1
    held = [path for path in root.glob("*/*") if path.is_file() and not path.is_symlink()]
    assert not any(SECRET in path.read_bytes() for path in held)


def test_nothing_outside_is_written_or_removed_through_a_link(root, tmp_path):
    (outside := tmp_path / "outside").mkdir()
    names = [data_name(1, "aa", 0), manifest.file_name(1), lineage.START]
    for name in names:
        (outside / name).write_bytes(SECRET)
    mine = root / "00000003"
    mine.symlink_to(outside)
    retain(root, 3, 2, {1, 2})
    for action in (
        lambda: disk.write_new(mine / "new", [b""]),
        lambda: lineage.write_start(root, Start(3, "u", 9, 0)),
        lambda: disk.remove(mine / names[0]),
        lambda: disk.link_or_copy(root / "00000001" / lineage.START, mine / "linked"),
        lambda: manifest.listed(mine),
    ):
        with pytest.raises(disk.NotAFileError):
            action()
    assert sorted(path.name for path in outside.iterdir()) == sorted(names)
    assert all((outside / name).read_bytes() == SECRET for name in names)


def test_a_pipe_that_came_after_the_look_is_not_waited_for(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    was = Path(__file__).stat()
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", lambda *_, **__: was)
        with pytest.raises(disk.NotAFileError):
            disk.open_file(tmp_path / "pipe")


def test_what_strangers_write_is_printed_on_one_line():
    text = str(manifest.InvalidSnapshotError("a\nb\x1b[31m" + "x" * 1000))
    assert text.isprintable()
    assert len(text) <= 300
