"""The termination report: one JSON object of at most 2 KiB for the operator."""

from __future__ import annotations

import json
import math
import re
import stat
from collections.abc import Sequence
from pathlib import Path

from ddpjob_trainer.contract import (
    REPORT_MAX_BYTES,
    REPORT_VERSION,
    ExitCode,
    Round,
    TerminationReport,
)
from ddpjob_trainer.launcher.verdict import Exit, kind
from ddpjob_trainer.rankstate import RankState

_MAX_LINE = 200
_LAST_LINES = 5  # of the log are kept before rounds are
_EXCEPTION_LINE = re.compile(r"^[A-Za-z_][\w.]*(: .*)?$")


def exception_in(lines: Sequence[str]) -> str:
    """Find the last exception of a Python traceback in a program's output, "" if none."""
    found = ""
    inside = False
    for line in lines:
        if line.startswith("Traceback (most recent call last)"):
            inside = True
        elif inside and not line.startswith(" ") and _EXCEPTION_LINE.match(line):
            found, inside = line, False
    return found


def make_report(
    failure: Exit | None,
    state: RankState | None,
    log: Sequence[str],
    *,
    round_: int,
    terminated: bool,
    snapshot_step: int,
    records: Sequence[Round] = (),
    elsewhere: str = "",
) -> TerminationReport:
    """Join what is known of the first failing rank, or of the first rank on success.

    ``terminated``: the launcher itself was told to end. ``elsewhere``: why the attempt ended,
    when no process of this launcher was the cause.
    """
    exception = failure.exception if failure else ""
    exception = exception or (state.exception if state else "")
    exception = exception or (exception_in(log) if failure else "")
    name = kind(failure, exception=exception, terminated=terminated)
    report: TerminationReport = {"version": REPORT_VERSION, "kind": name, "round": round_}
    if elsewhere:
        report["kind"] = "peerLost"
        report["code"] = ExitCode.PEER_LOST
        report["exception"] = elsewhere[:_MAX_LINE]
    if failure is not None:
        report["rank"] = failure.rank
        report["localRank"] = failure.local_rank
        report["code"] = failure.code
        if failure.status < 0:
            report["signal"] = -failure.status
        if exception and failure.status > 0 and not elsewhere:
            report["exception"] = exception[:_MAX_LINE]
        report["log"] = [line[:_MAX_LINE] for line in log]
    if state is not None:
        report["step"] = state.step
        if state.loss is not None and math.isfinite(state.loss):
            report["loss"] = state.loss
    if snapshot_step >= 0:
        report["snapshotStep"] = snapshot_step
    if records:
        report["rounds"] = list(records)
    return report


def encode(report: TerminationReport) -> bytes:
    """Return JSON within the limit; the oldest log lines go first, then the oldest rounds."""
    report = report.copy()
    while True:
        data = json.dumps(report, ensure_ascii=True, separators=(",", ":")).encode()
        if len(data) <= REPORT_MAX_BYTES:
            return data
        log, rounds = report.get("log", []), report.get("rounds", [])
        if len(log) > _LAST_LINES or (log and len(rounds) <= 1):
            report["log"] = log[1:]
        elif rounds:
            report["rounds"] = rounds[1:]
        else:
            report.pop("exception", None)


def write(report: TerminationReport, path: Path, *, create: bool) -> str:
    """Write the report; return what went wrong, "" if nothing.

    Without ``create`` only an existing regular file is written: outside a pod the default
    path does not exist, and /dev must not be littered.
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
