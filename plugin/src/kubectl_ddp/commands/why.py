"""Explain a job's failures on one page, newest first: `kubectl ddp why`.

From status.failures, Events and, where they can be read, the evidence beside the snapshots.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from signal import SIGKILL

from ddpjob_contract.evidence import Incident, RankEnd
from kubectl_ddp import cures, evidence, gang, reader
from kubectl_ddp.commands import events, life
from kubectl_ddp.commands.events import Happening
from kubectl_ddp.drawing import Failed
from kubectl_ddp.gang import Job, moment
from kubectl_ddp.kubectl import Failure, Kubectl, Object
from kubectl_ddp.text import NONE, clean, duration, ranges, row, since, width

_SHOWN = 3  # failures
_MARGIN = "   "
_LINES = 12  # of a log, of a failure
_MOST = 300  # characters of such a line
#: Clocks of nodes and of the operator differ, and a lost node is noticed late.
_NEAR = timedelta(seconds=180)
_CREATING = "ContainerCreating"


@dataclass(frozen=True, slots=True)
class Case:
    """One failure: the operator's record, what launchers kept of that round, and Events."""

    failure: Object
    incident: Incident  # empty where they kept none
    pods: Mapping[str, int]  # that served in that round, or at that time, and their replicas
    charged: str
    again: datetime | None  # when training ran on

    @property
    def at(self) -> datetime:
        """Return when it was seen."""
        seen = moment(self.failure.get("detectedAt")) or datetime.now(UTC)
        wrote = moment(self.incident.get("at"))
        return min(seen, wrote) if wrote else seen  # the operator may see it seconds later

    @property
    def first(self) -> RankEnd:
        """Return the launchers' first process that ended, if it is of the operator's pod."""
        own = self.failure.get("pod", "") in ("", self.incident.get("firstPod"))
        return self.incident.get("first", {}) if own else {}


def run(kubectl: Kubectl, options: argparse.Namespace) -> int:
    """Print the page, or write it as HTML; raise Failure."""
    if options.events and not options.html:
        raise Failure("--events is drawn on the page: give --html FILE, too")
    job = gang.find_job(kubectl, options.job)
    notes: dict[str, str] = {}
    story: list[Happening] = []
    warned = ""
    try:
        story = events.about_job(kubectl, job)
        if any(one["reason"] == _CREATING for one in true(job)):
            warned = events.warned(kubectl, job)
    except Failure as failure:
        notes["Events"] = f"without Events: {failure}"
    found = _incidents(kubectl, job, options, notes) if job.status.get("attempt") else []
    known = cases(job, story, found, everything=options.all or bool(options.html))
    if options.html:
        failed = [_failed(job, case, number) for number, case in enumerate(known, 1)]
        of_job = list(facts(job, found, warned))
        made = life.story(job, failed, of_job, found, story, notes, options.events)
        return life.write(options.html, made)
    shown = known if options.all else known[:_SHOWN]
    lines = [*head(job, found, datetime.now(UTC), width(), warned), ""]
    for number, case in enumerate(shown, 1):
        lines += [*page(job, case, number, datetime.now(UTC), width()), ""]
    if len(known) > len(shown):
        lines.append(f"{len(known) - len(shown)} earlier: kubectl ddp why {job.name} --all")
    lines += [f"({clean(note)})" for note in notes.values() if known]
    print("\n".join(lines).rstrip())
    return 0


def _incidents(
    kubectl: Kubectl, job: Job, options: argparse.Namespace, notes: dict[str, str]
) -> list[Incident]:
    """Read the evidence; note why there is none."""
    try:
        members = gang.find_members(kubectl, job)
        allowed = reader.consent(options) if options.reader or options.node else None
        said = evidence.read(kubectl, job, members, "ls", "--json", allowed=allowed)
        return [one for one in evidence.parsed(said) if one["uid"] == job.uid]
    except Failure as failure:
        notes["Evidence"] = f"without what launchers kept beside the snapshots: {failure}"
        return []


# --- The job ------------------------------------------------------------------------------


def true(job: Job) -> list[Object]:
    """Return the conditions that keep it from training, but for what one of them repeats."""
    stalled = () if job.phase == "Failed" else ("Stalled",)
    return job.true("Invalid", "Failed", "Silent", "Apart", *stalled)


def head(
    job: Job, found: Sequence[Incident], now: datetime, columns: int, warned: str = ""
) -> list[str]:
    """Tell what the job is doing, and what keeps it from more; ``warned``: a pod's Event."""
    attempt = f", attempt {job.status['attempt']}" if job.status.get("attempt") else ""
    lines = [
        f"{job.namespace}/{job.name} is {job.phase or 'not seen yet by the operator'}{attempt}"
    ]
    lines += [line for one in facts(job, found, warned) for line in row(*one, columns, 4, _MARGIN)]
    return lines if job.failures or not job.phase else [*lines, "It has had no failure."]


def facts(job: Job, found: Sequence[Incident], warned: str) -> Iterator[tuple[str, str]]:
    """Yield what is known of the job as a whole."""
    if not job.phase:
        yield "Do", "does the operator run? kubectl get deployments -A"
        return
    for one in true(job):
        yield one["type"], f"{one['reason']}: {one['message']}"
        if warned and one["reason"] == _CREATING:
            yield "Event", warned
        if cure := cures.of_condition(str(one["reason"]), job.name):
            yield "Do", cure
    progress = job.status.get("progress") or {}
    if "step" not in progress and (shown := progress.get("stepOfTotal")):
        yield "Progress", f"step {shown}, as the program has printed it"
    elif "step" in progress:
        total = f"/{progress['totalSteps']}" if progress.get("totalSteps") else ""
        snapshot = progress.get("snapshotStep")
        kept = "none yet" if snapshot is None else f"of step {snapshot}"
        if every := progress.get("snapshotEvery"):
            kept += f", one about every {every} steps"
        yield "Progress", f"step {progress['step']}{total}, newest snapshot {kept}"
    yield "Spent", cures.spent(job)
    if job.phase == "Suspended" and found and (saved := _saved(job, found[0])) is not None:
        yield "Saved", f"step {saved}, when it was suspended"


def _saved(job: Job, newest: Incident) -> int | None:
    """Return the step of the snapshot that was made as the job was suspended."""
    conditions = job.status.get("conditions") or []
    times = (one["lastTransitionTime"] for one in conditions if one["type"] == "Suspended")
    since, wrote = moment(next(times, None)), moment(newest["at"])
    at_that = bool(since and wrote and newest.get("signal") and wrote >= since - _NEAR)
    return newest.get("snapshotStep") if at_that else None


# --- One failure --------------------------------------------------------------------------


def cases(
    job: Job, story: Sequence[Happening], found: Sequence[Incident], *, everything: bool
) -> list[Case]:
    """Join failures with what else is known of them, newest first."""
    known: list[Case] = []
    left = list(found)
    for failure in reversed(job.failures):
        incident = _incident_of(failure, left)
        left = [one for one in left if one != incident]
        known.append(_case(job, failure, incident, story, found))
    if everything:
        left = [one for one in left if one.get("first", {}).get("end") == "failed"]
        known += [_case(job, cures.forgotten(one), one, story, found) for one in left]
        known.sort(key=lambda case: case.at, reverse=True)
    return known


def _case(
    job: Job,
    failure: Object,
    incident: Incident,
    story: Sequence[Happening],
    found: Sequence[Incident],
) -> Case:
    at = moment(failure.get("detectedAt")) or datetime.now(UTC)
    ran = [one.last for one in story if one.reason == "Running" and one.last >= at]
    if incident:
        key = (incident["attempt"], incident["round"])
        later = [one for one in found if (one["attempt"], one["round"]) > key]
        ran = [began for one in later if (began := moment(one["began"]))]
    written = f"{at:%Y-%m-%dT%H:%M:%SZ}"  # as launchers do
    around = [one for one in found if one["began"] <= written <= one["at"]]
    pods = next((one["pods"] for one in (incident, *around) if "pods" in one), {})
    return Case(failure, incident, pods, cures.charged_to(job, failure), min(ran, default=None))


def _incident_of(failure: Object, found: Sequence[Incident]) -> Incident:
    """Find the round that a failure ended, by its number, else by its time; empty: none."""
    at = moment(failure.get("detectedAt"))
    attempt, round_ = failure.get("attempt", 0), failure.get("round")
    may = [one for one in found if one["attempt"] <= attempt]
    near = [(abs(when - at), one) for one in may if at and (when := moment(one["at"]))]
    same = [one for one in may if (one["attempt"], one["round"]) == (attempt, round_)]
    if same:
        return same[0]
    near = [pair for pair in near if pair[0] <= _NEAR and round_ in (None, pair[1]["round"])]
    return min(near, key=lambda pair: pair[0])[1] if near else {}


def page(job: Job, case: Case, number: int, now: datetime, columns: int) -> list[str]:
    """Lay out one failure."""
    place = f"attempt {case.failure.get('attempt', NONE)}, round {case.failure.get('round', NONE)}"
    when = f"{case.at:%Y-%m-%d %H:%M:%S} UTC, {since(case.at, now)} ago ({place})"
    lines = [f"{number}. {when}"]
    for title, text in _rows(job, case):
        if title == "Last lines":
            lines.append(f"   {title}{text}:")
            lines += [f"     | {line}" for line in _last_lines(case)]
        else:
            lines += row(title, text, columns, 4, _MARGIN)
    return lines


def _failed(job: Job, case: Case, number: int) -> Failed:
    """Make a failure's part of the HTML page. Its lane is the attempt of the round it ended."""
    found = dict(_rows(job, case))
    old = found.pop("Last lines", "")
    attempt = int((case.incident or case.failure).get("attempt", 0))
    kind = cures.BUDGETS.get(str(case.failure.get("chargedTo")), "nothing")
    seen = f"{case.at:%Y-%m-%d %H:%M:%S} UTC, attempt {attempt}"
    when = f"{seen}, round {case.failure.get('round', NONE)}"
    replica, node = case.failure.get("replica"), case.failure.get("node")
    who = "the whole gang" if replica is None else f"replica {replica}"
    who += f" on {node}" if node else ""
    rows, log = list(found.items()), _last_lines(case)
    return Failed(number, attempt, case.at, when, who, kind, rows, log, old)


def _rows(job: Job, case: Case) -> Iterator[tuple[str, str]]:
    failure, incident = case.failure, case.incident
    yield "First", _who(job, case)
    yield "How", _how(case)
    if _last_lines(case):
        yield "Last lines", _as_of(case)
    if incident:
        yield from _others(incident, _own(case), job.name)
    yield "Charged", case.charged
    yield "Lost", _lost(case, snapshots="snapshot" in job.spec)
    again = f"; they ran again at {case.again:%H:%M:%S} UTC" if case.again else ""
    yield "Then", cures.did(job, failure) + again
    yield "Do", cures.of_failure(failure, job.name)


def _who(job: Job, case: Case) -> str:
    """Name rank, replica, pod and node. A pod's number is not the replica that it served."""
    failure = case.failure
    pod, standby = str(failure.get("pod", "")), bool(job.spec.get("standby"))
    pods = case.pods
    rank = failure.get("rank", case.first.get("rank"))
    replica: int | None = pods.get(pod, failure.get("replica"))
    if standby and pod and pods and pod not in pods:
        return f"pod {pod}, which stood by: no rank was lost"
    if standby and pod and not pods and "rank" not in failure:
        return f"pod {pod}, which stood by or served a replica: launchers know, the status does not"
    named = [] if rank is None else [f"rank {rank}"]
    named += [] if replica is None else [f"replica {replica}"]
    pod = pod or case.incident.get("firstPod", "")
    named += [f"pod {pod}"] if pod else []
    named += [f"node {failure['node']}"] if failure.get("node") else []
    return ", ".join(named) or "the whole gang"


def _how(case: Case) -> str:
    failure, step = case.failure, _step(case)
    after = f", after step {step}" if isinstance(step, int) and step >= 0 else ""
    words = cures.how(failure)
    said = failure.get("exception") or case.first.get("exception") or ""
    if not said and "exitCode" not in failure:  # without an end there is no log in it
        said = str(failure.get("message", ""))
    return f"{words}{after}{': ' if said else ''}{said}"


def _step(case: Case) -> object:
    """Return the last step that is known, as launchers have it before the status: one for all."""
    return case.incident.get("step", case.failure.get("step", case.first.get("step")))


def _last_lines(case: Case) -> list[str]:
    """Return the log's end: of the evidence, else what the status has of it."""
    failure = case.failure
    # An exception, which "How" shows, is the message's first line; of a round it has no log.
    lines = str(failure.get("message", "")).splitlines()[1 if failure.get("exception") else 0 :]
    log = _kept(case) or ([] if failure.get("inPlace") else lines)
    return [clean(line)[:_MOST] for line in log if line.strip()][-_LINES:]


def _kept(case: Case) -> Sequence[str]:
    """Return the log's end that launchers kept."""
    pod = str(case.failure.get("pod", ""))
    return case.first.get("log", []) if case.first else case.incident.get("tails", {}).get(pod, [])


def _as_of(case: Case) -> str:
    """Warn where the lines may be older than the end."""
    if not _kept(case):  # but the status's: nobody was left to write a report
        unreported = case.failure.get("signal") == SIGKILL and "round" not in case.failure
        return ", as far as they are known: they may be older than its end" if unreported else ""
    incident, silent = case.incident, case.incident.get("silent", {})
    pod = str(case.failure.get("pod", ""))
    when, whose = silent.get(pod, ""), "its"
    if "running" in incident and not silent and not incident.get("failed"):
        when, whose = incident["at"], "a"
    written = f" as of {when[11:19]}, when {whose} launcher last wrote (every 10 s at most)"
    return written if when else ""


def _own(case: Case) -> set[int]:
    """Return the ranks of the pod that failed: they are no others."""
    incident = case.incident
    pod = str(case.failure.get("pod", incident.get("firstPod", "")))
    replica, nproc = incident.get("pods", {}).get(pod), incident.get("nproc", 1)
    first = incident.get("first", {}).get("rank", -1)
    if first >= 0 or type(replica) is not int:
        return {first}
    return set(range(replica * nproc, (replica + 1) * nproc))


def _others(incident: Incident, own: set[int], job: str) -> Iterator[tuple[str, str]]:
    failed = [rank for rank in incident.get("failed", []) if rank not in own]
    if failed:
        yield "Too", f"rank {ranges(failed)} failed by itself, later or at once"
    words = []
    if followed := [rank for rank in incident.get("followed", []) if rank not in own]:
        words.append(f"rank {ranges(followed)} only lost its peers (exit code 75)")
    if stopped := [rank for rank in incident.get("stopped", []) if rank not in own]:
        words.append(f"rank {ranges(stopped)} was stopped for it")
    if words:
        yield "Followed", "; ".join(words)
    lost = {int(n): how for n, how in incident.get("lost", {}).items() if n.isdecimal()}
    if lost and not own & set(incident.get("failed", [])):
        hows = "; ".join(f"replica {n} {how}" for n, how in sorted(lost.items())[:8])
        yield "Launchers", hows
    silent = sorted(incident.get("silent", {}))
    if silent:
        yield "Silent", f"{', '.join(silent[:8])}: no word on the end of this round"
    if incident.get("stacks"):
        where = f"--attempt {incident['attempt']} --round {incident['round']}"
        yield "Stacks", f"kept: kubectl ddp logs {job} {where}"


def _lost(case: Case, *, snapshots: bool) -> str:
    incident, step = case.incident, _step(case)
    snapshot = incident.get("snapshotStep", incident.get("cause", {}).get("snapshotStep"))
    parts = []
    cause = incident.get("cause", {})
    if isinstance(saved := cause.get("savedStep"), int):
        again = max(0, step - saved) if isinstance(step, int) else 0
        what = f"{again} steps" if again else "nothing"
        parts.append(f"{what} repeated: saved by rank {cause.get('savedBy')} after step {saved}")
    elif isinstance(step, int) and isinstance(snapshot, int):
        parts.append(f"{max(0, step - snapshot)} steps, from {snapshot} to {step}")
    elif isinstance(step, int) and step >= 0 and not snapshots:
        parts.append(f"{step} steps, if the program has no checkpoints: there is no spec.snapshot")
    elif isinstance(step, int) and step >= 0:
        parts.append(f"the steps from the newest snapshot to step {step}")
    if case.again:
        ended = min(case.at, moment(incident.get("at")) or case.at)
        took = max(0.0, (case.again - ended).total_seconds())
        began = "processes" if case.failure.get("inPlace") else "pods"
        parts.append(f"{duration(took)} until its {began} ran again (all: kubectl ddp account)")
    return " and ".join(parts) or "not known: the program says nothing of steps"
