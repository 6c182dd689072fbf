"""Which sinks start() was asked for: known names, and objects of the user's own."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.telemetry.sinks import Sink, names_of
from ddpjob_trainer.telemetry.tensorboard import TensorBoard
from ddpjob_trainer.telemetry.trackers import MLflow, WandB

NAMES = ("tensorboard", "wandb", "mlflow")  # those of their packages, too


def choose(given: str | Sequence[str | Sink], tensorboard_dir: str | None) -> dict[str, Sink]:
    """Return the sinks by name. A string holds names with commas between them.

    A directory alone asks for TensorBoard where it is installed. Raises ConfigError.
    """
    chosen: dict[str, Sink] = {}
    parts = [part.strip() for part in given.split(",")] if isinstance(given, str) else given
    own: list[Sink] = []
    for part in parts:
        if not isinstance(part, str):
            own.append(_checked(part))
        elif part:
            chosen[part] = _known(part, tensorboard_dir)
    if tensorboard_dir is not None and "tensorboard" not in chosen:
        chosen["tensorboard"] = TensorBoard(tensorboard_dir)
    return chosen | dict(zip(names_of(own), own, strict=True))


def _known(name: str, tensorboard_dir: str | None) -> Sink:
    if name not in NAMES:
        raise ConfigError(
            f"sinks: {name!r} is not known; use {', '.join(NAMES)}, or an object with open(), log()"
            " and close()"
        )
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:  # a folder of that name, as wandb leaves one behind
        raise ConfigError(
            f"sinks: {name!r} was asked for, but its package is not installed: pip install {name}"
        )
    if name == "wandb":
        return WandB()
    if name == "mlflow":
        return MLflow()
    if tensorboard_dir is None:
        raise ConfigError(
            "sinks: 'tensorboard' needs a directory: give tensorboard_dir, or set"
            " DDPJOB_TRAINER_TENSORBOARD"
        )
    return TensorBoard(tensorboard_dir)


def _checked(sink: Sink) -> Sink:
    for method in ("open", "log", "close"):
        if not callable(getattr(sink, method, None)):
            raise ConfigError(f"sinks: {type(sink).__name__} has no {method}()")
    return sink
