"""Weights that come from a file and go into files, over kills and changes. 3 ranks, buckets."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import ddpjob_trainer as ddp
from support.stand import ALL_0, Stand, resumed

EVERY = 3
VALUES = [5.0, 3.0, 4.0, 3.5, 2.0, 2.2, 2.0, 9.0]  # the best is that of step index 4


class Extra(nn.Linear):
    """Keeps a plain value in get_extra_state(), which no safetensors file holds."""

    words = ""

    def get_extra_state(self) -> object:
        return {"words": self.words}

    def set_extra_state(self, state: Any) -> None:
        self.words = state["words"]


def net(words: str = "") -> nn.Module:
    last = Extra(300, 2)
    last.words = words
    return nn.Sequential(nn.Linear(6, 300), nn.BatchNorm1d(300), nn.Dropout(0.3), last)


@dataclass(kw_only=True)
class Training(Stand, every=EVERY, total_steps=8, global_batch=12, seed=3):
    weights: Path
    prepare: dict[str, Any] = field(default_factory=dict)
    samples: int = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        self.start = {"resume": self.weights} | self.start

    def train(self, run: ddp.Run) -> str:
        generator = torch.Generator().manual_seed(11)
        data = TensorDataset(torch.randn(self.samples, 6, generator=generator))
        torch.manual_seed(100 + run.rank)  # whatever they begin with, the file's weights count
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        wrapped, _ = run.prepare(model, optimizer, bucket_cap_mb=0.001, **self.prepare)
        best = self.directory / "best.safetensors"
        with (self.directory / f"log-{run.rank}").open("a") as log:
            for step in run.steps(data):
                if not run.finished_steps:
                    run.save(self.directory / "first.safetensors", ema="ema" in self.prepare)
                for (x,) in step.batches:
                    self.may_die(run, step.index)
                    step.backward(wrapped(x).pow(2).mean())
                step.commit()
                better = run.keep_best(VALUES[step.index], best)
                log.write(f"{step.index} {better} {run.weights_sha256()}\n")
                log.flush()
                if step.index == 4:
                    run.save(self.directory / "fifth.safetensors")
        run.save(self.directory / "last.safetensors", ema="ema" in self.prepare)
        return model[3].words

    def log(self, rank: int) -> dict[int, str]:
        lines = (self.directory / f"log-{rank}").read_text().splitlines()
        return {int(line.split()[0]): line for line in lines}

    def file(self, name: str) -> dict[str, torch.Tensor]:
        return load_file(self.directory / f"{name}.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    other.pop("3._extra_state", None)
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def test_killed_after_a_warm_start_its_own_snapshots_and_its_best_go_on(gang, tmp_path):
    weights = tmp_path / "weights.pt"
    torch.save(net("of the file").state_dict(), weights)
    undisturbed = Training(tmp_path / "undisturbed", weights=weights)
    assert gang.run(undisturbed) == ALL_0, gang.log(0)
    assert f"beginning with the weights of {weights}" in gang.log(0)
    assert same(undisturbed.file("first"), torch.load(weights, weights_only=True))
    assert same(undisturbed.file("best"), undisturbed.file("fifth"))
    assert not same(undisturbed.file("best"), undisturbed.file("last"))
    disturbed = Training(tmp_path / "disturbed", weights=weights)
    found = resumed(gang, disturbed, (1, 5), EVERY, between=weights.unlink)  # needed no more
    assert found == undisturbed.results()
    assert all(result.endswith(" of the file") for result in found)
    for rank in range(3):
        assert disturbed.log(rank) == undisturbed.log(rank)
    assert [better.split()[1] for _, better in sorted(disturbed.log(0).items())] == [
        "True", "True", "False", "False", "True", "False", "False", "False",
    ]  # fmt: skip
    for name in ("best", "last"):
        assert same(disturbed.file(name), undisturbed.file(name))


def test_it_goes_on_with_other_data_and_an_average_if_that_is_asked_for(gang, tmp_path):
    weights = tmp_path / "weights.pt"
    torch.save(net().state_dict(), weights)
    training = Training(tmp_path / "run", {"total_steps": 4}, weights=weights)
    assert gang.run(training) == ALL_0, gang.log(0)
    last = training.file("last")
    changes = {"total_steps": 6, "global_batch": 24, "micro_batches": 2}
    changed = Training(
        training.directory, changes, weights=weights, samples=70, prepare={"ema": 0.5}
    )
    assert set(gang.run(changed).values()) <= {64, 75}
    assert "go on with snapshots=ddp.Snapshots(allow_changes='global_batch')" in gang.log(0)
    kept = ddp.Snapshots(
        directory=tmp_path / "run/snapshots", every=EVERY, allow_changes="global_batch,data,ema"
    )
    changed.start["snapshots"] = kept
    assert gang.run(changed) == ALL_0, gang.log(0)
    assert "resuming after step 4" in gang.log(0)
    assert "global_batch was 12 and is 24, as allow_changes says" in gang.log(0)
    assert not same(changed.file("last"), last)
    assert sorted(changed.log(0)) == [0, 1, 2, 3, 4, 5]


def test_a_file_that_does_not_fit_is_refused_by_all_ranks(gang, tmp_path):
    weights = tmp_path / "weights.pt"
    torch.save({"0.weight": torch.zeros(300, 6)}, weights)
    assert gang.run(Training(tmp_path / "run", weights=weights)) == {0: 64, 1: 64, 2: 64}
    for rank in range(3):
        assert f"resume={weights} does not hold this model's weights" in gang.log(rank)
        assert '"3.bias"' in gang.log(rank)
