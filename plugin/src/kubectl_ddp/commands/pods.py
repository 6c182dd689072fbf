"""Ask the pods of a job: `kubectl ddp stacks` and `kubectl ddp snapshots`."""

from __future__ import annotations

import argparse

from ddpjob_contract.crd import TERMINAL_PHASES
from kubectl_ddp import gang, reader
from kubectl_ddp.gang import Job
from kubectl_ddp.kubectl import Failure, Kubectl
from kubectl_ddp.text import clean


def stacks(kubectl: Kubectl, options: argparse.Namespace) -> int:
    """Print the stacks of each pod that has some; raise Failure."""
    job = gang.find_job(kubectl, options.job)
    members = gang.find_members(kubectl, job)
    wanted = gang.chosen(job, options.replica)
    alive = [(job, n, one) for n, one in sorted(members.items()) if one.running and n in wanted]
    reports, refusal = gang.ask(kubectl, alive, "state")
    if refusal:
        raise Failure(refusal)
    silent = [
        members[replica].name for (_, _, replica), report in reports.items() if not report.state
    ]
    shown = 0
    for (_, _, replica), report in reports.items():
        if stacks := report.text("stacks"):
            place = f"attempt {report.number('attempt'):g}" if report.number("attempt") else ""
            print(f"--- {members[replica].name}, {place}: the last process that hung")
            print(clean(stacks).rstrip(), end="\n\n")
            shown += 1
    if shown:
        return 0
    for failure in reversed(job.failures):
        if failure.get("class") == "Hang" and failure.get("replica") in wanted:
            print(
                f"the pod of replica {failure.get('replica')} in attempt {failure.get('attempt')}"
                " is gone; what the status keeps of it:"
            )
            print(clean(failure.get("message", "")))
            return 0
    if silent:
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


_DIRECTORY = "DDPJOB_SNAPSHOT_DIR"


def snapshots(kubectl: Kubectl, options: argparse.Namespace) -> int:
    """Print the list; raises Failure."""
    job = gang.find_job(kubectl, options.job)
    if not job.spec.get("snapshot"):
        raise Failure(f"{job.name} has no spec.snapshot, so it makes no snapshots")
    members = gang.find_members(kubectl, job)
    alive = [member for _, member in sorted(members.items()) if member.running]
    if not alive:
        raise Failure(_without_pods(job))
    member = alive[0]
    command = ["ddpjob-trainer", "snapshot", "ls", member.environment(_DIRECTORY)]
    where = ("-n", job.namespace, member.name, "-c", member.container)
    for line in kubectl.read("exec", *where, "--", *command).splitlines():
        print(clean(line))  # the job's image may print what it likes
    return 0


def _without_pods(job: Job) -> str:
    resume = "" if job.phase in TERMINAL_PHASES else "resume it, or "
    by_hand = reader.by_hand(job, "ddpjob-trainer snapshot ls")
    where = "docs/start/your-script.md#the-weights"
    return f"no pod of {job.name} runs: {resume}run {by_hand}, as in {where}"
