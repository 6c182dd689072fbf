"""What the values of the chart refuse, and with which words; what they may be."""

import json
from typing import Any

import pytest
import yaml

from support.chart import CHART

#: Every pod of the namespace that names no account would have the operator's rights.
DEFAULT = "the namespace's default account must not get the operator's rights"


def test_labels_and_accounts_may_be_nothing(template):
    none = "metrics.dashboard.enabled=true,metrics.dashboard.labels=null"
    assert "ConfigMap/ddpjob-operator-dashboard" in template("--set", none)
    policy = "admissionPolicies.restricted"
    none = f"{policy}.enabled=true,{policy}.serviceAccounts=null"
    none += ",admissionPolicies.operator.serviceAccounts=null"
    assert "ValidatingAdmissionPolicy/ops.ddpjob-operator.restricted" in template("--set", none)


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ("serviceAccount.create=false", DEFAULT),
        ("serviceAccount.create=false,serviceAccount.name=default", DEFAULT),
        ("serviceAccount.name=default", DEFAULT),
        ("fullnameOverride=default", DEFAULT),
        ("replica=2", "replica"),
        ("replicas=two", "/replicas"),
        ("namespaces={A}", "/namespaces/0"),
        ("log.level=loud", "/log/level"),
        ("image.pullPolicy=Sometimes", "/image/pullPolicy"),
        ("image.digest=abc", "/image/digest"),
        ("workers=0", "/workers"),
        ("env[0].value=x", "/env/0"),
        ("workers=null", "workers"),
        ("commonLabels.app\\.kubernetes\\.io/name=x", "app.kubernetes.io/name"),
        ("networkPolicy.metricsFrom[0].foo=bar", "/networkPolicy/metricsFrom/0"),
        ("networkPolicy.metricsFrom[0].podSelector.a=b", "/networkPolicy/metricsFrom/0"),
        ("nodeSignals.conditions[0]=Kernel Deadlock", "/nodeSignals/conditions/0"),
        ("nodeSignals.cordon=1", "/nodeSignals/cordon"),
        ("admissionPolicies.operator.enabled=maybe", "/admissionPolicies/operator/enabled"),
        ("commonLabels.team=a b", "/commonLabels/team"),
        ("nodeSelector.pool=true", "/nodeSelector/pool"),
        ("serviceAccount.name=Mine", "/serviceAccount/name"),
        ("leaseName=a..b", "/leaseName"),
        ("image.repository=null", "repository"),
        ("resources.limits.memory=5Gib", "/resources/limits/memory"),
        ("resources.requests.cpu=one", "/resources/requests/cpu"),
        ("metrics.prometheusRule.runbookUrl=docs/runbooks.md", "/prometheusRule/runbookUrl"),
        ("dnsPolicy=Host", "/dnsPolicy"),
        ("metrics.podMonitor.scrapeTimeout=5", "/podMonitor/scrapeTimeout"),
        ("nameOverride=A", "/nameOverride"),
        ("hostNetwork=true", "hostNetwork"),
    ],
)
def test_refuses(helm, values, names):
    done = helm("template", str(CHART), "--set", values)
    assert done.returncode != 0
    assert names in done.stderr


def operator_pod(objects: Any, name: str = "ddpjob-operator") -> Any:
    return objects[f"Deployment/{name}"]["spec"]["template"]["spec"]


def test_an_umbrella_chart_leaves_it_out_by_a_condition(helm, tmp_path):
    """With the values that it gives all its charts."""
    (tmp_path / "charts").mkdir()
    (tmp_path / "charts/ddpjob").symlink_to(CHART)
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["version"]
    needs = [{"name": "ddpjob", "version": version, "condition": "ddpjob.enabled"}]
    whole = {"apiVersion": "v2", "name": "all", "version": "1.0.0", "dependencies": needs}
    (tmp_path / "Chart.yaml").write_text(yaml.safe_dump(whole))
    shared = "global.imageRegistry=r.local:5000/mirror/,global.imagePullSecrets={one},global.more=x"

    def made(enabled: str) -> Any:
        values = f"ddpjob.enabled={enabled},{shared}"
        done = helm("template", "all", str(tmp_path), "--set", values)
        assert done.returncode == 0, done.stderr
        return list(filter(None, yaml.safe_load_all(done.stdout)))

    assert made("false") == []
    [pod] = (one["spec"]["template"]["spec"] for one in made("true") if one["kind"] == "Deployment")
    assert pod["containers"][0]["image"].startswith("r.local:5000/mirror/ddpjob/operator:")
    assert pod["imagePullSecrets"] == [{"name": "one"}]
    alone = helm("template", str(CHART), "--set", "enabled=false")
    assert "only an umbrella chart's `condition` leaves this chart out" in alone.stderr


def test_who_renders_without_a_cluster_is_asked_for_no_namespace(template):
    """As Argo CD does, which names all versions that its cluster serves."""
    rendered = template("--set", "namespaces={a}", "--api-versions", "v1/Pod")
    assert "Role/a/ddpjob-operator" in rendered


@pytest.mark.parametrize("repository", ["quay.io/a/b", "r:5000/b", "localhost/b"])
def test_a_repository_that_names_its_registry_keeps_it(template, repository):
    values = f"global.imageRegistry=r.local,image.repository={repository},image.tag=v1"
    assert operator_pod(template("--set", values))["containers"][0]["image"] == f"{repository}:v1"


def test_another_name_is_in_all_names_and_labels(template):
    monitors = ("serviceMonitor", "podMonitor", "prometheusRule", "dashboard")
    on = ",".join(f"metrics.{one}.enabled=true,metrics.{one}.namespace=watch" for one in monitors)
    objects = template("--set", f"nameOverride=trains,{on}")
    assert not [name for name in objects if "ddpjob-operator" in name]
    selects = objects["Deployment/ddpjob-trains"]["spec"]["selector"]["matchLabels"]
    assert selects["app.kubernetes.io/name"] == "trains"
    assert objects["Service/ddpjob-trains-metrics"]["spec"]["selector"] == selects
    watch = {name for name in objects if "/watch/" in name}
    assert watch == {
        "ServiceMonitor/watch/ddpjob-trains", "PodMonitor/watch/ddpjob-trains-trainers",
        "PrometheusRule/watch/ddpjob-trains", "ConfigMap/watch/ddpjob-trains-dashboard",
    }  # fmt: skip
    monitor = objects["ServiceMonitor/watch/ddpjob-trains"]["spec"]
    assert monitor["namespaceSelector"] == {"matchNames": ["ops"]}


def test_what_people_expect_of_a_chart_reaches_its_objects(template):
    ca = {"name": "ca", "mountPath": "/etc/ca"}
    spread = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    drop = {"action": "labeldrop", "regex": "pod"}
    read = {"enabled": True, "scrapeTimeout": "5s", "relabelings": [drop]}
    values = {
        "volumes": [{"name": "ca", "configMap": {"name": "proxy-ca"}}], "volumeMounts": [ca],
        "envFrom": [{"secretRef": {"name": "proxy"}}], "annotations": {"reload": "yes"},
        "revisionHistoryLimit": 2, "topologySpreadConstraints": [spread],
        "dnsPolicy": "None", "dnsConfig": {"nameservers": ["10.0.0.1"]},
        "metrics": {
            "service": {"annotations": {"prometheus.io/scrape": "true"}},
            "serviceMonitor": read, "podMonitor": read,
        },
    }  # fmt: skip
    flags = [
        word for name in values for word in ("--set-json", f"{name}={json.dumps(values[name])}")
    ]
    objects = template(*flags)
    deployment = objects["Deployment/ddpjob-operator"]
    assert deployment["metadata"]["annotations"] == values["annotations"]
    assert deployment["spec"]["revisionHistoryLimit"] == 2
    pod = operator_pod(objects)
    (container,) = pod["containers"]
    assert container["envFrom"] == values["envFrom"]
    assert ca in container["volumeMounts"]
    assert [one["name"] for one in pod["volumes"]] == ["tmp", "ca"]
    for name in ("topologySpreadConstraints", "dnsPolicy", "dnsConfig"):
        assert pod[name] == values[name]
    service = objects["Service/ddpjob-operator-metrics"]
    assert service["metadata"]["annotations"] == {"prometheus.io/scrape": "true"}
    endpoints = [
        *objects["ServiceMonitor/ddpjob-operator"]["spec"]["endpoints"],
        *objects["PodMonitor/ddpjob-operator-trainers"]["spec"]["podMetricsEndpoints"],
    ]
    for one in endpoints:
        assert (one["scrapeTimeout"], one["relabelings"][-1]) == ("5s", drop)


@pytest.mark.parametrize("quantity", ["1", "0.5", "500m", "5Gi", "1e3", "1E", "100M", "1.5Gi"])
def test_quantities_of_kubernetes_are_taken(template, quantity):
    for how in ("--set", "--set-string"):
        made = template(how, f"resources.limits.memory={quantity}")["Deployment/ddpjob-operator"]
        (container,) = made["spec"]["template"]["spec"]["containers"]
        assert str(container["resources"]["limits"]["memory"]) in (quantity, "1000")


@pytest.mark.parametrize("values", ["crds.enabled=true", "crds.enabled=false,leaseName=mine"])
def test_only_who_brings_the_definition_is_told_how_to_delete_it(helm, values):
    """It is that of every team: a release beside the first has no business with it."""
    where = ("second", str(CHART), "-n", "ops", "--dry-run=client")
    done = helm("install", *where, "--set", values)
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("NOTES:")[2]
    owns = "crds.enabled=true" in values
    assert ("kubectl delete crd" in notes) == owns
    assert ("every DDPJob of every" in notes) == owns
    assert f"-n ops delete lease {'second-operator' if owns else 'mine'}" in notes
    assert "the whole cluster" in notes
    assert "the namespaces a, b" in helm("install", *where, "--set", "namespaces={a,b}").stdout


class Once(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value]
        assert len(names) == len(set(names)), f"twice in one mapping: {names}"
        return super().construct_mapping(node, deep)


def test_a_label_that_is_given_twice_is_there_once(helm):
    """YAML with a key twice is refused by some readers, kustomize for one; the nearer one holds."""
    values = [
        "commonLabels.team=common", "podLabels.team=pod", "metrics.dashboard.enabled=true",
        "podAnnotations.kubectl\\.kubernetes\\.io/default-container=other",
        "commonLabels.grafana_dashboard=common",
    ]  # fmt: skip
    for one in ("serviceMonitor", "podMonitor", "prometheusRule"):
        values += [f"metrics.{one}.enabled=true", f"metrics.{one}.labels.team={one}"]
    sets = [word for value in values for word in ("--set", value)]
    done = helm("template", "ddpjob", str(CHART), *sets)
    assert done.returncode == 0, done.stderr
    labels = {
        body["kind"]: body["metadata"]["labels"]["team"]
        for body in yaml.load_all(done.stdout, Once)
        if body and body["kind"].endswith(("Monitor", "Rule"))
    }
    assert labels == {
        "ServiceMonitor": "serviceMonitor",
        "PodMonitor": "podMonitor",
        "PrometheusRule": "prometheusRule",
    }


@pytest.mark.parametrize("name", ["2024", "1e3", "true", "null", "on"])
def test_names_that_are_numbers_or_words_of_yaml_stay_strings(helm, name):
    """As release, namespace, account and class; Kubernetes takes them, and no number."""
    full = name if name.isalpha() else "x"
    names = f"fullnameOverride={full},priorityClassName={name},serviceAccount.name={name}"
    policies = ("podCreators", "restricted", "operator", "gangLabels")
    monitors = ("serviceMonitor", "podMonitor", "prometheusRule", "dashboard")
    more = [f"admissionPolicies.{one}.enabled=true" for one in policies]
    more += [f"metrics.{one}.enabled=true" for one in monitors]
    more += ["rbac.nodes=true", "networkPolicy.metricsFrom[0].ipBlock.cidr=::/0"]
    names += f",namespaces[0]={name}"
    words = ("-n", name, "--set-string", names, "--set", ",".join(more))
    done = helm("template", name, str(CHART), *words)
    assert done.returncode == 0, done.stderr

    def walk(node: Any, path: str) -> None:
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            if str(key).endswith(("name", "Name", "namespace", "instance")):
                assert isinstance(value, str | dict), f"{path}.{key} is {value!r}"
            if isinstance(value, dict | list):
                walk(value, f"{path}.{key}")

    for body in yaml.safe_load_all(done.stdout):
        if body["kind"] != "CustomResourceDefinition":
            walk(body, body["kind"])
