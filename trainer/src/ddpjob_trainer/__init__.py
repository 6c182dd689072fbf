"""Train with PyTorch DDP, and resume bit for bit.

``start`` is all a script needs. Names are resolved when used, so that the launcher, which
shares this package, never imports torch.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

from ddpjob_trainer import environment

if TYPE_CHECKING:
    from ddpjob_trainer.data.order import steps_per_epoch
    from ddpjob_trainer.errors import ConfigError
    from ddpjob_trainer.options import Logging, Snapshots
    from ddpjob_trainer.snapshot.reader import read_snapshot
    from ddpjob_trainer.training.run import Run
    from ddpjob_trainer.training.start import start
    from ddpjob_trainer.training.step import Step

environment.arrive(os.environ)
__version__ = "0.2.0"
__all__ = [
    "ConfigError", "Logging", "Run", "Snapshots", "Step", "read_snapshot", "start",
    "steps_per_epoch",
]  # fmt: skip

_MODULES = {
    "ConfigError": "errors", "Logging": "options", "Run": "training.run", "Snapshots": "options",
    "Step": "training.step", "read_snapshot": "snapshot.reader", "start": "training.start",
    "steps_per_epoch": "data.order",
}  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
