"""The CRD as a document: equal to what is committed, to the contract, and small."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

import ddpjob_contract as contract
from ddpjob_contract.crd import DEFAULTS
from ddpjob_operator.core.objects import spec
from ddpjob_tools import cli
from devcluster import binaries
from support.cluster import CRD, ROOT
from support.manifest import changed, ddpjob, example, examples

Schema = dict[str, Any]


@pytest.fixture(scope="module")
def root() -> Schema:
    definition = yaml.safe_load(CRD.read_text())
    schema: Schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def walk(schema: Schema, path: str) -> Iterator[tuple[str, Schema]]:
    """Yield (path, schema) of every field, list item and map value."""
    yield path, schema
    for name, field in schema.get("properties", {}).items():
        yield from walk(field, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from walk(schema[key], f"{path}[]")


def test_committed_files_are_what_the_chart_renders():
    """manifests/crd.yaml, manifests/install.yaml and docs/reference/api.md."""
    helm = binaries.ensure(["helm"], print)["helm"]
    done = subprocess.run(
        [sys.executable, ROOT / "charts" / "render.py", "--check"],
        capture_output=True, text=True, check=False, env={**os.environ, "HELM": str(helm)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # A minimum that the schema leaves to a rule, for its message, is on the page, too.
    lines = (ROOT / "docs" / "reference" / "api.md").read_text().splitlines()
    (told,) = (line for line in lines if "terminationGracePeriodSeconds` (" in line)
    assert "*1 to 2592000*" in told


def test_rules_over_the_spec_read_no_text_of_unknown_length(root):
    """Kubernetes 1.30 reckons int-or-string as 3 MB each, and refuses the whole definition then."""
    rules = [rule["rule"] for rule in root["properties"]["spec"]["x-kubernetes-validations"]]
    assert rules
    assert [rule for rule in rules if re.search(r"\b(matches|string|quantity)\(", rule)] == []


def test_reserved_variables_are_those_of_the_contract(root):
    pod = root["properties"]["spec"]["properties"]["template"]["properties"]["spec"]
    for kind in ("containers", "initContainers"):
        item = pod["properties"][kind]["items"]["properties"]["env"]["items"]
        (rule,) = item["x-kubernetes-validations"]
        names = re.findall(r"'([A-Z][A-Z0-9_]*)'", rule["rule"])
        prefix, *reserved = names
        users, reserved = reserved[: len(contract.USER_ENV)], reserved[len(contract.USER_ENV) :]
        assert tuple(users) == contract.USER_ENV
        assert f"startsWith('{prefix}')" in rule["rule"]
        assert prefix == contract.OWN_PREFIX
        assert sorted(reserved) == sorted(contract.RESERVED_ENV)


def test_it_is_small_and_says_what_each_field_and_rule_is_about(root):
    text = json.dumps(yaml.safe_load(CRD.read_text()), separators=(",", ":"))
    # Client-side apply keeps a copy in an annotation: 262144 bytes for all annotations.
    assert len(text) < 64 * 1024
    for path, schema in walk(root, ""):
        if path and not path.endswith("[]") and not path.startswith(".metadata"):
            assert schema.get("description", "").strip().endswith((".", ")")), path
        # Without a message kubectl shows the CEL expression, which helps nobody.
        for rule in schema.get("x-kubernetes-validations", ()):
            assert rule.get("message"), f"{path}: {rule['rule']}"
            assert "\n" not in rule["message"] + rule.get("messageExpression", ""), path
    # A number without bounds would end in an overflow somewhere, or in an endless wait.
    for path, schema in walk(root["properties"]["spec"], "spec"):
        if schema.get("type") == "integer":
            assert {"minimum", "maximum"} <= schema.keys(), path


def test_the_operators_defaults_are_those_of_the_contract():
    """A job that was stored by an older definition lacks what is new in this one.

    That they are the CRD's, too, tests/api/test_admission.py sees.
    """
    volume = {"emptyDir": {}}
    given = stored = ddpjob("job", snapshot={"path": "/snapshots", "volume": volume})
    for path, value in DEFAULTS.items():
        stored = changed(stored, f"spec.{path}", value)
    assert spec.parse(given["spec"]) == spec.parse(stored["spec"])


def test_examples_are_restricted_and_run_scripts_that_exist():
    jobs = [(f, body) for f in examples() for body in example(f) if body["kind"] == "DDPJob"]
    assert jobs
    for file, body in jobs:
        pod = body["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True, file
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        (container,) = pod["containers"]
        assert container["image"] in ("ddpjob/trainer:0.2.0", "example/trainer-s3:1")
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert "hostPath" not in json.dumps(body)
        for word in container["command"]:
            if word.startswith("/workspace/"):
                assert (ROOT / word.removeprefix("/workspace/")).is_file(), word


def test_digits_snapshots_lie_on_its_claim():
    claim, job = example("digits.yaml")
    assert claim["kind"] == "PersistentVolumeClaim"
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    volume = job["spec"]["snapshot"]["volume"]
    assert volume == {"persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}}
    assert job["spec"]["replicas"] == 3


def test_the_check_of_gpus_is_one_pod_per_node_with_a_command_that_exists():
    (job,) = example("gpu-check.yaml")
    pod = job["spec"]["template"]["spec"]
    (apart,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart["topologyKey"] == "kubernetes.io/hostname"
    assert apart["labelSelector"] == {"matchLabels": {"ddpjob.dev/job-name": "gpu-check"}}
    program, *words = pod["containers"][0]["command"]
    assert program == "ddpjob"
    assert cli._parser().parse_args(words).command == "gpu-check"
