"""How a launcher ends: which worker was the cause, the termination report, the exit code."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ddpjob_trainer import contract
from ddpjob_trainer.contract import ExitCode, Round
from ddpjob_trainer.launcher import report, verdict
from ddpjob_trainer.launcher.gang import Gang
from ddpjob_trainer.launcher.messages import End
from ddpjob_trainer.launcher.output import OutputPump
from ddpjob_trainer.launcher.plan import Plan
from ddpjob_trainer.launcher.verdict import Exit


@dataclass(frozen=True, slots=True)
class Known:
    """What earlier rounds told, for /state and the report while a new one starts up."""

    step: int = -1
    snapshot_step: int = -1
    total_steps: int = 0
    records: tuple[Round, ...] = ()

    def after(self, gang: Gang) -> Known:
        """With what a round's workers said before they ended."""
        state = gang.state(0)
        known = state is not None and state.phase != "startup"
        return replace(
            self,
            step=state.step if state and known else self.step,
            total_steps=state.total_steps if state and known else self.total_steps,
            snapshot_step=max(self.snapshot_step, gang.snapshot_step()),
        )

    def with_records(self, records: tuple[Round, ...]) -> Known:
        """With the hub's record of the rounds so far."""
        return replace(self, records=records)


@dataclass(slots=True)
class Ended:
    """Why no round follows. ``signal`` 0: the launcher itself was not told to end."""

    signal: int = 0
    between_rounds: bool = False  # the signal came when the workers had been stopped anyway
    end: End | None = None
    lost: str = ""  # how the hub was lost
    before_loss: Exit | None = None  # a failure here that was seen before the hub was lost
    waiting_since: float = 0.0  # since when the hub knows of a failure, 0: none


def finish(
    plan: Plan,
    gang: Gang,
    pump: OutputPump,
    known: Known,
    ended: Ended,
    say: Callable[[str], None],
) -> int:
    """Write the termination report, say how it ended, return the launcher's exit code."""
    known = known.after(gang)
    failure, elsewhere = _failure(gang, ended)
    local_rank = failure.local_rank if failure else 0
    content = report.make_report(
        failure,
        gang.state(local_rank),
        pump.tail(plan.rank(local_rank)) if failure else [],
        round_=gang.round,
        terminated=ended.signal != 0,
        snapshot_step=known.snapshot_step,
        records=known.records,
        elsewhere=elsewhere,
    )
    path = plan.termination_log
    problem = report.write(content, path or Path(contract.TERMINATION_LOG), create=path is not None)
    if problem:
        say(f"no termination report: {problem}")
    if ended.end is not None and plan.rounds_without_progress and not ended.signal:
        say(f"no further round: {ended.end.why}")
    if elsewhere:
        say(f"ending with exit code {ExitCode.PEER_LOST:d}: {elsewhere}")
        return ExitCode.PEER_LOST
    if ended.between_rounds:
        return 128 + ended.signal
    if failure is None:
        return ExitCode.SUCCESS
    how = f"signal {-failure.status}" if failure.status < 0 else f"exit code {failure.status}"
    after = f" after step {content['step']}" if "step" in content else ""
    say(f"rank {failure.rank} ended first, with {how} ({content['kind']}){after}")
    if content["kind"] == "sigterm" and ended.signal == signal.SIGTERM:
        return ExitCode.SIGTERM  # also when our own SIGKILL ended it
    return failure.code


def _failure(gang: Gang, ended: Ended) -> tuple[Exit | None, str]:
    """The worker here that ended the attempt; or why another launcher's did, "" if none did."""
    if ended.between_rounds:
        return None, ""
    mine = verdict.first_failure(gang.exits)
    if ended.signal or gang.succeeded:
        # Killed by ourselves at the end of the grace period: that was its end all the same.
        return mine or min(
            (exit_ for exit_ in gang.exits if exit_.status), key=lambda e: e.at, default=None
        ), ""
    if ended.end is not None:
        here = [exit_ for exit_ in gang.exits if exit_.rank == ended.end.rank]
        if here:
            return here[0], ""
        first = f"rank {ended.end.rank} ended first" if ended.end.rank >= 0 else ended.end.why
        return (mine if mine and mine.code == ExitCode.PEER_LOST else None), first
    if ended.lost:
        if ended.before_loss is not None and ended.before_loss.code != ExitCode.PEER_LOST:
            return ended.before_loss, ""
        return (mine if mine and mine.code == ExitCode.PEER_LOST else None), (
            f"the hub was lost: {ended.lost}"
        )
    return mine, ""
