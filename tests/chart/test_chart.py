"""What the Helm chart renders: objects, security, rights, and what its values refuse."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from ddpjob_operator.shell import settings
from support.cluster import ROOT
from support.manifest import rights
from support.network import NAMESPACE, Pod, reaches
from support.site import OPERATOR_LABEL

CHART = ROOT / "charts" / "ddpjob"

Objects = dict[str, dict[str, Any]]
Template = Callable[..., Objects]
Helm = Callable[..., subprocess.CompletedProcess[str]]

# The operator's whole rights. A verb more or less is a decision: change both places.
RIGHTS = {
    ("ddpjob.dev", "ddpjobs"): {"get", "list", "watch", "delete"},
    ("ddpjob.dev", "ddpjobs/status"): {"update"},
    ("ddpjob.dev", "ddpjobs/finalizers"): {"update"},
    ("", "pods"): {"get", "list", "watch", "create", "delete"},
    ("", "services"): {"get", "create", "update"},
    ("networking.k8s.io", "networkpolicies"): {"get", "create", "update"},
    ("", "events"): {"list", "create"},
}
NODE_RIGHTS = {("", "nodes"): {"get", "list", "watch"}}


def pod_spec(objects: Objects) -> dict[str, Any]:
    spec: dict[str, Any] = objects["Deployment/ddpjob-operator"]["spec"]["template"]["spec"]
    return spec


def operator(objects: Objects) -> dict[str, Any]:
    (container,) = pod_spec(objects)["containers"]
    found: dict[str, Any] = container
    return found


def test_lints(helm: Helm) -> None:
    done = helm("lint", str(CHART), "--strict")
    assert done.returncode == 0, done.stdout + done.stderr


def test_renders_these_objects_by_default(template: Template) -> None:
    assert set(template()) == {
        "ServiceAccount/ddpjob-operator",
        "CustomResourceDefinition/ddpjobs.ddpjob.dev",
        "ClusterRole/ddpjob-edit",
        "ClusterRole/ddpjob-view",
        "ClusterRole/ops:ddpjob-operator",
        "ClusterRoleBinding/ops:ddpjob-operator",
        "Role/ddpjob-operator-lease",
        "RoleBinding/ddpjob-operator-lease",
        "Service/ddpjob-operator-metrics",
        "PodDisruptionBudget/ddpjob-operator",
        "Deployment/ddpjob-operator",
        "Pod/ddpjob-operator-test",  # of `helm test`
    }


def test_operator_pod_is_restricted(template: Template) -> None:
    objects = template()
    assert pod_spec(objects)["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "runAsGroup": 1000,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert operator(objects)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert operator(objects)["resources"]["requests"].keys() == {"cpu", "memory"}
    assert not any("hostPath" in volume for volume in pod_spec(objects)["volumes"])


def test_its_pods_carry_the_label_by_which_cluster_tests_find_and_kill_it(
    template: Template,
) -> None:
    key, _, value = OPERATOR_LABEL.partition("=")
    pods = template()["Deployment/ddpjob-operator"]["spec"]["template"]["metadata"]["labels"]
    assert pods.get(key) == value


def test_operator_pod_is_reachable(template: Template) -> None:
    objects = template()
    container = operator(objects)
    (port,) = container["ports"]
    assert (port["name"], port["containerPort"]) == ("http", 8080)
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "http"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}
    service = objects["Service/ddpjob-operator-metrics"]["spec"]
    assert service["ports"] == [
        {"name": "http-metrics", "port": 8080, "targetPort": "http", "protocol": "TCP"}
    ]
    labels = objects["Deployment/ddpjob-operator"]["spec"]["template"]["metadata"]["labels"]
    assert service["selector"].items() <= labels.items()


def test_arguments_are_the_operators_own(template: Template) -> None:
    """The rendered arguments go through the operator's parser: none may be unknown to it."""
    values = ("--set", "namespaces={a,b}", "--set", "progressSeconds=7", "--set", "leaseName=l")
    container = operator(template(*values, "--set", "log.level=debug,log.format=text"))
    parsed = settings.parse(container["args"], {"POD_NAME": "pod", "POD_NAMESPACE": "ops"})
    assert parsed.namespaces == ("a", "b")
    assert parsed.progress_seconds == 7
    assert (parsed.lease_name, parsed.lease_namespace) == ("l", "ops")
    assert (parsed.log_level, parsed.log_format) == ("debug", "text")
    ports = [port["containerPort"] for port in container["ports"]]
    assert ports == [parsed.probe_port]
    assert [variable["name"] for variable in container["env"]] == ["POD_NAME", "POD_NAMESPACE"]
    values = ("--set", "workers=3,resyncSeconds=40,leaseSeconds=20,extraArgs={--probe-host,::}")
    tuned = settings.parse(operator(template(*values))["args"], {})
    assert tuned.metrics_from == (), "empty: everybody"
    assert (tuned.workers, tuned.resync_seconds, tuned.lease_seconds) == (3, 40, 20)
    assert tuned.probe_host == "::"
    assert settings.parse(operator(template())["args"], {}).namespaces == ()


def test_who_may_read_metrics_besides_the_operator(template: Template) -> None:
    objects = template("--set", "networkPolicy.metricsFrom[0].podSelector.matchLabels.a=b")
    own, given = settings.parse(operator(objects)["args"], {}).metrics_from
    assert given == {"podSelector": {"matchLabels": {"a": "b"}}}
    assert own["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "ops"}}
    pods = objects["Deployment/ddpjob-operator"]["spec"]["template"]["metadata"]["labels"]
    assert own["podSelector"]["matchLabels"].items() <= pods.items()


def test_who_may_read_the_operators_own(template: Template) -> None:
    """The same who may read those of gangs; without a word about it everybody, as there."""
    kind = "NetworkPolicy/ddpjob-operator"
    assert kind not in template()
    there = f"namespaceSelector.matchLabels.{NAMESPACE.replace('.', chr(92) + '.')}=monitoring"
    objects = template("--set", f"networkPolicy.metricsFrom[0].{there}")
    pod = objects["Deployment/ddpjob-operator"]["spec"]["template"]
    operator = Pod("ops", pod["metadata"]["labels"])
    tester = objects["Pod/ddpjob-operator-test"]["metadata"]["labels"]
    number = pod["spec"]["containers"][0]["ports"][0]["containerPort"]
    for source, may in (
        (Pod("monitoring", {"app": "prometheus"}), True),
        (Pod("ops", tester), True),
        (Pod("ops", {"app": "neighbour"}), False),
        (Pod("team-a", tester), False),
    ):
        assert reaches(objects[kind], source, operator, number) is may, source
    assert reaches(objects[kind], Pod("team-a"), Pod("ops", tester), number), "it holds for ours"


@pytest.mark.parametrize("policy", ["podCreators", "restricted", "gangLabels"])
def test_a_policy_about_jobs_holds_where_this_release_serves(
    template: Template, policy: str
) -> None:
    """Elsewhere another release has its own operator, accounts and choices."""
    words = re.sub("[A-Z]", lambda each: f"-{each.group().lower()}", policy)
    name = f"ValidatingAdmissionPolicyBinding/ops.ddpjob-operator.{words}"
    on = f"admissionPolicies.{policy}.enabled=true"
    assert "matchResources" not in template("--set", on)[name]["spec"]
    found = template("--set", f"{on},namespaces={{a,b}}")[name]["spec"]["matchResources"]
    there = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["a", "b"]}
    assert found == {"namespaceSelector": {"matchExpressions": [there]}}


def test_image_follows_the_chart_and_a_digest_wins_over_a_tag(template: Template) -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    digest = "sha256:" + 64 * "a"
    for values, image in (
        ("image.pullPolicy=Always", f"ddpjob/operator:{chart['appVersion']}"),
        ("image.tag=t", "ddpjob/operator:t"),
        (f"image.digest={digest},image.tag=t,image.repository=r/o", f"r/o@{digest}"),
    ):
        assert operator(template("--set", values))["image"] == image


def test_two_releases_share_no_object(helm: Helm, template: Template) -> None:
    """But for the definition and the users' roles, which the second one leaves out."""
    second = ("--set", "crds.enabled=false,rbac.userRoles=false")

    def objects(release: str, namespace: str) -> set[tuple[str, str, str]]:
        done = helm("template", release, str(CHART), "--namespace", namespace, *second)
        found = [body for body in yaml.safe_load_all(done.stdout) if body]
        metas = [(body["kind"], body["metadata"]) for body in found]
        return {(kind, meta.get("namespace", ""), meta["name"]) for kind, meta in metas}

    first = objects("ddpjob", "ops")
    assert first.isdisjoint(objects("ddpjob", "elsewhere"))
    assert first.isdisjoint(objects("other", "ops"))
    lease = "--lease-name={}-operator"
    assert lease.format("ddpjob") in operator(template())["args"]
    done = helm("template", "other", str(CHART))
    assert lease.format("other") in done.stdout
    assert lease.format("ddpjob") not in done.stdout


@pytest.mark.parametrize("release", ["a" * 53, "a.b"])
def test_any_release_name_gives_valid_names(helm: Helm, release: str) -> None:
    done = helm("template", release, str(CHART))
    for body in filter(None, yaml.safe_load_all(done.stdout)):
        if body["kind"] == "Service":
            assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", body["metadata"]["name"])


def test_common_labels_are_everywhere_and_select_nothing(template: Template) -> None:
    on = "commonLabels.team=a,metrics.podMonitor.enabled=true,metrics.dashboard.enabled=true"
    objects = template("--set", on)
    for name, body in objects.items():
        if not name.startswith("CustomResourceDefinition/"):
            assert body["metadata"]["labels"]["team"] == "a", name
    deployment = objects["Deployment/ddpjob-operator"]["spec"]
    assert deployment["template"]["metadata"]["labels"]["team"] == "a"
    assert "team" not in deployment["selector"]["matchLabels"], "an upgrade could not change it"


def test_ids_can_be_left_to_openshift_and_environment_comes_after_our_own(
    template: Template,
) -> None:
    values = "podSecurityContext.runAsUser=null,podSecurityContext.runAsGroup=null"
    values += ",env[0].name=HTTPS_PROXY,env[0].value=http://p"
    objects = template("--set", values)
    context = pod_spec(objects)["securityContext"]
    assert context == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    names = [one["name"] for one in operator(objects)["env"]]
    assert names == ["POD_NAME", "POD_NAMESPACE", "HTTPS_PROXY"]


def test_cluster_wide_rights(template: Template) -> None:
    objects = template()
    assert rights(objects["ClusterRole/ops:ddpjob-operator"]) == {**RIGHTS, **NODE_RIGHTS}
    binding = objects["ClusterRoleBinding/ops:ddpjob-operator"]
    assert binding["roleRef"]["name"] == "ops:ddpjob-operator"
    account = {"kind": "ServiceAccount", "name": "ddpjob-operator", "namespace": "ops"}
    assert binding["subjects"] == [account]
    assert pod_spec(objects)["serviceAccountName"] == "ddpjob-operator"


def test_rights_in_namespaces_only(template: Template) -> None:
    objects = template("--set", "namespaces={a,b}")
    assert not any(name.startswith("ClusterRoleBinding/") for name in objects)
    assert "ClusterRole/ops:ddpjob-operator" not in objects
    for namespace in ("a", "b"):
        assert rights(objects[f"Role/{namespace}/ddpjob-operator"]) == RIGHTS
        binding = objects[f"RoleBinding/{namespace}/ddpjob-operator"]
        assert binding["roleRef"]["kind"] == "Role"
        assert binding["subjects"][0]["namespace"] == "ops"


def test_rights_to_read_nodes_beside_those_in_namespaces(template: Template) -> None:
    name = "ops:ddpjob-operator-nodes"
    assert f"ClusterRole/{name}" not in template("--set", "rbac.nodes=true"), "it has them"
    objects = template("--set", "namespaces={a},rbac.nodes=true")
    assert rights(objects[f"ClusterRole/{name}"]) == NODE_RIGHTS
    binding = objects[f"ClusterRoleBinding/{name}"]
    assert binding["roleRef"]["name"] == name
    account = {"kind": "ServiceAccount", "name": "ddpjob-operator", "namespace": "ops"}
    assert binding["subjects"] == [account]
    assert rights(objects["Role/a/ddpjob-operator"]) == RIGHTS


def test_lease_rights(template: Template) -> None:
    role = template("--set", "leaseName=mine")["Role/ddpjob-operator-lease"]
    assert role["metadata"]["namespace"] == "ops"
    assert rights(role) == {("coordination.k8s.io", "leases"): {"create", "get", "update"}}
    named = [rule for rule in role["rules"] if "create" not in rule["verbs"]]
    assert [rule["resourceNames"] for rule in named] == [["mine"]]


@pytest.mark.parametrize("values", [(), ("--set", "namespaces={a}")])
def test_no_rights_that_reach_further(template: Template, values: tuple[str, ...]) -> None:
    for name, body in template(*values).items():
        if body["kind"] in ("Role", "ClusterRole"):
            for (group, resource), verbs in rights(body).items():
                assert "*" not in {group, resource, *verbs}, name
                assert resource not in ("secrets", "configmaps", "pods/exec"), name
                assert not verbs & {"escalate", "bind", "impersonate"}, name


def test_users_get_rights_by_aggregation(template: Template) -> None:
    objects = template()
    edit, view = objects["ClusterRole/ddpjob-edit"], objects["ClusterRole/ddpjob-view"]
    prefix = "rbac.authorization.k8s.io/aggregate-to-"
    assert {f"{prefix}edit", f"{prefix}admin"} <= edit["metadata"]["labels"].keys()
    assert f"{prefix}view" in view["metadata"]["labels"]
    assert rights(view)[("ddpjob.dev", "ddpjobs")] == {"get", "list", "watch"}
    # Status is the operator's: nobody else may claim that a job has succeeded.
    for role in (edit, view):
        assert rights(role)[("ddpjob.dev", "ddpjobs/status")] == {"get"}


def test_definition_outlives_the_release(template: Template) -> None:
    definition = template()["CustomResourceDefinition/ddpjobs.ddpjob.dev"]
    assert definition["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


@pytest.mark.parametrize(
    ("values", "absent"),
    [
        ("crds.enabled=false", "CustomResourceDefinition/ddpjobs.ddpjob.dev"),
        ("metrics.service.enabled=false", "Service/ddpjob-operator-metrics"),
        ("rbac.create=false", "ClusterRole/ops:ddpjob-operator"),
        ("rbac.userRoles=false", "ClusterRole/ddpjob-edit"),
        (
            "serviceAccount.create=false,serviceAccount.name=mine",
            "ServiceAccount/ddpjob-operator",
        ),
    ],
)
def test_parts_can_be_left_out(template: Template, values: str, absent: str) -> None:
    objects = template("--set", values)
    assert set(template()) - set(objects) >= {absent}
    if absent.startswith("ServiceAccount/"):
        assert pod_spec(objects)["serviceAccountName"] == "mine"
        binding = objects["ClusterRoleBinding/ops:ddpjob-operator"]
        assert binding["subjects"][0]["name"] == "mine"


def test_disruption_budget_needs_two(template: Template) -> None:
    name = "PodDisruptionBudget/ddpjob-operator"
    two = template()
    assert two[name]["spec"]["maxUnavailable"] == 1
    policy = two[name]["spec"]["unhealthyPodEvictionPolicy"]
    assert policy == "AlwaysAllow", "two that are not ready would hold up a drain for ever"
    assert two["Deployment/ddpjob-operator"]["spec"]["replicas"] == 2
    assert name not in template("--set", "replicas=1")
    assert name not in template("--set", "podDisruptionBudget.enabled=false")


def test_one_lost_node_does_not_take_all_operators(template: Template) -> None:
    objects = template("--set", "tolerations[0].operator=Exists,tolerations[0].key=mine")
    spec = pod_spec(objects)
    (spread,) = spec["topologySpreadConstraints"]
    assert spread["topologyKey"] == "kubernetes.io/hostname"
    assert spread["whenUnsatisfiable"] == "ScheduleAnyway", "one node is enough to run"
    deployment = objects["Deployment/ddpjob-operator"]["spec"]
    assert spread["labelSelector"] == deployment["selector"]
    brief = {t["key"]: t.get("tolerationSeconds") for t in spec["tolerations"]}
    assert brief == {
        "node.kubernetes.io/not-ready": 30,
        "node.kubernetes.io/unreachable": 30,
        "mine": None,
    }


def test_service_monitor(template: Template, helm: Helm) -> None:
    on = ("--set", "metrics.serviceMonitor.enabled=true,metrics.serviceMonitor.labels.team=a")
    monitor = template(*on)["ServiceMonitor/ddpjob-operator"]
    assert monitor["metadata"]["labels"]["team"] == "a"
    service = template(*on)["Service/ddpjob-operator-metrics"]
    wanted = monitor["spec"]["selector"]["matchLabels"]
    assert wanted.items() <= service["metadata"]["labels"].items()
    assert monitor["spec"]["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
    done = helm("template", str(CHART), *on, "--set", "metrics.service.enabled=false")
    assert "needs metrics.service.enabled" in done.stderr


def test_notes_name_the_scope(helm: Helm) -> None:
    args = ("install", "ddpjob", str(CHART), "--dry-run=client", "--namespace", "ops")
    assert "the whole cluster" in helm(*args).stdout
    assert "the namespaces a, b" in helm(*args, "--set", "namespaces={a,b}").stdout
