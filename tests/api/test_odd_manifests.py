"""What becomes of odd DDPJobs, and when: tests/api/odd-manifests.md is what was seen."""

import os
import re
from typing import Any

import pytest

from api.odd_manifests import ODD, manifest
from support.arena import Arena
from support.cluster import ROOT
from support.rest import JOBS, Object, RestError, eventually

PAGE = ROOT / "tests" / "api" / "odd-manifests.md"
#: What a machine that is slow brings about, and what it is told of that; it passes by itself.
_PASSING = re.compile(r"ContainerCreating: |Unschedulable: .*no scheduler has looked at it yet")
_HEAD = re.compile(r'^(\S+ "[^"]*" is invalid|DDPJob in .* cannot be handled as a DDPJob): ')
_SAID = 80  # characters of a message that the page shows


@pytest.mark.fault("A5")
def test_each_is_told_what_is_wrong_and_none_is_failed_before_a_pod_ran(stage):
    found: dict[str, tuple[str, str]] = {}
    jobs: dict[str, str] = {}
    for number, name in enumerate(ODD):
        body = manifest(number, name)
        try:
            kept = apply(stage, body)
        except RestError as error:
            found[name] = ("refused at apply", str(error.body.get("message")))
        else:
            jobs[name] = kept["metadata"]["name"]
    for name, job in jobs.items():
        found[name] = eventually(f"{name} to come to rest", lambda j=job: at_rest(stage, j))
    for job in jobs.values():
        stage.remove(job)
    page = written({name: found[name] for name in ODD}, stage.namespace)
    if os.environ.get("DDPJOB_WRITE_PAGES"):
        PAGE.write_text(page)
    assert [name for name, (when, _) in found.items() if when in ("Failed", "Succeeded")] == []
    assert page == PAGE.read_text(), "look, and write it anew: DDPJOB_WRITE_PAGES=1"


def apply(stage: Arena, body: dict[str, Any]) -> Object:
    """As kubectl does: fields that nobody knows are refused."""
    group = f"/apis/{body['apiVersion']}" if body["apiVersion"] != JOBS[6:] else JOBS
    path = f"{group}/namespaces/{stage.namespace}/ddpjobs?fieldValidation=Strict"
    return stage.rest.post(path, body)


def at_rest(stage: Arena, job: str) -> tuple[str, str] | None:
    """When it was told, and what."""
    status = stage.status(job)
    if status.get("phase") in ("Failed", "Running", "Succeeded"):
        what = "good" if status["phase"] == "Running" else str(status["phase"])
        return what, str((status.get("lastFailure") or {}).get("message", ""))
    told = {c["type"]: c for c in status.get("conditions") or () if c["status"] == "True"}
    for kind in ("Invalid", "Stalled"):
        if kind in told and not _PASSING.match("{reason}: {message}".format_map(told[kind])):
            return f"{kind}: {told[kind]['reason']}", told[kind]["message"]
    return None


def written(found: dict[str, tuple[str, str]], namespace: str) -> str:
    """The page; what differs from run to run is left out."""
    lines = [
        "# Odd manifests",
        "",
        f"{len(found)} DDPJobs as people send them by mistake or on purpose, and the answer to",
        "each: at `kubectl apply`, or in a condition of the job (`kubectl describe`), before any",
        "pod runs. None ends as Failed for it. `good`: the API server accepts job and pod.",
        "`Invalid`: suspend the job, apply the corrected manifest, resume",
        "([reasons.md](../../docs/reference/reasons.md)). Of a message the page has the first 80",
        "characters; `env[N]` counts what ddpjob sets first.",
        "",
        "| | when | what it says |",
        "|---|---|---|",
    ]
    for name, (when, said) in found.items():
        text = re.sub(r"\s+", " ", said.replace(namespace, "NAMESPACE"))
        text = re.sub(
            r"; (suspend the job, |(released all pods|no pod was made), next try in \d+ s).*",
            "",
            text,
        )
        text = re.sub(r"\benv\[\d\d\]", "env[N]", _HEAD.sub("", text))
        text = text.encode("unicode_escape").decode().replace("|", "\\|").replace("<", "&lt;")
        text = text if len(text) <= _SAID else f"{text[:_SAID]} …"
        lines.append(f"| {name} | {when} | {text} |")
    return "\n".join(lines) + "\n"
