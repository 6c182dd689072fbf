"""State as tensors and JSON: every kind of value comes back as what it was."""

from __future__ import annotations

import enum
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from ddpjob_trainer.state.codec import (
    Exact,
    Flat,
    UnstorableError,
    flatten,
    unflatten,
    without_numpys,
)
from support.snapshots import open_snapshots, whole


def test_every_kind_of_value_survives_the_trip(tmp_path):  # type: ignore[no-untyped-def]
    shared = torch.arange(6.0).reshape(2, 3)
    value = {
        "plain": {0: [True, None], "$odd": (1, (0.1, float("-inf"))), "bytes": b"\x00\xff"},
        "numpy": np.arange(3, dtype=np.float32),
        "scalar": torch.tensor(3.5, dtype=torch.bfloat16),
        "bool": torch.tensor([True, False]),
        "empty": torch.empty(0, 4),
        "strided": torch.arange(12).reshape(3, 4).t(),
        "complex": torch.tensor([1 + 2j, 3 - 4j]),
        "conjugate": torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex128).conj(),
        "tied": [shared, shared],
    }
    store, _ = open_snapshots(tmp_path, 1)
    store.save(1, flatten(value), {})
    loaded = open_snapshots(tmp_path, 2)[1]
    assert loaded is not None
    found = unflatten(whole(loaded))
    assert found["plain"] == value["plain"]
    assert found["numpy"].dtype == np.float32
    assert found["numpy"].tolist() == [0, 1, 2]
    for name in ("scalar", "bool", "empty", "strided", "complex", "conjugate"):
        want = value[name]
        assert isinstance(want, torch.Tensor)
        assert found[name].dtype == want.dtype
        assert torch.equal(found[name], want)
    assert found["tied"][0] is found["tied"][1]
    assert torch.equal(found["tied"][0], shared)
    nan = unflatten(flatten({"x": float("nan")}))["x"]
    assert nan != nan


def back(value: Any) -> Any:
    flat = flatten({"a": value})
    return unflatten(Flat(json.loads(json.dumps(flat.tree)), flat.tensors, flat.aliases))["a"]


EXACT: list[Any] = [
    None, True, 5, 2**70, 0.1, math.inf, "text", b"\x00", [1], (1,), {}, deque([1], 3),
    np.float64(0.1), np.float32(0.1), np.float16(0.1), np.float32("inf"), np.int64(-5),
    np.uint8(255), np.uint64(2**64 - 1), np.bool_(True), np.str_("täxt"), np.bytes_(b"\x00a"),
    torch.Size([2, 3]), (np.float32(1), [np.int32(2)]),
    {np.int64(1): np.float64(2)}, {np.str_("a"): 1}, OrderedDict(a=np.float32(3)),
    Counter({2: 1, 5: 3}), OrderedDict([("z", 1), ("a", 2)]), defaultdict(list, {"x": [1]}),
]  # fmt: skip


@pytest.mark.parametrize("value", EXACT, ids=repr)
def test_a_value_comes_back_as_the_type_that_it_was(value: Any) -> None:
    found = back(Exact({"b": value}))["b"]
    assert found == value
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
    *((value, rf"a {type(value).__name__}; .*{OTHER_TYPE}") for value in OTHERS),
    (MappingProxyType({}), "a mappingproxy"),
    (defaultdict(lambda: 1), "a defaultdict"),
    (lambda: None, "a function"),
    (np.longdouble(1), "a longdouble; state must consist of"),
    (np.complex64(1), "a complex64; state must"),
    (np.datetime64(5, "ns"), "a datetime64; state must"),
]


@pytest.mark.parametrize(("value", "words"), INEXACT, ids=lambda value: type(value).__name__)
def test_one_that_would_come_back_as_another_is_refused_with_the_cure(value, words):  # type: ignore[no-untyped-def]
    with pytest.raises(UnstorableError, match=rf"cannot store a/b: {words}"):
        back(Exact({"b": value}))
    if value is Phase.WARM:
        with pytest.raises(UnstorableError, match=r"cannot store a/b \(a key\): a Phase"):
            back(Exact({"b": {value: 1}}))
    if value is Colour.RED:  # elsewhere too
        with pytest.raises(UnstorableError, match=rf"cannot store a: {words}"):
            back(value)


PLAIN: list[tuple[Any, Any]] = [
    (Phase.WARM, "warm"), (Level.LOW, 1), (Named("a"), "a"), (Number(0.1), 0.1),
    (Number("inf"), math.inf), (Stack([Number(1)]), [1.0]), (Best(0.1, Level.LOW), (0.1, 1)),
    (torch.Size([2, 3]), (2, 3)), ({Phase.WARM: 1, Level.LOW: 2}, {"warm": 1, 1: 2}),
    ({Named("$a"): 1}, {"$a": 1}), (np.float64(0.1), np.float64(0.1)), (True, True),
]  # fmt: skip


@pytest.mark.parametrize(("value", "plain"), PLAIN, ids=repr)
def test_elsewhere_a_subclass_is_stored_as_what_it_is_of(value: Any, plain: Any) -> None:
    """Of an optimizer's lr from a YAML file, say, the script sees nothing."""
    found = back([value, Exact([])])[0]
    assert found == plain
    assert repr(found) == repr(plain)


def test_an_export_needs_no_numpy() -> None:
    state = {"lr": [np.float64(0.1), np.float32("nan")], "n": {np.int64(1): np.str_("a")}}
    flat = flatten(state)
    found = unflatten(Flat(without_numpys(flat.tree)))
    assert repr(found) == "{'lr': [0.1, nan], 'n': {1: 'a'}}"


def test_what_is_nested_too_deeply_to_be_read_again_is_refused():  # type: ignore[no-untyped-def]
    deep: Any = 1
    for turn in range(12):
        deep = (deep,) if turn % 2 else {"a": deep, 1: [deep]}
    assert unflatten(flatten(deep)) == deep
    value: list[Any] = []
    value.append((value,))
    with pytest.raises(TypeError, match=r"cannot store x/0/0/.*: nested deeper than"):
        flatten({"x": value})


def test_arrays_that_no_tensor_can_share():  # type: ignore[no-untyped-def]
    of_no_dimension = np.array(3.0, dtype=">f8")
    for array in (np.arange(6)[::-1], np.arange(6, dtype=">f4"), of_no_dimension):
        found = unflatten(flatten({"it": array}))["it"]
        assert found.dtype == array.dtype.newbyteorder("=")
        assert found.shape == array.shape
        assert found.tolist() == array.tolist()


def test_equal_paths_do_not_overwrite_each_other():  # type: ignore[no-untyped-def]
    value: dict[str, Any] = {
        "a/b": torch.tensor(1.0),
        "a": {"b": torch.tensor(2.0)},
        "d": {1: torch.tensor(3.0), "1": torch.tensor(4.0)},
    }
    found = unflatten(flatten(value))
    assert [float(t) for t in (found["a/b"], found["a"]["b"])] == [1.0, 2.0]
    assert {key: float(t) for key, t in found["d"].items()} == {1: 3.0, "1": 4.0}


def test_only_what_is_the_same_elements_is_stored_once():  # type: ignore[no-untyped-def]
    whole = torch.arange(12.0).reshape(3, 4)
    views = {
        "whole": whole,
        "flat": whole.view(-1),
        "part": whole[:2],
        "turned": whole.view(4, 3).t(),
        "bits": whole.view(torch.int32),
        "again": whole.view(3, 4),
        "again flat": whole.view(12),
    }
    flat = flatten(views)
    assert flat.aliases == {"again": "whole", "again flat": "flat"}
    found = unflatten(flat)
    for name, tensor in views.items():
        assert torch.equal(found[name], tensor)
        assert found[name].dtype == tensor.dtype
