"""Suspend or resume a job by spec.suspend: `kubectl ddp suspend` and `resume`."""

from __future__ import annotations

import argparse
import json

from ddpjob_contract.crd import TERMINAL_PHASES
from kubectl_ddp import gang
from kubectl_ddp.gang import Job
from kubectl_ddp.kubectl import DDPJOBS, Failure, Kubectl


def suspend(kubectl: Kubectl, options: argparse.Namespace) -> int:
    """Set spec.suspend; raise Failure."""
    job = _set(kubectl, options.job, True)
    if job is None:
        print(f"{options.job} is suspended already")
        return 0
    print(f"{job.name} is being suspended: its pods get SIGTERM and are removed.")
    if job.spec.get("snapshot"):
        step = (job.status.get("progress") or {}).get("snapshotStep")
        known = "" if step is None else f"; the newest known is of step {step}"
        print(f"Training with our library saves a snapshot first{known}.")
    else:
        print("It has no spec.snapshot: what its program does not save itself is lost.")
    print(f"`kubectl ddp resume {job.name}` starts new pods; neither counts against a budget.")
    return 0


def resume(kubectl: Kubectl, options: argparse.Namespace) -> int:
    """Unset spec.suspend; raise Failure."""
    job = _set(kubectl, options.job, False)
    if job is None:
        print(f"{options.job} is not suspended")
        return 0
    step = (job.status.get("progress") or {}).get("snapshotStep")
    goes_on = "starts"
    if job.spec.get("snapshot"):
        goes_on = "goes on from the newest snapshot"
        goes_on += "" if step is None else f", that of step {step} or newer"
    attempt = int(job.status.get("attempt", 0)) + 1
    print(f"{job.name} is being resumed: attempt {attempt} {goes_on}.")
    print(f"`kubectl ddp status {job.name}` shows the gang come up.")
    return 0


def _set(kubectl: Kubectl, name: str, value: bool) -> Job | None:
    """Return the job as it was before; None if it had the value."""
    job = gang.find_job(kubectl, name)
    if job.phase in TERMINAL_PHASES:
        raise Failure(
            f"{name} has {job.phase.lower()}, which is final: to train again delete it and apply"
            " it again"
        )
    if bool(job.spec.get("suspend")) == value:
        return None
    patch = json.dumps({"spec": {"suspend": value}})
    kubectl.read("patch", DDPJOBS, name, "--type=merge", "-p", patch)
    return job
