"""What a script builds its optimizers and schedulers with, against what a snapshot was built with.

A resume takes the snapshot's values, as the bits need. Whoever has changed an argument in between
is told so. What training changes does not matter: compared is how both scripts began.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ddpjob_trainer.training.prepare import PreparedModels

_COUNTERS = {"last_epoch", "_step_count", "_last_lr", "_is_initial", "_get_lr_called_within_step"}
_PLAIN = (bool, int, float, str, type(None))
_TOLD = 6
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
            place: deepcopy(holder[key])
            for places in (self._of_groups(), *(found for _, _, found in self._of_schedulers()))
            for place, (holder, key) in places.items()
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
        told = [
            f"{place} {before[place]} (now {mine[place]})"
            for place in other
            if not place.endswith(" base_lrs") and not _follows(place, mine)
        ]
        if not told:
            return ""
        more = [f"{len(told) - _TOLD} more"] if len(told) > _TOLD else []
        text = f"the script had other hyperparameters before: {', '.join([*told[:_TOLD], *more])}"
        if script:
            return f"{text}: from here on those of now hold, as resume_hyperparameters says"
        return (
            f"warning: {text}: the snapshot's go on; to take those of now,"
            " start(resume_hyperparameters='script')"
        )

    def _put_back(self, other: set[str]) -> None:
        for place, (group, key) in self._of_groups().items():
            if place not in other or _follows(place, self.kept):
                continue
            if key == "initial_lr" and float(group[key]):  # the schedule is where it is
                _set(group, "lr", group["lr"] * self._built[place] / group[key])
            _set(group, key, self._built[place])
        for scheduler, state, places in self._of_schedulers():
            chosen = {place: found for place, found in places.items() if place in other}
            for place, (holder, key) in chosen.items():
                holder[key] = deepcopy(self._built[place])
            if chosen:
                scheduler.load_state_dict(state)

    def _of_groups(self) -> _Places:
        found: _Places = {}
        for name, groups in self._groups.items():
            for number, group in enumerate(groups):
                where = f"{name} group {number}" if len(groups) > 1 else name
                found |= {f"{where} {k}": (group, k) for k in group if _is_plain(group[k])}
        return found

    def _of_schedulers(self) -> Iterator[tuple[LRScheduler, dict[str, Any], _Places]]:
        for name, scheduler in self._schedulers.items():
            state = scheduler.state_dict()
            yield scheduler, state, dict(_within(name, state))


def _within(name: str, state: dict[str, Any]) -> Iterator[tuple[str, tuple[dict[str, Any], str]]]:
    for key, value in state.items():
        if key == "_schedulers":  # of those that chain others
            for number, part in enumerate(value):
                yield from _within(f"{name} {number}", part)
        elif key not in _COUNTERS and _is_plain(value):
            yield f"{name} {key}", (state, key)


def _follows(place: str, places: Mapping[str, str]) -> bool:
    """Whether it is a rate that a scheduler makes of the initial one."""
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
