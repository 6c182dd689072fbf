"""All that the chart and the operator make, against Kubernetes' schemas of several versions."""

from collections.abc import Iterator
from functools import cache
from typing import Any
from unittest import mock

import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import utils

from ddpjob_contract import crd
from ddpjob_operator.core import render
from ddpjob_operator.core.objects import observe, spec
from support.chart import Template
from support.cluster import ROOT
from support.manifest import example, examples
from support.world import crd_schema

Object = dict[str, Any]

#: docs/guides/operations.md names the first and the last.
VERSIONS = [f"1.{minor}" for minor in range(30, 38)]
DEFINITIONS = "kubernetes-json-schema/v{}.0-local/_definitions.json"
#: Values that make the chart render each of its objects, in each of its shapes.
VALUES = {
    "default": (),
    "everything": (
        "commonLabels.team=a,namespaces={a,b},rbac.nodes=true,podLabels.x=y,podAnnotations.x=y",
        "admissionPolicies.podCreators.enabled=true,admissionPolicies.operator.enabled=true",
        "admissionPolicies.restricted.enabled=true,admissionPolicies.restricted.serviceAccounts={m}",
        "admissionPolicies.gangLabels.enabled=true",
        "networkPolicy.metricsFrom[0].podSelector.matchLabels.a=b",
        "metrics.dashboard.enabled=true,image.pullSecrets[0].name=s,priorityClassName=p",
        "env[0].name=HTTPS_PROXY,env[0].value=http://p,extraArgs={--probe-host,::}",
        "volumes[0].name=v,volumes[0].configMap.name=c,volumeMounts[0].name=v",
        "volumeMounts[0].mountPath=/v,envFrom[0].secretRef.name=s,annotations.a=b",
        "topologySpreadConstraints[0].maxSkew=1,topologySpreadConstraints[0].topologyKey=z",
        "topologySpreadConstraints[0].whenUnsatisfiable=ScheduleAnyway,dnsPolicy=None",
        "dnsConfig.nameservers={10.0.0.1},metrics.service.annotations.a=b",
        "nodeSelector.a=b,tolerations[0].operator=Exists,serviceAccount.annotations.a=b",
    ),
    "alone": ("podSecurityContext.runAsUser=null,podSecurityContext.runAsGroup=null,replicas=1",),
}


@pytest.fixture(scope="module", autouse=True)
def read_once() -> Iterator[None]:
    """The package reads its schemas, 2 MB, anew for each object."""
    with mock.patch.object(utils, "schema_contents", cache(utils.schema_contents)):
        yield


def rendered(template: Template) -> Iterator[tuple[str, Object]]:
    for values, sets in VALUES.items():
        flags = [word for one in sets for word in ("--set", one)]
        for name, body in template(*flags).items():
            yield f"{values}: {name}", body
    for body in yaml.safe_load_all((ROOT / "manifests" / "install.yaml").read_text()):
        yield f"install.yaml: {body['kind']}/{body['metadata']['name']}", body


def of_examples() -> Iterator[tuple[str, Object]]:
    """The examples' own objects, and what the operator makes of their jobs."""
    for file in examples():
        for body in example(file):
            if body["kind"] != crd.KIND:
                yield f"{file}: {body['kind']}", body
                continue
            meta = {**body["metadata"], "namespace": "ns", "uid": "u", "resourceVersion": "1"}
            job, parsed = observe.job({**body, "metadata": meta}), spec.parse(body["spec"])
            for made in (render.pod(job, parsed, 1, 0, ["a"]), *render.network(job, parsed)):
                yield f"{file}: {made['kind']}", made


@pytest.fixture(scope="module")
def objects(template: Template) -> list[tuple[str, Object]]:
    return [*rendered(template), *of_examples()]


@pytest.mark.parametrize("version", VERSIONS)
def test_each_object_is_one_of_that_kubernetes(objects, version):
    kinds = {body["kind"] for _, body in objects}
    assert {"NetworkPolicy", "Pod", "ValidatingAdmissionPolicy", "RoleBinding"} <= kinds
    for name, body in objects:
        try:
            kubernetes_validate.validate(body, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            pytest.fail(f"{name}: {list(error.absolute_path)}: {error.message}")


def test_every_source_of_a_volume_is_named():
    """Of one without a name the definition sees no change, and takes null."""
    known: set[str] = set()
    for version in VERSIONS:
        found = utils.schema_contents(DEFINITIONS.format(version), version)["$defs"]
        known |= found["io.k8s.api.core.v1.Volume"]["properties"].keys()
    volume = crd_schema()["properties"]["spec"]["properties"]["snapshot"]["properties"]["volume"]
    assert known - volume["properties"].keys() == {"name"}
    assert {source["type"] for source in volume["properties"].values()} == {"object"}
