"""What the values of the chart refuse, and with which words; what they may be."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
import yaml

from support.chart import CHART, Helm, Template

#: Every pod of the namespace that names no account would have the operator's rights.
DEFAULT = "the namespace's default account must not get the operator's rights"


def test_labels_and_accounts_may_be_nothing(template: Template) -> None:
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
    ],
)
def test_refuses(helm: Helm, values: str, names: str) -> None:
    done = helm("template", str(CHART), "--set", values)
    assert done.returncode != 0
    assert names in done.stderr


@pytest.mark.parametrize("quantity", ["1", "0.5", "500m", "5Gi", "1e3", "1E", "100M", "1.5Gi"])
def test_quantities_of_kubernetes_are_taken(template: Template, quantity: str) -> None:
    for how in ("--set", "--set-string"):
        made = template(how, f"resources.limits.memory={quantity}")["Deployment/ddpjob-operator"]
        (container,) = made["spec"]["template"]["spec"]["containers"]
        assert str(container["resources"]["limits"]["memory"]) in (quantity, "1000")


@pytest.mark.parametrize("values", ["crds.enabled=true", "crds.enabled=false,leaseName=mine"])
def test_only_who_brings_the_definition_is_told_how_to_delete_it(helm: Helm, values: str) -> None:
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


def test_values_are_described_and_a_section_that_is_null_is_refused_by_name(helm: Helm) -> None:
    """A `# --` line above each, a place in the schema; not the line of a template with a nil."""
    lines = (CHART / "values.yaml").read_text().splitlines()
    described = {
        following.strip().split(":")[0]
        for line, following in itertools.pairwise(lines)
        if line.strip().startswith("# -- ")
    }

    def walk(values: dict[str, Any], node: dict[str, Any], path: str = "") -> None:
        for name, value in values.items():
            inner = node["properties"][name]
            if isinstance(value, dict) and inner.get("properties"):
                assert inner["additionalProperties"] is False, name
                done = helm("template", str(CHART), "--set", f"{path}{name}=null")
                assert f"missing property '{name}'" in done.stderr, name
                walk(value, inner, f"{path}{name}.")
            else:
                assert name in described, f"{name} has no `# --` line in values.yaml"

    schema = json.loads((CHART / "values.schema.json").read_text())
    walk(yaml.safe_load("\n".join(lines)), schema)


class Once(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value]
        assert len(names) == len(set(names)), f"twice in one mapping: {names}"
        return super().construct_mapping(node, deep)


def test_a_label_that_is_given_twice_is_there_once(helm: Helm) -> None:
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
def test_names_that_are_numbers_or_words_of_yaml_stay_strings(helm: Helm, name: str) -> None:
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


def test_the_table_of_values_hides_nothing() -> None:
    """What looks like a tag is not shown."""
    rows = [row for row in (CHART / "README.md").read_text().splitlines() if row.startswith("|")]
    assert len(rows) > 50
    assert [row for row in rows if "<" in re.sub("`[^`]*`", "", row)] == []
