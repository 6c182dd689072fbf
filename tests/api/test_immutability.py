"""Which fields of a DDPJob may change, and when: real updates through `kubectl apply`."""

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from support.cluster import Cluster
from support.manifest import DELETE, as_json, changed, ddpjob

NAMESPACE = "immutability"
TRAINER = "spec.template.spec.containers.0"
SNAPSHOT = {"path": "/snapshots", "volume": {"persistentVolumeClaim": {"claimName": "a"}}}
NFS = {"path": "/s", "volume": {"nfs": {"server": "s", "path": "/p"}}}
CPU = {"limits": {"cpu": "1"}}
_numbers = itertools.count()


@pytest.fixture(scope="module")
def plane(control_plane: Cluster) -> Iterator[Cluster]:
    control_plane.kubectl("create", "namespace", NAMESPACE, check=True)
    yield control_plane
    control_plane.kubectl("delete", "ddpjobs", "--all", "-n", NAMESPACE, "--wait=false")


def replace(plane: Cluster, body: dict[str, Any], *args: str) -> str:
    """PUT the whole object, so that removed fields are gone; "" or the refusal."""
    done = plane.kubectl("replace", "-n", NAMESPACE, "-f", "-", *args, input=as_json(body))
    return done.stderr if done.returncode else ""


@pytest.fixture
def stored(plane: Cluster) -> dict[str, Any]:
    """A new DDPJob with a snapshot, as it was accepted."""
    body = ddpjob(f"job{next(_numbers)}", snapshot=SNAPSHOT)
    body = changed(body, f"{TRAINER}.resources", CPU)
    body = changed(body, "spec.template.spec.volumes", [{"name": "v", "emptyDir": {}}])
    body = changed(body, "spec.template.spec.schedulerName", "mine")
    plane.kubectl("create", "-n", NAMESPACE, "-f", "-", input=as_json(body), check=True)
    return body


FIXED = (
    ("spec.replicas", 4),
    ("spec.standby", 1),
    ("spec.standbyPriorityClassName", "low"),
    ("spec.scheduling", {"gang": "Native"}),
    ("spec.scheduling.topologyKey", "rack"),
    ("spec.nprocPerNode", 2),
    ("spec.port", 29501),
    ("spec.snapshot.path", "/other"),
    ("spec.snapshot.everySteps", 51),
    ("spec.snapshot.volume.persistentVolumeClaim.claimName", "b"),
    ("spec.snapshot.volume", {"nfs": {"server": "s", "path": "/p"}}),
    ("spec.snapshot", DELETE),
    ("spec.cleanPodPolicy", "All"),
    ("spec.metrics.port", 9401),
    ("spec.networkPolicy.enabled", False),
    (f"{TRAINER}.image", "other:2"),
    (f"{TRAINER}.env", [{"name": "A", "value": "1"}]),
    # CEL has no type for these: a value, a field, one that is removed.
    (f"{TRAINER}.resources.limits.cpu", "2"),
    ("spec.template.spec.nodeName", "node1"),
    ("spec.template.spec.schedulerName", DELETE),
    # A field with a type goes, one without comes.
    (
        "spec.template.spec",
        {
            "containers": [{"name": "trainer", "image": "example/train:1", "resources": CPU}],
            "schedulerName": "mine",
            "nodeName": "node1",
        },
    ),
    ("spec.template.metadata", {"labels": {"a": "b"}}),
)


def test_refuses_change(plane, stored):
    for path, value in FIXED:
        said = replace(plane, changed(stored, path, value), "--dry-run=server")
        assert ".".join(path.split(".")[:2]) in said, (path, value, said or "accepted")
        free = "may change only while the job is suspended"
        assert (free if "template" in path else "is immutable") in said, (path, value)


def test_a_disruption_budget_reads_the_scale_and_nobody_changes_it(plane, stored):
    """Else Kubernetes counts no budget with maxUnavailable, and no drain gets on."""
    name = f"ddpjob/{stored['metadata']['name']}"
    read = ("get", name, "--subresource=scale", "-n", NAMESPACE, "-o", "jsonpath={.spec.replicas}")
    assert plane.kubectl(*read, check=True).stdout == str(stored["spec"]["replicas"])
    said = plane.kubectl("scale", name, "--replicas=9", "-n", NAMESPACE).stderr
    assert "spec.replicas is immutable: create a new DDPJob" in said
    assert plane.kubectl(*read, check=True).stdout == str(stored["spec"]["replicas"])


@pytest.mark.parametrize("before", [{"snapshot": NFS}, {}], ids=["another volume", "none yet"])
def test_refuses_one_snapshot_for_another(plane, before):
    body = ddpjob(f"job{next(_numbers)}", **before)
    plane.kubectl("create", "-n", NAMESPACE, "-f", "-", input=as_json(body), check=True)
    after = {"path": "/s", "volume": {"csi": {"driver": "d"}}} if before else SNAPSHOT
    said = replace(plane, changed(body, "spec.snapshot", after))
    assert "spec.snapshot is immutable" in said


FREE = {
    "spec.replicas": 3,  # as it is
    "spec.suspend": True,
    "spec.activeDeadlineSeconds": 60,
    "spec.startupDeadlineSeconds": 60,
    "spec.ttlSecondsAfterFinished": 60,
    "spec.hang": {"stepSeconds": 60},
    "spec.nodeLost": {"policy": "Fence"},
    "spec.restart.maxRestarts": 5,
    "spec.restart.backoff": {"maxSeconds": 10},
    "spec.restart.inPlace": {"enabled": False},
    "spec.restart.healAfterSeconds": 60,
    "spec.restart.progressPath": "/data/checkpoints",
    "spec.restart.resumeArgs": ["--resume"],
    "spec.restart.rules": [{"exitCodes": [3], "action": "Fail"}],
}


def test_accepts_change(plane, stored):
    for path, value in FREE.items():
        said = replace(plane, changed(stored, path, value), "--dry-run=server")
        assert (path, said) == (path, "")
    # No rule sees one field without a type for another: the operator compares hashes (U1).
    other = changed(stored, "spec.template.spec.schedulerName", DELETE)
    other = changed(other, "spec.template.spec.nodeName", "node1")
    assert replace(plane, other, "--dry-run=server") == ""


def test_template_may_change_while_suspended(plane, stored):
    suspended = changed(stored, "spec.suspend", True)
    assert replace(plane, suspended) == ""
    assert "spec.replicas is immutable" in replace(plane, changed(suspended, "spec.replicas", 4))
    other = changed(suspended, f"{TRAINER}.image", "other:2")
    assert replace(plane, other) == ""
    assert replace(plane, changed(other, "spec.suspend", False)) == ""
    assert "while the job is suspended" in replace(plane, changed(stored, "spec.suspend", False))


def test_status_is_written_apart(plane, stored):
    """A user's apply cannot set status; the status subresource can, and shows in columns."""
    name = stored["metadata"]["name"]
    status = {
        "phase": "Running",
        "reason": "Unschedulable",
        "ready": "2/3",
        "attempt": 2,
        "restarts": {"total": 1, "charged": 1, "inPlace": 4},
        "restarted": "1+4",
        "progress": {"step": 120, "stepOfTotal": "120/400", "loss": 0.25},
        "lastFailure": {"reason": "OOMKilled", "node": "node7", "class": "OOM"},
        "message": "words",
    }
    assert replace(plane, {**stored, "status": status}) == ""
    get = ("get", "ddp", name, "-n", NAMESPACE)
    found = json.loads(plane.kubectl(*get, "-o", "json", check=True).stdout)
    assert found["status"] == {"observedGeneration": -1}, "the definition's default, no more"
    patch = ("patch", "ddpjob", name, "-n", NAMESPACE, "--subresource=status", "--type=merge")
    plane.kubectl(*patch, "-p", json.dumps({"status": status}), check=True)
    header, row = plane.kubectl(*get, "-o", "wide", check=True).stdout.splitlines()
    assert header.split() == [
        "NAME", "PHASE", "REASON", "READY", "RESTARTS", "STEP", "LOSS", "ETA", "GOODPUT",
        "ATTEMPT", "LAST-FAILURE", "NODE", "AGE", "MESSAGE",
    ]  # fmt: skip
    *told, age, message = row.split()[1:]
    assert re.fullmatch(r"(\d+[smh])+", age)
    assert told == [
        "Running", "Unschedulable", "2/3", "1+4", "120/400", "0.25", "2", "OOMKilled", "node7",
    ]  # fmt: skip
    assert message == "words"
    refused = plane.kubectl(*patch, "-p", json.dumps({"status": {"phase": "Odd"}}))
    assert "status.phase" in refused.stderr


ENDED = (
    {"suspend": True},
    {"activeDeadlineSeconds": 600},
    {"restart": {"maxRestarts": 9}},
    {"hang": {"stepSeconds": 60}},
    {"nodeLost": {"policy": "Fence"}},
    {"startupDeadlineSeconds": 60},
)


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_job_that_has_ended_takes_no_change(plane, stored, phase):
    name = stored["metadata"]["name"]

    def patch(body: dict[str, Any], *args: str) -> str:
        command = ("patch", "ddpjob", name, "-n", NAMESPACE, "--type=merge", *args, "-p")
        done = plane.kubectl(*command, json.dumps(body))
        return done.stderr if done.returncode else ""

    assert patch({"spec": {"hang": {"stepSeconds": 99}}}) == ""
    assert patch({"status": {"phase": phase}}, "--subresource=status") == ""
    for change in ENDED:
        said = patch({"spec": change})
        assert f"the job has {phase.lower()}, which is final" in said, (change, said)
        assert "apply under another name" in said
    assert patch({"spec": {"ttlSecondsAfterFinished": 60}}) == ""
    assert patch({"spec": {"ttlSecondsAfterFinished": None}}) == ""
    assert patch({"metadata": {"labels": {"team": "a"}, "finalizers": ["example.com/x"]}}) == ""
    assert patch({"metadata": {"finalizers": None}}) == ""
    status = {"observedGeneration": 4, "replicas": {"succeeded": 3}}
    assert patch({"status": status}, "--subresource=status") == ""
    # An etcd that was restored knows nothing of the end, and neither does a status taken away.
    assert patch({"status": None}, "--subresource=status") == ""
    assert patch({"spec": {"suspend": True}}) == ""
    assert patch({"status": {"phase": phase}}, "--subresource=status") == ""
    assert "is final" in replace(plane, changed(stored, f"{TRAINER}.image", "other:2"))
