"""What a script registers or switches as it goes, and finds again after a resume."""

from __future__ import annotations

import copy
import enum
import json
import random
from collections import deque
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.snapshot.restore.load import fitting
from ddpjob_trainer.snapshot.training_state import TrainingState, weights_sha256
from ddpjob_trainer.state.codec import UnstorableError, flatten
from ddpjob_trainer.state.stateful import GeneratorState
from support.snapshots import memory_source

KINDS: dict[str, Any] = {
    "default_rng": np.random.default_rng,
    "MT19937": lambda seed: np.random.Generator(np.random.MT19937(seed)),
    "Philox": lambda seed: np.random.Generator(np.random.Philox(seed)),
    "SFC64": lambda seed: np.random.Generator(np.random.SFC64(seed)),
    "RandomState": np.random.RandomState,
    "Random": random.Random,
}


class Marked(torch.Tensor):
    pass


class Itself(bytes):
    def __bytes__(self) -> bytes:
        return self


def resumed(name: str, before: Any, after: Any) -> None:
    states = [TrainingState(nn.Linear(2, 2)) for _ in range(2)]
    for state, obj in zip(states, (before, after), strict=True):
        state.register(name, obj)
    assert not flatten(states[0].capture(0).flat.tree).tensors
    carry(*states)


def carry(before: TrainingState, after: TrainingState) -> None:
    flat = before.capture(0).flat
    flat.tree = json.loads(json.dumps(flat.tree))  # nothing but JSON goes to the disk
    flat.tensors = {
        name: tensor + 0 if type(tensor) is Coded else tensor
        for name, tensor in flat.tensors.items()
    }
    after.restore(memory_source(copy.deepcopy(flat)), 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_generator_of_numpys_or_pythons_goes_on_where_it_was(kind):
    one, other = KINDS[kind](1), KINDS[kind](2)
    drawn = [one.random(), *(getattr(one, n)() for n in ("standard_normal",) if hasattr(one, n))]
    assert drawn
    resumed("draws", one, other)
    assert [one.random() for _ in range(5)] == [other.random() for _ in range(5)]


def test_a_generator_of_another_kind_is_refused():
    with pytest.raises(ConfigError, match="as 'draws' does not fit"):
        resumed("draws", KINDS["MT19937"](1), KINDS["default_rng"](1))
    with pytest.raises(ConfigError, match="of another kind then"), fitting("draws"):
        GeneratorState(torch.Generator()).load_state_dict({"state": torch.zeros(16).byte()})
    with pytest.raises(ConfigError, match=r"has no state_dict\(\)"):
        TrainingState(nn.Linear(2, 2)).register("draws", random.SystemRandom())  # type: ignore[arg-type]


def test_a_deque_and_the_types_of_a_dicts_values_come_back():
    values = {"last": deque([9.0], maxlen=3), "pair": deque([torch.zeros(2)])}
    resumed("mine", {"last": deque([1.0, 2.0, 3.0], 3), "pair": deque([torch.ones(2)])}, values)
    last = values["last"]
    assert (list(last), last.maxlen) == ([1.0, 2.0, 3.0], 3)
    assert values["pair"][0].tolist() == [1.0, 1.0]
    fresh: dict[str, Any] = {}
    resumed("mine", {"last": deque([1.0], 2)}, fresh)
    assert (list(fresh["last"]), fresh["last"].maxlen) == ([1.0], 2)
    types: dict[str, Any] = {"mean": np.float32(0), "size": torch.Size([1, 1])}
    # A name may be an Enum's.
    resumed(Decay.LINEAR, {"mean": np.float32(0.1), "size": torch.Size([2, 3])}, types)
    assert repr(types) == "{'mean': np.float32(0.1), 'size': torch.Size([2, 3])}"


class Best(NamedTuple):
    loss: float


class Rate(float):
    """As YAML's and TOML's readers give one."""

    def __repr__(self) -> str:
        return "no JSON"


class Decay(enum.StrEnum):
    LINEAR = "linear"


class Warm(torch.optim.lr_scheduler.LRScheduler):
    """Its state_dict() is all that it holds."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.decay = Decay.LINEAR
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        assert self.decay == Decay.LINEAR
        return [base / (1 + self.last_epoch) for base in self.base_lrs]


def test_a_rate_of_a_readers_type_and_a_schedulers_enum_survive_a_resume():
    """Only a dict's values are the script's to see."""
    kept = []
    for _ in range(2):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=Rate(0.1))
        kept.append((TrainingState(model), optimizer, Warm(optimizer)))
        kept[-1][0].register("optimizer", optimizer)
        kept[-1][0].register("scheduler", kept[-1][2])
        kept[-1][0].register("also", kept[-1][2], per_rank=True)
    for _ in range(2):
        kept[0][1].step()
        kept[0][2].step()
    carry(kept[0][0], kept[1][0])
    for _, optimizer, scheduler in kept:
        optimizer.step()
        scheduler.step()
        assert (scheduler.last_epoch, scheduler.decay) == (3, Decay.LINEAR)
    assert kept[0][1].param_groups[0]["lr"] == kept[1][1].param_groups[0]["lr"] == 0.1 / 4


@pytest.mark.parametrize("per_rank", [False, True])
@pytest.mark.parametrize(
    "value",
    [
        Best(1), nn.Parameter(torch.ones(2)), torch.ones(2).as_subclass(Marked),
        np.ones(2).view(np.matrix), np.ma.masked_array([1.0, 2.0], [1, 0]),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_a_registered_dict_would_get_back_as_another_type_is_refused(value, *, per_rank):
    state = TrainingState(nn.Linear(2, 2))
    state.register("mine", {"kept": value}, per_rank=per_rank)
    words = rf"mine/values/kept: a {type(value).__name__}; .* keep what it is made of"
    with pytest.raises(UnstorableError, match=words):
        state.capture(0)


class Coded(torch.Tensor):
    """Eight bits and a scale for each number, as optimizers of torchao keep them."""

    codes: torch.Tensor

    @staticmethod
    def of(values: torch.Tensor) -> Coded:
        made: Coded = torch.Tensor._make_wrapper_subclass(Coded, values.shape, dtype=values.dtype)
        made.codes = values.to(torch.int8)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [one.codes.float() if isinstance(one, Coded) else one for one in args]
        if func is torch.ops.aten.detach.default:
            made = Coded.of(plain[0])
            made.codes = args[0].codes  # of one memory, as a detached tensor is
            return made
        if func is torch.ops.aten.copy_.default and isinstance(args[0], Coded):
            args[0].codes.copy_(plain[1])
            return args[0]
        return func(*plain, **(kwargs or {}))


@pytest.mark.parametrize("per_rank", [False, True])
@pytest.mark.parametrize("kept", ["optimizer", "object"])
def test_a_tensor_of_another_class_is_refused_in_any_state(kept, *, per_rank):
    """It would come back as a plain one, and update otherwise. In a module it is filled."""
    net = nn.Linear(2, 2)
    state, optimizer = TrainingState(net), torch.optim.SGD(net.parameters(), 0.1)
    optimizer.state[net.weight]["momentum"] = Coded.of(torch.ones(2, 2))
    mine: Any = optimizer
    if kept == "object":
        mine = SimpleNamespace(state_dict=optimizer.state_dict, load_state_dict=lambda _: None)
    state.register("mine", mine, per_rank=per_rank)
    with pytest.raises(UnstorableError, match=r"mine/state/.*momentum: a Coded; .*derive one"):
        state.capture(0)
    filled = TrainingState(nn.Linear(2, 2))
    filled.register("teacher", nn.Linear(2, 2), per_rank=per_rank)
    for module in (filled.module, *filled.registered.values(), *filled.per_rank.values()):
        module.weight = nn.Parameter(torch.ones(2, 2).as_subclass(Marked))  # type: ignore[attr-defined]
    filled.capture(0)


def test_a_models_tensor_of_another_class_is_filled():
    states = []
    for number in (3.0, 5.0):
        net = nn.Linear(2, 2)
        net.weight = nn.Parameter(Coded.of(torch.full((2, 2), number)), requires_grad=False)
        states.append(TrainingState(net))
        average = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2))
        average.module.weight = nn.Parameter(Coded.of(net.weight + 1), requires_grad=False)
        states[-1].register("ema", average)
        states[-1].averages.add("ema")
    weight = states[1].module.weight
    carry(*states)
    assert states[1].module.weight is weight
    assert weight.codes.tolist() == [[3, 3], [3, 3]]  # type: ignore[union-attr]
    assert average.module.weight.codes.tolist() == [[4, 4], [4, 4]]


def test_in_a_state_dict_of_the_scripts_only_a_mask_is_refused():
    for value in (nn.Parameter(torch.ones(2)), np.ones(2).view(np.matrix), Itself(b"x")):
        flatten({"kept": value})
    with pytest.raises(UnstorableError, match="cannot store kept: a MaskedArray"):
        flatten({"kept": np.ma.masked_array([1.0, 2.0], [1, 0])})


def test_conjugates_and_elements_of_others_in_a_model_come_back():
    states = []
    for number in (1, 2):
        model = nn.Module()
        made = torch.full((3,), complex(number, number)).conj()
        model.w, model.same = [nn.Parameter(made)] * 2
        model.register_buffer("freqs", made.clone().conj())
        model.register_buffer("negative", made[:1].imag)
        both = torch.full((3,), complex(number, number))  # of one memory
        model.register_buffer("plain", both.imag)
        model.register_buffer("minus", both.conj().imag)
        model.register_buffer("of a table", torch.full((3, 2), float(number))[:1, 0])
        states.append(TrainingState(model))
    carry(*states)
    found = states[1].module.state_dict()
    assert found["w"].tolist() == found["same"].tolist() == [1 - 1j] * 3
    assert found["freqs"].tolist() == [1 + 1j] * 3
    assert found["negative"].tolist() == [-1.0]
    assert (found["plain"].tolist(), found["minus"].tolist()) == ([1.0] * 3, [-1.0] * 3)
    assert found["of a table"].tolist() == [1.0]
    assert weights_sha256(states[0].module) == weights_sha256(states[1].module)


def regroup(groups: list[dict[str, Any]]) -> None:
    groups.append({**groups[0], "params": [groups[0]["params"].pop()]})


def reverse(groups: list[dict[str, Any]]) -> None:
    groups[0]["params"].reverse()


@pytest.mark.parametrize("change", [regroup, reverse])
def test_parameters_that_change_their_group_in_the_loop_are_refused(change):
    """load_state_dict() goes by the place: another parameter would get the state."""
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    state = TrainingState(net)
    state.register("optimizer", optimizer)
    state.begin()
    optimizer.param_groups[0].update(lr=0.5)
    state.capture(0)
    change(optimizer.param_groups)
    with pytest.raises(ConfigError, match=r"Make all groups before prepare\(\)"):
        state.capture(0)


def test_a_rate_that_is_a_tensor_stays_the_one_that_all_groups_hold():
    def made(rate: torch.Tensor) -> torch.optim.Optimizer:
        groups = [{"params": [nn.Parameter(torch.ones(2))]} for _ in range(2)]
        return torch.optim.Adam(groups, lr=rate)

    before, after = torch.tensor(0.5), torch.tensor(0.25)
    optimizers = [made(before), made(after)]
    states = [TrainingState(nn.Linear(2, 2)) for _ in range(2)]
    for state, optimizer in zip(states, optimizers, strict=True):
        state.register("optimizer", optimizer)
    carry(*states)
    assert after == 0.5
    assert [group["lr"] is after for group in optimizers[1].param_groups] == [True, True]
    assert states[0].sha256(0) == states[1].sha256(0)
