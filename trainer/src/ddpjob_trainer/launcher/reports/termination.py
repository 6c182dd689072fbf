"""End a launcher: find the first failed worker, write the report, choose the exit code.

The supervisor calls finish() once; the operator reads the report, one JSON object of at most 2 KiB.
"""

from __future__ import annotations

import json
import signal
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import ddpjob_contract as contract
from ddpjob_contract import (
    REPORT_MAX_BYTES,
    REPORT_VERSION,
    ExitCode,
    Finished,
    Round,
    TerminationReport,
)
from ddpjob_trainer.launcher.host import NoRoomError
from ddpjob_trainer.launcher.hub import root_cause
from ddpjob_trainer.launcher.hub.messages import End
from ddpjob_trainer.launcher.hub.root_cause import Exit, kind
from ddpjob_trainer.launcher.launch_config import LaunchConfig
from ddpjob_trainer.launcher.output import OutputPump
from ddpjob_trainer.launcher.reports.state import Results, known
from ddpjob_trainer.launcher.worker_group import WorkerGroup
from ddpjob_trainer.liveness.heartbeat import RankState

#: Bytes in the report, in any script: an exception, the last lines and a round fit into it.
_MAX_LINE = 200
_MAX_EXCEPTION = 300
_LAST_LINES = 5  # of the log are kept before rounds are


@dataclass(slots=True)
class Ended:
    """Why no round follows. ``signal`` 0: the launcher itself got no signal to end."""

    signal: int = 0
    at_work: bool = False  # workers still ran when the signal came
    between_rounds: bool = False  # the signal came after the round's workers had been stopped
    stood_by: bool = False  # the others succeeded while nothing ran here
    abandoned: bool = False  # the last round here was stopped, and none followed: no success
    finished: bool = False  # all have succeeded, as the hub says
    number: int = 0  # that hub's
    end: End | None = None
    lost: str = ""  # how the hub was lost
    before_loss: Exit | None = None  # a failure here that was seen before the hub was lost
    report: TerminationReport | None = None  # as finish() has written it

    @property
    def over(self) -> bool:
        """Return whether no round follows."""
        return bool(self.finished or self.signal or self.end is not None or self.lost)


def finish(
    config: LaunchConfig,
    workers: WorkerGroup,
    pump: OutputPump,
    results: Results,
    ended: Ended,
    left: Sequence[str],
    say: Callable[[str], None],
) -> int:
    """Write the termination report, print how the run ended, return the launcher's exit code.

    ``left``: about processes that could not be ended.
    """
    results = results.after(workers)
    failure, elsewhere = _failure(workers, ended)
    if elsewhere and left:
        elsewhere = "; ".join((elsewhere, *left))
    early = ended.end.early if ended.end else root_cause.ended_early(workers.exits, failure)
    if failure and early:
        failure = replace(failure, exception=root_cause.failure_text(early, failure))
    local_rank = failure.local_rank if failure else 0
    log = [*pump.tail(config.rank(local_rank)), *left] if failure else []
    idle = ended.stood_by or workers.key.round < 0
    content = make_report(
        failure,
        workers.state(local_rank),
        log,
        round_=workers.round,
        terminated=ended.signal != 0,
        results=results,
        elsewhere=elsewhere,
        replica=(-1 if idle else config.replica) if config.env.reseats else None,
        finished=_finished(config, workers, ended, served=not idle and not ended.abandoned),
    )
    cut_short = _cut_short(config, workers, ended, failure)
    if cut_short:
        if not ended.between_rounds:
            say("all ended with exit code 0, but at a signal, so this is no success")
        content["kind"] = "sigterm" if ended.signal == signal.SIGTERM else "signal"
        content |= {"code": 128 + ended.signal, "signal": ended.signal}
    if failure is not None and not elsewhere and ended.end is not None and ended.end.code:
        content["code"] = ended.end.code
    _save(config, content, say)
    ended.report = content
    if ended.end is not None and config.rounds_without_progress and not ended.signal:
        say(f"no further round: {ended.end.why}")
    elif ended.lost and failure is not None and not elsewhere:
        say(f"no further round: the hub was lost: {ended.lost}")
    if elsewhere:
        say(f"ending with exit code {ExitCode.PEER_LOST:d}: {elsewhere}")
        return ExitCode.PEER_LOST
    if cut_short:
        return 128 + ended.signal
    if failure is None:
        return ExitCode.SUCCESS
    _say_first(failure, content, say)
    if content["kind"] == "sigterm" and ended.signal == signal.SIGTERM:
        return ExitCode.SIGTERM  # also when our own SIGKILL ended it
    return content["code"]


def _say_first(failure: Exit, report: TerminationReport, say: Callable[[str], None]) -> None:
    """Print which rank ended first, and how."""
    how = f"signal {-failure.status}" if failure.status < 0 else f"exit code {failure.status}"
    after = f" after step {report['step']}" if "step" in report else ""
    kind = root_cause.signal_name(-failure.status) if failure.status < 0 else report["kind"]
    why = root_cause.because(report.get("exception", ""))
    say(f"rank {failure.rank} ended first, with {how} ({kind}{why}){after}")


def _finished(
    config: LaunchConfig, workers: WorkerGroup, ended: Ended, *, served: bool
) -> Finished | None:
    """Name the round of an elastic gang that has succeeded, as the hub says (E11)."""
    if not ended.finished or config.elastic is None:
        return None
    if not served:
        return {"number": ended.number}
    return {"number": ended.number, "round": workers.round, "size": config.replicas}


def _cut_short(
    config: LaunchConfig, workers: WorkerGroup, ended: Ended, failure: Exit | None
) -> bool:
    """Return whether a signal ended training that no worker reports as failed."""
    if ended.between_rounds:
        return True
    # Some programs save at a signal and end with 0, unfinished.
    return ended.at_work and failure is None and not _is_done(config, workers)


def _is_done(config: LaunchConfig, workers: WorkerGroup) -> bool:
    """Return whether all workers here have reached the end of training.

    A loop left early, as by sys.exit() in the script's own handler, also reports "done". A run with
    an unknown number of steps has no known end.
    """
    states = [workers.state(local_rank) for local_rank in range(config.nproc)]
    return all(one and one.phase == "done" and 0 < one.total_steps <= one.step for one in states)


def broke(config: LaunchConfig, error: Exception, say: Callable[[str], None]) -> int:
    """Report a failure of the launcher itself; return its exit code."""
    text = str(error.strerror if isinstance(error, NoRoomError) else f"{error!r}")
    say(f"ending: {text}")
    report: TerminationReport = {
        "version": REPORT_VERSION, "kind": "exception", "round": 0, "code": 1,
        "exception": _cut_middle(f"launcher: {text}", _MAX_EXCEPTION),
    }  # fmt: skip
    _save(config, report, say)
    return 1


def _save(config: LaunchConfig, report: TerminationReport, say: Callable[[str], None]) -> None:
    path = config.termination_log
    problem = write(report, path or Path(contract.TERMINATION_LOG), create=path is not None)
    if problem:
        say(f"no termination report: {problem}")


def _failure(workers: WorkerGroup, ended: Ended) -> tuple[Exit | None, str]:
    """Find the worker here that ended the attempt, or why another launcher's did."""
    if ended.between_rounds or ended.stood_by:
        return None, ""
    mine = root_cause.first_failure(workers.exits)
    if ended.signal or (workers.succeeded and not ended.abandoned):
        # Also an exit by our SIGKILL at the end of the grace period.
        return mine or min(
            (exit_ for exit_ in workers.exits if exit_.status), key=lambda e: e.at, default=None
        ), ""
    collateral = mine if mine and mine.lost_peer else None
    if ended.end is not None:
        here = [e for e in workers.exits if e.rank == ended.end.rank and e.status]
        if here:
            return here[0], ""
        first = f"rank {ended.end.rank} ended first" if ended.end.rank >= 0 else ended.end.why
        return collateral, first
    if not ended.lost:
        return mine, ""
    before = ended.before_loss
    if before is not None and not before.lost_peer:
        return before, ""
    return collateral, f"the hub was lost: {ended.lost}"


def make_report(
    failure: Exit | None,
    state: RankState | None,
    log: Sequence[str],
    *,
    round_: int,
    terminated: bool,
    results: Results,
    elsewhere: str = "",
    replica: int | None = None,
    finished: Finished | None = None,
) -> TerminationReport:
    """Build the report on the first failing rank, or on the first rank after success.

    ``terminated``: the launcher itself got a signal to end. ``elsewhere``: why the attempt ended,
    when no process of this launcher was the cause. ``replica``, ``finished``: see the contract.
    """
    exception = failure.exception if failure else ""
    said = elsewhere or exception
    found: dict[str, Any] = {
        "version": REPORT_VERSION,
        "kind": kind(failure, exception=exception, terminated=terminated),
        "round": round_,
        "replica": replica,
        "finished": finished,
        "exception": _cut_middle(said, _MAX_EXCEPTION) if said else None,
        "step": state.step if state else None,
        "rounds": [_brief(record) for record in results.records] or None,
        **results.facts(state),
    }
    if elsewhere:
        found |= {"kind": "peerLost", "code": ExitCode.PEER_LOST}
    if failure is not None:
        found |= {
            "rank": failure.rank,
            "localRank": failure.local_rank,
            "code": failure.code,
            "signal": -failure.status if failure.status < 0 else None,
            "log": [_cut(line, _MAX_LINE) for line in log],
        }
    return cast("TerminationReport", known(found))


def _brief(record: Round) -> Round:
    if said := record.get("exception"):
        return {**record, "exception": _cut_middle(said, _MAX_LINE)}
    return record


def _cut(text: str, limit: int) -> str:
    """Cut a text to ``limit`` bytes of the report."""
    sizes = accumulate(len(_json(char).encode()) - len('""') for char in text[:limit])
    return text[: sum(size <= limit for size in sizes)]


def _cut_middle(text: str, limit: int) -> str:
    """Keep head and tail of a text within ``limit`` bytes of the report."""
    if len(_cut(text, limit)) == len(text):
        return text
    head, gap = limit * 2 // 3, " ... "
    return _cut(text, head) + gap + _cut(text[::-1], limit - head - len(gap))[::-1]


def _json(value: object) -> str:
    """Encode as JSON in UTF-8; escape what a terminal or UTF-8 cannot show."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return "".join(c if c.isprintable() else json.dumps(c).strip('"') for c in text)


def encode(report: TerminationReport) -> bytes:
    """Encode a report within the limit; drop the oldest log lines first, then rounds."""
    report = report.copy()
    while True:
        data = _json(report).encode()
        if len(data) <= REPORT_MAX_BYTES:
            return data
        log, rounds = report.get("log", []), report.get("rounds", [])
        if len(log) > _LAST_LINES or (log and len(rounds) <= 1):
            report["log"] = log[1:]
        elif rounds:
            report["rounds"] = rounds[1:]
        else:
            longest = next((name for name in ("metrics", "printed") if name in report), "exception")
            report.pop(longest, None)  # type: ignore[misc]


def write(report: TerminationReport, path: Path, *, create: bool) -> str:
    """Write the report; return the problem, "" if none.

    Without ``create`` only an existing regular file is written: outside a pod the default path does
    not exist, and /dev must not be littered.
    """
    try:
        if not create and not stat.S_ISREG(path.stat().st_mode):
            return f"{path} is not a regular file"
        path.write_bytes(encode(report))
    except FileNotFoundError:
        return "" if not create else f"{path}: no such directory"
    except OSError as error:
        return f"{path}: {error.strerror}"
    return ""
