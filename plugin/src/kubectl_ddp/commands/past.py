"""Print the log of one process or attempt: `kubectl ddp logs --attempt A --rank R`.

From the pod, as long as the one of that attempt is there, else from the evidence beside the
snapshots.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from kubectl_ddp import evidence, reader
from kubectl_ddp.failure import Failure
from kubectl_ddp.gang import Job, Member
from kubectl_ddp.kubectl import Kubectl
from kubectl_ddp.text import clean


def run(
    kubectl: Kubectl, job: Job, members: Mapping[int, Member], options: argparse.Namespace
) -> int:
    """Print it; raise Failure."""
    for name in ("follow", "since", "replica", "failed"):
        if getattr(options, name) not in (None, False):
            raise Failure(f"--{name} does not go with --attempt, --round or --rank: leave it out")
    for name in ("attempt", "round", "rank"):
        if (getattr(options, name) or 0) < 0:
            raise Failure(f"--{name} {getattr(options, name)}: a number from 0")
    member = _living(job, members, options)
    if member is not None:
        return _of_pod(kubectl, job, member, options)
    words = ["show"]
    for name in ("attempt", "round", "rank"):
        if getattr(options, name) is not None:
            words += [f"--{name}", str(getattr(options, name))]
    seat = -1 if options.rank is None else _seat(job, options.rank // _nproc(members))
    allowed = reader.consent(options)
    text = evidence.read(kubectl, job, members, *words, seat=seat, allowed=allowed)
    lines = text.splitlines()
    tail = len(lines) if options.tail is None else max(0, options.tail)
    for line in lines[len(lines) - tail :]:
        print(clean(line))
    return 0


def _living(job: Job, members: Mapping[int, Member], options: argparse.Namespace) -> Member | None:
    """Return the pod that has been the rank's since the attempt, if it is there.

    A pod's log does not say where a round begins, so those lines come from the evidence.
    """
    now = job.status.get("attempt", 0)
    if options.rank is None or options.round is not None or options.node:
        return None
    if options.attempt is not None and options.attempt > now:
        raise Failure(f"--attempt {options.attempt}: {job.name} has had {now}")
    nproc = _nproc(members)
    if options.rank >= nproc * job.replicas and members:
        raise Failure(f"--rank {options.rank}: {job.name} has 0 to {nproc * job.replicas - 1}")
    member = members.get(_seat(job, options.rank // nproc))
    moved = bool(job.status.get("serving"))
    if member is None or not member.started or moved:
        return None
    return member if options.attempt is None or member.attempt <= options.attempt else None


def _seat(job: Job, replica: int) -> int:
    return next((seat for one, seat in job.places if one == replica), -1)


def _nproc(members: Mapping[int, Member]) -> int:
    found = (one.environment("PET_NPROC_PER_NODE") for one in members.values())
    return max(1, next((int(text) for text in found if text.isdecimal()), 1))


def _of_pod(kubectl: Kubectl, job: Job, member: Member, options: argparse.Namespace) -> int:
    """Print the pod's log, of several processes the lines of one."""
    where = ("-n", job.namespace, member.name, "-c", member.container)
    nproc = int(member.environment("PET_NPROC_PER_NODE") or 1)
    tail = -1 if options.tail is None else options.tail
    if nproc == 1:
        kubectl.show("logs", *where, f"--tail={tail}")
        return 0
    mark = f"[rank {options.rank}] "
    lines = [
        line.removeprefix(mark)
        for line in kubectl.read("logs", *where).splitlines()
        if line.startswith(mark)
    ]
    print("\n".join(lines if tail < 0 else lines[len(lines) - min(tail, len(lines)) :]))
    return 0
