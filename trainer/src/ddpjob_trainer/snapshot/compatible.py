"""Whether a run may go on from a snapshot: what it was made with against what is asked now."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.telemetry.console import say

Config = Mapping[str, Any]
_CHANGED = {
    "samples": "the dataset is another one",
    "world_size": "each has a stream of its own",
}


def compare(stored: Config, mine: Config, rank: int, allowed: Collection[str]) -> None:
    """Refuse to continue another run; warn where only bitwise equality is lost."""
    for name, change in (
        ("order", "data"),
        ("seed", ""),
        ("global_batch", "global_batch"),
        ("samples", "data"),
        ("tail", ""),
        # Each process has a stream of its own.
        *([("world_size", "")] if mine["order"] == "stream" else []),
    ):
        if stored.get(name) == mine[name]:
            continue
        if change in allowed:
            if rank == 0:
                say(0, f"{name} was {stored.get(name)} and is {mine[name]}, as allow_changes says")
            continue
        if name == "order" and name not in stored:
            raise ConfigError(
                "the snapshot was made by an older version of ddpjob-trainer, which shuffled the"
                " data in another order: finish the run with that version, or start anew with"
                " snapshot.resume: Never"
            )
        what = _CHANGED.get(name, "the data order would change")
        cure = f", go on with start(allow_changes={change!r})" if change else ""
        raise ConfigError(
            f"the snapshot was made with {name}={stored.get(name)}, now it is {mine[name]}: {what}."
            f" Use the old value{cure}, or start anew with snapshot.resume: Never"
        )
    elastic = mine["level"] == "elastic"
    if elastic and stored.get("shards") not in (None, mine["shards"]):
        raise ConfigError(
            f"the snapshot was made with shards={stored['shards']}, now it is {mine['shards']}: the"
            " result would be another one. Use the old value, or start anew with snapshot.resume:"
            " Never"
        )
    if rank != 0 or mine["level"] == "off":
        return
    exact = ("micro_batches", "precision", "level", "threads", "torch", "device")
    names = exact if elastic else ("world_size", *exact)
    pairs = [(name, stored.get(name), mine[name]) for name in names]
    are = mine.get("accelerator", {})
    were = stored.get("accelerator", are)  # older versions did not say
    pairs += [(name, were.get(name), are.get(name)) for name in sorted(were.keys() | are.keys())]
    for name, was, now in pairs:
        if was != now:
            say(
                0,
                f"warning: {name} was {was} and is {now}: the result will"
                " not equal an undisturbed run's bit for bit",
            )
