"""Jobs that were stored before a rule of today: what of them may still change, and what is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from support.cluster import CRD, Cluster, wait_for
from support.manifest import as_json, changed, ddpjob

NAMESPACE, GROUP, PLURAL = "before", "before.ddpjob.dev", "oldjobs"
POD = "spec.template.spec"
SNAPSHOT = {"path": "/snapshots", "volume": {"nfs": {"server": "s", "path": "/p"}}}

#: What is refused today and was not always, and the words.
BEFORE = {
    "several containers, none a trainer": (
        changed(
            # A field that CEL has no type for: such an object never counts as unchanged.
            changed(ddpjob(), f"{POD}.containers", [{"name": n, "image": "i"} for n in "ab"]),
            f"{POD}.nodeSelector",
            {"gpu": "a"},
        ),
        "of several containers the one that trains must be named trainer",
    ),
    "a $ in the path": (
        ddpjob(snapshot=changed(SNAPSHOT, "path", "/$(A)")),
        "spec.snapshot.path must be an absolute directory",
    ),
    "a null for the volume": (
        ddpjob(snapshot=changed(SNAPSHOT, "volume", {"secret": None})),
        "spec.snapshot.volume",
    ),
}


def definition(*, today: bool) -> dict[str, Any]:
    """Ours under another name, as nobody else's test may see it change."""
    found: dict[str, Any] = yaml.safe_load(CRD.read_text())
    found["metadata"]["name"] = f"{PLURAL}.{GROUP}"
    found["spec"]["group"] = GROUP
    found["spec"]["names"] = {"kind": "OldJob", "plural": PLURAL, "singular": "oldjob"}
    if not today:
        schema = found["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        del schema["properties"]["spec"]["properties"]["snapshot"]["properties"]["volume"][
            "properties"
        ]["secret"]
        _forget_rules(schema)
    return found


def _forget_rules(schema: Any) -> None:
    if isinstance(schema, dict):
        schema.pop("x-kubernetes-validations", None)
        for each in schema.values():
            _forget_rules(each)


@pytest.fixture(scope="module")
def plane(control_plane: Cluster) -> Iterator[Cluster]:
    """Holds the jobs of BEFORE, and has the rules of today."""
    kubectl, ours = control_plane.kubectl, f"{PLURAL}.{GROUP}"
    kubectl("create", "namespace", NAMESPACE, check=True)
    kubectl("create", "-f", "-", input=json.dumps(definition(today=False)), check=True)
    wait_for(lambda: kubectl("get", ours, "-A").returncode == 0 or None, f"{PLURAL} to be served")
    for number, (body, _) in enumerate(BEFORE.values()):
        assert create(control_plane, f"job{number}", body) == ""
    assert create(control_plane, "other", ddpjob()) == ""
    stored = json.loads(kubectl("get", "crd", ours, "-o", "json", check=True).stdout)
    new = {**definition(today=True), "metadata": stored["metadata"]}
    kubectl("replace", "-f", "-", input=json.dumps(new), check=True)
    body, words = next(iter(BEFORE.values()))
    wait_for(lambda: words in create(control_plane, "new", body) or None, "the rules of today")
    yield control_plane
    kubectl("delete", "crd", ours, "--wait=false")


def create(plane: Cluster, name: str, body: dict[str, Any]) -> str:
    """Return what is said against it; "" where it is stored."""
    meta = {"apiVersion": f"{GROUP}/v1alpha1", "kind": "OldJob", "metadata": {"name": name}}
    command = ("create", "-n", NAMESPACE, "--validate=false", "-f", "-")
    done = plane.kubectl(*command, input=as_json({**body, **meta}))
    return done.stderr if done.returncode else ""


def patch(plane: Cluster, name: str, body: dict[str, Any], *args: str) -> str:
    """Return what is said against it."""
    command = ("patch", f"{PLURAL}.{GROUP}", name, "-n", NAMESPACE, "--type=merge", *args, "-p")
    done = plane.kubectl(*command, json.dumps(body))
    return done.stderr if done.returncode else ""


@pytest.mark.parametrize("number", range(len(BEFORE)), ids=BEFORE)
def test_a_job_of_before_a_rule_goes_on_to_its_end(plane: Cluster, number: int) -> None:
    name = f"job{number}"
    body, words = list(BEFORE.values())[number]
    assert words in create(plane, "new", body)

    def status(**told: Any) -> str:
        return patch(plane, name, {"status": told}, "--subresource=status")

    for attempt in (1, 2):
        assert status(phase="Running", attempt=attempt) == ""
    for metadata in ({"labels": {"team": "a"}, "finalizers": ["a.b/c"]}, {"finalizers": None}):
        assert patch(plane, name, {"metadata": metadata}) == ""
    for change in ({"hang": {"stepSeconds": 99}}, {"suspend": True}):
        assert patch(plane, name, {"spec": change}) == ""
    other = {"template": {"spec": {"priorityClassName": "low"}}}
    assert patch(plane, name, {"spec": other}) == "", "which does not touch what is wrong"
    assert patch(plane, name, {"spec": {"suspend": False}}) == ""
    assert status(phase="Failed") == ""
    assert patch(plane, name, {"spec": {"ttlSecondsAfterFinished": 60}}) == ""


def test_what_was_right_cannot_become_wrong(plane: Cluster) -> None:
    body, words = next(iter(BEFORE.values()))
    assert patch(plane, "other", {"spec": {"suspend": True}}) == ""
    containers = {"containers": body["spec"]["template"]["spec"]["containers"]}
    assert words in patch(plane, "other", {"spec": {"template": {"spec": containers}}})
