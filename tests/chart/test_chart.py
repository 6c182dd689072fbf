"""What the Helm chart renders: objects, security, rights, and whom they reach."""

import re
from typing import Any

import pytest
import yaml

from ddpjob_operator import settings
from support.chart import CHART, Objects
from support.manifest import rights
from support.network import NAMESPACE, Pod, reaches
from support.site import OPERATOR_LABEL

# The operator's whole rights. A verb more or less is a decision: change both places.
RIGHTS = {
    ("ddpjob.dev", "ddpjobs"): {"get", "list", "watch", "delete"},
    ("ddpjob.dev", "ddpjobs/status"): {"update"},
    ("ddpjob.dev", "ddpjobs/finalizers"): {"update"},
    ("", "pods"): {"get", "list", "watch", "create", "delete"},
    ("", "services"): {"get", "create", "update"},
    ("", "secrets"): {"create"},
    ("networking.k8s.io", "networkpolicies"): {"get", "create", "update"},
    ("", "events"): {"create"},
}
#: With kueue.enabled, beside those.
KUEUE = "kueue.x-k8s.io"
QUEUE_RIGHTS = {
    (KUEUE, "workloads"): {"get", "list", "watch", "create", "delete"},
    (KUEUE, "workloads/status"): {"update"},
}
OF_QUEUES = {
    "ClusterRole/ops:ddpjob-operator-kueue": {
        (KUEUE, "resourceflavors"): {"get"},
        (KUEUE, "workloadpriorityclasses"): {"get"},
        ("scheduling.k8s.io", "priorityclasses"): {"get"},
    }
}
NODE_RIGHTS = {("", "nodes"): {"get", "list", "watch"}}
LEASES = ("coordination.k8s.io", "leases")
OF_NODES = {"Role/kube-node-lease/ops:ddpjob-operator-node-leases": {LEASES: {"list"}}}
#: What binds the operator's account.
POLICY = "ValidatingAdmissionPolicy/ops.ddpjob-operator.operator"
#: Writes that it leaves alone: a status can only be forged, and RBAC names the one Lease.
UNJUDGED = {
    ("ddpjob.dev", "ddpjobs/status", "UPDATE"),
    ("ddpjob.dev", "ddpjobs/finalizers", "UPDATE"),
    (*LEASES, "UPDATE"),
}
ACCOUNT = {"kind": "ServiceAccount", "name": "ddpjob-operator", "namespace": "ops"}


def deployment(objects: Objects) -> dict[str, Any]:
    return objects["Deployment/ddpjob-operator"]["spec"]  # type: ignore[no-any-return]


def pod_spec(objects: Objects) -> dict[str, Any]:
    return deployment(objects)["template"]["spec"]  # type: ignore[no-any-return]


def operator(objects: Objects) -> dict[str, Any]:
    (container,) = pod_spec(objects)["containers"]
    return container  # type: ignore[no-any-return]


def labels(objects: Objects) -> dict[str, str]:
    return deployment(objects)["template"]["metadata"]["labels"]  # type: ignore[no-any-return]


def test_renders_these_objects_by_default(helm, template):
    assert set(template()) == {
        "ServiceAccount/ddpjob-operator",
        "CustomResourceDefinition/ddpjobs.ddpjob.dev",
        "ClusterRole/ddpjob-edit",
        "ClusterRole/ddpjob-view",
        "ClusterRole/ops:ddpjob-operator",
        "ClusterRoleBinding/ops:ddpjob-operator",
        "Role/kube-node-lease/ops:ddpjob-operator-node-leases",
        "RoleBinding/kube-node-lease/ops:ddpjob-operator-node-leases",
        "Role/ddpjob-operator-lease",
        "RoleBinding/ddpjob-operator-lease",
        "Service/ddpjob-operator-metrics",
        "PodDisruptionBudget/ddpjob-operator",
        "Deployment/ddpjob-operator",
        POLICY,
        POLICY.replace("Policy/", "PolicyBinding/"),
        "Pod/ddpjob-operator-test",  # of `helm test`
    }
    done = helm("lint", str(CHART), "--strict")
    assert done.returncode == 0, done.stdout + done.stderr


def test_operator_pod_is_restricted_and_reachable(template):
    objects = template()
    spec, container = pod_spec(objects), operator(objects)
    assert spec["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "runAsGroup": 1000,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["requests"].keys() == {"cpu", "memory"}
    assert not any("hostPath" in volume for volume in spec["volumes"])
    (port,) = container["ports"]
    assert (port["name"], port["containerPort"]) == ("http", 8080)
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "http"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}
    service = objects["Service/ddpjob-operator-metrics"]["spec"]
    assert service["ports"] == [
        {"name": "http-metrics", "port": 8080, "targetPort": "http", "protocol": "TCP"}
    ]
    assert service["selector"].items() <= labels(objects).items()
    key, _, value = OPERATOR_LABEL.partition("=")
    assert labels(objects).get(key) == value, "by it tests find and kill the operator"
    definition = objects["CustomResourceDefinition/ddpjobs.ddpjob.dev"]
    assert definition["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_arguments_are_the_operators_own(template):
    """The rendered arguments go through the operator's parser: none may be unknown to it."""
    values = "namespaces={a,b},progressSeconds=7,leaseName=l,log.level=debug,log.format=text"
    container = operator(template("--set", values))
    parsed = settings.parse(container["args"], {"POD_NAME": "pod", "POD_NAMESPACE": "ops"})
    assert parsed.namespaces == ("a", "b")
    assert parsed.progress_seconds == 7
    assert (parsed.lease_name, parsed.lease_namespace) == ("l", "ops")
    assert (parsed.log_level, parsed.log_format) == ("debug", "text")
    ports = [port["containerPort"] for port in container["ports"]]
    assert ports == [parsed.probe_port]
    assert [variable["name"] for variable in container["env"]] == ["POD_NAME", "POD_NAMESPACE"]
    values = "workers=3,resyncSeconds=40,leaseSeconds=20,extraArgs={--probe-host,::}"
    tuned = settings.parse(operator(template("--set", values))["args"], {})
    assert tuned.metrics_from == (), "empty: everybody"
    assert (tuned.workers, tuned.resync_seconds, tuned.lease_seconds) == (3, 40, 20)
    assert tuned.probe_host == "::"
    plain = settings.parse(operator(template())["args"], {})
    assert (plain.namespaces, plain.kueue) == ((), False)
    assert settings.parse(operator(template("--set", "kueue.enabled=true"))["args"], {}).kueue
    assert "KernelDeadlock" in plain.node_signals.conditions
    assert "karpenter.sh/disrupted" in plain.node_signals.taints
    assert not plain.node_signals.cordon
    values = "nodeSignals.conditions={Ready=False},nodeSignals.cordon=true"
    given = settings.parse(operator(template("--set", values))["args"], {}).node_signals
    assert (given.conditions, given.cordon) == (("Ready=False",), True)


def test_who_may_read_the_operators_own(template):
    """The same who may read those of gangs; without a word about it everybody, as there."""
    kind = "NetworkPolicy/ddpjob-operator"
    assert kind not in template()
    there = f"namespaceSelector.matchLabels.{NAMESPACE.replace('.', chr(92) + '.')}=monitoring"
    objects = template("--set", f"networkPolicy.metricsFrom[0].{there}")
    pod = Pod("ops", labels(objects))
    tester = objects["Pod/ddpjob-operator-test"]["metadata"]["labels"]
    number = operator(objects)["ports"][0]["containerPort"]
    for source, may in (
        (Pod("monitoring", {"app": "prometheus"}), True),
        (Pod("ops", tester), True),
        (Pod("ops", {"app": "neighbour"}), False),
        (Pod("team-a", tester), False),
    ):
        assert reaches(objects[kind], source, pod, number) is may, source
    assert reaches(objects[kind], Pod("team-a"), Pod("ops", tester), number), "it holds for ours"
    own, given = settings.parse(operator(objects)["args"], {}).metrics_from
    assert given == {"namespaceSelector": {"matchLabels": {NAMESPACE: "monitoring"}}}
    assert own["namespaceSelector"] == {"matchLabels": {NAMESPACE: "ops"}}
    assert own["podSelector"]["matchLabels"].items() <= labels(objects).items()


def test_a_policy_about_jobs_holds_where_this_release_serves(template):
    """Elsewhere another release has its own operator, accounts and choices."""
    policies = ("podCreators", "restricted", "gangLabels")
    on = ",".join(f"admissionPolicies.{policy}.enabled=true" for policy in policies)
    everywhere, here = template("--set", on), template("--set", f"{on},namespaces={{a,b}}")
    there = {"key": NAMESPACE, "operator": "In", "values": ["a", "b"]}
    for policy in ("pod-creators", "restricted", "gang-labels"):
        name = f"ValidatingAdmissionPolicyBinding/ops.ddpjob-operator.{policy}"
        assert "matchResources" not in everywhere[name]["spec"]
        found = here[name]["spec"]["matchResources"]
        assert found == {"namespaceSelector": {"matchExpressions": [there]}}


def test_the_policy_judges_all_that_the_operators_account_may_write(template):
    """A right that is added is judged, or is written down here."""
    groups = ("--api-versions", "scheduling.k8s.io/v1beta1/PodGroup")
    for values in ("kueue.enabled=true", "kueue.enabled=true,namespaces={a},rbac.nodes=true"):
        objects = template("--set", f"{values},rbac.userRoles=false", *groups)
        may = {
            (group, resource, verb.upper())
            for name, role in objects.items()
            if name.startswith(("Role/", "ClusterRole/"))
            for (group, resource), verbs in rights(role).items()
            for verb in verbs - {"get", "list", "watch"}
        }
        judged = {
            (group, resource, operation)
            for rule in objects[POLICY]["spec"]["matchConstraints"]["resourceRules"]
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for operation in rule["operations"]
        }
        assert may - judged == UNJUDGED


@pytest.mark.parametrize(
    ("enabled", "served", "bound"),
    [
        ("Auto", (), True),  # `helm template` asks no API server
        ("Auto", ("v1/Pod",), False),
        ("Auto", ("v1/Pod", "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy"), True),
        ("true", ("v1/Pod",), True),
        ("false", (), False),  # also of a release from before, with --reuse-values
    ],
)
def test_the_operators_account_is_bound_where_the_api_server_can_do_it(
    template, enabled, served, bound
):
    kinds = [word for kind in served for word in ("--api-versions", kind)]
    objects = template("--set", f"admissionPolicies.operator.enabled={enabled}", *kinds)
    assert (POLICY in objects) is bound
    spec = objects[POLICY]["spec"] if bound else {"matchConditions": [], "failurePolicy": "Fail"}
    assert spec["failurePolicy"] == "Fail"
    name = "system:serviceaccount:ops:ddpjob-operator"
    assert [name in one["expression"] for one in spec["matchConditions"]] == [True] * bound


def test_only_the_operators_pod_gets_the_accounts_token(template):
    objects = template()
    assert objects["ServiceAccount/ddpjob-operator"]["automountServiceAccountToken"] is False
    assert pod_spec(objects)["automountServiceAccountToken"] is True


def test_image_follows_the_chart_and_a_digest_wins_over_a_tag(template):
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    digest = "sha256:" + 64 * "a"
    for values, image in (
        ("image.pullPolicy=Always", f"ddpjob/operator:{chart['appVersion']}"),
        ("image.tag=t", "ddpjob/operator:t"),
        (f"image.digest={digest},image.tag=t,image.repository=r/o", f"r/o@{digest}"),
    ):
        assert operator(template("--set", values))["image"] == image


def test_two_releases_share_no_object(helm):
    """But for the definition and the users' roles, which the second one leaves out."""
    second = ("--set", "crds.enabled=false,rbac.userRoles=false")

    def objects(release: str, namespace: str) -> set[tuple[str, str, str]]:
        done = helm("template", release, str(CHART), "--namespace", namespace, *second)
        assert f"--lease-name={release}-operator" in done.stdout
        found = [body for body in yaml.safe_load_all(done.stdout) if body]
        metas = [(body["kind"], body["metadata"]) for body in found]
        return {(kind, meta.get("namespace", ""), meta["name"]) for kind, meta in metas}

    first = objects("ddpjob", "ops")
    assert first.isdisjoint(objects("ddpjob", "elsewhere"))
    assert first.isdisjoint(objects("other", "ops"))


@pytest.mark.parametrize("release", ["a" * 53, "a.b", "2024"])
def test_any_release_name_gives_valid_names_or_is_refused(helm, release):
    done = helm("template", release, str(CHART))
    refused = "fullnameOverride: 2024-operator-metrics is no name of a Service" in done.stderr
    assert bool(done.returncode) == refused == (release == "2024"), done.stderr
    for body in filter(None, yaml.safe_load_all(done.stdout)):
        if body["kind"] == "Service":
            assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", body["metadata"]["name"])


def test_common_labels_are_everywhere_and_select_nothing(template):
    on = "commonLabels.team=a,metrics.podMonitor.enabled=true,metrics.dashboard.enabled=true"
    objects = template("--set", on)
    for name, body in objects.items():
        if not name.startswith("CustomResourceDefinition/"):
            assert body["metadata"]["labels"]["team"] == "a", name
    assert labels(objects)["team"] == "a"
    selected = deployment(objects)["selector"]["matchLabels"]
    assert "team" not in selected, "an upgrade could not change it"


def test_ids_can_be_left_to_openshift_and_environment_comes_after_our_own(template):
    values = "podSecurityContext.runAsUser=null,podSecurityContext.runAsGroup=null"
    values += ",env[0].name=HTTPS_PROXY,env[0].value=http://p"
    objects = template("--set", values)
    context = pod_spec(objects)["securityContext"]
    assert context == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    names = [one["name"] for one in operator(objects)["env"]]
    assert names == ["POD_NAME", "POD_NAMESPACE", "HTTPS_PROXY"]


# --- Rights -------------------------------------------------------------------------------


def test_the_operators_rights_are_these_and_no_others(template):
    """In the whole cluster, or in namespaces only, there with or without a look at nodes."""
    whole, nodes = "ops:ddpjob-operator", "ops:ddpjob-operator-nodes"
    for values, wanted in (
        ("rbac.nodes=true", {f"ClusterRole/{whole}": {**RIGHTS, **NODE_RIGHTS}, **OF_NODES}),
        ("namespaces={a,b}", {f"Role/{n}/ddpjob-operator": RIGHTS for n in ("a", "b")}),
        (
            "namespaces={a},rbac.nodes=true",
            {"Role/a/ddpjob-operator": RIGHTS, f"ClusterRole/{nodes}": NODE_RIGHTS, **OF_NODES},
        ),
        (
            "namespaces={a},kueue.enabled=true",
            {"Role/a/ddpjob-operator": {**RIGHTS, **QUEUE_RIGHTS}, **OF_QUEUES},
        ),
    ):
        objects = template("--set", f"{values},rbac.userRoles=false,leaseName=mine")
        assert pod_spec(objects)["serviceAccountName"] == ACCOUNT["name"]
        given = {
            n: rights(o) for n, o in objects.items() if n.startswith(("Role/", "ClusterRole/"))
        }
        leases = {LEASES: {"create", "get", "update"}}
        assert given == {**wanted, "Role/ddpjob-operator-lease": leases}, values
        for name in given:
            kind, _, rest = name.partition("/")
            binding = objects[f"{kind}Binding/{rest}"]
            assert binding["roleRef"]["kind"] == kind
            assert binding["roleRef"]["name"] == rest.rpartition("/")[2]
            assert binding["subjects"] == [ACCOUNT]
        lease = objects["Role/ddpjob-operator-lease"]["rules"]
        named = [rule for rule in lease if "create" not in rule["verbs"]]
        assert [rule["resourceNames"] for rule in named] == [["mine"]]


@pytest.mark.parametrize("served", ["v1alpha2", "v1beta1", "v1"])
@pytest.mark.parametrize("when", ["Auto", "Always", "Never"])
def test_rights_to_pod_groups_are_given_where_they_are_served(template, served, when):
    """v1 has no PodGroups so far."""
    kinds = f"scheduling.k8s.io/{served}/{'PriorityClass' if served == 'v1' else 'PodGroup'}"
    objects = template("--api-versions", kinds, "--set", f"rbac.podGroups={when}")
    given = rights(objects["ClusterRole/ops:ddpjob-operator"])
    found = given.get(("scheduling.k8s.io", "podgroups"), set())
    wanted = when == "Always" or (when == "Auto" and served != "v1")
    assert found == ({"get", "list", "create", "delete"} if wanted else set())


def test_users_get_rights_by_aggregation(template):
    """Status is the operator's: nobody else may claim that a job has succeeded."""
    objects = template()
    view = {"get", "list", "watch"}
    edit = {*view, "create", "update", "patch", "delete", "deletecollection"}
    for name, verbs, roles in (("edit", edit, {"edit", "admin"}), ("view", view, {"view"})):
        role = objects[f"ClusterRole/ddpjob-{name}"]
        prefix = "rbac.authorization.k8s.io/aggregate-to-"
        assert {f"{prefix}{one}" for one in roles} <= role["metadata"]["labels"].keys()
        jobs = ("ddpjob.dev", "ddpjobs")
        assert rights(role) == {jobs: verbs, ("ddpjob.dev", "ddpjobs/status"): {"get"}}


# --- What values change -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "absent"),
    [
        ("crds.enabled=false", "CustomResourceDefinition/ddpjobs.ddpjob.dev"),
        ("metrics.service.enabled=false", "Service/ddpjob-operator-metrics"),
        ("rbac.create=false", "ClusterRole/ops:ddpjob-operator"),
        ("rbac.userRoles=false", "ClusterRole/ddpjob-edit"),
        ("replicas=1", "PodDisruptionBudget/ddpjob-operator"),
        ("podDisruptionBudget.enabled=false", "PodDisruptionBudget/ddpjob-operator"),
        ("serviceAccount.create=false,serviceAccount.name=mine", "ServiceAccount/ddpjob-operator"),
    ],
)
def test_parts_can_be_left_out(template, values, absent):
    objects = template("--set", values)
    assert set(template()) - set(objects) >= {absent}
    if absent.startswith("ServiceAccount/"):
        assert pod_spec(objects)["serviceAccountName"] == "mine"
        binding = objects["ClusterRoleBinding/ops:ddpjob-operator"]
        assert binding["subjects"][0]["name"] == "mine"


def test_one_lost_node_does_not_take_all_operators(template):
    objects = template("--set", "tolerations[0].operator=Exists,tolerations[0].key=mine")
    budget = objects["PodDisruptionBudget/ddpjob-operator"]["spec"]
    assert budget["maxUnavailable"] == 1
    policy = budget["unhealthyPodEvictionPolicy"]
    assert policy == "AlwaysAllow", "two that are not ready would hold up a drain for ever"
    assert deployment(objects)["replicas"] == 2
    spec = pod_spec(objects)
    (spread,) = spec["topologySpreadConstraints"]
    assert spread["topologyKey"] == "kubernetes.io/hostname"
    assert spread["whenUnsatisfiable"] == "ScheduleAnyway", "one node is enough to run"
    assert spread["labelSelector"] == deployment(objects)["selector"]
    brief = {t["key"]: t.get("tolerationSeconds") for t in spec["tolerations"]}
    assert brief == {
        "node.kubernetes.io/not-ready": 30,
        "node.kubernetes.io/unreachable": 30,
        "mine": None,
    }
