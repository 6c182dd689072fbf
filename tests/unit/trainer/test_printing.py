"""No text that a volume holds reaches a terminal as more than text, by whichever command."""

import ast
import copy
import inspect
import json
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpjob_trainer import cli
from ddpjob_trainer.evidence import commands as evidence_commands
from ddpjob_trainer.evidence import folder
from ddpjob_trainer.launcher.output import Log
from ddpjob_trainer.snapshot import manager, reader
from ddpjob_trainer.snapshot.ondisk import manifest
from ddpjob_trainer.snapshot.ondisk.disk import seal, unseal
from ddpjob_trainer.state.codec import flatten
from support.snapshots import open_snapshots

AT = "2026-01-01T12:00:00Z"
#: A title, the clipboard, C1, letters turned around, ends of lines, a lone surrogate, a tag.
ODD = (
    "\x1b]0;t\x07\x1b[2J\x1b]52;c;aGk=\x07\x9b31m\u202eevil\u2066\nFORGED\rFORGED\x85FORGED"
    "\u2028FORGED\x0bFORGED\ud800\x7f\t\U000e0041"
)
WRITTEN = ODD.replace("\ud800", "")  # what a name of a file can be


def plain(captured: Any) -> str:
    """Hold that what was printed is lines of plain text, none of which a stranger began."""
    for text in captured:
        for line in text.split("\n"):
            assert line.isprintable(), ascii(line)
            assert not line.startswith("FORGED"), line
    return "".join(captured)


def paths(value: Any, *before: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the way to each value, containers too."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield (*before, key)
        if isinstance(inner, dict | list):
            yield from paths(inner, *before, key)


def spoiled(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the body with odd text in place of each value, inside of it, and of each key."""
    for *way, last in paths(body):
        for odd in (ODD, [ODD], {ODD: ODD}, None):
            changed = inner = copy.deepcopy(body)
            for key in way:
                inner = inner[key]
            if odd is not None:
                inner[last] = odd
            elif isinstance(inner, dict):
                inner[ODD] = inner.pop(last)
            yield changed


def rank(number: int, end: str) -> dict[str, Any]:
    return {"rank": number, "end": end, "code": 1, "signal": 9, "exception": f"E: {ODD}",
            "step": 3, "snapshotStep": 2, "log": [ODD, "last"]}  # fmt: skip


def evidence(uid: str, replica: int) -> dict[str, Any]:
    cause = {"rank": 0, "replica": 0, "kind": ODD, "snapshotStep": 1, "step": 2}
    return {
        "version": 1, "uid": uid, "attempt": 1, "round": 0, "replica": replica, "nproc": 1,
        "pod": ODD, "state": "over", "began": AT, "at": AT, "made": 1, "why": ODD, "signal": 15,
        "cause": cause, "lost": {ODD: ODD}, "report": {"kind": ODD, "log": [ODD]}, "stacks": "f",
        "flight": [ODD], "ranks": [rank(replica, "failed"), rank(replica + 5, "running")],
    }  # fmt: skip


def test_evidence_is_plain_text_whatever_its_files_say(tmp_path, capsys):
    uid = f"u{WRITTEN}"
    place = folder.round_folder(uid, 1, 0)
    with folder.opened(tmp_path, place.name, make=True) as fd:
        folder.write(fd, "\x1b]0;t\x07.nccl.gz", b"")
    seen, parser = 0, cli._parser()
    kinds = ("ls", "ls --json", "show", "show --rank 1")
    asked = [parser.parse_args(["evidence", *one.split(), str(tmp_path)]) for one in kinds]
    for body in [evidence(uid, 1), *spoiled(evidence(uid, 1))]:
        if isinstance(body.get("stacks"), str):  # these are lines
            body["stacks"] = body["stacks"].replace("FORGED", "frame")
        with folder.opened(tmp_path, place.name) as fd:
            folder.write(fd, "replica-1.json", json.dumps(body).encode())
        for one in asked:
            cli._evidence(one)
            seen += len(plain(capsys.readouterr()))
    assert seen > 100_000
    assert cli.main(["evidence", "show", "--uid", ODD, str(tmp_path / f"absent{WRITTEN}")]) == 1
    assert "no such directory" in plain(capsys.readouterr())
    assert cli.main(["evidence", "ls", "--uid", WRITTEN, str(tmp_path)]) == 1
    assert "no evidence of the job with uid ?]0;t?" in plain(capsys.readouterr())
    assert cli.main(["evidence", "ls", f"nothing://{ODD}"]) == 1
    assert "cannot be read" in plain(capsys.readouterr())


def rewritten(path: Path, change: Callable[[Any], Any]) -> None:
    """Put other content into a file that may be linked elsewhere."""
    data = change(path.read_bytes())
    path.unlink()
    path.write_bytes(data)


def with_header(path: Path, header: dict[str, Any]) -> None:
    """Give a snapshot's first data file another header, its checksum right."""
    found = manifest.read(path)
    file = path.parent / found.files[0].name
    old = file.read_bytes()
    (length,) = struct.unpack("<Q", old[:8])
    text = json.dumps(header).encode()
    data = struct.pack("<Q", len(text)) + text + old[8 + length :]
    rewritten(file, lambda _: data)
    changed = replace(found.files[0], bytes=len(data), crc32=zlib.crc32(data))
    body = replace(found, files=(changed, *found.files[1:])).encode()
    rewritten(path, lambda _: body)


def test_snapshots_are_plain_text_whatever_their_files_say(tmp_path, capsys):
    root = tmp_path / "job"
    store, _ = open_snapshots(root, 1)
    tensors = {f"w{WRITTEN}": torch.ones(2), "v": torch.ones(2)}
    extra = {f"layer{ODD}": {"calls": 5}, "other": ODD}
    state = {"model": tensors, "registered": {ODD: {"a": ODD}}, "rng": [], "extra": extra}
    (root / f"00000009{WRITTEN}").mkdir()
    store.save(10, flatten(state), {"job": ODD, "program": {"script": ODD}, ODD: ODD})
    path, start = store.directory / manifest.file_name(10), store.directory / "start.json"
    data = path.parent / manifest.read(path).files[0].name
    kept = {one: one.read_bytes() for one in (path, start, data)}
    (length,) = struct.unpack("<Q", kept[data][:8])
    header = json.loads(kept[data][8 : 8 + length])
    spoil: list[Callable[[], None]] = [lambda: None]
    for one in (path, start):
        sealed = map(seal, spoiled(unseal(kept[one])))
        spoil += [partial(rewritten, one, lambda _, data=data: data) for data in sealed]
    spoil += [partial(with_header, path, body) for body in spoiled(header)]
    shown, parser, out = "", cli._parser(), tmp_path / "out"
    asked = [parser.parse_args(["snapshot", one, str(root)]) for one in ("ls", "verify")]
    asked += [parser.parse_args(["snapshot", "export", str(root), str(out)])]
    for change in spoil:
        for one, content in kept.items():
            rewritten(one, lambda _, content=content: content)
        change()
        for options in asked:
            cli._snapshot(options)
            shown += plain(capsys.readouterr())
        out.unlink(missing_ok=True)
    assert "the extra state of layer?]0;t?" in shown
    assert "is not in" in shown
    assert "DAMAGED" in shown
    assert cli.main(["snapshot", "ls", str(tmp_path / WRITTEN)]) == 1
    assert "holds no snapshots" in plain(capsys.readouterr())


@pytest.mark.parametrize("module", [evidence_commands, reader, cli])
def test_the_commands_print_in_one_way(module):
    tree = ast.parse(inspect.getsource(module))
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert not [func for func in calls if isinstance(func, ast.Name) and func.id == "print"]
    assert "stdout" not in inspect.getsource(module)


def test_ranks_and_launchers_quote_a_volume_in_one_plain_line(capfd):
    config = {"job": "mine", "program": {}, "total_steps": 3}
    manager.resumed_from(1, {"job": ODD, "program": {}}, config)
    log = Log()
    log.say(ODD)
    log.flush()
    out, err = capfd.readouterr()
    assert out == ""
    assert plain([err]).count("\n") == 2
    assert "of another job (uid ?]0;t?" in err
