"""Run `ddpjob-trainer snapshot ls` in a pod of the job: `kubectl ddp snapshots`."""

from __future__ import annotations

import argparse

from ddpjob_contract.crd import TERMINAL_PHASES
from kubectl_ddp import gang
from kubectl_ddp.failure import Failure
from kubectl_ddp.gang import Job
from kubectl_ddp.kubectl import Kubectl
from kubectl_ddp.text import clean

_DIRECTORY = "DDPJOB_SNAPSHOT_DIR"


def run(kubectl: Kubectl, options: argparse.Namespace) -> int:
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
    path = f"{job.spec['snapshot']['path']}/{job.name}"
    volume = job.spec["snapshot"].get("volume") or {}
    claim = (volume.get("persistentVolumeClaim") or {}).get("claimName")
    what = f"claim {claim}" if claim else "its snapshot volume"
    resume = "" if job.phase in TERMINAL_PHASES else "resume it, or "
    return (
        f"no pod of {job.name} runs: {resume}run `ddpjob-trainer snapshot ls {path}` in a pod that"
        f" mounts {what} at {job.spec['snapshot']['path']}, as in"
        " docs/start/your-script.md#the-weights"
    )
