"""Build the answer to GET /state: the ranks' reports, and earlier rounds' outcomes.

The supervisor keeps a Summary of all rounds; a thread that serves HTTP asks.
"""

from __future__ import annotations

import hmac
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final, cast
from urllib.parse import parse_qs

from ddpjob_contract import Proof, Resumed, Round, Spent, State, Straggler
from ddpjob_trainer.launcher.launch_config import LaunchConfig
from ddpjob_trainer.launcher.reports.account import Account
from ddpjob_trainer.launcher.reports.progress_path import NEVER, ProgressPath, as_text
from ddpjob_trainer.launcher.worker_group import WorkerGroup
from ddpjob_trainer.liveness.heartbeat import PROOF, RESUMED, STRAGGLER, RankState, read_told

_VERSION: Final = 1
#: For the progress path: a file server that does not answer must not delay the launcher.
_POLL_SECONDS: Final = 0.2


@dataclass(frozen=True, slots=True)
class Results:
    """Results of earlier rounds, for /state and the report while the next starts up."""

    step: int = -1
    snapshot_step: int = -1
    total_steps: int = 0
    modified: int = NEVER  # newest mtime at the progress path, ns since the epoch
    records: tuple[Round, ...] = ()
    resumed: Resumed | None = None
    proof: Proof | None = None
    spent: Spent | None = None  # of the launcher of replica 0
    straggler: Straggler | None = None  # of this round
    printed: dict[str, float] | None = None  # what rank 0 has printed in this round

    def after(self, workers: WorkerGroup) -> Results:
        """Add the records of a round's workers."""
        state = workers.state(0)
        known = state is not None and state.phase != "startup"
        return replace(
            self,
            step=state.step if state and known else self.step,
            total_steps=state.total_steps if state and known else self.total_steps,
            snapshot_step=max(self.snapshot_step, workers.snapshot_step()),
            resumed=read_told(workers.state_dir, RESUMED) or self.resumed,
            straggler=read_told(workers.state_dir, STRAGGLER),
            proof=_newest(read_told(workers.state_dir, PROOF), self.proof),
        )

    def facts(self, state: RankState | None) -> dict[str, Any]:
        """Return what /state and the report say alike; None: unknown."""
        loss, step = (state.loss, state.snapshot_step) if state else (None, -1)
        step = max(step, self.snapshot_step)
        return {
            "loss": loss if loss is not None and math.isfinite(loss) else None,
            "snapshotStep": step if step >= 0 else None,
            "fileModifiedAt": as_text(self.modified) if self.modified != NEVER else None,
            "resumed": self.resumed,
            "spent": self.spent,
            # What the library reports counts; without it this is shown, and decides nothing.
            "printed": self.printed if state is None else None,
        }


class Summary:
    """What all rounds of a launcher came to. ``results``: of those before the present one.

    ``account`` is shown by the launcher with the hub, which asks for the ``progress``.
    """

    def __init__(self, config: LaunchConfig, now: float) -> None:
        self.results = Results()
        self.account = Account(now, config.env.reached, reports_steps=config.uses_our_library)
        self.progress = ProgressPath(config.env.progress_path if config.replica == 0 else None)
        self._leads = config.replica == 0

    def add(self, workers: WorkerGroup) -> int:
        """Add a round that has ended; return the newest snapshot's step."""
        self.results = self.results.after(workers)
        self.progress.poll(_POLL_SECONDS)  # the hub decides on it
        return self.results.snapshot_step

    def read(self, workers: WorkerGroup) -> Results:
        """Return all results, with those of workers that run; from another thread, too."""
        spent = self.account.read(time.monotonic(), workers.state(0)) if self._leads else None
        found = self.results.after(workers)
        return replace(found, modified=self.progress.newest, spent=spent)

    def close(self, workers: WorkerGroup, *, signalled: bool) -> Results:
        """Close the account, whose last stretch went to saving where a signal has ended it."""
        self.progress.poll(_POLL_SECONDS)
        now, rest = time.monotonic(), "snapshot" if signalled else None
        self.account.begin("idle", now, workers.state(0), rest=rest)
        spent = self.account.read(now, None) if self._leads else None
        return replace(self.results, modified=self.progress.newest, spent=spent)


def _newest(proof: Proof | None, before: Proof | None) -> Proof | None:
    """Choose the verdict on the restarts: one that was not checked takes nothing back."""
    return before if not proof or (before and "unchecked" in proof) else proof


def state_body(
    state: RankState | None,
    *,
    uid: str = "",
    attempt: int,
    round_: int,
    gang: Mapping[str, Any] = {},
    results: Results | None = None,
    stacks: str = "",
    pace: float | None = None,
) -> State:
    """Return the JSON object of GET /state for one rank's record.

    ``uid``: of the job, if it is one's. ``attempt``: the hub's number. ``gang``: the hub's facts.
    ``results``: of earlier rounds, shown while this one starts up. ``stacks``: of the last hang.
    ``pace``: steps per second.
    """
    results = results or Results()
    step, total = results.step, results.total_steps  # unknown before the resume
    if state is not None and state.phase != "startup":
        step, total = state.step, state.total_steps
    found: dict[str, Any] = {
        "version": _VERSION,
        "uid": uid,
        "attempt": attempt,
        "round": round_,
        **{name: fact or None for name, fact in gang.items()},
        "phase": state.phase if state else "startup",
        "step": step if step >= 0 else None,
        "totalSteps": total or None,
        "stacks": stacks or None,
        "proof": results.proof,
        "straggler": results.straggler or None,
        "rounds": list(results.records) or None,
        **results.facts(state),
    }
    if state is not None:
        moment = datetime.fromtimestamp(state.updated_at, UTC).replace(microsecond=0)
        found |= {
            "stepsPerSecond": pace,
            "samplesPerSecond": state.samples_per_second,
            "updatedAt": moment.isoformat().replace("+00:00", "Z"),
        }
    return cast("State", known(found))


def known(found: Mapping[str, Any]) -> dict[str, Any]:
    """Drop what is None."""
    return {name: value for name, value in found.items() if value is not None}


def answer(state: State, query: str, *, local: bool) -> State | None:
    """Return the answer to GET /state?``query``, None: it asks for another job.

    ``local``: a client on this machine asks, who may know all where there is no job.

    A client that names the job's uid may read the job, and gets all. Others are strangers: the uid
    would admit them to the hub, and stacks and exceptions expose the program.
    """
    uid = state.get("uid", "")
    named = parse_qs(query).get("uid", [""])[0]
    if hmac.compare_digest(named.encode(), uid.encode()) if uid else local:
        return state
    if uid and named:
        return None
    told = state.copy()
    for private in ("uid", "stacks", "rounds", "resumed", "proof"):
        told.pop(private, None)  # type: ignore[misc]
    return told
