"""What a snapshot holds, how it is written, and how a state comes back from it.

Values of every kind, each rank's bytes; on the way back in place, nothing shared, all or nothing.
"""

import enum
import errno
import fcntl
import itertools
import json
import math
import mmap
import os
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.optim.update import make_ema
from ddpjob_trainer.snapshot.ondisk import disk, files, manifest
from ddpjob_trainer.snapshot.ondisk.files import Piece
from ddpjob_trainer.snapshot.restore import load
from ddpjob_trainer.snapshot.save import layout
from ddpjob_trainer.snapshot.training_state import TrainingState
from ddpjob_trainer.state.codec import (
    Exact,
    Flat,
    UnstorableError,
    flatten,
    unflatten,
    without_numpys,
)
from support.snapshots import error, memory_source, open_snapshots, saved, stored, whole

# --- Values -----------------------------------------------------------------------------------


def test_tensors_of_every_kind_come_back(tmp_path):
    shared = torch.arange(6.0).reshape(2, 3)
    plain = {0: [True, None], "$odd": (1, (0.1, float("-inf"))), "bytes": b"\x00\xff"}
    tensors = {
        "numpy": np.arange(3, dtype=np.float32),
        "scalar": torch.tensor(3.5, dtype=torch.bfloat16),
        "bool": torch.tensor([True, False]),
        "empty": torch.empty(0, 4),
        "strided": torch.arange(12).reshape(3, 4).t(),
        "complex": torch.tensor([1 + 2j, 3 - 4j]),
        "conjugate": torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex128).conj(),
    }
    open_snapshots(tmp_path, 1)[0].save(
        1, flatten({**tensors, "tied": [shared] * 2, "p": plain}), {}
    )
    loaded = open_snapshots(tmp_path, 2)[1]
    assert loaded is not None
    found = unflatten(whole(loaded))
    assert found.pop("p") == plain
    one, other = found.pop("tied")
    assert one is other
    assert torch.equal(one, shared)
    assert isinstance(found["numpy"], np.ndarray)
    for name, wanted in tensors.items():
        assert found[name].dtype == wanted.dtype
        assert torch.equal(*map(torch.as_tensor, (found[name], wanted))), name


def back(value: Any) -> Any:
    flat = flatten({"a": value})
    return unflatten(Flat(json.loads(json.dumps(flat.tree)), flat.tensors, flat.aliases))["a"]


EXACT: list[Any] = [
    None, True, 5, 2**70, 0.1, math.inf, math.nan, "text", b"\x00", [1], (1,), {}, deque([1], 3),
    np.float64(0.1), np.float32(0.1), np.float16(0.1), np.float32("inf"), np.int64(-5),
    np.uint8(255), np.uint64(2**64 - 1), np.bool_(True), np.str_("täxt"), np.bytes_(b"\x00a"),
    torch.Size([2, 3]), (np.float32(1), [np.int32(2)]),
    {np.int64(1): np.float64(2)}, {np.str_("a"): 1}, OrderedDict(a=np.float32(3)),
    Counter({2: 1, 5: 3}), OrderedDict([("z", 1), ("a", 2)]), defaultdict(list, {"x": [1]}),
]  # fmt: skip


@pytest.mark.parametrize("value", EXACT, ids=repr)
def test_a_value_comes_back_as_the_type_that_it_was(value):
    found = back(Exact({"b": value}))["b"]
    assert found == value or value != value
    assert repr(found) == repr(value), "types within, and numpy's"
    assert type(found) is type(value)


Named = type("Named", (str,), {})
Number = type("Number", (float,), {"__repr__": lambda _: "no JSON"})
Stack = type("Stack", (list,), {})
Phase = enum.StrEnum("Phase", {"WARM": "warm"})
Level = enum.IntEnum("Level", "LOW")
Colour = enum.Enum("Colour", "RED")
Best = namedtuple("Best", "loss step")
OTHER_TYPE = r"after a resume it would be of another type: keep what it is made of"
OTHERS = [
    Best(0.1, 2), Phase.WARM, Level.LOW, Colour.RED, Named("a"), Stack(), Number(1),
    torch.max(torch.ones(2, 2), 0),
]  # fmt: skip
INEXACT: list[tuple[Any, str]] = [
    *((Exact({"b": v}), rf"a/b: a {type(v).__name__}; .*{OTHER_TYPE}") for v in OTHERS),
    (Exact({"b": {Phase.WARM: 1}}), r"a/b \(a key\): a Phase"),
    (Colour.RED, f"a: a Colour; .*{OTHER_TYPE}"),  # outside of Exact too
    (Exact(MappingProxyType({})), "a: a mappingproxy"),
    (Exact(defaultdict(lambda: 1)), "a: a defaultdict"),
    (Exact(lambda: None), "a: a function"),
    (Exact(np.longdouble(1)), "a: a longdouble; state must consist of"),
    (Exact(np.complex64(1)), "a: a complex64; state must"),
    (Exact(np.datetime64(5, "ns")), "a: a datetime64; state must"),
]


@pytest.mark.parametrize(("value", "words"), INEXACT, ids=[words[:30] for _, words in INEXACT])
def test_a_value_that_would_change_its_type_is_refused(value, words):
    with pytest.raises(UnstorableError, match=f"cannot store {words}"):
        back(value)


PLAIN: list[tuple[Any, Any]] = [
    (Phase.WARM, "warm"), (Level.LOW, 1), (Named("a"), "a"), (Number(0.1), 0.1),
    (Number("inf"), math.inf), (Stack([Number(1)]), [1.0]), (Best(0.1, Level.LOW), (0.1, 1)),
    (torch.Size([2, 3]), (2, 3)), ({Phase.WARM: 1, Level.LOW: 2}, {"warm": 1, 1: 2}),
    ({Named("$a"): 1}, {"$a": 1}), (np.float64(0.1), np.float64(0.1)), (True, True),
]  # fmt: skip


@pytest.mark.parametrize(("value", "plain"), PLAIN, ids=repr)
def test_elsewhere_a_subclass_is_stored_as_its_base(value, plain):
    """Of an optimizer's lr from a YAML file, say, the script sees nothing."""
    found = back([value, Exact([])])[0]
    assert found == plain
    assert repr(found) == repr(plain)


def test_an_export_needs_no_numpy():
    state = {"lr": [np.float64(0.1), np.float32("nan")], "n": {np.int64(1): np.str_("a")}}
    found = unflatten(Flat(without_numpys(flatten(state).tree)))
    assert repr(found) == "{'lr': [0.1, nan], 'n': {1: 'a'}}"


def test_what_is_nested_too_deeply_to_be_read_again_is_refused():
    deep: Any = 1
    for turn in range(12):
        deep = (deep,) if turn % 2 else {"a": deep, 1: [deep]}
    assert unflatten(flatten(deep)) == deep
    value: list[Any] = []
    value.append((value,))
    with pytest.raises(TypeError, match=r"cannot store x/0/0/.*: nested deeper than"):
        flatten({"x": value})


ARRAYS = [np.arange(6)[::-1], np.arange(6, dtype=">f4"), np.array(3.0, dtype=">f8")]


@pytest.mark.parametrize("array", ARRAYS, ids=["backwards", "big endian", "no dimension"])
def test_arrays_that_no_tensor_can_share_come_back(array):
    found = unflatten(flatten({"it": array}))["it"]
    assert found.dtype == array.dtype.newbyteorder("=")
    assert (found.shape, found.tolist()) == (array.shape, array.tolist())


def test_of_equal_paths_none_is_written_over_another():
    one, two, three, four = (torch.tensor(float(n)) for n in range(4))
    value = {"a/b": one, "a": {"b": two}, "d": {1: three, "1": four}}
    found = unflatten(flatten(value))
    assert [float(found["a/b"]), float(found["a"]["b"])] == [0, 1]
    assert {key: float(t) for key, t in found["d"].items()} == {1: 2, "1": 3}


def test_only_what_is_the_same_elements_is_stored_once():
    whole = torch.arange(12.0).reshape(3, 4)
    views = {
        "whole": whole, "flat": whole.view(-1), "part": whole[:2], "turned": whole.view(4, 3).t(),
        "bits": whole.view(torch.int32), "again": whole.view(3, 4), "again flat": whole.view(12),
    }  # fmt: skip
    flat = flatten(views)
    assert flat.aliases == {"again": "whole", "again flat": "flat"}
    found = unflatten(flat)
    assert all(torch.equal(found[name], tensor) for name, tensor in views.items())
    assert all(found[name].dtype == tensor.dtype for name, tensor in views.items())


# --- Layout -----------------------------------------------------------------------------------


@pytest.mark.parametrize("writers", [1, 2, 3, 5, 8, 64])
def test_every_element_has_one_writer_and_all_write_as_much(monkeypatch, writers):
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


def test_a_file_is_read_as_it_was_laid_out(tmp_path):
    pieces = files.order_pieces([Piece("b", "U8", 3), Piece("a", "F64", 2), Piece("c", "BF16", 5)])
    assert [piece.dtype for piece in pieces] == ["F64", "BF16", "U8"]
    head = files.data_header(pieces)
    (tmp_path / "head").write_bytes(head)
    with (tmp_path / "head").open("rb") as file:
        found = files.read_data_header(file, len(head) + sum(piece.bytes for piece in pieces))
    offsets = {key: offset - len(head) for key, (_, offset) in found.items()}
    assert offsets == {"a": 0, "c": 16, "b": 26}
    assert len(head) % 8 == 0


def test_data_files_are_plain_safetensors(tmp_path):
    saved(tmp_path, 5)
    found = [load_file(path) for path in sorted(tmp_path.glob("*/*.safetensors"))]
    assert len(found) == 3
    pieces = {key: one for file in found for key, one in file.items() if key.startswith("model/w@")}
    ordered = sorted(pieces, key=lambda key: int(key.partition("@")[2]))
    assert torch.equal(torch.cat([pieces[key] for key in ordered]), torch.full((64,), 5.0))


# --- Past the page cache: the same bytes, also where a file system cannot -----------------------

BLOCK = 4096


def aligned(size: int) -> memoryview:
    """Bytes in pages of their own, as the staging buffers are."""
    content = memoryview(mmap.mmap(-1, max(size, 1)))[:size]
    content[:] = os.urandom(size)
    return content


@pytest.fixture
def writes(monkeypatch):
    """Of each write, on a file system that is so: whether past the cache, and its length."""

    def on(kind: str) -> list[tuple[bool, int]]:
        seen: list[tuple[bool, int]] = []
        write, control = os.write, fcntl.fcntl

        def wrote(fd: int, data: memoryview) -> int:
            direct = bool(control(fd, fcntl.F_GETFL) & os.O_DIRECT)
            seen.append((direct, len(data)))
            if kind == "full" or (kind == "refuses the write" and direct):
                raise error(errno.ENOSPC if kind == "full" else errno.EINVAL)
            return write(fd, data[:512] if kind == "short" and direct else data)

        def set_flag(fd: int, command: int, argument: int = 0) -> int:
            if kind == "refuses the flag" and command == fcntl.F_SETFL and argument & os.O_DIRECT:
                raise error(errno.EINVAL)
            return control(fd, command, argument)

        monkeypatch.setattr(os, "write", wrote)
        monkeypatch.setattr(fcntl, "fcntl", set_flag)
        return seen

    return on


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 7])
def test_whole_blocks_go_past_the_cache_and_the_rest_through_it(tmp_path, writes, size):
    content, seen = aligned(size), writes("usual")
    disk.write_new(tmp_path / "file", [content], past_cache=True)
    assert (tmp_path / "file").read_bytes() == bytes(content)
    whole = size - size % BLOCK
    assert seen == [(True, whole)] * (whole > 0) + [(False, size % BLOCK)] * (size % BLOCK > 0)


@pytest.mark.parametrize("kind", ["refuses the write", "refuses the flag", "short", "not aligned"])
def test_what_cannot_go_past_the_cache_goes_through_it(tmp_path, writes, kind):
    content, seen = aligned(4 * BLOCK + 3)[3 if kind == "not aligned" else 0 :], writes(kind)
    disk.write_new(tmp_path / "file", [content], past_cache=True)
    assert (tmp_path / "file").read_bytes() == bytes(content)
    assert kind != "refuses the flag" or not any(direct for direct, _ in seen)


def test_a_full_disk_is_not_tried_again(tmp_path, writes):
    seen = writes("full")
    with pytest.raises(OSError, match="No space left"):
        disk.write_new(tmp_path / "file", [aligned(2 * BLOCK)], past_cache=True)
    assert len(seen) == 1
    assert not list(tmp_path.iterdir())


def test_only_large_parts_go_past_the_cache(tmp_path, monkeypatch, writes):
    monkeypatch.setattr(files, "PAST_CACHE_BYTES", 3 * BLOCK)
    writer, seen = files.SnapshotFiles(tmp_path, 1, "n", 2), writes("usual")
    writer.directory.mkdir(parents=True)
    for blocks in (2, 3):
        writer.write(f"part-{blocks}", aligned(blocks * BLOCK))
    assert seen == [(False, 2 * BLOCK), (True, 3 * BLOCK)]


# --- Back ----------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self, seed: int, *, tie: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(33, 7)
        self.head = nn.Linear(7, 33, bias=False)
        if tie:
            self.head.weight = self.embed.weight
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.wave = nn.Parameter(torch.randn(9, dtype=torch.complex64))
        self.register_buffer("calls", torch.tensor(seed))

    def get_extra_state(self) -> Any:
        return {"seen": torch.arange(3), "name": "x"}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


class Keeps:
    def __init__(self, model: Tied) -> None:
        self.state = {"a": torch.arange(5.0), "weights": model.embed.weight}
        self.state["b"] = self.state["a"]

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def training(
    seed: int, *, tie: bool = True, keeps: bool = False
) -> tuple[TrainingState, Tied, torch.optim.Optimizer]:
    model = Tied(seed, tie=tie)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = TrainingState(model)
    state.register("optimizer", optimizer)
    if keeps:
        state.register("keeps", Keeps(model))
        state.register("own", Keeps(model), per_rank=True)
    return state, model, optimizer


def train(model: Tied, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    out = model.head(model.embed(torch.arange(33))).pow(2).mean()
    out = out + model.conv(torch.ones(1, 3, 4, 4)).pow(2).mean() + model.wave.abs().pow(2).sum()
    out.backward()
    optimizer.step()


@pytest.mark.parametrize("window", [64, 200, 1 << 20])
def test_all_comes_back_in_place_and_trains_on_equally(monkeypatch, window):
    monkeypatch.setattr(load, "_WINDOW_BYTES", window)
    (first, *one), (second, *two) = training(1), training(2)
    train(*one)
    places = [parameter.data_ptr() for parameter in two[0].parameters()]
    second.restore(memory_source(stored(first)), 0)
    for pair in (one, one, two, two):
        train(*pair)
    assert first.sha256(0) == second.sha256(0)
    assert places == [parameter.data_ptr() for parameter in two[0].parameters()]
    assert second.module.head.weight is second.module.embed.weight


def test_what_comes_back_shares_memory_within_an_object_only():
    (first, *_), (second, model, _) = training(1, keeps=True), training(2, keeps=True)
    second.restore(memory_source(stored(first)), 0)
    objects = (second.registered["keeps"], second.per_rank["own"])
    for keeps in objects:
        assert isinstance(keeps, Keeps)
        assert keeps.state["a"] is keeps.state["b"]
        assert torch.equal(keeps.state["a"], torch.arange(5.0))
        assert torch.equal(keeps.state["weights"], first.module.embed.weight)  # type: ignore[arg-type]
    live = [*model.parameters(), *(o.state[n] for o in objects for n in ("a", "weights"))]  # type: ignore[attr-defined]
    assert len({tensor.untyped_storage().data_ptr() for tensor in live}) == len(live) == 4 + 4


def test_tied_in_the_snapshot_only_or_in_the_model_only():
    (tied, *_), (apart, *_) = training(1), training(2, tie=False)
    with torch.no_grad():
        apart.module.head.weight.copy_(apart.module.embed.weight)
    flat, other = stored(tied), stored(apart)
    for one in (apart.registered, tied.registered, *(f.tree["registered"] for f in (flat, other))):
        del one["optimizer"]
    apart.restore(memory_source(flat), 0)
    assert torch.equal(apart.module.head.weight, tied.module.embed.weight)
    assert torch.equal(apart.module.embed.weight, tied.module.embed.weight)
    tied.restore(memory_source(other), 0)
    assert torch.equal(tied.module.embed.weight, other.tensors["model/embed.weight"])


CHANGES: dict[str, Callable[[Flat], object]] = {
    "a name": lambda f: f.tree["model"].update(other=f.tree["model"].pop("conv.bias")),
    "a shape": lambda f: f.tensors.update({"model/conv.bias": torch.zeros(6)}),
    "a type": lambda f: f.tensors.update({"model/conv.bias": torch.zeros(5, dtype=torch.float64)}),
    "an object": lambda f: f.tree["registered"].update(more={}),
    "no model": lambda f: f.tree.update(model=[]),
    "no objects": lambda f: f.tree.pop("registered"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_does_not_fit_overwrites_nothing(change):
    (first, *_), (second, *_) = training(1), training(2)
    flat, before = stored(first), second.sha256(0)
    change(flat)
    with pytest.raises(ConfigError):
        second.restore(memory_source(flat), 0)
    assert second.sha256(0) == before


def test_an_optimizers_state_is_read_where_its_parameters_are(monkeypatch):
    """Meta stands for a GPU: eight of them need not fit into their host's memory at once."""
    (first, *one), (second, model, optimizer) = training(1), training(2)
    train(*one)
    model.to("meta")
    model.head.weight = model.embed.weight
    optimizer.param_groups[0]["params"] = list(model.parameters())
    asked: dict[str, torch.Tensor] = {}
    empty = load.Source.empty

    def seen(*args: Any) -> Any:
        asked.update(found := empty(*args))
        return found

    monkeypatch.setattr(load.Source, "empty", seen)
    second.restore(memory_source(stored(first)), 0)
    states = {name: one for name, one in asked.items() if "state" in name}
    kinds = {name.rpartition("/")[2]: one.device.type for name, one in states.items()}
    assert kinds == {"step": "cpu", "exp_avg": "meta", "exp_avg_sq": "meta"}


def test_an_average_is_divided_among_the_ranks_and_read_in_place():
    (first, one, _), (second, two, _) = training(1), training(2)
    for state, model in ((first, one), (second, two)):
        average = make_ema(model, 0.9)
        average.update_parameters(model)
        state.register("ema", average)
        assert not {n for n in state.capture(0).shared if n.startswith("registered/ema/")}
        state.averages.add("ema")
    # Only updates change it, from parameters that are equal; its buffers are each rank's own.
    shared = first.capture(0).shared
    assert "registered/ema/module.conv.weight" in shared
    assert not {"registered/ema/module.calls", "registered/ema/n_averaged"} & shared
    source = memory_source(stored(first))
    targets: dict[str, int] = {}
    read = source.read

    def seen(names: Any, into: Any) -> None:
        targets.update({name: tensor.data_ptr() for name, tensor in into.items()})
        read(names, into)

    source.read = seen  # type: ignore[method-assign]
    second.restore(source, 0)
    assert first.sha256(0) == second.sha256(0)
    for name, parameter in average.named_parameters():
        if not parameter.is_complex():  # those are stored as pairs
            assert targets.get(f"registered/ema/{name}") == parameter.data_ptr(), name


def test_no_second_copy_is_held(tmp_path, monkeypatch):
    """What is read at a time is bounded, whatever the size of the state."""
    store, _ = open_snapshots(tmp_path)
    flat = Flat({"$tensor": "w"}, {"w": torch.arange(20.0 * (1 << 20))})  # 80 MiB
    store.save(1, flat, {})
    source = open_snapshots(tmp_path, 2)[1]
    assert source is not None
    sizes, target, empty = [], torch.empty(20 << 20), torch.empty

    def counted(size: Any, *rest: Any, **more: Any) -> torch.Tensor:
        sizes.append(size)
        return empty(size, *rest, **more)

    monkeypatch.setattr(torch, "empty", counted)
    source.read(lambda name: name == "w", {"w": target})
    assert torch.equal(target, flat.tensors["w"])
    assert 0 < max(sizes) <= 16 << 20
