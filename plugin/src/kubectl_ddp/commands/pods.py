"""Print the stacks of a process at the time it hung: `kubectl ddp stacks`."""

from __future__ import annotations

import argparse

from kubectl_ddp import gang
from kubectl_ddp.failure import Failure
from kubectl_ddp.kubectl import Kubectl
from kubectl_ddp.text import clean


def run(kubectl: Kubectl, options: argparse.Namespace) -> int:
    """Print the stacks of each pod that has some; raise Failure."""
    job = gang.find_job(kubectl, options.job)
    members = gang.find_members(kubectl, job)
    wanted = gang.chosen(job, options.replica)
    alive = [(job, n, one) for n, one in sorted(members.items()) if one.running and n in wanted]
    told, refusal = gang.ask(kubectl, alive, "state")
    if refusal:
        raise Failure(refusal)
    silent = [members[replica].name for (_, _, replica), say in told.items() if not say.state]
    shown = 0
    for (_, _, replica), say in told.items():
        if stacks := say.text("stacks"):
            place = f"attempt {say.number('attempt'):g}" if say.number("attempt") else ""
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
    if told and all(say.silent for say in told.values()):
        print(
            "no process in the pods that run has told of itself, so none is watched for hangs:"
            " plain scripts never do, others from ddp.start() or their adapter on"
        )
        return 0
    print("no process has hung in the pods that run")
    return 0
