"""Snapshot files made to do harm, their checksums right: nothing runs, memory stays bounded."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import pickle
import resource
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.snapshot.ondisk import checked_json, data_file, manifest
from ddpjob_trainer.snapshot.ondisk.checked_json import seal, unseal
from ddpjob_trainer.snapshot.ondisk.data_file import Piece
from ddpjob_trainer.snapshot.restore import resume
from ddpjob_trainer.snapshot.save import layout
from ddpjob_trainer.state.codec import flatten
from support.snapshots import open_snapshots

HUGE = 10**9
ALLOWED_BYTES = 1 << 29  # more than any honest load needs here


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def write(root: Path, *steps: int) -> None:
    store, _ = open_snapshots(root)
    for step in steps:
        store.save(step, flatten({"w": torch.full((64,), float(step)), "n": step}), {})


def newest(root: Path) -> Path:
    return max(root.glob("*/step-*.json"))


def with_data(root: Path, change: Callable[[bytes], bytes]) -> None:
    path = newest(root)
    found = manifest.read(path)
    file = path.parent / found.files[0].name
    data = change(file.read_bytes())
    file.unlink()
    file.write_bytes(data)
    changed = replace(found.files[0], bytes=len(data), crc32=zlib.crc32(data))
    path.write_bytes(replace(found, files=(changed, *found.files[1:])).encode())


def with_header(root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    def rewrite(data: bytes) -> bytes:
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + length :]

    with_data(root, rewrite)


def with_manifest(root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = newest(root)
    body = unseal(path.read_bytes())
    change(body)
    path.write_bytes(seal(body))


def reseal(path: Path, body: bytes) -> None:
    digest = hashlib.sha256(body).hexdigest().encode()
    path.write_bytes(body[:-1] + b',"sha256":"' + digest + b'"}')


def first(header: dict[str, Any]) -> dict[str, Any]:
    return header[min(key for key in header if key.startswith("w@"))]  # type: ignore[no-any-return]


def each(header: dict[str, Any], **values: Any) -> None:
    for entry in header.values():
        entry.update(values)


HEADERS: dict[str, Callable[[dict[str, Any]], None]] = {
    "a million dimensions": lambda h: first(h).update(shape=[1] * 10**6),
    "a huge size": lambda h: first(h).update(shape=[HUGE**3]),
    "overlapping": lambda h: each(h, data_offsets=[0, 8]),
    "beyond the end": lambda h: first(h).update(data_offsets=[0, HUGE]),
    "negative": lambda h: first(h).update(shape=[-4], data_offsets=[0, -16]),
    "another type": lambda h: first(h).update(dtype="I32"),
    "an unknown type": lambda h: first(h).update(dtype="PICKLE"),
    "text": lambda h: first(h).update(shape=["x"], data_offsets=["a", "b"]),
    "a key missing": lambda h: first(h).pop("shape") and None,
    "nothing": lambda h: h.clear(),
}
MANIFESTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "huge tensor": lambda m: m["tensors"].update(w=["F32", [HUGE, HUGE]]),
    "tensor without chunks": lambda m: m["tensors"].update(x=["F32", [HUGE]]),
    "many dimensions": lambda m: m["tensors"].update(w=["F32", [1] * 100_000]),
    "negative shape": lambda m: m["tensors"].update(w=["F32", [-64]]),
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


def check_older_is_taken(root: Path) -> None:
    """In a process of its own that may not have much memory."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + ALLOWED_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            told: list[str] = []
            resume.say = lambda _, text: told.append(text)  # type: ignore[assignment]
            loaded = open_snapshots(root, 2)[1]
            assert loaded is not None
            assert loaded.step == 1, loaded.step
            assert any("is not usable" in text for text in told), told
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def of_a_terabyte(root: Path) -> None:
    path = newest(root)
    os.truncate(path.parent / manifest.read(path).files[0].name, 1 << 40)


def as_its_manifest_says(root: Path) -> None:
    of_a_terabyte(root)
    with_manifest(root, lambda m: m["files"][0].update(bytes=1 << 40))


def much(text: str) -> Callable[[Path], None]:
    """Small in the file: empty lists and dicts; and letters, each as wide as the widest."""

    def write(root: Path) -> None:
        many = text * ((60 << 20) // len(text))
        tree = f'["{many}\N{GRINNING FACE}"]' if text == "a" else f"[{many}0]"
        reseal(newest(root), f'{{"tree":{tree}}}'.encode())

    return write


def a_larger_header(root: Path) -> None:
    path = newest(root)
    found = manifest.read(path)
    file, size = path.parent / found.files[0].name, 200 << 20
    file.unlink()
    file.write_bytes(struct.pack("<Q", size - 8))
    crc = zlib.crc32(bytes(size - 8), zlib.crc32(file.read_bytes()))
    os.truncate(file, size)
    changed = replace(found.files[0], bytes=size, crc32=crc)
    path.write_bytes(replace(found, files=(changed, *found.files[1:])).encode())


LIES: dict[str, Callable[[Path], object]] = {
    **{f"header: {name}": partial(with_header, change=lie) for name, lie in HEADERS.items()},
    **{f"manifest: {name}": partial(with_manifest, change=lie) for name, lie in MANIFESTS.items()},
    **{
        f"a header of {n} bytes": partial(
            with_data, change=lambda data, n=n: struct.pack("<Q", n) + data[8:]
        )
        for n in (2**64 - 1, 2**63, 10**12, 0, 1)
    },
    **{f"much memory: {text}": much(text) for text in ("[],", "{},", "a")},
    "a terabyte of nothing": of_a_terabyte,
    "a terabyte, as its manifest says": as_its_manifest_says,
    "a tree of endless depth": lambda root: reseal(
        newest(root), b'{"format":"ddpjob-snapshot","tree":%b}' % (b"[" * 200_000 + b"]" * 200_000)
    ),
    "a larger header": a_larger_header,
}


@pytest.mark.parametrize("name", LIES)
def test_what_lies_is_passed_over(tmp_path, name):  # type: ignore[no-untyped-def]
    write(tmp_path, 1, 2)
    LIES[name](tmp_path)
    check_older_is_taken(tmp_path)


@pytest.mark.tier("gate")
def test_as_many_values_as_may_be_take_bounded_memory(tmp_path):  # type: ignore[no-untyped-def]
    write(tmp_path, 1, 2)
    names = ",".join(f'"{number:x}":[]' for number in range(checked_json._MAX_VALUES // 2 - 10))
    reseal(newest(tmp_path), ('{"tree":{' + names + "}}").encode())
    checked_json.check(newest(tmp_path).read_bytes())
    check_older_is_taken(tmp_path)


def test_pickle_in_disguise_is_not_run(tmp_path):  # type: ignore[no-untyped-def]
    trap, file = tmp_path / "run", tmp_path / "file"
    torch.save({"w": Trap(trap)}, file)
    for content in (pickle.dumps(Trap(trap)), file.read_bytes()):
        write(data := tmp_path / f"data-{len(content)}", 1, 2)
        with_data(data, lambda _, content=content: content)
        write(listed := tmp_path / f"manifest-{len(content)}", 1, 2)
        newest(listed).write_bytes(content)
        for root in (data, listed):
            check_older_is_taken(root)
        assert not trap.exists()


def test_without_an_older_one_nothing_begins_anew_unless_asked(tmp_path):  # type: ignore[no-untyped-def]
    write(tmp_path, 1)
    with_header(tmp_path, HEADERS["overlapping"])
    with pytest.raises(ConfigError, match=r"00000001 holds 1\..*header is wrong.*begin anew"):
        open_snapshots(tmp_path, 2)
    assert open_snapshots(tmp_path, 1, uid="new", resume=False)[1] is None


@pytest.mark.parametrize("writers", [1, 2, 3, 5, 8, 64])
def test_every_element_has_one_writer_and_all_write_as_much(monkeypatch, writers):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(layout, "MAX_PIECE_BYTES", 1 << 10)
    tensors = {"a": ("F32", 1001), "b": ("BF16", 3), "c": ("F64", 0), "d": ("I64", 777)}
    shapes = tuple((name, (dtype, (count,))) for name, (dtype, count) in tensors.items())
    structure = layout.Structure((*shapes, ("m", ("F64", (500,)))), frozenset("abcd"), ())
    divided = layout.divide(structure, writers)
    for name, (_, count) in tensors.items():
        spans = sorted((s.start, s.count) for share in divided for s in share if s.tensor == name)
        ends = [*itertools.accumulate(n for _, n in spans)]
        assert [start for start, _ in spans] == [0, *ends][: len(spans)]
        assert sum(n for _, n in spans) == count
    items = {name: manifest.ITEM_BYTES[dtype] for name, (dtype, _) in tensors.items()}
    sizes = [sum(s.count * items[s.tensor] for s in share) for share in divided]
    assert max(sizes) - min(sizes) <= 16 + writers
    assert all(s.count * items[s.tensor] <= 1 << 10 for share in divided for s in share)


def test_a_file_is_read_as_it_was_laid_out(tmp_path):  # type: ignore[no-untyped-def]
    pieces = data_file.order([Piece("b", "U8", 3), Piece("a", "F64", 2), Piece("c", "BF16", 5)])
    assert [piece.dtype for piece in pieces] == ["F64", "BF16", "U8"]
    head = data_file.header(pieces)
    (tmp_path / "head").write_bytes(head)
    with (tmp_path / "head").open("rb") as file:
        found = data_file.read_header(file, len(head) + sum(piece.bytes for piece in pieces))
    offsets = {key: offset - len(head) for key, (_, offset) in found.items()}
    assert offsets == {"a": 0, "c": 16, "b": 26}
    assert len(head) % 8 == 0
