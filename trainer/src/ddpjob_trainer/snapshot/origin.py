"""Compare a run with the snapshot that it goes on from. Called by manager.restore().

compare() refuses what cannot go on and warns where only the bits are lost. tell() says whose
snapshot it is: a job that is deleted and applied again, with another script perhaps, finds those of
the first.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ddpjob_contract import Resumed
from ddpjob_trainer.environment import Identity
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.telemetry.console import say

Config = Mapping[str, Any]
_CHANGED = {
    "samples": "the dataset is another one",
    "shards": "the result would be another one",
    "world_size": "each has a stream of its own",
}
_WORDS = {"script": "another script", "arguments": "other arguments"}


def compare(stored: Config, mine: Config, rank: int, allowed: Collection[str]) -> None:
    """Refuse to continue another run; warn where only bitwise equality is lost."""
    elastic = mine["level"] == "elastic"
    for name, change in (
        ("order", "data"),
        ("seed", ""),
        ("global_batch", "global_batch"),
        ("samples", "data"),
        ("tail", ""),
        # Each process has another stream.
        *([("world_size", "")] if mine["order"] == "stream" else []),
        *([("shards", "")] if elastic and stored.get("shards") is not None else []),
    ):
        if stored.get(name) == mine[name]:
            continue
        if change in allowed:
            if rank == 0:
                say(0, f"{name} was {stored.get(name)} and is {mine[name]}, as allow_changes says")
            continue
        what = _CHANGED.get(name, "the data order would change")
        allow = f", go on with snapshots=ddp.Snapshots(allow_changes={change!r})" if change else ""
        raise ConfigError(
            f"the snapshot was made with {name}={stored.get(name)}, now it is {mine[name]}: {what}."
            f" Use the old value{allow}, or start anew with snapshot.resume: Never"
        )
    if rank != 0 or mine["level"] == "off":
        return
    exact = ("micro_batches", "precision", "level", "threads", "torch", "device")
    names = exact if elastic else ("world_size", *exact)
    pairs = [(name, stored.get(name), mine[name]) for name in names]
    are = mine.get("accelerator", {})
    were = stored.get("accelerator", are)
    pairs += [(name, were.get(name), are.get(name)) for name in sorted(were.keys() | are.keys())]
    for name, was, now in pairs:
        if was != now:
            say(
                0,
                f"warning: {name} was {was} and is {now}: the result will"
                " not equal an undisturbed run's bit for bit",
            )


def marks(identity: Identity) -> dict[str, Any]:
    """Return what a snapshot's configuration keeps of it: plain values.

    Without an operator each run has another uid, though it is meant to go on from the last.
    """
    alone = not identity.unique or identity.uid.startswith("local-")
    job = None if alone else identity.uid
    return {"job": job, "namespace": identity.namespace, "program": _program()}


def tell(step: int, stored: Config, config: Config) -> Resumed:
    """Say what training goes on from; return it for the launcher.

    ``stored``, ``config``: of the snapshot and of this run, with marks(). On rank 0.
    """
    found: Resumed = {"step": step}
    uid, mine = stored.get("job"), config.get("job")
    if isinstance(uid, str) and isinstance(mine, str) and uid != mine:
        found["uid"] = uid
    were, are = stored.get("program"), config.get("program")
    if isinstance(were, Mapping) and isinstance(are, Mapping):
        known = (name for name in _WORDS if were.get(name) and are.get(name))
        found["changed"] = [name for name in known if were[name] != are[name]]  # type: ignore[misc]
    say(0, f"resuming after step {step}{_words(found)}")
    if step >= config["total_steps"]:
        say(0, f"nothing is left to train of {config['total_steps']} steps: 0 steps trained")
    return found


def _words(found: Resumed) -> str:
    said = ""
    if "uid" in found:
        said = (
            f" of another job (uid {found['uid']}), whose snapshots lie here; to begin anew use"
            " another name or snapshot.resume: Never, or delete them"
        )
    if changed := found.get("changed"):
        said += f"; that was made by {' and '.join(_WORDS[name] for name in changed)}"
    return said


def _program() -> dict[str, str | None]:
    """Hash the script and its arguments, which may hold what is nobody's business."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        script = None if file is None else _digest(Path(file).read_bytes())
    except OSError:
        script = None
    return {
        "script": script,
        "arguments": _digest("\0".join(sys.argv[1:]).encode(errors="replace")),
    }


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=8).hexdigest()
