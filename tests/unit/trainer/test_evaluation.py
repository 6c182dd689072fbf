"""What evaluate() adds up: numbers and dicts of them, over ranks that have batches and some not."""

import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddpjob_trainer.comm.world import World
from ddpjob_trainer.data import fetch
from ddpjob_trainer.environment import Identity
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.training import evaluation

VALUES = torch.arange(50.0)
DATA = TensorDataset(VALUES)
MODEL = nn.Identity()


class Noisy:
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(()) + index


def evaluate(
    metric: Any, *, data: Any = DATA, batch_size: int = 8, workers: int = 0, mean: bool = False
) -> Any:
    worlds = [
        World(rank, 3, torch.device("cpu"), Identity("u", 1, 0, True), None, None)
        for rank in range(3)
    ]
    given = evaluation.EvaluationOptions(
        batch_size=batch_size,
        workers=workers,
        reduce="mean" if mean else "sum",
        collate=None,
        ema=False,
    )
    source = fetch.Batches(data, None, 7)
    shares = [
        evaluation.share_of_metric(MODEL, source, metric, world, given, lambda: None)
        for world in worlds
    ]
    blobs = [json.dumps(share).encode() for share in shares]
    gather = type("Gathered", (), {"gather_bytes": lambda self, what, mine: blobs})()
    assert blobs[0] in gather.gather_bytes("", b"")
    return evaluation.total(shares[0], gather, mean=mean)


# With 25 the third rank has no batch, and the second a smaller one.
@pytest.mark.parametrize("batch_size", [1, 8, 20, 25, 64])
def test_every_sample_counts_once_however_it_is_cut(batch_size):
    assert evaluate(lambda m, b: b[0].sum(), batch_size=batch_size) == VALUES.sum()
    found = evaluate(lambda m, b: {"sum": b[0].sum(), "count": len(b[0])}, batch_size=batch_size)
    assert found == {"sum": float(VALUES.sum()), "count": 50.0}
    mean = evaluate(lambda m, b: b[0].mean(), batch_size=batch_size, mean=True)
    assert mean == pytest.approx(float(VALUES.mean()))
    named = evaluate(lambda m, b: {"mean": b[0].mean()}, batch_size=batch_size, mean=True)
    assert named == {"mean": pytest.approx(float(VALUES.mean()))}
    late = evaluate(lambda m, b: {"all": 1.0} | ({"late": 2.0} if b[0][0] >= 40 else {}))
    assert late == {"all": 7.0, "late": 4.0}, "a name counts where it is"


def test_workers_change_no_bit():
    """Though dataset and metric draw; with this batch size the third rank has no batch."""
    results = {
        evaluate(lambda m, b: (b * torch.rand(())).sum(), data=Noisy(), batch_size=25, workers=n)
        for n in (0, 2, 4)
    }
    assert len(results) == 1, results


def test_what_is_no_metric_is_refused_and_options_before_anybody_waits():
    for metric, words in (
        (lambda m, b: b[0], "must be a number or a tensor of one element"),
        (lambda m, b: {"acc": "x"}, "the metric 'acc' must be a number"),
        (lambda m, b: {"a": 1.0} if b[0][0] >= 40 else 1.0, "one number for some batches"),
    ):
        with pytest.raises(ConfigError, match=words):
            evaluate(metric)
    usual = {
        "dataset": DATA, "metric": len, "batch_size": 8, "workers": 0, "reduce": "sum",
        "collate": None, "ema": False,
    }  # fmt: skip
    for name, value, words in (
        ("batch_size", 0, "batch_size=0 must be at least 1"),
        ("workers", -1, "workers=-1 must be at least 0"),
        ("reduce", "max", "reduce='max' must be one of 'sum', 'mean'"),
        ("dataset", [], "the dataset is empty"),
        ("dataset", iter([1]), "not a map-style dataset"),
    ):
        with pytest.raises(ConfigError, match=words):
            evaluation.check({**usual, name: value})


def test_modes_and_gradients_are_put_back():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].eval()
    model(torch.ones(3, 2)).sum().backward()
    before = [parameter.grad for parameter in model.parameters()]
    values = [gradient.clone() for gradient in before if gradient is not None]
    with evaluation.evaluating(model), torch.enable_grad():
        assert not any(part.training for part in model.modules())
        model(torch.ones(3, 2)).sum().backward()
    assert [part.training for part in model] == [True, False]
    after = [parameter.grad for parameter in model.parameters()]
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert all(map(torch.equal, values, [gradient for gradient in after if gradient is not None]))


def test_shared_buffers_are_no_change_to_a_graph_that_waits():
    model = nn.BatchNorm1d(2)
    loss = model(torch.randn(4, 2)).pow(2).sum()

    class Sharing:
        def broadcast_tensor(self, tensor: torch.Tensor) -> None:
            tensor.zero_()

    evaluation.share_buffers(model, Sharing())  # type: ignore[arg-type]
    assert not model.running_mean.any()
    loss.backward()
