"""Collect all that decides a run's result: snapshots store it, resumes compare it.

Hyperparameters belong to it: what a script builds its optimizers and schedulers with, not what
training has changed since.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ddpjob_trainer.data.fetch import BatchSettings, Fingerprint, dataset_difference
from ddpjob_trainer.data.order import DataOrder, Epochs
from ddpjob_trainer.data.stream import Endless
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.options import Options
from ddpjob_trainer.printing import say
from ddpjob_trainer.snapshot import manager
from ddpjob_trainer.training.models.prepare import PreparedModels
from ddpjob_trainer.training.run_context import RunContext

_OPTIONS = (
    "seed", "global_batch", "micro_batches", "tail", "precision", "total_steps", "level",
    "nan_policy", "check_every", "threads",
)  # fmt: skip
#: What must be equal on all ranks, lest they wait for different things.
OF_ALL = (*_OPTIONS[:-1], "samples", "order", "shards", "resume")


def batch_settings(process: RunContext, options: Options) -> BatchSettings:
    """Return the run's settings that shape one rank's batches."""
    world = process.world
    return BatchSettings(
        seed=options.seed,
        rank=world.rank,
        ranks=world.size,
        global_batch=options.global_batch,
        parts=(process.averaging.shards or world.size) * options.micro_batches,
        level=options.level,
        tail=options.tail,
        collate=options.collate,
        accelerator=world.accelerator,
        say=lambda text: say(0, text) if world.rank == 0 else None,
        alive=process.progress.alive,
    )


def with_steps(options: Options, order: DataOrder) -> Options:
    """Count the steps of start(epochs=...) by the dataset. Raises ConfigError for a stream."""
    if options.epochs is None:
        return options
    if isinstance(order.epochs, Endless):
        raise ConfigError(
            f"epochs={options.epochs}: an epoch of a stream has no known length; give start()"
            " total_steps instead"
        )
    return replace(options, total_steps=options.epochs * order.steps_per_epoch)


def fingerprint(
    process: RunContext, options: Options, epochs: Epochs, data: Fingerprint | None
) -> dict[str, Any]:
    """Return plain values only: a snapshot's JSON holds them."""
    world = process.world
    return {
        **{name: getattr(options, name) for name in _OPTIONS},
        "samples": epochs.length,
        "order": epochs.name,
        "data": data,
        "shards": process.averaging.shards,
        "resume": None if options.resume is None else str(options.resume),
        "world_size": world.size,
        "device": world.device.type,
        "accelerator": world.accelerator.facts(),
        "torch": torch.__version__,
        **manager.identity_marks(world.identity),
    }


def dataset_warning(stored: Mapping[str, Any], mine: Fingerprint | None) -> str:
    """Return a warning where the dataset is not the one of the snapshot."""
    what = dataset_difference(stored.get("data"), mine)
    return what and (
        f"warning: the dataset is not that of the snapshot, by {what}: the result will not equal an"
        " undisturbed run's. If it is made, shuffled or split at random, do so after ddp.start(),"
        " which seeds all processes alike, or with a seed"
    )


def schedule_warning(stored: Mapping[str, Any], mine: Mapping[str, Any]) -> str:
    """Return a warning where schedules counted something else before the snapshot."""
    were, are = stored.get("scheduler_every", mine["scheduler_every"]), mine["scheduler_every"]
    if were == are:
        return ""
    return (
        f"warning: schedulers advanced at every {' and '.join(were)} before the snapshot and now"
        f" advance at every {' and '.join(are)}: the learning rate will not be that of a new run."
        " For that start over in another snapshot directory"
    )


def note_layout(config: dict[str, Any], layout: str | None) -> str:
    """Put an Averaging's layout() into the configuration; return a warning if it was another."""
    before, config["buckets"] = config["buckets"], layout
    if before in (None, layout):
        return ""
    return (
        "warning: gradients are added up in another order than before the snapshot, in other"
        " buckets, by other GPUs or over other links: the result will not equal an undisturbed"
        " run's bit for bit"
    )


# --- Hyperparameters ---

_COUNTERS = {"last_epoch", "_step_count", "_last_lr", "_is_initial", "_get_lr_called_within_step"}
_PLAIN = (bool, int, float, str, type(None))
#: By place: what holds it, and its key there.
_Places = dict[str, tuple[dict[str, Any], str]]


class Hyperparameters:
    """As the script has built them, when made before the snapshot is loaded."""

    def __init__(self, trained: PreparedModels) -> None:
        self._groups = {
            f"optimizer{number or ''}": unit.optimizer.param_groups
            for number, unit in enumerate(trained.updater.units)
        }
        every = trained.state.registered | trained.state.per_rank
        self._schedulers = {n: obj for n, obj in every.items() if isinstance(obj, LRScheduler)}
        self._built = {
            place: deepcopy(holder[key]) for place, (holder, key) in self._places().items()
        }
        #: In texts, for a snapshot's JSON, which knows no infinity.
        self.kept = {place: _text(value) for place, value in self._built.items()}

    def compare(self, stored: object, *, script: bool) -> str:
        """Return what differs from ``stored``, an earlier ``kept``, or nothing.

        ``script``: put the script's values in the place of those that were loaded.
        """
        before: Mapping[str, str] = stored if isinstance(stored, dict) else {}
        mine = self.kept
        other = [place for place in mine if before.get(place, mine[place]) != mine[place]]
        if script:
            self._put_back(set(other))
        else:
            self.kept = {place: before.get(place, text) for place, text in mine.items()}
        changed = [
            f"{place} {before[place]} (now {mine[place]})"
            for place in other
            if not place.endswith(" base_lrs") and not _follows(place, mine)
        ]
        if not changed:
            return ""
        text = f"the script had other hyperparameters before: {', '.join(changed)}"
        if script:
            return f"{text}: using the new ones, as snapshots.hyperparameters says"
        return (
            f"warning: {text}: keeping those of the snapshot; to use the new ones:"
            " snapshots=ddp.Snapshots(hyperparameters='script')"
        )

    def _put_back(self, other: set[str]) -> None:
        for place, (holder, key) in self._places().items():
            if place not in other or _follows(place, self.kept):
                continue
            if key == "initial_lr" and float(holder[key]):  # the schedule is where it is
                _set(holder, "lr", holder["lr"] * self._built[place] / holder[key])
            _set(holder, key, deepcopy(self._built[place]))

    def _places(self) -> _Places:
        found: _Places = {}
        for name, groups in self._groups.items():
            for number, group in enumerate(groups):
                where = f"{name} group {number}" if len(groups) > 1 else name
                found |= {f"{where} {k}": (group, k) for k in group if _is_plain(group[k])}
        for name, scheduler in self._schedulers.items():
            found |= _of_scheduler(name, scheduler)
        return found


def _of_scheduler(name: str, scheduler: LRScheduler) -> _Places:
    held = vars(scheduler)
    chosen = (key for key in held if key not in _COUNTERS and _is_plain(held[key]))
    found: _Places = {f"{name} {key}": (held, key) for key in chosen}
    for number, part in enumerate(held.get("_schedulers", ())):  # of those that chain others
        found |= _of_scheduler(f"{name} {number}", part)
    return found


def _follows(place: str, places: Mapping[str, str]) -> bool:
    """Tell whether it is a rate that a scheduler makes of the initial one."""
    return place.endswith(" lr") and f"{place.removesuffix(' lr')} initial_lr" in places


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return repr(value.item())
    return repr(dict(value) if isinstance(value, dict) else value)


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    if isinstance(group[key], torch.Tensor):
        group[key].fill_(value)
    else:
        group[key] = value
