"""The models and data that both sides of a comparison train, equal to the last bit."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, TensorDataset

SEED = 7


@dataclass(frozen=True)
class Workload:
    model: Callable[[], nn.Module]
    inputs: Callable[[], torch.Tensor]
    classes: int
    per_rank: int  # samples per rank and step
    bucket_cap_mb: float
    sample_seconds: float = 0.0  # what reading one takes, as from a disk
    workers: int = 0


class Slow(Dataset):
    """Each sample takes a while."""

    def __init__(self, data: TensorDataset, seconds: float) -> None:
        self.data, self.seconds = data, seconds

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        time.sleep(self.seconds)
        return self.data[index]


class Gpt(nn.Module):
    """A small GPT on sequences of 32 tokens that predicts the class of the whole sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 128)
        self.place = nn.Parameter(torch.zeros(32, 128))
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(128, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks(self.embed(tokens) + self.place)
        return self.head(hidden.mean(1))


class Rnn(nn.Module):
    """Many small layers: a stack of cells in a loop over time, each step a handful of tiny kernels.

    What Python does between two kernels takes longer than the kernels.
    """

    def __init__(self, width: int = 32, layers: int = 6) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.GRUCell(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, sequence: torch.Tensor) -> torch.Tensor:
        state = [sequence.new_zeros(len(sequence), sequence.shape[2]) for _ in self.cells]
        for element in sequence.unbind(1):
            below = element
            for place, cell in enumerate(self.cells):
                below = state[place] = cell(below, state[place])
        return self.head(state[-1])


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )


def _wide() -> nn.Module:
    """Have 100 MB of state: 8.9 million parameters and AdamW's two moments of each."""
    wide = (nn.Linear(2048, 2048), nn.ReLU())
    return nn.Sequential(
        nn.Linear(256, 2048), nn.ReLU(), *wide, nn.Linear(2048, 2048), nn.Linear(2048, 10)
    )


WORKLOADS = {
    "cnn": Workload(_cnn, lambda: torch.randn(2048, 1, 16, 16), 10, 32, 0.05),
    "mlp": Workload(_mlp, lambda: torch.randn(2048, 256), 10, 64, 2.0),
    "wide": Workload(_wide, lambda: torch.randn(2048, 256), 10, 16, 25.0),
    "slow": Workload(
        _cnn, lambda: torch.randn(2048, 1, 16, 16), 10, 24, 0.05, sample_seconds=0.005, workers=4
    ),
    "rnn": Workload(Rnn, lambda: torch.randn(2048, 16, 32), 10, 16, 0.05),
    "gpt": Workload(Gpt, lambda: torch.randint(0, 256, (2048, 32)), 10, 8, 1.0),
}


def make(name: str) -> tuple[Workload, nn.Module, Dataset]:
    """The same model and data in every process and in every program."""
    workload = WORKLOADS[name]
    torch.manual_seed(SEED)
    inputs = workload.inputs()
    data: Dataset = TensorDataset(inputs, torch.randint(0, workload.classes, (len(inputs),)))
    if workload.sample_seconds:
        data = Slow(data, workload.sample_seconds)
    return workload, workload.model(), data


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(inputs), targets)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=WORKLOADS, default="cnn")
    parser.add_argument("--warmup", type=int, default=20, help="steps before the clock starts")
    parser.add_argument("--steps", type=int, default=200, help="steps on the clock")
    parser.add_argument("--out", help="file for the seconds on the clock")
    parser.add_argument("--level", default=None, help="of determinism, for ours")
    parser.add_argument("--checkpoint", help="file of the hand-written loop")
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    return parser.parse_args()
