"""What a rescue reads of one process: a model, its optimizer, and what a script has registered."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ddpjob_trainer.snapshot.training_state import TrainingState, flat_sha256
from ddpjob_trainer.state.stateful import Modes
from ddpjob_trainer.training.rescue import Boundary


class Trained:
    """A model with BatchNorm, its optimizer, and what a script has registered."""

    def __init__(self, kind: type[Boundary] = Boundary) -> None:
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 2))
        self.teacher = nn.BatchNorm1d(5)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.1)
        self.seen: dict[str, Any] = {"losses": [1.0], "mean": torch.ones(2)}
        self.state = TrainingState(self.net)
        for name, obj in (
            ("optimizer", self.optimizer), ("seen", self.seen), ("teacher", self.teacher),
        ):  # fmt: skip
            self.state.register(name, obj)  # type: ignore[arg-type]
        self.best: dict[str, Any] = {"net.safetensors": [2.0, "min"]}
        modes = Modes({"model": self.net})
        self.boundary = kind(self.state, {"optimizer"}, modes, lambda: self.best)

    def forward(self) -> None:
        self.net(self.teacher(torch.randn(6, 5))).pow(2).mean().backward()

    def body(self) -> None:
        """What a body may change before its update."""
        self.forward()
        self.optimizer.param_groups[0]["lr"] *= 0.5
        self.seen["losses"].append(0.5)
        self.seen["mean"] += 1
        self.best["other"] = [1.0, "max"]
        self.net[1].eval()

    def step(self, done: int) -> None:
        self.forward()
        self.boundary.wait_for_readers()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.boundary.take(done)

    def sha256(self) -> str:
        return flat_sha256(self.state.capture(0).flat)
