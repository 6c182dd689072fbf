"""`kubectl ddp logs`: the logs of a whole gang, or of the pod that failed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from datetime import UTC, datetime

from kubectl_ddp import gang
from kubectl_ddp.commands.status import failure_line
from kubectl_ddp.failure import Failure
from kubectl_ddp.gang import LABEL_REPLICA, LABEL_UID, Job, Member
from kubectl_ddp.kubectl import Kubectl
from kubectl_ddp.text import clean


def run(kubectl: Kubectl, options: argparse.Namespace) -> int:
    """Print them; raises Failure."""
    job = gang.find_job(kubectl, options.job)
    members = gang.find_members(kubectl, job)
    if options.failed:
        return _failed(kubectl, job, members, _how_much(options))
    wanted = gang.chosen(job, options.replica)
    chosen = {n: one for n, one in members.items() if n in wanted}
    started = {n: one for n, one in chosen.items() if one.started}
    for n, one in sorted(chosen.items()):
        if n not in started:
            print(f"{one.name}: no log yet: {one.state}", file=sys.stderr)
    if not started:
        raise Failure(
            f"{job.name} has no pod with a log: `kubectl ddp events {job.name}` says what happened"
        )
    words = [*_how_much(options), *(["-f"] if options.follow else [])]
    selector = f"{LABEL_UID}={job.uid}"
    if len(started) < len(members):
        selector += f",{LABEL_REPLICA} in ({','.join(map(str, sorted(started)))})"
    container = next(iter(started.values())).container
    words += ["-l", selector, "-c", container, "--prefix", "--ignore-errors"]
    # kubectl would show the last ten lines of each, and follow five pods at most.
    words += ["--tail=-1"] if options.tail is None else []
    words += [f"--max-log-requests={max(5, len(started))}"]
    kubectl.show("logs", "-n", job.namespace, *words)
    return 0


def _how_much(options: argparse.Namespace) -> list[str]:
    words = [f"--tail={options.tail}"] if options.tail is not None else []
    return [*words, *([f"--since={options.since}"] if options.since else [])]


def _failed(kubectl: Kubectl, job: Job, members: Mapping[int, Member], how_much: list[str]) -> int:
    """What the status tells of the last failure, and the log of that pod while it is there."""
    failure = job.status.get("lastFailure")
    if not failure:
        print(f"{job.name} has had no failure")
        return 0
    told = clean(failure_line(failure, datetime.now(UTC)))
    member = members.get(int(failure.get("replica", -1)))
    if member is None or member.attempt != failure.get("attempt") or not member.started:
        print(told)
        where = f"the pod of attempt {failure.get('attempt')}"
        print(f"\n{where} is gone, and its log with it: above is what the status keeps of it")
        return 0
    print(told.partition("\n")[0])
    print(f"\n--- {member.name}, attempt {member.attempt}", flush=True)
    kubectl.show("logs", "-n", job.namespace, member.name, "-c", member.container, *how_much)
    return 0
