"""Whose snapshot a run goes on from: another job of the same name, or another program.

A job that is deleted and applied again, with another script, finds the snapshots of the first: it
goes on from them, and has perhaps nothing left to train. Each snapshot says who made it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ddpjob_contract import Resumed
from ddpjob_trainer.environment import Identity
from ddpjob_trainer.telemetry.console import say

_WORDS = {"script": "another script", "arguments": "other arguments"}


def marks(identity: Identity) -> dict[str, Any]:
    """Return what a snapshot's configuration keeps of it: plain values.

    Without an operator each run has a uid of its own, and to go on from the last is what it is for.
    """
    alone = not identity.unique or identity.uid.startswith("local-")
    return {"job": None if alone else identity.uid, "program": _program()}


def tell(step: int, stored: Mapping[str, Any], config: Mapping[str, Any]) -> Resumed:
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
    """Hashes of the script and its arguments, which may hold what is nobody's business."""
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
