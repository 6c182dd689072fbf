"""Profile some steps of one rank that trains, on its launcher's order: `ddpjob-trainer profile`.

The loop asks at each step; without an order that is a read of two bytes. A profile draws no random
number and changes no tensor, so the weights are the same; the other ranks wait for this one, as for
any slow one. Once the trace is whole the rank answers by a file beside its record.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import torch

from ddpjob_contract.evidence import EVIDENCE_DIR
from ddpjob_trainer.liveness.heartbeat import RankStateWriter, profile_path


class Profiler:
    """The profiles of one rank. ``directory``: of the snapshots; traces lie in the evidence there.

    ``state_dir`` None: no launcher, and so no orders.
    """

    def __init__(
        self, writer: RankStateWriter, rank: int, state_dir: Path | None, directory: Path | None
    ) -> None:
        self._writer, self._rank = writer, rank
        self._state_dir, self._directory = state_dir, directory
        self._profile: torch.profiler.profile | None = None
        self._first = self._until = 0
        writer.take_orders()

    def step_begins(self, step: int) -> None:
        """Begin what is ordered, or end it after its last step."""
        if self._profile is None:
            if steps := self._writer.ordered:
                self._begin(step, steps)
        elif step < self._until:
            self._profile.step()
        else:
            self.end()

    def _begin(self, step: int, steps: int) -> None:
        if self._directory is None:
            self._answer(error="this run has no snapshot directory, where the trace would lie")
            return
        profile = torch.profiler.profile()
        try:
            profile.start()
        except Exception as error:  # the script's own is at work, or the device's refuses
            self._answer(error=f"no profile: {type(error).__name__}: {error}")
            return
        self._profile, self._first, self._until = profile, step, step + steps

    def end(self) -> None:
        """Write the trace of what there is, also where training ends before the last step."""
        profile, self._profile = self._profile, None
        if profile is None or self._directory is None:
            return
        path = self._directory / EVIDENCE_DIR
        path /= f"profile-rank-{self._rank}-step-{self._first}.json.gz"
        part = path.with_name(f".{path.name}")
        try:
            profile.stop()
            path.parent.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(part))
            part.replace(path)
            self._answer(path=str(path))
        except Exception as error:  # a full disk must not end the training
            self._answer(error=f"the trace was not written: {type(error).__name__}: {error}")

    def _answer(self, **how: str) -> None:
        if self._state_dir is not None:
            path = profile_path(self._state_dir, self._rank)
            with contextlib.suppress(OSError):
                path.with_suffix(".part").write_text(json.dumps(how))
                path.with_suffix(".part").replace(path)
        self._writer.take_orders()
