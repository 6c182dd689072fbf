"""Tell the story of a job, from Events and recorded failures: `kubectl ddp events`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from kubectl_ddp import gang
from kubectl_ddp.gang import Job, moment
from kubectl_ddp.kubectl import Kubectl, Object
from kubectl_ddp.text import NONE, WHOLE, since, width, wrapped_table

#: Equal words about other replicas within this time share a line.
_TOGETHER = timedelta(seconds=60)
_LINES = 3  # of a message
_POD = "<pod>"
#: The order within a second: a failure, the operator's Event about it, then pods' Events.
_FAILED, _OF_JOB, _OF_POD = range(3)
_ANY = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Happening:
    """One line: ``first`` and ``last`` are times; ``order`` and ``version`` sort equal times."""

    first: datetime
    last: datetime
    count: int
    order: int
    replicas: tuple[int, ...]
    reason: str
    message: str
    attempt: str = NONE
    round: str = NONE
    version: int = 0


def run(kubectl: Kubectl, options: argparse.Namespace) -> int:
    """Print the story, oldest first; raise Failure."""
    job = gang.find_job(kubectl, options.job)
    events = [*_of_job(kubectl, job), *_events(kubectl, job, "involvedObject.kind=Pod")]
    found = story(job, events)
    if not found:
        print("nothing yet, or it is older than the API server keeps Events (an hour)")
        return 0
    most = WHOLE if options.full else _LINES
    print("\n".join(lines(found, datetime.now(UTC), width(), most)))
    return 0


def about_job(kubectl: Kubectl, job: Job) -> list[Happening]:
    """Return the Events of the job alone, oldest first; raise Failure."""
    found = (_of_event(job, event) for event in _of_job(kubectl, job))
    return sorted((one for one in found if one is not None), key=_when)


def warned(kubectl: Kubectl, job: Job) -> str:
    """Return the newest warning about a pod of the job, "" without one; raise Failure."""
    events = _events(kubectl, job, "involvedObject.kind=Pod,type=Warning")
    found = (one for event in events if (one := _of_event(job, event)) is not None)
    newest = max(found, key=_when, default=None)
    return f"{newest.reason}: {newest.message}" if newest else ""


def _of_job(kubectl: Kubectl, job: Job) -> list[Object]:
    return _events(kubectl, job, f"involvedObject.kind=DDPJob,involvedObject.name={job.name}")


def _events(kubectl: Kubectl, job: Job, selector: str) -> list[Object]:
    return kubectl.items("events", "-n", job.namespace, f"--field-selector={selector}")


def story(job: Job, events: Iterable[Object]) -> list[Happening]:
    """Sort the Events and failures of a job by time; join equal ones."""
    found = [one for event in events if (one := _of_event(job, event)) is not None]
    found += [_of_failure(failure) for failure in job.failures]
    return sorted(_together(sorted(found, key=_when)), key=_when)


def lines(found: Sequence[Happening], now: datetime, columns: int, most: int = _LINES) -> list[str]:
    """Format the table."""
    head = ("AGE", "ABOUT", "ATTEMPT", "ROUND", "REASON", "MESSAGE")
    rows = []
    for one in found:
        about = gang.named(one.replicas) if one.replicas else "job"
        rows.append([_age(one, now), about, one.attempt, one.round, one.reason, one.message])
    return wrapped_table(head, rows, columns, most)


def _of_event(job: Job, event: Object) -> Happening | None:
    """Read an Event; None for those of another job, or a former namesake."""
    about = event["involvedObject"]
    replicas: tuple[int, ...] = ()
    series = event.get("series") or {}
    last = _first_of(
        series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"),
        event["metadata"].get("creationTimestamp"),
    )  # fmt: skip
    first = _first_of(event.get("firstTimestamp"), event.get("eventTime")) or last
    if last is None or first is None:
        return None
    message = str(event.get("message") or "")
    if about.get("kind") == "DDPJob":
        if about.get("uid") != job.uid:
            return None
    else:
        # Pods of past attempts had the same names, and their uids are unknown by now.
        pod = re.fullmatch(rf"{re.escape(job.name)}-(\d{{1,5}})", str(about.get("name", "")))
        if not pod or int(pod[1]) >= job.seats:
            return None
        if last < (moment(job.obj["metadata"].get("creationTimestamp")) or _ANY):
            return None
        replicas = (int(pod[1]),)
        message = message.replace(str(about["name"]), _POD)
    count = int(series.get("count") or event.get("count") or 1)
    reason = str(event.get("reason") or NONE)
    version = str(event["metadata"].get("resourceVersion", ""))
    return Happening(
        first, last, count, _OF_POD if replicas else _OF_JOB, replicas, reason, message,
        version=int(version) if version.isdecimal() else 0,
    )  # fmt: skip


def _of_failure(failure: Object) -> Happening:
    at = moment(failure.get("detectedAt")) or _ANY
    alone = "replaced alone" if failure.get("replaced") else ""
    place = f"on {failure['node']}" if "node" in failure else ""
    said = (", ".join(filter(None, (place, alone))), failure.get("message", ""))
    words = [failure.get("class"), failure.get("reason")]
    return Happening(
        at, at, 1, _FAILED,
        (int(failure["replica"]),) if "replica" in failure else (),
        "/".join(dict.fromkeys(str(word) for word in words if word)) or "Failure",
        "\n".join(part for part in said if part),
        str(failure.get("attempt", NONE)),
        str(failure.get("round", NONE)),
    )  # fmt: skip


def _together(found: Iterable[Happening]) -> list[Happening]:
    """Join equal words about several replicas at about the same time."""
    result: list[Happening] = []
    places: dict[tuple[str, str], int] = {}
    for one in found:
        key = one.reason, one.message
        at = places.get(key)
        if one.order == _OF_POD and at is not None and one.last - result[at].last <= _TOGETHER:
            old = result[at]
            replicas = tuple(sorted({*old.replicas, *one.replicas}))
            count, first = old.count + one.count, min(old.first, one.first)
            result[at] = replace(old, last=one.last, first=first, count=count, replicas=replicas)
            continue
        if one.order == _OF_POD:
            places[key] = len(result)
        result.append(one)
    return result


def _when(one: Happening) -> tuple[datetime, int, int]:
    """Sort by time, then order: most Events have whole seconds."""
    return one.last.replace(microsecond=0), one.order, one.version


def _age(one: Happening, now: datetime) -> str:
    age = since(one.last, now)
    if one.count <= max(1, len(one.replicas)):
        return age
    return f"{age} (x{one.count} over {since(one.first, now)})"


def _first_of(*times: str | None) -> datetime | None:
    return next((moment(time) for time in times if time), None)
