"""Print a whole gang's logs, or the failed pod's: `kubectl ddp logs`."""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import IO

from ddpjob_contract.crd import LABEL_ATTEMPT, LABEL_JOB_UID, LABEL_REPLICA, TERMINAL_PHASES
from kubectl_ddp import evidence, gang, reader
from kubectl_ddp.commands.status import failure_line, seat_of
from kubectl_ddp.gang import Job, Member
from kubectl_ddp.kubectl import Failure, Kubectl, judge
from kubectl_ddp.text import clean, ranges

#: Looks until a stream that ended before its container counts as broken: kubelets report late.
BROKEN = 5


class Broken(Failure):
    """The logs are no longer followed; the job may go on."""


def run(kubectl: Kubectl, options: argparse.Namespace) -> int:
    """Print the logs; raise Failure."""
    job = gang.find_job(kubectl, options.job)
    members = gang.find_members(kubectl, job)
    if options.failed:
        return _failed(kubectl, job, members, _how_much(options))
    if (options.attempt, options.round, options.rank) != (None, None, None):
        return _past(kubectl, job, members, options)
    wanted = gang.chosen(job, options.replica)
    if options.follow and job.phase not in TERMINAL_PHASES:
        return follow(kubectl, gang.looks(kubectl, job), wanted, _how_much(options))
    chosen = {n: one for n, one in sorted(members.items()) if n in wanted}
    started = {n: one for n, one in chosen.items() if one.started}
    waiting = [one for one in chosen.values() if not one.started]
    for one in waiting:
        print(f"{one.name}: no log yet: {one.state}", file=sys.stderr)
        if one.failed_init:
            _of_init(kubectl, job, one, _how_much(options))
    if not started:
        if any(one.failed_init for one in waiting):
            return 0
        raise Failure(
            f"{job.name} has no pod with a log: `kubectl ddp events {job.name}` says what happened"
        )
    # For a job that has ended, the rest of its logs is followed.
    words = [*_how_much(options), *(["-f"] if options.follow else [])]
    some = f",{_of(started)}" if len(started) < len(members) else ""
    kubectl.show(*_words(job, started, some), *words)
    return 0


def _words(job: Job, started: Mapping[int, Member], selected: str) -> list[str]:
    """Build kubectl's arguments for the logs of these pods."""
    container = next(iter(started.values())).container
    words = ["-n", job.namespace, "-l", f"{LABEL_JOB_UID}={job.uid}{selected}", "-c", container]
    # kubectl would follow five pods at most.
    most = f"--max-log-requests={max(5, len(started))}"
    return ["logs", *words, "--prefix", "--ignore-errors", most]


def _of(members: Mapping[int, Member]) -> str:
    return f"{LABEL_REPLICA} in ({','.join(map(str, sorted(members)))})"


def _how_much(options: argparse.Namespace) -> list[str]:
    # Without a number kubectl would show the last ten lines of each.
    return [f"--tail={options.tail}", *([f"--since={options.since}"] if options.since else [])]


def follow(
    kubectl: Kubectl,
    looks: Iterable[Job],
    wanted: set[int],
    how_much: list[str],
    *,
    waits: bool = True,
) -> int:
    """Show the logs of each attempt's pods, until the job ends; raise Failure, Broken if logs end.

    ``waits``: say what the job waits for.
    """
    attempt, version, shown, broken = 0, "", "", 0
    with contextlib.ExitStack() as stack:
        streams = _Streams(kubectl, stack)
        for look in looks:
            alive = streams.alive()
            if alive and look.version == version and wanted <= streams.followed.keys():
                continue
            version = look.version
            members = gang.patiently(partial(gang.find_members, kubectl, look))
            members = {n: one for n, one in members.items() if n in wanted}
            fresh = {
                n: one
                for n, one in members.items()
                if one.started and streams.followed.get(n) != one.uid
            }
            newest = max((one.attempt for one in fresh.values()), default=attempt)
            if attempt and newest > attempt:
                whose = f"replica{'s' * (len(fresh) > 1)} {ranges(fresh)}"
                print(f"attempt {newest}: new pods, whose logs follow: {whose}", file=sys.stderr)
                how_much = ["--tail=-1"]
            attempt = newest
            if fresh:
                streams.begin(look, fresh, how_much)
            elif look.phase in TERMINAL_PHASES and not alive:
                return 0
            elif waits and look.phase != shown and (not attempt or look.phase == "Suspended"):
                state = look.phase or "not seen yet"
                print(f"{look.name} is {state}: logs follow when pods start", file=sys.stderr)
                shown = look.phase
            # A lost node's pod keeps its phase Running: follow it no more once it is to go.
            on = {n for n, one in members.items() if one.running and one.state != "Terminating"}
            still = on & streams.followed.keys()
            broken = broken + 1 if still and not fresh and not alive else 0
            if broken >= BROKEN:
                again = f"`kubectl ddp logs -f {look.name} --since 1m{kubectl.more}` goes on"
                raise Broken(f"the stream of logs has broken off: {again}")
    return 0


class _Streams:
    """Several kubectl, each of which follows the pods that have started at about one time."""

    def __init__(self, kubectl: Kubectl, stack: contextlib.ExitStack) -> None:
        self._kubectl, self._stack = kubectl, stack
        self._open: list[tuple[subprocess.Popen[str], IO[str]]] = []
        self.followed: dict[int, str] = {}  # replicas, and the uids of their pods

    def begin(self, job: Job, fresh: Mapping[int, Member], how_much: list[str]) -> None:
        """Follow these pods."""
        attempt = max(one.attempt for one in fresh.values())
        words = _words(job, fresh, f",{LABEL_ATTEMPT}={attempt},{_of(fresh)}")
        said = self._stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8"))  # noqa: SIM115
        process = self._kubectl.running(*words, *how_much, "-f", stderr=said)
        self._open.append((self._stack.enter_context(process), said))
        self.followed |= {n: one.uid for n, one in fresh.items()}

    def alive(self) -> bool:
        """Tell whether one still follows; raise the error of one that has ended."""
        for process, said in self._open:
            if process.poll() is not None:
                said.seek(0)
                try:
                    judge(process, said.read())
                except Failure as failure:
                    raise Broken(str(failure)) from None
        self._open = [(process, said) for process, said in self._open if process.poll() is None]
        return bool(self._open)


def _of_init(kubectl: Kubectl, job: Job, member: Member, how_much: list[str]) -> None:
    """Print the log of the init container that keeps the trainer from starting."""
    container = member.failed_init
    print(f"\n--- {member.name}, init container {container}", flush=True)
    kubectl.show("logs", "-n", job.namespace, member.name, "-c", container, *how_much)


def _failed(kubectl: Kubectl, job: Job, members: Mapping[int, Member], how_much: list[str]) -> int:
    """Print the status's last failure, and the log of its pod while it exists."""
    failure = job.status.get("lastFailure")
    if not failure:
        print(f"{job.name} has had no failure")
        return 0
    print(clean(failure_line(failure, datetime.now(UTC))))
    member = members.get(seat_of(failure))
    there = member is not None and member.attempt <= failure.get("attempt", 0)
    if member is not None and there and not member.started and member.failed_init:
        _of_init(kubectl, job, member, how_much)
        return 0
    if member is None or not there or not member.started:
        if failure.get("message"):
            print(clean(str(failure["message"])))
        where = f"the pod of attempt {failure.get('attempt')}"
        print(f"\n{where} is gone, and its log with it: above is what the status keeps of it")
        return 0
    print(f"\n--- {member.name}, attempt {member.attempt}", flush=True)
    kubectl.show("logs", "-n", job.namespace, member.name, "-c", member.container, *how_much)
    return 0


def _past(
    kubectl: Kubectl, job: Job, members: Mapping[int, Member], options: argparse.Namespace
) -> int:
    """Print the log of an attempt, round or rank; raise Failure.

    From its pod while that is there, else from the evidence beside the snapshots.
    """
    for name in ("follow", "since", "replica", "failed"):
        if getattr(options, name) not in (None, False):
            raise Failure(f"--{name} does not go with --attempt, --round or --rank: leave it out")
    words = ["show"]
    for name in ("attempt", "round", "rank"):
        number = getattr(options, name)
        if number is not None and number < 0:
            raise Failure(f"--{name} {number}: a number from 0")
        words += [] if number is None else [f"--{name}", str(number)]
    member = _living(job, members, options)
    if member is not None:
        return _of_pod(kubectl, job, member, options)
    seat = -1 if options.rank is None else number_of(job, options.rank // processes(members))
    allowed = reader.consent(options)
    text = evidence.read(kubectl, job, members, *words, seat=seat, allowed=allowed)
    _print_last(map(clean, text.splitlines()), options.tail)
    return 0


def _print_last(lines: Iterable[str], tail: int) -> None:
    """Print the last lines; by a negative number, as kubectl has it, all."""
    for line in deque(lines, None if tail < 0 else tail):
        print(line)


def _living(job: Job, members: Mapping[int, Member], options: argparse.Namespace) -> Member | None:
    """Return the pod that has been the rank's since the attempt, if it is there.

    A pod's log does not say where a round begins, so those lines come from the evidence.
    """
    now = job.status.get("attempt", 0)
    if options.rank is None or options.round is not None or options.node:
        return None
    if options.attempt is not None and options.attempt > now:
        raise Failure(f"--attempt {options.attempt}: {job.name} has had {now}")
    each = processes(members)
    if options.rank >= each * job.replicas and members:
        raise Failure(f"--rank {options.rank}: {job.name} has 0 to {each * job.replicas - 1}")
    member = members.get(number_of(job, options.rank // each))
    moved = bool(job.status.get("serving"))
    if member is None or not member.started or moved:
        return None
    return member if options.attempt is None or member.attempt <= options.attempt else None


def number_of(job: Job, replica: int) -> int:
    """Return the number of the pod that serves a replica, -1: none."""
    return next((seat for one, seat in job.places if one == replica), -1)


def processes(members: Mapping[int, Member]) -> int:
    """Return how many processes a pod has."""
    found = (one.environment("PET_NPROC_PER_NODE") for one in members.values())
    return max(1, next((int(text) for text in found if text.isdecimal()), 1))


def _of_pod(kubectl: Kubectl, job: Job, member: Member, options: argparse.Namespace) -> int:
    """Print the pod's log, of several processes the lines of one."""
    where = ("-n", job.namespace, member.name, "-c", member.container)
    if processes({0: member}) == 1:
        kubectl.show("logs", *where, f"--tail={options.tail}")
        return 0
    mark = f"[rank {options.rank}] "
    lines = kubectl.read("logs", *where).splitlines()
    _print_last((one.removeprefix(mark) for one in lines if one.startswith(mark)), options.tail)
    return 0
