"""Files of weights: what save() writes, what read() takes, what is refused; the best so far."""

import math
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.options import CHANGES, Snapshots
from ddpjob_trainer.snapshot import weights
from ddpjob_trainer.snapshot.manager import compare_configs
from ddpjob_trainer.training.run_config import note_layout, schedule_warning
from ddpjob_trainer.training.snapshot_policy import is_better


class Tied(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.image = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.register_buffer("row", torch.rand(3, 4)[1])
        self.register_buffer("cache", torch.rand(2), persistent=False)


class Extra(nn.Linear):
    def get_extra_state(self) -> object:
        return {"words": ["a"]}

    def set_extra_state(self, state: object) -> None:
        self.words = state


def equal(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


def test_what_is_saved_can_be_loaded_and_equal_weights_are_equal_bytes(tmp_path):
    about = {"step": "7", "ema": "false", "note": 'ä"\x07\x7f\u2028\\'}
    paths = [tmp_path / "new" / f"{n}.safetensors" for n in range(8)]
    for path in paths:
        assert weights.save(path, Tied(0), about) == []
    assert len({path.read_bytes() for path in paths}) == 1
    assert load_file(paths[0]).keys() == Tied(0).state_dict().keys()
    with safe_open(paths[0], "pt") as file:
        assert file.metadata() == {"format": "pt", **about}
    for seed in (0, 2):
        weights.save(paths[0], Tied(seed), {})
        weights.load(paths[0], other := Tied(1))
        assert equal(Tied(seed), other)
    assert sorted(paths[0].parent.iterdir()) == paths


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("kind", ["weights.pt", "weights.safetensors"])
def test_plain_state_dicts_are_read_with_the_prefixes_of_wrappers(tmp_path, prefix, kind):
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    state = {f"{prefix}{name}": value for name, value in model.state_dict().items()}
    path = tmp_path / kind
    torch.save(state, path) if kind.endswith("pt") else save_file(state, path)
    weights.load(path, other)
    assert equal(model, other)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def compiled() -> nn.Module:
    made: nn.Module = torch.compile(net())
    return made


def in_part() -> nn.Module:
    made = net()
    made[1] = torch.compile(made[1])
    return made


@pytest.mark.parametrize("writer", [net, compiled, in_part])
@pytest.mark.parametrize("reader", [net, compiled, in_part])
def test_compiled_and_plain_modules_read_one_anothers_weights(tmp_path, writer, reader):
    weights.save(tmp_path / "w", source := writer(), {})
    assert load_file(tmp_path / "w").keys() == net().state_dict().keys()
    weights.load(tmp_path / "w", found := reader())
    torch.save(source.state_dict(), tmp_path / "pt")
    weights.load(tmp_path / "pt", reader())
    pairs = zip(source.parameters(), found.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_a_file_that_is_being_written_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "weights"
    weights.save(path, Tied(0), {})
    (tmp_path / "weights.0badcafe.tmp").write_text("of a process that was killed")
    monkeypatch.setattr(weights.os, "fsync", lambda fd: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        weights.save(path, Tied(1), {})
    other = Tied(2)
    weights.load(path, other)
    assert equal(Tied(0), other)
    assert [file.name for file in tmp_path.iterdir()] == ["weights"]


def test_what_is_no_tensor_is_named_and_read_from_torchs_files(tmp_path):
    assert weights.save(tmp_path / "weights", Extra(2, 2), {}) == ["_extra_state"]
    torch.save(Extra(2, 2).state_dict(), tmp_path / "weights.pt")
    model = Extra(2, 2)
    weights.load(tmp_path / "weights.pt", model)
    assert model.words == {"words": ["a"]}


class Unsafe:
    """What weights_only refuses to make."""


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: No such file"),
        ("directory", "is a directory: give a file of weights; `ddpjob-trainer snapshot export`"),
        (b"not weights", "is neither a safetensors file nor a state_dict"),
        (b"", "is neither a safetensors file nor a state_dict"),
        ({"model": {}, "optimizer": {}}, "holds a dict of 'model', 'optimizer': give a plain"),
        ([1], "holds list: give a plain state_dict"),
        ({"weight": Unsafe()}, "with weights_only=True"),
        ({"weight": torch.zeros(2, 3)}, 'Missing key.*"bias".*load them yourself before'),
        ({"weight": torch.zeros(3, 3), "bias": torch.zeros(2)}, "size mismatch for weight"),
        ({"weight": torch.zeros(2, 3), "bias": torch.zeros(2), "odd": torch.zeros(1)},
         'Unexpected key.*"odd"'),
    ],
)  # fmt: skip
def test_a_file_that_does_not_fit_is_refused_with_its_name(content, words, tmp_path):
    path = tmp_path / "weights"
    if content == "directory":
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(ConfigError, match=words) as error:
        weights.load(path, nn.Linear(3, 2))
    assert str(path) in str(error.value)


def test_the_best_is_strictly_better_and_finite():
    before = [1.0, "min"]
    assert [is_better(v, "min", before) for v in (0.5, 1.0, 2.0, math.nan)] == [
        True, False, False, False,
    ]  # fmt: skip
    assert is_better(2.0, "max", [1.0, "max"])
    assert is_better(2.0, "min", None)
    assert not is_better(math.inf, "max", None)
    with pytest.raises(ConfigError, match="must be one of min, max"):
        is_better(2.0, "least", None)
    with pytest.raises(ConfigError, match="it was 'min' before; give another file"):
        is_better(2.0, "max", before)


RUN = {
    "seed": 1, "global_batch": 8, "samples": 100, "tail": "drop", "order": "shuffled",
    "level": "off", "shards": None,
}  # fmt: skip


def test_another_batch_or_other_data_only_if_asked_for(capsys):
    def allowed(words: Any) -> frozenset[str]:
        return frozenset(Snapshots.taken(Snapshots(allow_changes=words)).allow_changes)

    for name, asked in (("global_batch", "global_batch"), ("samples", "data"), ("order", "data")):
        changed = {**RUN, name: "x"}
        with pytest.raises(ConfigError, match=rf"Snapshots\(allow_changes='{asked}'\)"):
            compare_configs(RUN, changed, 0, allowed("ema"))
        compare_configs(RUN, changed, 0, allowed(f"ema,{asked}"))
        assert "as allow_changes says" in capsys.readouterr().err
        compare_configs(RUN, RUN, 0, allowed([asked]))
        assert not capsys.readouterr().err
    for name in ("seed", "tail"):
        with pytest.raises(ConfigError, match=f"with {name}=") as error:
            compare_configs(RUN, {**RUN, name: "x"}, 0, allowed(CHANGES))
        assert "allow_changes" not in str(error.value)


def test_another_gpu_is_told_and_an_older_snapshot_is_not_blamed(capsys):
    exact = ("micro_batches", "precision", "level", "threads", "torch", "device", "world_size")
    mine = {**RUN, **dict.fromkeys(exact, 1), "level": "resume"}
    here = {**mine, "accelerator": {"gpu": "H100", "nccl": "2.28.9"}}
    compare_configs(here, here, 0, ())
    compare_configs(mine, here, 0, ())
    compare_configs({**here, "accelerator": {"gpu": "A100", "nccl": "2.28.9"}}, here, 1, ())
    assert not capsys.readouterr().err
    other = {"gpu": "A100", "nccl": "2.28.9", "NCCL_ALGO": "Tree"}
    compare_configs({**here, "accelerator": other}, here, 0, ())
    words = capsys.readouterr().err
    assert "warning: gpu was A100 and is H100: the result will not equal" in words
    assert "warning: NCCL_ALGO was Tree and is None" in words
    assert "nccl was" not in words


def test_sums_in_another_order_are_told():
    config = {"buckets": None}
    assert note_layout(config, "layout/sums") == ""
    assert config == {"buckets": "layout/sums"}
    assert note_layout(config, "layout/sums") == ""
    assert "added up in another order than before" in note_layout(config, "layout/other")


def test_a_schedule_that_counts_something_else_now_is_told():
    steps, epochs = {"scheduler_every": ["step"]}, {"scheduler_every": ["epoch"]}
    assert "at every step before the snapshot and now advance at every epoch" in schedule_warning(
        steps, epochs
    )
    assert schedule_warning(epochs, epochs) == schedule_warning({}, epochs) == ""  # or an older one
