"""Check each restart: the steps after the snapshot, done again, must be the same.

Each rank records what its steps computed, in a file that outlives it (records.py). The ranks tell
one another in the exchange of each step how far they are with those that they do again, and draw
the conclusion together: Loop calls conclude(). A drill is a restart like any other here.
"""

from __future__ import annotations

import functools
import json
import math
import os
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from struct import pack
from typing import Any, Final

import numpy as np
import torch

from ddpjob_contract import Differs, Proof
from ddpjob_trainer.comm.world import World
from ddpjob_trainer.environment import DrillSettings, Identity
from ddpjob_trainer.gpu.accelerator import Reading, in_order
from ddpjob_trainer.printing import say
from ddpjob_trainer.snapshot.manager import SnapshotManager
from ddpjob_trainer.telemetry.progress import Progress
from ddpjob_trainer.training.replay.records import KEY_BYTES, Comparison, Entry, Finding, Records
from ddpjob_trainer.training.step import Step

# --- Samples --------------------------------------------------------------------------------------
# Replay takes them. What is on a GPU is not waited for: its samples are returned, to travel to the
# host beside the step's losses.

#: Elements that are looked at: of a tensor in a batch, and how many samples of it; of a parameter.
_ELEMENTS = 512
_ROWS = 64
_OF_PARAMETER = 64
_PARTS = 64  # of a list
_CHARACTERS = 256
_OF_NUMPY = {torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool}
#: Of a generator's words all change when the position comes to their end, so some will do.
_WORDS_BYTES = 128


class Digest:
    """A hash of what was added, in that order. ``later``: samples that a device still has."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=8)
        self.later: list[torch.Tensor] = []

    def add(self, value: Any) -> None:
        """Add a batch: tensors, arrays and plain values in nested lists, tuples and mappings."""
        if isinstance(value, torch.Tensor) and not value.is_nested:  # which may have no shape
            self.sample(value, _ELEMENTS, _ROWS)
        elif isinstance(value, list | tuple):
            self._note("list", len(value))
            for part in value[:_PARTS]:
                self.add(part)
        elif isinstance(value, np.ndarray):
            self._note("array", value.shape)
            if value.dtype.kind in "biufc":
                self._hash.update(value[_thinned(value.shape, _ELEMENTS, _ROWS)].tobytes())
        elif isinstance(value, Mapping):
            self._note("mapping", *map(str, value))
            for part in value.values():
                self.add(part)
        elif isinstance(value, str | bytes | int | float | complex | None):
            self._note(repr(value[:_CHARACTERS] if isinstance(value, str | bytes) else value))
        else:
            self._note(type(value).__qualname__)

    def sample(self, tensor: torch.Tensor, elements: int = _OF_PARAMETER, rows: int = 8) -> None:
        """Add a tensor: its shape, and evenly spaced elements."""
        self._note(tensor.dtype, tensor.shape)
        if tensor.layout is not torch.strided or tensor.is_quantized or not tensor.numel():
            return
        places = _thinned(tensor.shape, elements, rows)
        if tensor.device.type == "cpu" and tensor.dtype in _OF_NUMPY and not tensor.is_neg():
            self._hash.update(tensor.detach().numpy()[places].tobytes())  # a third of torch's time
            return
        thin = in_order(tensor.detach()[places])
        if thin.device.type == "cpu":
            self._hash.update(thin.view(torch.uint8).numpy().tobytes())
        else:
            self.later.append((torch.view_as_real(thin) if thin.is_complex() else thin).flatten())

    def value(self, came: Iterable[float] = ()) -> int:
        """Return the hash, never 0. ``came``: the numbers of ``later``."""
        numbers = list(came)
        self._hash.update(pack(f"<{len(numbers)}d", *numbers))
        return int.from_bytes(self._hash.digest(), "little") or 1

    def _note(self, *facts: object) -> None:
        self._hash.update(repr(facts).encode(errors="replace"))


@functools.lru_cache(maxsize=256)
def _thinned(sizes: tuple[int, ...], elements: int, rows: int) -> tuple[slice, ...]:
    """Index about so many elements, evenly: of up to ``rows`` samples a few elements each."""
    places = []
    for dimension, size in enumerate(sizes):
        last = dimension == len(sizes) - 1
        wanted = max(1, elements if last else min(elements, rows if not dimension else 2))
        step = max(1, -(-size // wanted))
        places.append(slice(step // 2, None, step))
        elements //= max(1, min(size, wanted))
    return tuple(places)


def of_generators(device: torch.device) -> int:
    """Return a hash of the global generators of torch and the device.

    Those of `random` and numpy are left out: they take longer to be shown than all this takes.
    """
    torchs = torch.get_rng_state().numpy()
    found = blake2b(torchs[:_WORDS_BYTES].tobytes() + torchs[-_WORDS_BYTES:].tobytes())
    if device.type == "cuda":
        found.update(torch.cuda.get_rng_state(device).numpy().tobytes())  # the host has it
    return int.from_bytes(found.digest()[:8], "little") or 1


# --- Replay ---------------------------------------------------------------------------------------

_CAUSES: Final[dict[Differs, str]] = {
    "batch": "the dataset, its transforms or the sampler keep something from sample to sample, or"
    " draw from a generator of their own. Compute it from the sample's index or the epoch, name the"
    " generator in run.steps(dataset, generators=[...]), or keep it with run.register(name, obj)",
    "random numbers": "a branch of the script that draws random numbers was not taken as before, by"
    " something that the script keeps. Keep that with run.state(...) or run.register(name, obj)",
    "loss": "the script keeps something from step to step: a variable, an attribute, a flag, a"
    " DataLoader or its own model. Compute it from step.index, or keep it with run.state(...)"
    " or run.register(name, obj)",
    "weights": "the script changes gradients, optimizers or weights by something that it keeps."
    " Compute it from step.index, or keep it with run.state(...) or run.register(name, obj)",
}


@dataclass(slots=True)
class _Pending:
    """A step with numbers that may be on their way: losses, then samples of batches."""

    step: int
    batches: Digest
    random: int
    losses: int  # so many
    numbers: Reading
    weights: Digest | None = None
    of_weights: Reading | None = None


class Replay:
    """One process's side of each restart's check. Every rank makes the same calls.

    ``path``: where the launcher wants the record; None: nothing is recorded.
    """

    def __init__(self, world: World, progress: Progress, path: Path | None) -> None:
        self._world = world
        self._progress = progress
        self._path = path
        self.records: Records | None = None
        self._comparison = Comparison()
        self._batches = Digest()
        self._pending: deque[_Pending] = deque()
        self.compares = False  # a rank has steps of a restart left to compare
        self._due = False  # conclude() now
        self._program: Any = None
        self._unproven: Proof | None = None  # a difference after an earlier restart
        self._mark: dict[str, Any] | None = None  # of it
        self._paused = False  # no step is recorded before a snapshot has the mark

    def begin(self, done: int, facts: Mapping[str, Any], mark: Any = None) -> None:
        """Open the record, and read what it holds of the steps after ``done``.

        ``facts``: what decides the result and must be as before. After 0 steps, so without a
        snapshot, nothing is compared. ``mark``: the snapshot's own, see mark().
        """
        self._program = facts.get("program")
        proof = mark.get("proof") if isinstance(mark, dict) else None
        if isinstance(proof, dict) and {"step", "rank", "what"} <= proof.keys():
            self._unproven = proof  # type: ignore[assignment]
            self._mark = mark if mark.get("program") == self._program else None
        if self._path is None:
            return
        text = json.dumps(facts, sort_keys=True, default=str)
        try:
            records = Records(self._path, blake2b(text.encode(), digest_size=KEY_BYTES).digest())
        except OSError as error:
            say(self._world.rank, f"restart check off: cannot write the step record: {error}")
            return
        self.records = records
        if not done:
            records.forget_after(0)
        elif records.found is not None:
            later = {step: entry for step, entry in records.found.items() if step > done}
            self._comparison = Comparison(later)
        else:
            self.tell_unchecked(
                "restart not checked: this pod has no record of the steps before by this program,"
                " with these options, at this world size"
            )

    def tell_unchecked(self, why: str) -> None:
        """Have rank 0 say in the log and in /state why nothing is compared."""
        if self._world.rank == 0:
            self._progress.proven({"unchecked": why})
            say(0, why)

    # --- In each step, in the order of the calls --------------------------------------------

    def batch(self, batch: Any) -> None:
        """Take a batch as the dataset has made it, before it goes to a device."""
        if self.records is not None:
            self._batches.add(batch)

    def report(self) -> list[float]:
        """Return numbers to add up over all ranks: this one differs; has steps to compare."""
        return [float(self._comparison.found.what is not None), float(self._comparison.pending)]

    def receive(self, sums: Sequence[float]) -> None:
        """Take in the sums of report()."""
        differ, pending = sums
        self.compares = self.compares or pending > 0
        self._due = self.compares and (differ > 0 or not pending)

    def step_ended(self, step: Step) -> None:
        """Take what a step has left behind, its body included."""
        if self.records is None:
            return
        accelerator, batches = self._world.accelerator, self._batches
        random, count = of_generators(self._world.device), len(step.losses)
        numbers = accelerator.numbers([accelerator.number(loss) for loss in step.losses])
        if batches.later:
            numbers = torch.cat([numbers, *(sample.to(numbers) for sample in batches.later)])
        read = accelerator.read(numbers)
        self._pending.append(_Pending(step.index + 1, batches, random, count, read))
        self._batches = Digest()

    def snapshot_due(self, module: torch.nn.Module) -> None:
        """Take a sample of the weights, of the step that has just ended."""
        if self.records is None:
            return
        pending = self._pending[-1]
        pending.weights = Digest()
        for parameter in module.parameters():
            pending.weights.sample(parameter)
        if later := pending.weights.later:
            values = torch.cat([sample.to(self._world.device, torch.float64) for sample in later])
            pending.of_weights = self._world.accelerator.read(values)

    def known(self) -> None:
        """Take in the numbers of the oldest step: compare them, write them down."""
        if self.records is None:
            return
        pending = self._pending.popleft()
        values = pending.numbers.values()
        losses = Digest()
        weights = pending.of_weights.values() if pending.of_weights is not None else ()
        entry = Entry(
            pending.step,
            pending.batches.value(values[pending.losses :]),
            pending.random,
            losses.value(values[: pending.losses]),
            pending.weights.value(weights) if pending.weights is not None else 0,
            values[0] if pending.losses else math.nan,
        )
        if self._comparison.add(entry):
            self.records.forget_after(entry.step)  # the first course's stay, for the next restart
            self._paused = True
        if not self._paused:
            self.records.put(entry)

    def mark(self) -> dict[str, Any] | None:
        """Return what a snapshot says of a difference that the restarts before it have shown.

        Two processes that have both resumed may have lost the same, so that they agree is no proof.
        A changed program makes snapshots without it.
        """
        self._paused = self._paused and self._mark is None
        return self._mark

    # --- The conclusion ---------------------------------------------------------------------

    def conclude(self, *, end: bool = False) -> None:
        """Tell what the comparison has shown, if it is over. ``end``: no step follows.

        Every rank calls it after each step. Raises PeerLostError.
        """
        if self._due or (end and self.compares):
            self.compares = self._due = False
            found, self._comparison = self._comparison.found, Comparison()
            blob = json.dumps(asdict(found)).encode()
            gathered = self._world.gather_bytes("the check of the restart", blob)
            self._report([Finding(**json.loads(one)) for one in gathered])
        if end and self.records is not None:
            self.records.remove()
            self.records = None

    def _report(self, findings: Sequence[Finding]) -> None:
        different = [(one.step, rank, one) for rank, one in enumerate(findings) if one.what]
        compared = [one for one in findings if one.last]
        proof: Proof
        if different:
            step, rank, found = min(different, key=lambda one: one[:2])
            assert found.what is not None
            proof = {"equal": False, "step": step, "rank": rank, "what": found.what}
            self._unproven, self._mark = proof, {"proof": proof, "program": self._program}
            self._paused = True
            if self.records is not None:
                self.records.forget_after(step)
            values = ""
            if found.what == "loss" and found.before != found.now:
                values = f", {found.before:.9g} before and {found.now:.9g} now"
            text = (
                f"warning: restart not proven: step {step}, done again after the restart, differs"
                f" on rank {rank} in its {found.what}{values}. The run goes on, but its result will"
                f" not equal an undisturbed run's. As a rule {_CAUSES[found.what]}"
            )
        elif compared:
            first, last = min(one.first for one in compared), max(one.last for one in compared)
            proof = {"equal": True, "first": first, "last": last}
            text = f"restart proven: steps {first} to {last} again, bit for bit"
            if before := self._unproven:
                proof = before
                text = (
                    f"warning: restart not proven: steps {first} to {last} are equal again, but"
                    f" step {before['step']} differed after an earlier restart, on rank"
                    f" {before['rank']} in its {before['what']}: what was lost then is missing in"
                    " both. To prove a changed script, restart it from a snapshot that it made"
                )
        else:
            return
        self._progress.proven(proof)
        if self._world.rank == 0:
            say(0, text)


# --- Drills ---------------------------------------------------------------------------------------
# All ranks end after the same step and say so to their launchers; the hub, which takes that for
# no failure (launcher/hub/rounds.py), has the next round begin. A long run has two: after its
# first durable snapshot, and after the first one that holds an epoch's end.

#: Auto leaves the drill out where the start took longer, for the next one would as well.
SLOW_SECONDS: Final = 60.0
#: Steps after a snapshot before a drill: these are done again.
STEPS: Final = 2


class Drill:
    """One process's side of the drills. Every rank makes the same calls."""

    def __init__(
        self, given: DrillSettings, identity: Identity, replay: Replay, snapshots: SnapshotManager
    ) -> None:
        self._given = given
        self._first = (identity.attempt, identity.round) == (1, 0)
        self._replay = replay
        self._snapshots = snapshots
        # A shell or a torchrun between us would take the end of this process for its own affair.
        self._ours = given.mode != "Never" and given.launcher == os.getppid()
        self._slow: bool | None = None  # known in the first step
        self._allowed = False  # by every rank
        self._goal = 0  # a durable snapshot of this step or a later one; 0: no drill
        self._total = 0

    def begin(self, done: int, *, epoch: int | None, total: int, rescued: bool = False) -> None:
        """Choose what to wait for. ``done``: steps before; ``epoch``: its steps, if it has an end.

        Who resumes a snapshot in the midst of a job is checked by that restart itself, but for one
        that was ``rescued``: then no step is done again.
        """
        self._total = total
        if self._first or rescued or not done:
            self._goal = done + 1
        elif epoch is not None and done < epoch:
            self._goal = epoch

    def report(self) -> list[float]:
        """Return numbers to add up over all ranks: drill impossible here; slow start here."""
        if self._slow is None:
            took = time.monotonic() - self._given.begun
            self._slow = self._given.mode == "Auto" and took > SLOW_SECONDS
        return [float(not (self._ours and self._replay.records)), float(self._slow)]

    def receive(self, sums: Sequence[float]) -> None:
        """Take in the sums of report()."""
        cannot, slow = sums
        self._allowed = not cannot and not slow
        if not cannot and slow and self._goal:
            self._goal = 0
            self._replay.tell_unchecked(
                f"no drill: on {slow:.0f} ranks the first step took more than {SLOW_SECONDS:.0f} s"
                " from the start, and a drill would take as long. One is made all the same with"
                " restart.inPlace.drill: Always, or DDPJOB_DRILL=Always"
            )

    def is_due(self, step: int) -> bool:
        """Tell whether all ranks end now, after this step. It is the same on all of them.

        Not while another restart is still compared, nor when no snapshot but the last follows.
        """
        before, after = self._snapshots.around(step)
        return (
            self._allowed
            and not self._replay.compares
            and 0 < self._goal <= self._snapshots.newest
            and step - before >= STEPS
            and 0 < after < self._total
        )
