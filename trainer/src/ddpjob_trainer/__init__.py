"""PyTorch DDP training that resumes bit for bit.

``start`` is all a script needs. Names are resolved when used, so that the launcher, which
shares this package, never imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpjob_trainer.data.order import steps_per_epoch
    from ddpjob_trainer.errors import ConfigError
    from ddpjob_trainer.snapshot.reader import read_snapshot
    from ddpjob_trainer.training.run import Run
    from ddpjob_trainer.training.start import start
    from ddpjob_trainer.training.step import Step

__version__ = "0.1.0"
__all__ = ["ConfigError", "Run", "Step", "read_snapshot", "start", "steps_per_epoch"]


def __getattr__(name: str) -> object:
    if name == "Run":
        from ddpjob_trainer.training.run import Run

        return Run
    if name == "Step":
        from ddpjob_trainer.training.step import Step

        return Step
    if name == "start":
        from ddpjob_trainer.training.start import start

        return start
    if name == "steps_per_epoch":
        from ddpjob_trainer.data.order import steps_per_epoch

        return steps_per_epoch
    if name == "read_snapshot":
        from ddpjob_trainer.snapshot.reader import read_snapshot

        return read_snapshot
    if name == "ConfigError":
        from ddpjob_trainer.errors import ConfigError

        return ConfigError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
