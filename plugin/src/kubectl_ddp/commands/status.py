"""Print all jobs in a line each, or one with its gang: `kubectl ddp status`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from ddpjob_contract.crd import TERMINAL_PHASES
from kubectl_ddp import gang
from kubectl_ddp.gang import Job, Member, Report, moment
from kubectl_ddp.kubectl import DDPJOBS, Failure, Kubectl, Object
from kubectl_ddp.text import NONE, WHOLE, clean, duration, row, since, table, width

_LINES = 4  # of a message
FAILED = 3  # exit code of a job's end
_NUMBERS = ("round", "step", "totalSteps", "loss", "samplesPerSecond", "snapshotStep")
_PLAIN = "a plain script, without ddp.start() or an adapter"
_STALE = 60  # seconds without a new step: its rate is out of date


def run(kubectl: Kubectl, options: argparse.Namespace) -> int:
    """Print the status; raise Failure."""
    if options.job and options.all_namespaces:
        raise Failure(f"-A lists all jobs: leave it out, and report -n NAMESPACE for {options.job}")
    if not options.job and (options.watch or options.output):
        raise Failure("-w and -o are about one job: name it, or use `kubectl get ddpjobs`")
    if not options.job:
        _print(*_all(kubectl, everywhere=options.all_namespaces))
        return 0
    job = gang.find_job(kubectl, options.job)
    if not options.watch:
        _print(*_one(kubectl, job, options))
        return 0
    return _watch(kubectl, job, options)


def _print(lines: Sequence[str], refusal: str) -> None:
    print("\n".join(lines), flush=True)
    if refusal:
        print(f"no steps and no snapshots of pods: {clean(refusal)}", file=sys.stderr)


def _watch(kubectl: Kubectl, job: Job, options: argparse.Namespace) -> int:
    """Print it after each change; return the exit code of the job's end."""
    version = None
    for look in gang.looks(kubectl, job):
        if look.version != version:
            if version is not None and not options.output:
                print(f"\n--- {datetime.now(UTC):%H:%M:%S} UTC")
            shown = partial(_one, kubectl, look, options)
            _print(*(shown() if version is None else gang.patiently(shown)))
            version = look.version
        if look.phase in TERMINAL_PHASES:
            return 0 if look.phase == "Succeeded" else FAILED
    return 0


def _all(kubectl: Kubectl, *, everywhere: bool) -> tuple[list[str], str]:
    where = ["-A"] if everywhere else []
    jobs = [Job(obj) for obj in kubectl.items(DDPJOBS, *where)]
    if not jobs:
        return [f"no DDPJobs {'in any namespace' if everywhere else 'in this namespace'}"], ""
    running = [job for job in jobs if job.phase == "Running"]
    first = gang.find_first(kubectl, running, *where)
    alive = [(job, 0, first.get(job.uid)) for job in running]
    reports, refusal = gang.ask(kubectl, alive, "metrics")
    head = ["NAME", "PHASE", "REASON", "READY", "RESTARTS", "STEP", "LOSS", "SNAPSHOT"]
    rows = [
        job_row(job, reports.get((job.namespace, job.name, 0), Report()), time.time())
        for job in jobs
    ]
    if everywhere:
        head = ["NAMESPACE", *head]
        rows = [[job.namespace, *row] for job, row in zip(jobs, rows, strict=True)]
    return table(head, rows), refusal


def _one(kubectl: Kubectl, job: Job, options: argparse.Namespace) -> tuple[list[str], str]:
    members = gang.find_members(kubectl, job)
    alive = [(job, n, member) for n, member in sorted(members.items()) if member.running]
    by_pod, refusal = gang.ask(kubectl, alive, "state", "metrics")
    reports = {replica: answer for (_, _, replica), answer in by_pod.items()}
    now = datetime.now(UTC)
    if options.output:
        try:  # of a watch each line is one look, as `jq` reads them
            text = json.dumps(facts(job, members, reports), indent=None if options.watch else 2)
        except RecursionError:
            raise Failure(f"{job.name} is nested too deep to be written as JSON") from None
        return [text], refusal
    most = WHOLE if options.full else _LINES
    head = head_lines(job, reports, now, width(), most)
    return [*head, "", *gang_table(job, members, reports, now)], refusal


def facts(job: Job, members: Mapping[int, Member], reports: Mapping[int, Report]) -> Object:
    """Return the data of the tables for programs; docs/reference/plugin.md has each field."""
    replicas = []
    for replica, n in job.places:
        one: Object = {"replica": replica}
        if member := members.get(n):
            one |= {"pod": member.name, "attempt": member.attempt, "node": member.node}
            one |= {"state": member.state, "ready": member.ready}
        report = reports.get(n, Report())
        one |= {name: report.number(name) for name in _NUMBERS}
        one |= {"phase": report.text("phase"), "stepsPerSecond": report.rate}
        one |= {"snapshotTimestampSeconds": report.snapshot_at}
        one |= {"dataShare": report.data, "exchangeShare": report.exchange}
        replicas.append({key: value for key, value in one.items() if value not in (None, "")})
    return {"job": job.obj, "replicas": replicas}


def job_row(job: Job, report: Report, now: float) -> list[str]:
    """Make the list's row of one job."""
    status, progress = job.status, job.status.get("progress") or {}
    return [
        job.name,
        job.phase or NONE,
        str(status.get("reason") or NONE),
        str(status.get("ready") or NONE),
        _restarts(status.get("restarts") or {}),
        _step(progress),
        _number(Report(progress).number("loss")),
        _kept_since(report, now),
    ]


def head_lines(
    job: Job, reports: Mapping[int, Report], now: datetime, columns: int = 120, most: int = _LINES
) -> list[str]:
    """Make the lines about the gang as a whole."""
    status, first = job.status, reports.get(0, Report())
    lines = [("Job", f"{job.namespace}/{job.name}"), ("Phase", job.phase or "not seen yet")]
    if not job.phase:
        lines.append(("Reason", "the operator has not looked at it: does it run?"))
    # For a failed job Stalled repeats the same, for tools that deploy.
    troubles = ("Invalid", "Stalled", "Straggling", "Silent", "Apart")
    worth = ("Failed",) if job.phase == "Failed" else troubles
    lines += [(one["type"], f"{one['reason']}: {one['message']}") for one in job.true(*worth)]
    timings = status.get("timings") or {}
    ended = moment(timings.get("completedAt"))
    if started := moment(timings.get("startedAt")):
        took = f"{since(started, ended or now)} in all"
        lines.append(("Time", f"{took}, ended {since(ended, now)} ago" if ended else took))
    if (eta := status.get("eta")) and (remaining := eta.get("remaining")):
        lines.append(("Ends", f"in about {remaining}"))
    if attempt := status.get("attempt"):
        began = moment(timings.get("attemptStartedAt"))
        took_or_age = f"took {since(began, ended)}" if ended else f"begun {since(began, now)} ago"
        lines.append(("Attempt", f"{attempt}, {took_or_age}"))
    if group := status.get("podGroup"):
        lines.append(("PodGroup", group))
    lines.append(("Restarts", _budget(status.get("restarts") or {}, job.spec)))
    lost, begun = moment(timings.get("replacingSince")), job.replaced
    if lost and begun:
        left = job.spec["restart"]["replaceSeconds"] - (now - lost).total_seconds()
        what = f"{gang.named(begun)}, lost {since(lost, now)} ago"
        lines.append(("Replacing", f"{what}; all pods restart in {duration(left)}"))
    retry = moment(timings.get("nextRestartAt"))
    if retry and retry > now and not ended:
        lines.append(("Next try", f"in {duration((retry - now).total_seconds())}"))
    # The trainer's own page is newer than the operator's copy.
    progress = {**(status.get("progress") or {}), **first.state}
    lines.append(("Progress", _progress(progress, job.phase, first, now)))
    lines.append(("Snapshot", _snapshot(progress, reports, now)))
    if origin := (status.get("progress") or {}).get("resumed"):
        lines.append(("Began", f"from {origin}"))
    if last := status.get("lastFailure"):
        lines.append(("Failure", f"{failure_line(last, now)}\n{_gist(last, most)}".rstrip("\n")))
    return [line for title, text in lines for line in row(title, text, columns, most)]


def gang_table(
    job: Job, members: Mapping[int, Member], reports: Mapping[int, Report], now: datetime
) -> list[str]:
    """Make a row for each replica, and for each standby pod."""
    head = ("REPLICA", "NODE", "POD", "READY", "ROUND", "STEP", "STEPS/S", "DATA", "EXCHANGE")
    last = {seat_of(one): one for one in job.failures}
    rows: list[Sequence[str]] = []
    for replica, seat in job.places:
        member, report = members.get(seat), reports.get(seat, Report())
        who = "standby" if replica is None else str(replica)
        place = [NONE, NONE, NONE]
        if member:
            place = [member.node or NONE, member.state, "yes" if member.ready else "no"]
        rate = None if _age(report.state, now) > _STALE else report.rate
        rows.append((
            who if replica == seat else f"{who} (pod {seat})", *place,
            _number(report.number("round")), _place(report, job.phase),
            NONE if rate is None else f"{rate:.3g}", _share(report.data), _share(report.exchange),
            _kept_since(report, now.timestamp()),
            _brief(last[seat], now) if seat in last else NONE,
        ))  # fmt: skip
    return table((*head, "SNAPSHOT", "LAST FAILURE"), rows)


def _kept_since(report: Report, now: float) -> str:
    return NONE if report.snapshot_at is None else duration(now - report.snapshot_at)


def _share(part: float | None) -> str:
    return NONE if part is None else f"{part:.0%}"


def seat_of(failure: Object) -> int:
    """Return the number at the end of its pod's name; -1: of the whole gang.

    The replica is another one where the pod has taken a lost one's place.
    """
    number = str(failure.get("pod", "")).rpartition("-")[2]
    return int(number) if number.isdecimal() else int(failure.get("replica", -1))


def failure_line(failure: Object, now: datetime) -> str:
    """Write a failure in one line, without the trainer's message."""
    who = f"replica {failure['replica']}" if "replica" in failure else "the gang"
    if "rank" in failure:
        who = f"rank {failure['rank']} in {who}"
    if "node" in failure:
        who += f" on {failure['node']}"
    when = since(moment(failure.get("detectedAt")), now)
    follows = "restarted in place" if failure.get("inPlace") else "ended the attempt"
    follows = "replaced alone" if failure.get("replaced") else follows
    place = f"attempt {failure.get('attempt', NONE)}, round {failure.get('round', 0)}"
    return f"{who}, {when} ago: {_kind(failure)} ({place}; {follows})"


def _gist(failure: Object, most: int) -> str:
    """Return the exception, or else the end of the log; all if ``most`` allows."""
    message = str(failure.get("message", ""))
    if most == WHOLE:
        return message
    return str(failure.get("exception") or "\n".join(message.splitlines()[1 - _LINES :]))


def _kind(failure: Object) -> str:
    """Write class and reason: User ExitCode1, OOMKilled, Hang."""
    words = [str(failure[key]) for key in ("class", "reason") if failure.get(key)]
    class_is_said = len(words) == 2 and words[1].startswith(words[0])
    return " ".join(words[1:] if class_is_said else words)


def _brief(failure: Object, now: datetime) -> str:
    return f"{_kind(failure)}, {since(moment(failure.get('detectedAt')), now)}"


def _restarts(restarts: Object) -> str:
    total, in_place = restarts.get("total", 0), restarts.get("inPlace", 0)
    return f"{total} (+{in_place} in place)" if in_place else str(total)


def _budget(restarts: Object, spec: Mapping[str, Any]) -> str:
    limits = spec["restart"]  # the CRD's defaults are filled in
    charged = f"{restarts.get('charged', 0)} of {limits['maxRestarts']} charged"
    lost = f"{restarts.get('disruptions', 0)} of {limits['maxDisruptions']} disruptions"
    alone = f"{restarts['replaced']} of lost pods alone, " if restarts.get("replaced") else ""
    return (
        f"{restarts.get('total', 0)} with new pods ({alone}{charged}, {lost}),"
        f" {restarts.get('inPlace', 0)} in place"
    )


def _step(progress: Mapping[str, Any]) -> str:
    report = Report(progress)
    step, total = report.number("step"), report.number("totalSteps")
    if step is None:
        return report.text("stepOfTotal") or NONE  # what the program has printed
    return f"{step}/{total}" if total else str(step)


def _place(report: Report, phase: str) -> str:
    """Return the step of a replica, or the phase before its first one."""
    if "step" in report.state:
        return _number(report.number("step"))
    silent = phase == "Running" and report.silent
    return NONE if silent else report.text("phase") or NONE


def _age(state: Mapping[str, Any], now: datetime) -> float:
    """Return the seconds since the last reported step, 0 without a time."""
    try:
        return (now - (moment(Report(state).text("updatedAt")) or now)).total_seconds()
    except (TypeError, ValueError):
        return 0.0  # a stranger's text


def _progress(progress: Mapping[str, Any], phase: str, first: Report, now: datetime) -> str:
    report, age = Report(progress), _age(progress, now)
    known = "step" in progress or "stepOfTotal" in progress
    parts = [f"step {_step(progress)}"] if known else []
    for name, words in (("loss", "loss {:.4g}"), ("samplesPerSecond", "{:.4g} samples/s")):
        number = report.number(name)
        stale = name == "samplesPerSecond" and age > _STALE and phase not in TERMINAL_PHASES
        parts += [words.format(number)] if number is not None and not stale else []
    values = progress.get("metrics")
    numbers = Report(values if isinstance(values, dict) else {})
    named = ((name, numbers.number(name)) for name in list(numbers.state)[:8])
    parts += [f"{name[:40]} {_number(number)}" for name, number in named if number is not None]
    if parts and age > _STALE and phase not in TERMINAL_PHASES:
        parts.append(f"last reported {duration(age)} ago")
    if not parts and report.text("phase") == "startup":
        silent = phase == "Running" and first.silent
        return f"running, no steps yet: it starts, or is {_PLAIN}" if silent else "starting up"
    started = "" if phase in TERMINAL_PHASES else "not started yet, or "
    return ", ".join(parts) or f"not reported: {started}{_PLAIN}"


def _snapshot(progress: Mapping[str, Any], reports: Mapping[int, Report], now: datetime) -> str:
    step = Report(progress).number("snapshotStep")
    if step is None:
        return "none"
    known = [one.snapshot_at for one in reports.values() if one.snapshot_at is not None]
    age = f", {duration(now.timestamp() - max(known))} ago" if known else ""
    return f"step {step}{age}"


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
