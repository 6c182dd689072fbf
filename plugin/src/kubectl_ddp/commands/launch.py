"""Run a script as a DDPJob, from its files to its result: `kubectl ddp run`; `init` writes it only.

The job comes first and owns the ConfigMap of its files, which goes with it; the claim stays.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import secrets
import sys
import time
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial

from ddpjob_contract import crd
from kubectl_ddp import gang
from kubectl_ddp.commands import logs
from kubectl_ddp.commands.status import FAILED, failure_line
from kubectl_ddp.gang import Job, moment
from kubectl_ddp.kubectl import DDPJOBS, Failure, Kubectl, Object
from kubectl_ddp.script import manifest, upload
from kubectl_ddp.script.dump import dumped
from kubectl_ddp.script.manifest import Made
from kubectl_ddp.text import clean, since

_HEAD = "# Written by kubectl ddp init; `kubectl explain ddpjob.spec` describes every field.\n"
#: Without vowels, as Kubernetes draws names.
_LETTERS = "bcdfghjklmnpqrstvwxz2456789"
_DRAWN = 5
_MOST_NAME = 53
_SIZE = "10Gi"
_INTERRUPTED = 130
_MARK = f"{crd.GROUP}/made-by-run"
_UNSEEN = 3  # looks within which the operator's first word comes


def init(kubectl: Kubectl, options: argparse.Namespace) -> int:
    """Print the manifest; raise Failure."""
    return _print(manifest.make(options))


def run(kubectl: Kubectl, options: argparse.Namespace) -> int:
    """Create the job and follow it to its end; return its exit code; raise Failure."""
    base = options.name or manifest.name_of(options)
    if not options.name:  # one that no snapshots are of: a new run begins at its beginning
        drawn = "".join(secrets.choice(_LETTERS) for _ in range(_DRAWN))
        options.name = f"{base[: _MOST_NAME - _DRAWN - 1].rstrip('-')}-{drawn}"
    if not options.snapshots:
        options.snapshots = f"{base}-snapshots"
        options.claim = options.claim or _SIZE
    made = manifest.make(options, may_upload=True)
    if options.dry_run:
        if made.uploads:
            _say(f"not in the manifest: the files, which run lays into {made.folder} of the claim")
        return _print(made)
    job = _created(kubectl, made)
    try:
        return _followed(kubectl, job)
    except KeyboardInterrupt:
        return _interrupted(kubectl, job)


def _print(made: Made) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # as YAML is, in any locale
    print(_HEAD + "---\n".join(map(dumped, made.objects)), end="")
    return 0


def _say(text: str) -> None:
    print(clean(text), file=sys.stderr, flush=True)


def _created(kubectl: Kubectl, made: Made) -> Job:
    of_kind = {one["kind"]: dict(one) for one in made.objects}
    body = of_kind[crd.KIND]
    name = body["metadata"]["name"]
    if _found(kubectl, DDPJOBS, name):
        raise Failure(
            f"there is a job {name}: give another --name, or none; or delete that one first"
            f" (kubectl delete ddpjob {name}{kubectl.more}): the new one goes on from its snapshots"
        )
    if claim := of_kind.get("PersistentVolumeClaim"):
        _claim(kubectl, claim)
    if made.uploads:
        upload.lay(kubectl, body, made.uploads, made.folder)
    body["metadata"] = {**body["metadata"], "annotations": {_MARK: secrets.token_hex(8)}}
    with contextlib.ExitStack() as undo:
        # Before: the signal may come when the server has it and kubectl has not said so.
        undo.callback(_remove, kubectl, body)
        try:
            job = Job(json.loads(_create(kubectl, body)))
        except Failure:  # also of a connection that broke when the server had it
            found = gang.patiently(partial(_ours, kubectl, body))
            if found is None:
                undo.pop_all()
                raise
            job = found
        if files := of_kind.get("ConfigMap"):
            _hold(kubectl, files, job)
        _say(f"{name}: created in namespace {job.namespace}, replicas: {job.replicas}")
        undo.pop_all()
    return job


def _ours(kubectl: Kubectl, body: Object) -> Job | None:
    """Return the job that this command has made, by its mark: another's may have the name."""
    mark = body["metadata"]["annotations"]
    found = _found(kubectl, DDPJOBS, body["metadata"]["name"])
    has = found["metadata"].get("annotations") or {} if found else {}
    return Job(found) if mark.items() <= has.items() else None


def _found(kubectl: Kubectl, *words: str) -> Object:
    """Return an object, an empty one where there is none."""
    found: Object = json.loads(
        kubectl.read("get", *words, "--ignore-not-found", "-o", "json") or "{}"
    )
    return found


def _claim(kubectl: Kubectl, body: Object) -> None:
    """Make it where it is missing; nothing deletes it: another run may use it at once."""
    name = body["metadata"]["name"]
    if _found(kubectl, "pvc", name):
        _say(f"claim {name}: used as it is")
        return
    _create(kubectl, body)
    _say(f"claim {name}: made, {body['spec']['resources']['requests']['storage']}; it stays")


def _hold(kubectl: Kubectl, body: Object, job: Job) -> None:
    """Create the job's ConfigMap; raise Failure where there is one that is no job's."""
    name, where = body["metadata"]["name"], ("-n", job.namespace)
    owner = {"apiVersion": crd.API_VERSION, "kind": crd.KIND, "name": job.name}
    body["metadata"]["ownerReferences"] = [{**owner, "uid": job.uid}]
    try:
        _create(kubectl, body, *where)
    except Failure:
        found = _found(kubectl, "configmap", name, *where)
        if not found:
            raise
        owners = found["metadata"].get("ownerReferences") or [{}]
        if not owner.items() <= owners[0].items():  # else one of a deleted job of this name
            raise Failure(
                f"there is a ConfigMap {name}, which is no job's: give another --name"
            ) from None
        kubectl.read("delete", "configmap", name, *where, "--ignore-not-found")
        _create(kubectl, body, *where)


def _create(kubectl: Kubectl, body: Object, *where: str) -> str:
    return kubectl.read("create", *where, "-f", "-", "-o", "json", given=json.dumps(body))


def _remove(kubectl: Kubectl, body: Object) -> None:
    name = body["metadata"]["name"]
    try:
        if job := _ours(kubectl, body):
            where = ("-n", job.namespace, "--ignore-not-found", "--wait=false")
            kubectl.read("delete", DDPJOBS, name, *where)
            _say(f"{name}: removed again")
    except Failure as failure:  # what went wrong before is what matters
        _say(f"{name} may be left: {failure}")


def _followed(kubectl: Kubectl, job: Job) -> int:
    last, times = job, deque([time.monotonic()], logs.BROKEN + 2)

    def looks() -> Iterator[Job]:
        nonlocal last
        shown = ("", "")
        for n, look in enumerate(gang.looks(kubectl, last)):
            last = look
            times.append(time.monotonic())
            if n == _UNSEEN and not last.phase:
                _say("the operator has not looked at it: does it run?")
            state = (last.phase, str(last.status.get("reason", "")))
            if state != shown and last.phase not in crd.TERMINAL_PHASES:
                why = f" ({state[1]}): {last.status.get('message', '')}" if state[1] else ""
                _say(f"{last.name}: {last.phase}{why}")
                shown = state
            yield last

    how_much, ended_by = ["--tail=-1"], ""
    while True:
        try:
            logs.follow(kubectl, looks(), set(range(job.seats)), how_much, waits=False)
        except logs.Broken as broken:  # the job goes on without them
            if str(broken) != ended_by:
                _say(f"{job.name}: no logs for now: {broken}")
            ended_by = str(broken)
            if last.phase not in crd.TERMINAL_PHASES:
                how_much = ["--tail=-1", f"--since={time.monotonic() - times[0] + 1:.0f}s"]
                continue
        break
    timings = last.status.get("timings") or {}
    ended = moment(timings.get("completedAt")) or datetime.now(UTC)
    took = since(moment(timings.get("startedAt")), ended)
    if last.phase == "Succeeded":
        _say(
            f"{job.name}: Succeeded, after {took}; `kubectl ddp cp {job.name} DIR{kubectl.more}`"
            " has its results"
        )
        return 0
    if failure := last.status.get("lastFailure"):
        _say(failure_line(failure, ended))
    cure = f"`kubectl ddp why {job.name}{kubectl.more}` says why"
    _say(f"{job.name}: {last.phase}, after {took}; {cure}")
    return FAILED


def _interrupted(kubectl: Kubectl, job: Job) -> int:
    if os.isatty(0) and os.isatty(2):
        print(f"\nLeave {job.name} running? [Y/n] ", end="", file=sys.stderr, flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            if sys.stdin.readline().strip().lower() in ("n", "no"):
                where = ("-n", job.namespace, "--wait=false")
                kubectl.read("delete", DDPJOBS, job.name, *where)
                _say(f"{job.name}: deleted; what it saved stays on its claim")
                return _INTERRUPTED
    _say(
        f"{job.name}: goes on; `kubectl ddp logs -f {job.name}{kubectl.more}` follows it again,"
        f" `kubectl delete ddpjob {job.name}{kubectl.more}` ends it"
    )
    return _INTERRUPTED
