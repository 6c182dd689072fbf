"""Snapshots by several ranks within one process: what training and writer threads do, in turn."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ddpjob_trainer.comm.world import World
from ddpjob_trainer.environment import Identity, SnapshotSettings
from ddpjob_trainer.gpu import accelerator
from ddpjob_trainer.snapshot.ondisk import manifest
from ddpjob_trainer.snapshot.ondisk.files import SnapshotFiles, data_name, retain
from ddpjob_trainer.snapshot.ondisk.manifest import Chunk, DataFile, Manifest
from ddpjob_trainer.snapshot.restore.load import FileSpan, Source
from ddpjob_trainer.snapshot.restore.resume import Retry
from ddpjob_trainer.snapshot.restore.resume import resume as resume_from
from ddpjob_trainer.snapshot.save.layout import Buffer, Captured, Draft, fingerprint, lay_out
from ddpjob_trainer.snapshot.save.parts import Report
from ddpjob_trainer.snapshot.training_state import TrainingState
from ddpjob_trainer.state.codec import DTYPES, Flat, flatten, unflatten
from support.patience import PATIENCE, wait_for

CPU = accelerator.of(torch.device("cpu"))
SOLE = "n"  # tensors below this name are rank 0's alone


@dataclass
class Store:
    """One incarnation of ``ranks`` ranks."""

    root: Path
    sequence: int
    keep: int
    ranks: int

    def __post_init__(self) -> None:
        self.nonce = f"{self.sequence:08x}"
        self.files = SnapshotFiles(self.root, self.sequence, self.nonce, self.keep)
        found = self.directory.is_dir() and manifest.listed(self.directory)
        #: All that it has saved.
        self.verified = {manifest.step_of(path.name) for path in found or ()}

    @property
    def directory(self) -> Path:
        """Where this incarnation writes."""
        return self.files.directory

    def save(self, step: int, flat: Flat, config: Mapping[str, Any]) -> None:
        """What all ranks do. Raises OSError."""
        shared = frozenset(name for name in flat.tensors if not name.startswith(SOLE))
        all_captured = [
            Captured(flat, shared, {f"rank/{rank}/own": torch.full((3,), rank)})
            for rank in range(self.ranks)
        ]
        structure = all_captured[0].structure
        draft = Draft(step, config, structure, self.nonce, flat.tree, flat.aliases)
        try:
            reports = [self._part(step, one, rank) for rank, one in enumerate(all_captured)]
        except OSError:
            self.files.discard(step)
            raise
        self.files.commit(step, draft.manifest(reports).encode())
        self.verified.add(step)
        retain(self.root, self.sequence, self.keep, self.verified)

    def _part(self, step: int, captured: Captured, rank: int) -> Report:
        image = lay_out(captured.structure, self.ranks, rank)
        buffer = Buffer.allocate(image.bytes, CPU)
        buffer.write(0, image.header)
        buffer.copy(sum(image.copies(captured), ()), CPU, None)
        with buffer.content(image.bytes) as content:
            crc = self.files.write(data_name(step, self.nonce, rank), content)
        buffer.release(CPU)
        own = tuple((n, DTYPES[t.dtype], tuple(t.shape)) for n, t in captured.own.items())
        return Report(rank, image.bytes, crc, own, fingerprint(captured.structure))


@dataclass
class Clock:
    """Time that passes only where somebody waits. ``pauses``: how long each time."""

    now: float = 0.0
    pauses: list[float] = field(default_factory=list)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.pauses.append(seconds)


def open_snapshots(
    root: Path,
    attempt: int = 1,
    *,
    uid: str = "u",
    resume: bool = True,
    keep: int = 3,
    ranks: int = 3,
    clock: Clock | None = None,
    secret: str = "",
    namespace: str = "",
    **settings: Any,
) -> tuple[Store, Source | None]:
    """Start an incarnation, as rank 0 does."""
    identity = Identity(uid, attempt, 0, unique=True, secret=secret, namespace=namespace)
    world = World(0, 1, torch.device("cpu"), identity, None, None)
    clock = clock or Clock()
    retry = Retry(0, now=lambda: clock.now, wait=clock.wait)
    asked = SnapshotSettings(root, 1, keep, resume, **settings)
    resumed = resume_from(root, world, asked, retry=retry)
    store = Store(root, resumed.start.sequence, keep, ranks)
    store.verified |= {resumed.source.step} if resumed.source else set()
    retain(root, store.sequence, keep, store.verified)
    return store, resumed.source


def state(step: int) -> dict[str, Any]:
    """What a job's state is after a step."""
    return {"model": {"w": torch.full((64,), float(step))}, "n": step, "more": [torch.arange(step)]}


def save(store: Store, *steps: int, **config: Any) -> None:
    for step in steps:
        store.save(step, flatten(state(step)), {"seed": 1} | config)


def saved(root: Path, *steps: int, attempt: int = 1, **options: Any) -> Store:
    """Start an incarnation that saves these steps."""
    store, _ = open_snapshots(root, attempt, **options)
    save(store, *steps)
    return store


def step_of(source: Source | None) -> int | None:
    """Return the step of a snapshot that holds the state after it, in whole."""
    if source is None:
        return None
    found, wanted = unflatten(whole(source)), state(source.step)
    assert found["n"] == wanted["n"]
    assert torch.equal(found["model"]["w"], wanted["model"]["w"])
    assert torch.equal(found["more"][0], wanted["more"][0])
    return source.step


def loaded_step(root: Path, attempt: int = 2, **options: Any) -> int | None:
    """Start an incarnation; return the step that it goes on from."""
    return step_of(open_snapshots(root, attempt, **options)[1])


def steps_in(root: Path) -> set[int | None]:
    """The steps that have a manifest, in whatever directory."""
    return {manifest.step_of(path.name) for path in root.glob("*/step-*.json")}


def newest_manifest(root: Path) -> Path:
    return max(root.glob("*/step-*.json"))


def flip(path: Path, at: int = -1) -> None:
    """Change a bit of a file, and of no other name that it has."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.unlink()
    path.write_bytes(data)


def error(code: int) -> OSError:
    return OSError(code, os.strerror(code))


def exit_code(action: Callable[[], object]) -> int:
    """Act in a process of its own; return its exit code, or the negative number of a signal."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def memory_source(flat: Flat) -> Source:
    """What a snapshot of this state gives back, without a disk."""
    shapes = {n: (DTYPES[t.dtype], tuple(t.shape)) for n, t in flat.tensors.items()}
    chunks = tuple(Chunk(n, 0, t.numel(), "all", n) for n, t in flat.tensors.items())
    found = Manifest(1, {}, (DataFile("all", 0, 0),), shapes, chunks, flat.aliases, flat.tree)

    def fetch(_: DataFile, spans: Sequence[FileSpan], buffer: torch.Tensor) -> None:
        for span in spans:
            content = accelerator.in_order(flat.tensors[span.chunk.tensor])
            buffer[span.at : span.at + span.bytes] = content.view(torch.uint8)

    return Source(found, fetch)


def stored(state: TrainingState) -> Flat:
    """What a snapshot gives back: elements in C order, in memory of their own."""
    captured = state.capture(0)
    tensors = {**captured.flat.tensors, **captured.own}
    copies = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    return Flat(captured.flat.tree, copies, captured.flat.aliases)


def whole(source: Source) -> Flat:
    """Everything in it, in memory."""
    tensors = source.empty(lambda name: True)
    source.read(lambda name: True, tensors)
    return Flat(source.manifest.tree, tensors, dict(source.manifest.aliases))


def await_snapshot(directory: Path, step: int, seconds: float = PATIENCE) -> None:
    """Wait until the snapshot of a step is committed in an incarnation's directory."""
    there = directory / manifest.file_name(step)
    wait_for(there.exists, f"a snapshot of step {step} in {directory}", seconds, every=0.005)
