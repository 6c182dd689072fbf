"""The termination report: one JSON object of at most 2 KiB for the operator."""

from __future__ import annotations

import json
import math
import re
import stat
from collections.abc import Sequence
from pathlib import Path

from ddpjob_trainer.contract import REPORT_MAX_BYTES, REPORT_VERSION, TerminationReport
from ddpjob_trainer.launcher.verdict import Exit, kind
from ddpjob_trainer.rankstate import RankState

_MAX_LINE = 200
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
) -> TerminationReport:
    """Join what is known of the first failing rank, or of the first rank on success."""
    exception = (state.exception if state else "") or (exception_in(log) if failure else "")
    report: TerminationReport = {
        "version": REPORT_VERSION,
        "kind": kind(failure, exception=exception, terminated=terminated),
        "round": round_,
    }
    if failure is not None:
        report["rank"] = failure.rank
        report["localRank"] = failure.local_rank
        report["code"] = failure.code
        if failure.status < 0:
            report["signal"] = -failure.status
        if exception and failure.status > 0:
            report["exception"] = exception[:_MAX_LINE]
        report["log"] = [line[:_MAX_LINE] for line in log]
    if state is not None:
        report["step"] = state.step
        if state.loss is not None and math.isfinite(state.loss):
            report["loss"] = state.loss
    if snapshot_step >= 0:
        report["snapshotStep"] = snapshot_step
    return report


def encode(report: TerminationReport) -> bytes:
    """Return JSON within the limit; the oldest log lines go first."""
    report = report.copy()
    while True:
        data = json.dumps(report, ensure_ascii=True, separators=(",", ":")).encode()
        if len(data) <= REPORT_MAX_BYTES:
            return data
        log = report.get("log", [])
        if len(log) > 1:
            report["log"] = log[1:]
        elif log:
            del report["log"]
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
