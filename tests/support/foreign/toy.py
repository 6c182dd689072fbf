"""Something to train for the scripts beside it, which are as their authors' manuals have them.

At one item each process waits for a file of the test's, which kills one of them there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset

STEPS = 30
BATCH = 4
EVERY = 5  # steps between checkpoints, and in an epoch
HOLD_AT = 13  # steps after the first in this process
OUT = Path(sys.argv[1])
RANK = int(os.environ["RANK"])


class Toy(Dataset[dict[str, torch.Tensor]]):
    """A line with noise, 3 features."""

    def __init__(self) -> None:
        rows = torch.Generator().manual_seed(1)
        self._x = torch.randn(3 * EVERY * BATCH, 3, generator=rows)
        self._y = self._x @ torch.tensor([[1.0], [-2.0], [0.5]])
        self._served = 0

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self._served += 1
        if self._served == HOLD_AT * BATCH and not (OUT / "go").exists():
            (OUT / f"at-{RANK}.new").write_text(str(os.getpid()))
            (OUT / f"at-{RANK}.new").rename(OUT / f"at-{RANK}")
            while not (OUT / "go").exists():
                time.sleep(0.01)
        return {"x": self._x[index], "y": self._y[index]}


class Line(torch.nn.Module):
    """Returns the loss first, as transformers wants it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(3, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.mse_loss(self.layers(x), y)}


def begun(step: int) -> None:
    """This process trains from here on."""
    with (OUT / f"begun-{RANK}").open("a") as log:
        log.write(f"{step}\n")


def ended(step: int, model: torch.nn.Module) -> None:
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).tolist()
    (OUT / f"ended-{RANK}").write_text(json.dumps({"step": step, "weights": weights}))
