"""The lineage fence in an object store, which has no exclusive creation and no hard links.

Every incarnation writes below a number of its own: above all that it has seen, its last digits
drawn, so that no two have the same. It puts its parent snapshot there first and then a start
record naming its parent; the records make the same chains as those on disk. A zombie writes
below its own number only and is on no newer chain beyond the step at which it was left.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from dataclasses import asdict

from ddpjob_trainer.snapshot.ondisk import lineage, manifest
from ddpjob_trainer.snapshot.ondisk.checked_json import MAX_BYTES, seal, unseal
from ddpjob_trainer.snapshot.ondisk.lineage import Start
from ddpjob_trainer.snapshot.ondisk.manifest import InvalidSnapshotError, Manifest, NewerFormatError
from ddpjob_trainer.snapshot.remote.store import Store

_FOLDER = re.compile("[0-9]{15}")
_DRAWN = 10**6
_GAP = 10**12  # who is beyond is a stranger, and has no number above
_MANIFEST = re.compile(r"step-[0-9]{12,15}\.json")


def folder(number: int) -> str:
    """Name of an incarnation's folder."""
    return f"{number:015d}"


def numbers(store: Store) -> list[int]:
    """All that are taken, ascending."""
    found = [int(name) for name in store.names() if _FOLDER.fullmatch(name)]
    return lineage.before_gap(found, _GAP)


def draw(taken: list[int]) -> int:
    """A number above all others, that nobody draws at the same time."""
    highest = max(taken, default=0)
    return (highest // _DRAWN + 1) * _DRAWN + secrets.randbelow(_DRAWN)


def starts(store: Store, newer: list[NewerFormatError] | None = None) -> dict[int, Start]:
    """Every readable start record by its number. ``newer`` gets why another program is needed."""
    found = {}
    for number in numbers(store):
        try:
            data = store.read(folder(number), lineage.START, lineage.MAX_START_BYTES)
            start = lineage.parse_start(unseal(data))
        except (FileNotFoundError, ValueError) as error:
            if newer is not None and isinstance(error, NewerFormatError):
                newer.append(error)
            continue  # not begun yet, or not ours
        if start.sequence == number:
            found[number] = start
    return found


def write_start(store: Store, start: Start) -> None:
    """Make an incarnation part of the lineage."""
    store.write(folder(start.sequence), lineage.START, seal(asdict(start)))


def steps(store: Store, number: int) -> list[int]:
    """Steps whose manifests an incarnation holds, ascending."""
    names = (name for name in store.names(folder(number)) if _MANIFEST.fullmatch(name))
    found = {int(name[5:-5]) for name in names if name == manifest.file_name(int(name[5:-5]))}
    return sorted(found)


def read(store: Store, number: int, step: int) -> Manifest:
    """Raises InvalidSnapshotError, FileNotFoundError."""
    found = manifest.decode(store.read(folder(number), manifest.file_name(step), MAX_BYTES))
    if found.step != step:
        raise InvalidSnapshotError(f"the manifest is that of step {found.step}")
    return found


def counting(store: Store, known: dict[int, Start]) -> Iterator[tuple[int, int]]:
    """Yield (number, step) of what a resume may take, newest first."""
    for number, limit in lineage.chain(known):
        for step in reversed(steps(store, number)):
            if limit is None or step <= limit:
                yield number, step


def identity(start: Start) -> tuple[str, int, int]:
    """What an incarnation is called on disk and in the store alike."""
    return (start.uid, start.attempt, start.round)
