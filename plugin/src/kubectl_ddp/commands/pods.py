"""Ask the pods of a job: `kubectl ddp stacks`, `profile` and `snapshots`."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from subprocess import PIPE

from ddpjob_contract import SNAPSHOT_DIR
from ddpjob_contract.crd import TERMINAL_PHASES
from kubectl_ddp import gang, reader
from kubectl_ddp.commands import logs
from kubectl_ddp.gang import Job, Member
from kubectl_ddp.kubectl import Failure, Kubectl, explained
from kubectl_ddp.text import clean, ranges

_AT_ONCE = 32  # kubectl that run beside each other
#: Each rank's stacks follow such a line. Threads have other addresses in each process.
_RANK = re.compile(r"^--- rank (\d+)(.*)\n", re.MULTILINE)
_ADDRESS = re.compile(r"0x[0-9a-f]+|\bpid \d+|Process \d+")


def stacks(kubectl: Kubectl, options: argparse.Namespace) -> int:
    """Print where the processes of each pod are now, or were as they hung; raise Failure."""
    job = gang.find_job(kubectl, options.job)
    members = gang.find_members(kubectl, job)
    wanted = gang.chosen(job, options.replica)
    if options.hung:
        return _hung(kubectl, job, members, wanted)
    alive = [one for n, one in sorted(members.items()) if one.running and n in wanted]
    if not alive:
        raise Failure(
            f"no pod of {job.name} runs: `kubectl ddp stacks {job.name} --hung` shows the last hang"
        )

    found = _in_pods(kubectl, job, alive, "stacks")
    texts = [text for text in found if isinstance(text, str)]
    if isinstance(found[0], Failure) and not texts:
        raise found[0]
    for member, text in zip(alive, found, strict=True):
        if isinstance(text, Failure):
            print(f"{member.name}: {clean(str(text))}", file=sys.stderr)
    for ranks, how, shown in grouped(texts):
        print(f"--- rank{'s' * (len(ranks) > 1)} {ranges(ranks)}{how}\n{clean(shown)}\n")
    return 0


def grouped(texts: Iterable[str]) -> list[tuple[list[int], str, str]]:
    """Group ranks whose stacks are equal: the ranks, by which program, the text of the first."""
    groups: dict[tuple[str, str], tuple[list[int], str, str]] = {}
    for text in texts:
        _, *parts = _RANK.split(text)
        for rank, how, shown in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
            key = how, _ADDRESS.sub("", shown)
            groups.setdefault(key, ([], how, shown.rstrip()))[0].append(int(rank))
    return sorted(groups.values())


def profile(kubectl: Kubectl, options: argparse.Namespace) -> int:
    """Have a rank profile its next steps; print where the trace lies. Raises Failure."""
    job = gang.find_job(kubectl, options.job)
    members = gang.find_members(kubectl, job)
    member = members.get(logs.number_of(job, options.rank // logs.processes(members)))
    if member is None or not member.running:
        raise Failure(f"no pod of {job.name} runs rank {options.rank}")
    words = ("--rank", str(options.rank), "--steps", str(options.steps))
    path = clean(kubectl.read(*_exec(job, member, "profile", *words)).strip())
    print(path)
    print(
        f"`kubectl ddp cp {job.name}:{path} DIR` brings it; ui.perfetto.dev shows it",
        file=sys.stderr,
    )
    return 0


def _exec(job: Job, member: Member, *words: str) -> tuple[str, ...]:
    where = ("-n", job.namespace, member.name, "-c", member.container)
    return ("exec", *where, "--", "ddpjob-trainer", *words)


def _in_pods(
    kubectl: Kubectl, job: Job, members: Sequence[Member], *words: str
) -> list[str | Failure]:
    """Run the command in all pods, in some at once; return what each printed, or why not."""
    found: list[str | Failure] = []
    start = partial(kubectl.running, stdout=PIPE, stderr=PIPE)
    while some := members[len(found) :][:_AT_ONCE]:
        with contextlib.ExitStack() as stack:
            begun = [stack.enter_context(start(*_exec(job, one, *words))) for one in some]
            for process in begun:
                out, said = process.communicate()
                found.append(Failure(explained(said)) if process.returncode else out)
    return found


def _hung(kubectl: Kubectl, job: Job, members: Mapping[int, Member], wanted: set[int]) -> int:
    alive = [(job, n, one) for n, one in sorted(members.items()) if one.running and n in wanted]
    reports, refusal = gang.ask(kubectl, alive, "state")
    if refusal:
        raise Failure(refusal)
    hung = {n: report for (_, _, n), report in reports.items() if report.text("stacks")}
    for n, report in hung.items():
        place = f"attempt {report.number('attempt'):g}" if report.number("attempt") else ""
        print(f"--- {members[n].name}, {place}: the last process that hung")
        print(clean(report.text("stacks")).rstrip(), end="\n\n")
    if hung:
        return 0
    for failure in reversed(job.failures):
        if failure.get("class") == "Hang" and failure.get("replica") in wanted:
            print(
                f"the pod of replica {failure.get('replica')} in attempt {failure.get('attempt')}"
                " is gone; what the status keeps of it:"
            )
            print(clean(failure.get("message", "")))
            return 0
    if silent := [members[n].name for (_, _, n), report in reports.items() if not report.state]:
        raise Failure(
            f"no answer from {', '.join(silent)}: the launcher may be starting, or gone; pods of"
            " torchrun or python have none, and so no stacks: `ddpjob-trainer run` is one"
        )
    if reports and all(report.silent for report in reports.values()):
        print(
            "no process in the pods that run has reported anything, so none is watched for hangs:"
            " plain scripts never do, others from ddp.start() or their adapter on"
        )
        return 0
    print("no process has hung in the pods that run")
    return 0


def snapshots(kubectl: Kubectl, options: argparse.Namespace) -> int:
    """Print the list; raises Failure."""
    job = gang.find_job(kubectl, options.job)
    if not job.spec.get("snapshot"):
        raise Failure(f"{job.name} has no spec.snapshot, so it makes no snapshots")
    members = gang.find_members(kubectl, job)
    alive = [member for _, member in sorted(members.items()) if member.running]
    if not alive:
        raise Failure(_without_pods(job))
    words = ("snapshot", "ls", alive[0].environment(SNAPSHOT_DIR))
    for line in kubectl.read(*_exec(job, alive[0], *words)).splitlines():
        print(clean(line))  # the job's image may print what it likes
    return 0


def _without_pods(job: Job) -> str:
    resume = "" if job.phase in TERMINAL_PHASES else "resume it, or "
    by_hand = reader.by_hand(job, "ddpjob-trainer snapshot ls")
    where = "docs/start/your-script.md#the-weights"
    return f"no pod of {job.name} runs: {resume}run {by_hand}, as in {where}"
