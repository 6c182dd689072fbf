"""All ranks open the snapshot directory together and agree on one snapshot, or none.

Rank 0 looks for candidates. Each rank that sees the directory checks an equal number of a
candidate's data files; if one cannot, all take an older snapshot. Later it reads the same files
and hands what is in them to all others, piece by piece.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ddpjob_trainer.comm.world import World
from ddpjob_trainer.environment import SnapshotSettings
from ddpjob_trainer.snapshot import load
from ddpjob_trainer.snapshot.load import Source, Span
from ddpjob_trainer.snapshot.ondisk import disk, lineage, manifest
from ddpjob_trainer.snapshot.ondisk.lineage import Start
from ddpjob_trainer.snapshot.ondisk.manifest import DataFile, InvalidSnapshotError, Manifest
from ddpjob_trainer.snapshot.patience import Patience
from ddpjob_trainer.snapshot.takeover import Loaded, open_store

_MARK = b"candidate "


@dataclass(frozen=True, slots=True)
class Opened:
    """An incarnation that all ranks have started. ``writers``: ranks that see its directory."""

    start: Start
    writers: tuple[int, ...]
    loaded: Loaded | None


def open_together(
    directory: Path, settings: SnapshotSettings, world: World, tell: Callable[[str], None]
) -> Opened:
    """Every rank calls this at the same point. Raises OSError, PeerLostError."""
    loaded: Loaded | None = None
    if world.rank == 0:

        def propose(where: Path, found: Manifest) -> Source:
            world.broadcast_bytes(_MARK + where.name.encode() + b" " + found.encode())
            return _check_together(where, found, world, tell)

        start, loaded = open_store(
            directory, world.identity, resume=settings.resume, load=propose, tell=tell
        )
        world.broadcast_bytes(json.dumps(asdict(start)).encode())
    else:
        start, loaded = _follow(directory, world, tell)
    writers = _agreed(world, _sees(directory, start))
    if len(writers) < world.size:
        others = [rank for rank in range(world.size) if rank not in writers]
        what = (
            f"{len(others)} of {world.size} ranks do not see rank 0's snapshot directory"
            f" (rank {others[0]} is the first), so they write no part of the snapshots"
        )
        cure = "Give all pods one shared volume (ReadWriteMany), or set snapshot_upload"
        tell(what if settings.upload else f"warning: {what}. {cure}")
    return Opened(start, writers, loaded)


def _follow(
    directory: Path, world: World, tell: Callable[[str], None]
) -> tuple[Start, Loaded | None]:
    """What the other ranks do: load what rank 0 proposes, until it has started."""
    loaded: Loaded | None = None
    while True:
        message = world.broadcast_bytes(None)
        if not message.startswith(_MARK):
            return lineage.parse_start(json.loads(message)), loaded
        name, _, content = message.removeprefix(_MARK).partition(b" ")
        found = manifest.decode(content)
        try:
            source = _check_together(directory / name.decode(), found, world, tell)
        except (InvalidSnapshotError, OSError):
            loaded = None
        else:
            loaded = Loaded(source)


def _sees(directory: Path, start: Start) -> bool:
    try:
        return lineage.read_start(directory, start.sequence) == start
    except (OSError, ValueError):
        return False


def _holds(path: Path) -> bool:
    try:
        return disk.exists(path)
    except OSError:  # the others read, and wait for this answer
        return False


def _agreed(world: World, yes: bool) -> tuple[int, ...]:
    """Ranks that say yes; rank 0 always does."""
    said = world.gather_bytes("the start of run.steps()", b"1" if yes or world.rank == 0 else b"0")
    return tuple(rank for rank, answer in enumerate(said) if answer == b"1")


def _check_together(
    where: Path, found: Manifest, world: World, tell: Callable[[str], None]
) -> Source:
    """Raises InvalidSnapshotError or OSError on all ranks when it happens on one."""
    # The names hold a number that was drawn: a file of that name is the same file.
    readers = _agreed(world, not found.files or _holds(where / found.files[0].name))
    owners = {f.name: readers[n % len(readers)] for n, f in enumerate(found.files)}
    offsets: dict[str, load.Offsets] = {}
    problem: Exception | None = None

    def fetch(file: DataFile, spans: Sequence[Span], buffer: torch.Tensor) -> None:
        owner = owners[file.name]
        if owner == world.rank:
            patience = Patience()
            patience.call(
                lambda: load.read_spans(where, file, offsets[file.name], spans, buffer),
                tell,
                patience.deadline(),
            )
        world.broadcast_tensor(buffer, owner)

    source, chunks = Source(found, fetch), load.by_file(found)
    try:
        _ = source.outline
        for file in found.files:
            if owners[file.name] == world.rank:
                offsets[file.name] = load.verify_file(where, found, file, chunks[file.name])
    except (InvalidSnapshotError, OSError) as error:
        problem = error
    _vote(world, where, found, problem, tell)
    return source


def _vote(
    world: World,
    where: Path,
    found: Manifest,
    problem: Exception | None,
    tell: Callable[[str], None],
) -> None:
    """Raise on every rank when one of them has a problem."""
    invalid = isinstance(problem, InvalidSnapshotError)
    failed, damaged = world.sum([float(problem is not None), float(invalid)])
    if problem is not None and world.rank != 0:
        tell(f"cannot read the snapshot of step {found.step}: {problem}")
    if not failed:
        return
    if world.rank == 0 and problem is None and damaged:
        # Perhaps it is damaged only as seen from there: rank 0 looks for itself.
        manifest.verify(where, found)
    if isinstance(problem, OSError | InvalidSnapshotError):
        raise problem
    raise OSError(errno.EIO, "another rank cannot read it")
