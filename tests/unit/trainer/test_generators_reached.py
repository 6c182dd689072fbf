"""How far a dataset's own generators are looked for, and what it costs."""

from __future__ import annotations

import dis
import functools
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Dataset

from ddpjob_trainer import accelerator
from ddpjob_trainer.data import own_generators
from ddpjob_trainer.data.inputs import InputOptions, Place, open_input

pytestmark = pytest.mark.tier("all")

RNG = np.random.default_rng(1)
MODULE = ModuleType("augmentation")
MODULE.draws = np.random.default_rng(1)  # type: ignore[attr-defined]


class Noise:
    def __init__(self, rng: Any = None) -> None:
        self.rng = rng or random.Random(1)


class Holds(Dataset[Any]):
    """A dataset, one around another, a transform of transforms."""

    transform: Any = None

    def __init__(self, *parts: Any) -> None:
        self.parts = [*parts]

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: int) -> Any:
        return self.parts[index]


class OfTheClass:
    rng = np.random.default_rng(1)


class OfItsBase(OfTheClass):
    pass


class StaticMethod:
    @staticmethod
    def draw() -> float:
        return float(RNG.random())


class ClassMethod:
    @classmethod
    def draw(cls) -> float:
        return float(RNG.random())


class Property:
    @property
    def drawn(self) -> float:
        return float(RNG.random())


class CachedProperty:
    @functools.cached_property
    def drawn(self) -> float:
        return float(RNG.random())


class Decorated:
    @torch.no_grad()
    def draw(self) -> float:
        return float(RNG.random())


@dataclass(slots=True)
class Slots:
    rng: Any
    empty: Any = None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rng = torch.Generator()


class Entries(list[Any]):
    """Of a class that is not list's own, and asks for trouble."""

    def __len__(self) -> int:
        raise AssertionError("code of the script is run")

    def __iter__(self) -> Any:
        raise AssertionError("code of the script is run")


AUGMENT, TABLE = Holds(Holds(Noise())), {"deep": [{"rng": np.random.default_rng(1)}]}


def names_an_object() -> Any:
    return AUGMENT[0]


def names_a_table() -> Any:
    return [TABLE["deep"] for _ in range(3)]


def names_a_module() -> Any:
    return MODULE.draws.random()


def names_a_class() -> Any:
    return OfTheClass.rng.random()


@functools.lru_cache
def is_wrapped() -> float:
    return float(RNG.random())


def closure(rng: Any) -> Callable[[], Any]:
    return lambda: [rng.random()]


REACHED: dict[str, Callable[[], Any]] = {
    "plain": lambda: Holds(Noise()),
    "compose of compose": lambda: Holds(Holds(Holds(Noise()))),
    "concat of compose": lambda: ConcatDataset([Holds(Holds(Noise()))]),
    "dataset of a dataset": lambda: Holds(Holds(Holds(Holds(Holds(Holds(Noise())))))),
    "twice the same": lambda: Holds(AUGMENT, [AUGMENT], AUGMENT.parts[0]),
    "around in a circle": lambda: (circle := Holds(Noise()), circle.parts.append(circle))[0],
    "class": lambda: Holds(OfTheClass()),
    "base of the class": lambda: Holds(OfItsBase()),
    "static method": lambda: Holds(StaticMethod()),
    "class method": lambda: Holds(ClassMethod()),
    "property": lambda: Holds(Property()),
    "cached property": lambda: Holds(CachedProperty()),
    "decorated method": lambda: Holds(Decorated()),
    "slots": lambda: Holds(Slots(random.Random(1))),
    "method of C": lambda: Holds(random.Random(1).random),
    "partial": lambda: Holds(functools.partial(max, random.Random(1))),
    "closure": lambda: Holds(closure(random.Random(1))),
    "nn.Module": lambda: Holds(nn.Sequential(nn.Identity(), Layer())),
    "namespace": lambda: Holds(SimpleNamespace(rng=np.random.RandomState(1))),
    "mappings": lambda: Holds(OrderedDict(a=deque([{"b": random.Random(1)}]))),
    "a list's own kind": lambda: Holds(Entries([random.Random(1)])),
    "behind 500 numbers": lambda: Holds([*range(500), random.Random(1)]),
    "global object": lambda: Holds(names_an_object),
    "global table": lambda: Holds(names_a_table),
    "global of a module": lambda: Holds(names_a_module),
    "global class": lambda: Holds(names_a_class),
    "wrapped function": lambda: Holds(is_wrapped),
}


@pytest.mark.parametrize("case", REACHED)
def test_it_is_found_once_however_deep_it_is(case: str) -> None:
    assert len(own_generators.found_in(REACHED[case]())) == 1


def test_two_closures_of_one_code_have_two() -> None:
    found = own_generators.found_in([closure(random.Random(1)), closure(random.Random(2))])
    assert len(found) == 2


def test_the_code_of_many_closures_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read, instructions = [0], dis.get_instructions

    def counted(code: Any) -> Any:
        read[0] += 1
        return instructions(code)

    monkeypatch.setattr(dis, "get_instructions", counted)
    found = own_generators.found_in([closure(random.Random(n)) for n in range(900)])
    assert len(found) == 900
    assert read[0] < 5


class Odd:
    """What must not be touched. ``AUGMENT`` is an attribute here, not the module's variable."""

    def __init__(self) -> None:
        self.model = torch.zeros(3)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is asked for")

    @property
    def __class__(self) -> Any:
        raise AssertionError("the class is asked for")

    @property
    def drawn(self) -> Any:
        raise AssertionError("the property is asked for")

    def use(self) -> Any:
        return self.AUGMENT.RNG


def test_no_code_of_the_scripts_is_run_and_attributes_are_no_variables() -> None:
    assert own_generators.found_in(Holds(Odd())) == []


@dataclass
class Record:
    path: str
    label: int
    boxes: list[float]
    transform: Any = None


SHARED = Noise()
MANY = 50_000
LARGE: dict[str, tuple[Callable[[], Any], int]] = {
    "numbers": (lambda: list(range(MANY)), 0),
    "tuples": (lambda: [(f"{number}.jpg", number) for number in range(MANY)], 0),
    "dicts": (lambda: [{"text": "a", "ids": [number]} for number in range(MANY)], 0),
    "tensors": (lambda: {number: torch.zeros(()) for number in range(MANY)}, 0),
    "records": (lambda: [Record("a", number, [1.0]) for number in range(MANY)], 0),
    "records of one transform": (lambda: [Record("a", 1, [], SHARED) for _ in range(MANY)], 1),
}


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many objects are looked at."""
    looks, is_end = [0], own_generators._is_end

    def counted(obj: Any) -> bool:
        looks[0] += 1
        return is_end(obj)

    monkeypatch.setattr(own_generators, "_is_end", counted)
    return looks


@pytest.mark.parametrize("case", LARGE)
def test_of_many_samples_only_the_first_are_looked_at(case: str, looks: list[int]) -> None:
    make, wanted = LARGE[case]
    walk = own_generators.Walk([Holds(make(), Noise())])
    assert walk.whole
    assert len(walk.found) == wanted + 1
    assert looks[0] < 1000


def opened(source: Any) -> list[str]:
    """What is said then."""
    said: list[str] = []
    place = Place(
        seed=5, rank=0, ranks=2, global_batch=8, parts=2, level="resume", tail="drop",
        collate=None, accelerator=accelerator.of(torch.device("cpu")), say=said.append,
        alive=lambda: None,
    )  # fmt: skip
    open_input(source, InputOptions.among(InputOptions.defaults()), place)
    return said


def sample(number: int) -> Any:
    return f"{number}.jpg", number


PER_CLASS: dict[str, tuple[Callable[[], Any], bool]] = {
    "100 of 500": (lambda: {a: [sample(b) for b in range(500)] for a in range(100)}, False),
    "12 of 900": (lambda: {a: [sample(b) for b in range(900)] for a in range(12)}, False),
    "a list of 12 of 900": (lambda: [[sample(b) for b in range(900)] for _ in range(12)], False),
    "500 of 60": (lambda: {a: [sample(b) for b in range(60)] for a in range(500)}, False),
    "100 of 500 records": (
        lambda: [[Record("a", b, [1.0]) for b in range(500)] for _ in range(100)],
        False,
    ),
    "30 of 30 of 30": (
        lambda: [[[sample(c) for c in range(30)] for _ in range(30)] for _ in range(30)],
        False,
    ),
    "1000 of 1000 numbers": (lambda: {a: [a] * 1000 for a in range(1000)}, False),
    "1000 of 1000": (lambda: {a: [sample(a)] * 1000 for a in range(1000)}, False),
    "1000 of 1300": (lambda: {a: [sample(a)] * 1300 for a in range(1000)}, False),
    "900 of 150": (lambda: {a: [sample(b) for b in range(150)] for a in range(900)}, False),
    "900 of 150 records": (
        lambda: {a: [Record("a", b, [1.0]) for b in range(150)] for a in range(900)},
        True,
    ),
}


@pytest.mark.parametrize("case", PER_CLASS)
def test_many_samples_of_each_class_hide_none_of_the_transforms(case: str) -> None:
    make, warned = PER_CLASS[case]
    source = Holds(make(), *range(8))
    source.transform = Holds(Holds(Noise()))
    assert own_generators.found_in(source) == [source.transform[0][0].rng]
    assert len(opened(source)) == warned


def kept(number: int) -> Any:
    return SimpleNamespace(rng=random.Random(number) if number >= 20 else None)


def split(length: int, first: int) -> Any:
    whole = [kept(20 + number) for number in range(length)]
    return {"train": whole[:first], "all": whole}


KEPT = [kept(20 + number) for number in range(10)]


def tokens(number: int) -> Any:
    names = ("input_ids", "attention_mask", "token_type_ids", "labels")
    return SimpleNamespace(**dict.fromkeys(names, [1] * 1000), rng=random.Random(number))


def fields(number: int) -> Any:
    return SimpleNamespace(**{f"f{n}": n for n in range(260)}, rng=random.Random(number))


WORDS = [("a", n) for n in range(600)]


def words(transform: Any) -> Any:
    return SimpleNamespace(words=WORDS, transform=transform)


def leads_back(length: int) -> Any:
    whole = Holds(Noise())
    whole.parts += [SimpleNamespace(dataset=whole) for _ in range(length)]
    return whole


BESIDE: dict[str, tuple[Callable[[], Any], int]] = {
    "80 of 100 of another class": (
        lambda: {n: Noise() if n >= 20 else SimpleNamespace() for n in range(100)},
        80,
    ),
    "80 of 100 of the same class": (lambda: [kept(number) for number in range(100)], 80),
    "one of 100 alike": (lambda: [kept(90 if n == 70 else 0) for n in range(100)], 1),
    "in a tuple of 100 alike": (lambda: [(n, kept(n - 70)) for n in range(100)], 10),
    "of another class behind 50,000": (lambda: [*map(Record, *[range(MANY)] * 3), Noise()], 1),
    "each of 2,000, the first also elsewhere": (lambda: split(2000, 100), 2000),
    "every other 8 of 2,000": (
        lambda: [kept(20 + n if n % 16 < 8 else 0) for n in range(2000)],
        1000,
    ),
    "each of 2,000 closures": (lambda: [closure(random.Random(n)) for n in range(2000)], 2000),
    "behind 1,500 tensors": (lambda: [*torch.zeros(1500), *map(kept, range(20, 520))], 500),
    "behind 9,000 numbers": (lambda: [*[7] * 9000, *map(kept, range(20, 1020))], 1000),
    "each of ten classes of 200": (lambda: [KEPT[n // 200] for n in range(2000)], 10),
    "ten, in turn, of 20,000": (lambda: [KEPT[n % 10] for n in range(20_000)], 10),
    "ten of 2,000": (lambda: [KEPT[n // 2000] for n in range(20_000)], 10),
    "one, of 20,000 with words": (lambda: [words(SHARED) for _ in range(20_000)], 1),
    "one, of 20,000 that lead back": (lambda: leads_back(20_000), 1),
    "beside 200 books": (
        lambda: [[[7] * 100_000 for _ in range(200)], [kept(n + 10) for n in range(11)]],
        1,
    ),
}


@functools.cache
def samples() -> Any:
    return [[Record("a", b, [1.0]) for b in range(500)] for _ in range(100)]


@pytest.mark.parametrize("case", BESIDE)
def test_beside_many_samples_of_each_class_no_entry_of_a_list_is_overlooked(case: str) -> None:
    make, wanted = BESIDE[case]
    source = Holds(samples(), make(), *range(8))
    assert len(own_generators.found_in(source)) == wanted
    assert opened(source) == []


def test_classes_that_have_no_hash_are_gone_through() -> None:
    class Meta(type):
        def __eq__(cls, _: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    class One(metaclass=Meta):
        __slots__ = ("rng",)

    class Other(One):
        __slots__ = ("more",)

    one, other = One(), Other()
    one.rng, other.more = random.Random(1), random.Random(2)  # type: ignore[attr-defined]
    assert own_generators.found_in([one, other]) == [one.rng, other.more]  # type: ignore[attr-defined]
    assert len(own_generators.found_in([*[one] * 20, other])) == 2


def test_no_code_of_a_metaclass_is_run() -> None:
    class Meta(type):
        def __getattribute__(cls, name: str) -> Any:
            raise AssertionError(f"{name} is asked for")

    class One(metaclass=Meta):
        __module__ = np.arange(3)  # type: ignore[assignment]

        def __init__(self) -> None:
            self.rng = random.Random(1)

    one = One()
    assert own_generators.found_in([one, One]) == [one.rng]
    globals_: dict[str, Any] = {"__builtins__": {}, "type": type}
    exec("Bare = type('Bare', (), {})", globals_)
    assert own_generators.found_in([one, globals_["Bare"]()]) == [one.rng]


def test_what_a_thread_changes_meanwhile_is_gone_through(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = deque([kept(20 + number) for number in range(900)])
    calls = [0]

    def entries(of: deque[Any]) -> Any:
        """As if a thread had changed it between two of three calls."""
        calls[0] += 1
        found = iter(of)
        if calls[0] % 3:
            of.rotate(1)
            of.rotate(-1)
        return found

    monkeypatch.setitem(own_generators._CONTAINERS, deque, entries)
    assert len(own_generators.found_in(Holds(buffer))) == 900


class Node:
    def __init__(self) -> None:
        self.near: list[Node] = []


def test_linked_data_are_gone_through_once(looks: list[int]) -> None:
    nodes, chance = [Node() for _ in range(5000)], random.Random(1)
    for node in nodes:
        node.near = [chance.choice(nodes) for _ in range(12)]
    source = Holds(nodes, *range(8))
    assert own_generators.found_in(source) == []
    assert looks[0] < 200_000
    assert opened(source) == []


@pytest.mark.parametrize("case", [*LARGE, *PER_CLASS])
def test_no_search_looks_at_more_than_is_said(
    case: str, looks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_generators, "_LOOKS", 40)
    walk = own_generators.Walk([Holds((LARGE | PER_CLASS)[case][0]())])
    assert looks[0] < 40
    assert not walk.whole or case in LARGE


def test_those_found_near_come_first_and_none_twice() -> None:
    """Also one that stands behind others of its list, which are taken for samples at last."""
    behind = [*range(500), random.Random(1)]
    source = Holds(behind, [[sample(b) for b in range(900)] for _ in range(12)])
    source.near, source.transform = Noise(), Holds(Holds(Noise()))
    wanted = [source.near.rng, behind[-1], source.transform[0][0].rng]
    assert own_generators.found_in(source) == wanted


@pytest.mark.parametrize("make", [tokens, fields])
def test_each_sample_may_have_its_own_behind_much_else(make: Callable[[int], Any]) -> None:
    walk = own_generators.Walk([Holds(*map(make, range(1100)))])
    assert walk.whole
    assert len(walk.found) == 1100


@pytest.mark.parametrize(
    ("before", "count", "warned"), [(0, 3000, False), (0, 30_000, True), (99_000, 1000, True)]
)
def test_a_dataset_that_leads_to_too_much_is_named(
    before: int, count: int, *, warned: bool
) -> None:
    source = Holds(*[7] * before, *(Noise(random.Random(number)) for number in range(count)))
    source.transform = AUGMENT
    said = opened(source)
    assert len(said) == warned
    assert all("warning: Holds leads to more objects than are looked at" in text for text in said)
    found = len(own_generators.found_in(source))
    assert 1 < found < count if warned else found == count + 1
