"""The chart's ValidatingAdmissionPolicies against a real API server: who may make which pods."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from devcluster import binaries
from support import cluster
from support.cluster import ROOT, Cluster, wait_for
from support.manifest import as_json, changed, ddpjob

pytestmark = pytest.mark.tier("all")

NAMESPACE = "policies"
OPERATOR = "system:serviceaccount:ops:ddpjob-operator"
POD = "spec.template.spec"
VALUES = (
    "admissionPolicies.podCreators.enabled=true,admissionPolicies.operator.enabled=true,"
    "admissionPolicies.restricted.enabled=true,admissionPolicies.restricted.serviceAccounts={mine},"
    "admissionPolicies.gangLabels.enabled=true"
)
HOST = {"hostPath": {"path": "/"}}
GANG = {"ddpjob.dev/job-uid": "u"}
ROLES = """\
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {{name: jobs-only, namespace: {namespace}}}
rules:
  - {{apiGroups: [ddpjob.dev], resources: [ddpjobs], verbs: ["*"]}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {{name: jobs-only, namespace: {namespace}}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: Role, name: jobs-only}}
subjects: [{{apiGroup: rbac.authorization.k8s.io, kind: User, name: clerk}}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {{name: policies-stolen-token}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: cluster-admin}}
subjects: [{{apiGroup: rbac.authorization.k8s.io, kind: User, name: "{operator}"}}]
"""


@pytest.fixture(scope="module")
def control_plane() -> Iterator[Cluster]:
    """One of this file's own: a policy holds for all of a cluster."""
    with cluster.control_plane("policies") as plane:
        yield plane


@pytest.fixture(scope="module")
def plane(control_plane: Cluster) -> Cluster:
    """With the policies in effect."""
    helm = binaries.ensure(["helm"], print)["helm"]
    chart = str(ROOT / "charts" / "ddpjob")
    only = ("--set", VALUES, "-s", "templates/policies.yaml")
    command = (helm, "template", "ddpjob", chart, "-n", "ops", *only)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    control_plane.kubectl("create", "namespace", NAMESPACE, check=True)
    for body in from_before():
        create(control_plane, body)
    objects = done.stdout + "---\n" + ROLES.format(namespace=NAMESPACE, operator=OPERATOR)
    control_plane.kubectl("apply", "-f", "-", input=objects, check=True)
    # The API server takes policies in by and by, each by itself.
    for policy, body, user in (
        ("podCreators", ddpjob(), "clerk"),
        ("restricted", changed(ddpjob(), f"{POD}.hostPID", True), ""),
        ("operator", pod(), OPERATOR),
        ("gangLabels", pod(labels=GANG), ""),
    ):
        wait_for(lambda b=body, u=user: refused(control_plane, b, u) or None, policy)
    return control_plane


def refused(
    plane: Cluster, body: dict[str, Any], user: str = "", namespace: str = NAMESPACE
) -> str:
    """What the API server says if it does not take it, else an empty string."""
    who = [f"--as={user}"] if user else []
    dry = ["--dry-run=server", "-n", namespace, "-f", "-"]
    done = plane.kubectl("create", *dry, *who, input=as_json(body))
    return done.stderr if done.returncode else ""


def create(plane: Cluster, body: dict[str, Any]) -> None:
    plane.kubectl("create", "-n", NAMESPACE, "-f", "-", input=as_json(body), check=True)


def merge(plane: Cluster, what: str, patch: dict[str, Any], *more: str) -> str:
    """Patch it, as `kubectl patch` does; the refusal, or an empty string."""
    kind, name = what.split("/")
    command = ("patch", kind, name, "-n", NAMESPACE, "--type=merge", "-p", as_json(patch), *more)
    done = plane.kubectl(*command)
    return done.stderr if done.returncode else ""


def from_before() -> list[dict[str, Any]]:
    """Jobs that policy `restricted` refuses, made before there was one."""
    runs = changed(ddpjob("old"), f"{POD}.volumes", [{"name": "v", **HOST}])
    waits = ddpjob("old-waits", suspend=True, snapshot={"path": "/s", "volume": HOST})
    waits = changed(waits, f"{POD}.hostPID", True)
    return [runs, waits, changed(waits, "metadata.name", "old-judged")]


def pod(**meta: Any) -> dict[str, Any]:
    containers = [{"name": "trainer", "image": "example/train:1"}]
    spec = {"containers": containers, "automountServiceAccountToken": False}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", **meta}, "spec": spec}


def owner(kind: str = "DDPJob", api: str = "ddpjob.dev/v1alpha1") -> dict[str, Any]:
    return {"apiVersion": api, "kind": kind, "name": "j", "uid": "u", "controller": True}


def test_who_may_not_create_pods_may_not_create_jobs_but_label_them(plane: Cluster) -> None:
    says = refused(plane, ddpjob(), "clerk")
    assert "clerk may not create pods in policies" in says
    assert "Forbidden" in says
    create(plane, ddpjob("labelled"))
    clerk = "--as=clerk"
    assert not merge(plane, "ddpjob/labelled", {"metadata": {"labels": {"a": "b"}}}, clerk)
    says = merge(plane, "ddpjob/labelled", {"spec": {"suspend": True}}, clerk)
    assert "may not create pods" in says


PRIVILEGED = {"securityContext": {"privileged": True}}
WINDOWS = {"windowsOptions": {"hostProcess": True}}


#: Field, value, words of the refusal; none where it is taken.
JUDGED: tuple[tuple[str, Any, str], ...] = (
    (f"{POD}.volumes", [{"name": "v", **HOST}], f"{POD}.volumes: hostPath"),
    ("spec.snapshot", {"path": "/s", "volume": HOST}, "spec.snapshot.volume"),
    (f"{POD}.containers.0.securityContext.privileged", True, "privileged"),
    (f"{POD}.initContainers", [{"name": "i", "image": "i", **PRIVILEGED}], "privileged"),
    (f"{POD}.hostIPC", True, "hostIPC"),
    (f"{POD}.hostNetwork", True, f"{POD}.hostNetwork"),
    (f"{POD}.serviceAccountName", "admin", "admin is not allowed here"),
    (f"{POD}.serviceAccount", "admin", "admin is not allowed here"),
    (f"{POD}.containers.0.securityContext", {"capabilities": {"add": ["SYS_ADMIN"]}}, "add"),
    (f"{POD}.containers.0.ports", [{"containerPort": 80, "hostPort": 80}], "hostPort"),
    (f"{POD}.containers.0.securityContext", {"procMount": "Unmasked"}, "procMount"),
    (f"{POD}.containers.0.securityContext", WINDOWS, "hostProcess"),
    (f"{POD}.securityContext", WINDOWS, "hostProcess"),
    (f"{POD}.serviceAccountName", "mine", ""),
    (f"{POD}.serviceAccountName", "default", ""),
    # Kubernetes takes the deprecated field then. What a chart leaves empty is null.
    *((f"{POD}.serviceAccountName", empty, "") for empty in ("", None)),
    (f"{POD}.volumes", [{"name": "v", "emptyDir": {}}], ""),
    ("spec.snapshot", {"path": "/s", "volume": {"persistentVolumeClaim": {"claimName": "c"}}}, ""),
    (f"{POD}.containers.0.securityContext", {"privileged": False}, ""),
)


def test_what_reaches_beyond_the_pod_is_refused_and_no_more(plane: Cluster) -> None:
    for path, value, words in JUDGED:
        says = refused(plane, changed(ddpjob(), path, value))
        assert words in says, (path, value, says)
        assert bool(words) == bool(says), (path, value, says)
    for empty in ("", None):
        body = changed(ddpjob(), f"{POD}.serviceAccountName", empty)
        says = refused(plane, changed(body, f"{POD}.serviceAccount", "admin"))
        assert "admin is not allowed" in says, "an empty name hides no account"


def test_all_that_is_refused_is_told_at_once(plane: Cluster) -> None:
    """One at a time costs a round of `kubectl apply` each."""
    body = changed(ddpjob(), f"{POD}.hostPID", True)
    body = changed(body, f"{POD}.volumes", [{"name": "v", **HOST}])
    says = refused(plane, changed(body, f"{POD}.serviceAccountName", "admin"))
    for one in ("volumes: hostPath", "hostPID and hostIPC", "admin is not allowed here"):
        assert says.count(one) == 1
    assert "privileged" not in says


def test_a_suspended_job_is_judged_again_when_it_is_changed(plane: Cluster) -> None:
    """Also by fields that the definition does not know, as most of a pod are."""
    create(plane, ddpjob("waits", suspend=True))
    for field in ({"hostPID": True}, {"volumes": [{"name": "v", **HOST}]}):
        patch = {"spec": {"template": {"spec": field}}}
        assert "not allowed here" in merge(plane, "ddpjob/waits", patch)
        assert not merge(plane, "ddpjob/waits", patch, "--subresource=status")
    kept = plane.kubectl("get", "ddpjob", "waits", "-n", NAMESPACE, "-o", "jsonpath={.spec}")
    assert "hostP" not in kept.stdout, "a write of the status changes no spec"


def test_a_job_from_before_can_still_be_managed(plane: Cluster) -> None:
    """What the policy judges stays what it was, so it judges nothing."""
    for name, patch in (
        ("old", {"spec": {"suspend": True}}),
        ("old", {"spec": {"suspend": False}}),
        ("old", {"spec": {"ttlSecondsAfterFinished": 60}}),
        ("old", {"spec": {"activeDeadlineSeconds": 60}, "metadata": {"labels": {"a": "b"}}}),
        ("old-waits", {"spec": {"ttlSecondsAfterFinished": 60}}),
        ("old-waits", {"spec": {"template": {"metadata": {"labels": {"a": "b"}}}}}),
        ("old-waits", {"spec": {"suspend": False}}),
    ):
        assert not merge(plane, f"ddpjob/{name}", patch)


@pytest.mark.parametrize("suspend", [True, False])
def test_what_is_judged_of_it_is_judged_as_a_whole_once_any_of_it_changes(
    plane: Cluster, suspend: bool
) -> None:
    """Otherwise one bad field would let in the next. (spec.snapshot never changes.)"""
    for changes in (
        {"hostIPC": True},
        {"hostPID": None},
        {"hostPID": None, "volumes": [{"name": "v", **HOST}]},
        {"hostPID": None, "hostNetwork": True},
        {"nodeSelector": {"a": "b"}},
    ):
        patch = {"spec": {"template": {"spec": changes}, "suspend": suspend}}
        assert "not allowed here" in merge(plane, "ddpjob/old-judged", patch), changes


def test_the_operators_account_makes_only_pods_of_jobs(plane: Cluster) -> None:
    assert not refused(plane, pod(ownerReferences=[owner()]), OPERATOR)
    for wrong in (
        [],
        [owner("ReplicaSet", "apps/v1")],
        [owner(api="evil.dev/v1")],
        [{**owner(), "controller": False}],
    ):
        assert "only what a DDPJob owns" in refused(plane, pod(ownerReferences=wrong), OPERATOR)
    assert "kube-*" in refused(plane, pod(ownerReferences=[owner()]), OPERATOR, "kube-system")


def test_the_operators_account_removes_only_pods_of_jobs(plane: Cluster) -> None:
    for name, owners, stays in (("theirs", [], True), ("ours", [owner()], False)):
        create(plane, pod(ownerReferences=owners, name=name))
        done = plane.kubectl("delete", "pod", name, "-n", NAMESPACE, f"--as={OPERATOR}", "--force")
        assert ("only what a DDPJob owns" in done.stderr) == stays
    plane.kubectl("delete", "pod", "theirs", "-n", NAMESPACE, "--force", check=True)


def test_the_operators_account_changes_only_services_of_jobs(plane: Cluster) -> None:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "theirs"},
        "spec": {"clusterIP": "None", "ports": [{"port": 80}]},
    }
    assert "only what a DDPJob owns" in refused(plane, service, OPERATOR)
    owned = changed(service, "metadata.ownerReferences", [owner()])
    assert not refused(plane, owned, OPERATOR)
    create(plane, service)
    own = {"metadata": {"ownerReferences": [owner()]}, "spec": {"externalName": "evil"}}
    says = merge(plane, "service/theirs", own, f"--as={OPERATOR}")
    assert "only what a DDPJob owns" in says, "a change must not make it its own"


def test_no_pod_labels_itself_into_a_gang(plane: Cluster) -> None:
    assert "lets them into a gang's network" in refused(plane, pod(labels=GANG))
    assert not refused(plane, pod(labels=GANG, ownerReferences=[owner()]), OPERATOR)
    create(plane, pod(labels={"a": "b"}))
    label = ("label", "pod", "p", "-n", NAMESPACE, "--overwrite")
    assert "lets them into" in plane.kubectl(*label, "ddpjob.dev/job-uid=u").stderr
    # What the operator has labelled others may still annotate, but not move to another gang.
    plane.kubectl(*label, "ddpjob.dev/job-uid=u", f"--as={OPERATOR}", check=True)
    plane.kubectl(*label, "a=c", check=True)
    assert "lets them into" in plane.kubectl(*label, "ddpjob.dev/job-uid=v").stderr
    plane.kubectl("delete", "pod", "p", "-n", NAMESPACE, "--force", check=True)


def test_nor_does_its_status_or_its_way_to_a_node(plane: Cluster) -> None:
    """Labels can be changed along with a status, and a Binding brings its own."""
    # A name of its own: no scheduler must be first.
    body = pod(labels={"a": "b"})
    body["spec"]["schedulerName"] = "hand"
    create(plane, body)
    status = "--subresource=status"
    assert "lets them into" in merge(plane, "pod/p", {"metadata": {"labels": GANG}}, status)
    binding = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": "p", "labels": GANG},
        "target": {"kind": "Node", "name": "somewhere"},
    }
    pods = f"/api/v1/namespaces/{NAMESPACE}"
    for path in (f"{pods}/pods/p/binding", f"{pods}/bindings"):
        done = plane.kubectl("create", "--raw", path, "-f", "-", input=as_json(binding))
        assert "lets them into" in done.stderr, path
    # A kubelet tells of pods of gangs, a scheduler finds nodes for them.
    label = ("label", "pod", "p", "-n", NAMESPACE, "ddpjob.dev/job-uid=u", f"--as={OPERATOR}")
    plane.kubectl(*label, check=True)
    assert not merge(plane, "pod/p", {"status": {"message": "well"}}, status)
    plain = as_json({**binding, "metadata": {"name": "p"}})
    plane.kubectl("create", "--raw", f"{pods}/pods/p/binding", "-f", "-", input=plain, check=True)
    plane.kubectl("delete", "pod", "p", "-n", NAMESPACE, "--force", check=True)
