"""The chart's ValidatingAdmissionPolicies against a real API server: who may make which pods."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from ddpjob_operator.core import actions, render
from ddpjob_operator.core.objects import observe
from ddpjob_operator.core.objects import spec as specs
from ddpjob_operator.shell import telemetry
from devcluster import binaries
from support import cluster, policy, workloads
from support.cluster import Cluster, wait_for
from support.manifest import DELETE, as_json, changed, ddpjob
from support.plane import Plane

pytestmark = pytest.mark.tier("all")

NAMESPACE = "policies"
OPERATOR = policy.ACCOUNT
POD = "spec.template.spec"
VALUES = (
    "admissionPolicies.podCreators.enabled=true,admissionPolicies.operator.serviceAccounts={mine},"
    "admissionPolicies.restricted.enabled=true,admissionPolicies.restricted.serviceAccounts={mine},"
    "admissionPolicies.gangLabels.enabled=true"
)
HOST = {"hostPath": {"path": "/"}}
UID = "0123abcd-0000-4000-8000-000000000000"
GANG = {"ddpjob.dev/job-uid": UID}
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
"""


@pytest.fixture(scope="module")
def control_plane() -> Iterator[Cluster]:
    """One of this file's own, with PodGroups and Workloads: a policy holds for all of a cluster."""
    name = f"t-policies-{os.getpid()}"
    try:
        plane = cluster.up(name, "--nodes", "0", "--gang-scheduling")
        plane.apply_crd()
        folder = binaries.module_directory("kueue") / "config/components/crd/bases"
        file = str(folder / "kueue.x-k8s.io_workloads.yaml")
        plane.kubectl("apply", "--server-side", "-f", file, check=True)
        wait_for(
            lambda: plane.kubectl("get", "workloads.kueue.x-k8s.io").returncode == 0 or None, file
        )
        yield plane
    finally:
        cluster.down(name)


@pytest.fixture(scope="module")
def plane(control_plane: Cluster) -> Cluster:
    """With the policies in effect."""
    for name in (NAMESPACE, "ops"):
        control_plane.kubectl("create", "namespace", name, check=True)
    for where, name in ((NAMESPACE, "mine"), (NAMESPACE, "other"), ("ops", "ddpjob-operator")):
        control_plane.kubectl("create", "serviceaccount", name, "-n", where, check=True)
    for where in (NAMESPACE, "ops"):
        account = ("get", "serviceaccount", "default", "-n", where)
        wait_for(lambda a=account: control_plane.kubectl(*a).returncode == 0, " ".join(account))
    # Owners are claims here: the garbage collector would remove what names them.
    Plane(control_plane).kill("controller-manager")
    for body in from_before():
        create(control_plane, body)
    roles = ROLES.format(namespace=NAMESPACE)
    control_plane.kubectl("apply", "-f", "-", input=roles, check=True)
    policy.bind(control_plane, "ops", "ddpjob-operator", VALUES)
    # The API server takes policies in by and by, each by itself.
    for name, body, user in (
        ("podCreators", ddpjob(), "clerk"),
        ("restricted", changed(ddpjob(), f"{POD}.hostPID", True), ""),
        ("gangLabels", pod(labels=GANG), ""),
    ):
        wait_for(lambda b=body, u=user: refused(control_plane, b, u) or None, name)
    return control_plane


def refused(
    plane: Cluster, body: dict[str, Any], user: str = "", namespace: str = NAMESPACE
) -> str:
    """What the API server says if it does not take it, else an empty string."""
    who = [f"--as={user}"] if user else []
    who = list(policy.AS_OPERATOR) if user == OPERATOR else who
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
    return {"apiVersion": api, "kind": kind, "name": "j", "uid": UID, "controller": True}


def made() -> dict[str, dict[str, Any]]:
    """What the operator makes for a job, as it renders it, by kind."""
    meta = {"name": "j", "namespace": NAMESPACE, "uid": UID, "resourceVersion": "1"}
    job = observe.job({**ddpjob(), "metadata": {**meta, "labels": {workloads.QUEUE: "team"}}})
    spec = specs.parse(job.spec)
    bodies = [*render.network(job, spec), render.pod(job, spec, 1, 2, group="g")]
    bodies += [render.pod_group(job, spec, 1, "v1alpha2"), render.workload(job, spec, "x")]
    found = {body["kind"]: body for body in bodies}
    found["Secret"] = {**found["Secret"], "stringData": {"token": "t"}}
    event = telemetry._body(job, actions.Event("Normal", "Started", "m"), "op")
    return {**found, "Event": event, "Lease": policy.lease("ddpjob-operator")}


def test_who_may_not_create_pods_may_not_create_jobs_but_label_them(plane):
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


def test_what_reaches_beyond_the_pod_is_refused_and_no_more(plane):
    for path, value, words in JUDGED:
        says = refused(plane, changed(ddpjob(), path, value))
        assert words in says, (path, value, says)
        assert bool(words) == bool(says), (path, value, says)
    for empty in ("", None):
        body = changed(ddpjob(), f"{POD}.serviceAccountName", empty)
        says = refused(plane, changed(body, f"{POD}.serviceAccount", "admin"))
        assert "admin is not allowed" in says, "an empty name hides no account"


def test_all_that_is_refused_is_told_at_once(plane):
    """One at a time costs a round of `kubectl apply` each."""
    body = changed(ddpjob(), f"{POD}.hostPID", True)
    body = changed(body, f"{POD}.volumes", [{"name": "v", **HOST}])
    says = refused(plane, changed(body, f"{POD}.serviceAccountName", "admin"))
    for one in ("volumes: hostPath", "hostPID and hostIPC", "admin is not allowed here"):
        assert says.count(one) == 1
    assert "privileged" not in says


def test_a_suspended_job_is_judged_again_when_it_is_changed(plane):
    """Also by fields that the definition does not know, as most of a pod are."""
    create(plane, ddpjob("waits", suspend=True))
    for field in ({"hostPID": True}, {"volumes": [{"name": "v", **HOST}]}):
        patch = {"spec": {"template": {"spec": field}}}
        assert "not allowed here" in merge(plane, "ddpjob/waits", patch)
        assert not merge(plane, "ddpjob/waits", patch, "--subresource=status")
    kept = plane.kubectl("get", "ddpjob", "waits", "-n", NAMESPACE, "-o", "jsonpath={.spec}")
    assert "hostP" not in kept.stdout, "a write of the status changes no spec"


def test_a_job_from_before_can_still_be_managed(plane):
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
def test_what_is_judged_of_it_is_judged_as_a_whole_once_any_of_it_changes(plane, suspend):
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


#: Kubernetes has Workloads of its own.
WORKLOADS = "workloads.kueue.x-k8s.io"
OWNED = ("Pod", "Secret", "Service", "NetworkPolicy", "PodGroup", "Workload")
NOBODYS: tuple[list[dict[str, Any]], ...] = (
    [],
    [owner("ReplicaSet", "apps/v1")],
    [owner(api="evil.dev/v1")],
    [{**owner(), "controller": False}],
)
OWNER = "metadata.ownerReferences.0"
ANY = [{"key": "a", "operator": "Exists"}]
NAMED = "names what it makes after the DDPJob"
#: Of what the operator makes: kind, field, value, words of the refusal.
MISUSES: tuple[tuple[str, str, Any, str], ...] = (
    *((kind, "metadata.name", "kube-dns", NAMED) for kind in OWNED),
    *((kind, f"{OWNER}.name", "k", NAMED) for kind in OWNED if kind != "Workload"),
    *((kind, f"{OWNER}.uid", "f" * 36, NAMED) for kind in ("Secret", "PodGroup", "Workload")),
    ("Pod", f"{OWNER}.uid", "f" * 36, "labels a pod with the uid"),
    ("Pod", "metadata.labels", {}, NAMED),
    ("Pod", "spec.serviceAccountName", "other", "pods of DDPJobs may not have the account other"),
    ("Secret", "type", "bootstrap.kubernetes.io/token", "of type Opaque"),
    ("Secret", "type", "example.com/x", "of type Opaque"),
    ("Secret", "stringData", {"token": "t", "tls.key": "x"}, "the one key token"),
    ("Service", "spec.clusterIP", DELETE, "headless"),
    ("Service", "spec", {"type": "ExternalName", "externalName": "evil.example"}, "headless"),
    ("Service", "spec.externalIPs", ["10.0.0.1"], "headless"),
    ("Service", "spec.selector", {"k8s-app": "kube-dns"}, "headless"),
    ("Service", "metadata.annotations", {"dns.example/hostname": "login"}, "neither annotations"),
    ("Service", "metadata.finalizers", ["example.com/x"], "neither annotations nor finalizers"),
    ("NetworkPolicy", "spec.podSelector", {}, "NetworkPolicies for the pods of a gang"),
    ("NetworkPolicy", "spec.podSelector.matchExpressions", ANY, "for the pods of a gang"),
    ("Event", "involvedObject.kind", "Pod", "about DDPJobs"),
    ("Event", "involvedObject.apiVersion", "v1", "about DDPJobs"),
    ("Lease", "metadata.name", "kube-scheduler", "no Lease but its own"),
)  # fmt: skip


@pytest.mark.parametrize("kind", made())
def test_the_operators_account_makes_only_what_an_operator_makes(plane, kind):
    """As it is rendered for a job; any other owner, name, type, or whom it is about, is refused."""
    good = made()[kind]
    assert not refused(plane, good, OPERATOR)
    if kind in OWNED:
        for owners in NOBODYS:
            body = changed(good, "metadata.ownerReferences", owners)
            assert "only what a DDPJob owns" in refused(plane, body, OPERATOR)
        elsewhere = changed(good, "metadata.namespace", "kube-system")
        assert "nothing in kube-*" in refused(plane, elsewhere, OPERATOR, "kube-system")
    for _, path, value, words in (one for one in MISUSES if one[0] == kind):
        says = refused(plane, changed(good, path, value), OPERATOR)
        assert says, (path, value)
        assert words in says, (path, value, says)


def test_no_pod_of_a_job_has_the_operators_own_account(plane):
    """A user's template would give its rights away, and a stolen token would live on in it."""
    body = changed(made()["Pod"], "metadata.namespace", "ops")
    assert not refused(plane, body, OPERATOR, "ops")
    body = changed(body, "spec.serviceAccountName", "ddpjob-operator")
    assert "the operator's own account" in refused(plane, body, OPERATOR, "ops")


@pytest.mark.parametrize("kind", ["Pod", "PodGroup", "Workload"])
def test_the_operators_account_removes_only_what_jobs_own(plane, kind):
    for owners, stays in (([], True), ([owner()], False)):
        # Labelled as a pod of a gang it could only be made by the operator.
        body = changed(made()[kind], "metadata.labels", {})
        create(plane, changed(body, "metadata.ownerReferences", owners))
        where = (
            WORKLOADS if kind == "Workload" else kind,
            made()[kind]["metadata"]["name"],
            "-n",
            NAMESPACE,
        )
        done = plane.kubectl("delete", *where, *policy.AS_OPERATOR, "--wait=false", "--force")
        assert ("only what a DDPJob owns" in done.stderr) == stays, done.stderr
        finalizers = as_json({"metadata": {"finalizers": None}})
        plane.kubectl("patch", *where, "--type=merge", "-p", finalizers)
        plane.kubectl("delete", *where, "--ignore-not-found", "--force", check=True)


@pytest.mark.parametrize("kind", ["Service", "NetworkPolicy", "Workload"])
def test_the_operators_account_changes_only_what_jobs_own(plane, kind):
    good = made()[kind]
    create(plane, changed(good, "metadata.ownerReferences", []))
    status = kind == "Workload"
    what = f"{WORKLOADS if status else kind}/{good['metadata']['name']}"
    own = {"metadata": {"ownerReferences": [owner()], "labels": {"a": "b"}}}
    sub = ["--subresource=status"] * status
    says = merge(plane, what, {**own, "status": {}} if status else own, *sub, *policy.AS_OPERATOR)
    assert "only what a DDPJob owns" in says, "a change must not make it its own"
    assert not merge(plane, what, {"metadata": {"ownerReferences": [owner()]}})
    assert not merge(plane, what, own, *sub, *policy.AS_OPERATOR)
    plane.kubectl("delete", what, "-n", NAMESPACE, check=True)


def test_what_somebody_added_to_a_gangs_service_does_not_stop_its_repair(plane):
    """An address that is already there may stay; the operator's account can add none."""
    create(plane, changed(made()["Service"], "spec.externalIPs", ["10.0.0.1"]))
    selector = {"selector": {**GANG, "a": "b"}}
    assert not merge(plane, "service/j", {"spec": selector})
    for spec, words in (
        ({"selector": {"a": None}}, ""),
        ({"externalIPs": ["10.0.0.2"]}, "headless"),
        (selector, "headless"),
    ):
        says = merge(plane, "service/j", {"spec": spec}, *policy.AS_OPERATOR)
        assert words in says, spec
        assert bool(words) == bool(says), says
    plane.kubectl("delete", "service", "j", "-n", NAMESPACE, check=True)


@pytest.mark.parametrize("ttl", [None, 60])
@pytest.mark.parametrize("phase", ["Running", "Succeeded", "Failed"])
def test_the_operators_account_deletes_only_jobs_past_their_ttl(plane, ttl, phase):
    create(plane, ddpjob("ends", **({"ttlSecondsAfterFinished": ttl} if ttl else {})))
    status = {"status": {"phase": phase}}
    assert not merge(plane, "ddpjob/ends", status, "--subresource=status", *policy.AS_OPERATOR)
    delete = ("delete", "ddpjob", "ends", "-n", NAMESPACE)
    done = plane.kubectl(*delete, *policy.AS_OPERATOR)
    may = ttl is not None and phase != "Running"
    assert ("deletes only jobs that have ended" in done.stderr) == (not may), done.stderr
    plane.kubectl(*delete, "--ignore-not-found", check=True)


def test_no_pod_labels_itself_into_a_gang(plane):
    assert "lets them into a gang's network" in refused(plane, pod(labels=GANG))
    assert not refused(plane, made()["Pod"], OPERATOR)
    create(plane, pod(labels={"a": "b"}))
    label = ("label", "pod", "p", "-n", NAMESPACE, "--overwrite")
    assert "lets them into" in plane.kubectl(*label, "ddpjob.dev/job-uid=u").stderr
    # What the operator has labelled others may still annotate, but not move to another gang.
    plane.kubectl(*label, f"ddpjob.dev/job-uid={UID}", *policy.AS_OPERATOR, check=True)
    plane.kubectl(*label, "a=c", check=True)
    assert "lets them into" in plane.kubectl(*label, "ddpjob.dev/job-uid=v").stderr
    plane.kubectl("delete", "pod", "p", "-n", NAMESPACE, "--force", check=True)


def test_nor_does_its_status_or_its_way_to_a_node(plane):
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
    label = ("label", "pod", "p", "-n", NAMESPACE, f"ddpjob.dev/job-uid={UID}")
    plane.kubectl(*label, *policy.AS_OPERATOR, check=True)
    assert not merge(plane, "pod/p", {"status": {"message": "well"}}, status)
    plain = as_json({**binding, "metadata": {"name": "p"}})
    plane.kubectl("create", "--raw", f"{pods}/pods/p/binding", "-f", "-", input=plain, check=True)
    plane.kubectl("delete", "pod", "p", "-n", NAMESPACE, "--force", check=True)
