"""The CRD as a document: equal to what is committed, to the contract, and small."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest
import yaml

import ddpjob_contract as contract
from ddpjob_contract.crd import DEFAULTS
from ddpjob_operator.core.objects import spec
from ddpjob_trainer import cli
from devcluster import binaries
from support.cluster import CRD, ROOT
from support.manifest import changed, ddpjob, documented, example, examples

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


def test_committed_files_are_what_the_chart_renders() -> None:
    """manifests/crd.yaml, manifests/install.yaml and docs/reference/api.md."""
    helm = binaries.ensure(["helm"], print)["helm"]
    done = subprocess.run(
        [sys.executable, ROOT / "charts" / "render.py", "--check"],
        capture_output=True, text=True, check=False, env={**os.environ, "HELM": str(helm)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_page_gives_the_bounds_of_rules_too() -> None:
    """A minimum that the schema leaves to a rule, for its message."""
    lines = (ROOT / "docs" / "reference" / "api.md").read_text().splitlines()
    (told,) = (line for line in lines if "terminationGracePeriodSeconds` |" in line)
    assert "*1 to 2592000*" in told


def test_every_column_is_a_field_of_its_type(root: Schema) -> None:
    """Otherwise kubectl shows an empty column, or `<invalid>`."""
    version = yaml.safe_load(CRD.read_text())["spec"]["versions"][0]
    known = {path: schema.get("type") for path, schema in walk(root, "")}
    columns = {c["name"]: c for c in version["additionalPrinterColumns"]}
    age = columns.pop("Age")
    assert age["jsonPath"] == ".metadata.creationTimestamp"
    assert {name: c["type"] for name, c in columns.items()} == {
        name: known.get(c["jsonPath"]) for name, c in columns.items()
    }
    assert columns["Step"]["jsonPath"] == ".status.progress.stepOfTotal"


def test_rules_over_the_spec_read_no_text_of_unknown_length(root: Schema) -> None:
    """Kubernetes 1.30 reckons int-or-string as 3 MB each, and refuses the whole definition then."""
    rules = [rule["rule"] for rule in root["properties"]["spec"]["x-kubernetes-validations"]]
    assert rules
    assert [rule for rule in rules if re.search(r"\b(matches|string|quantity)\(", rule)] == []


def test_reserved_variables_are_those_of_the_contract(root: Schema) -> None:
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


def test_is_small() -> None:
    """Client-side apply keeps a copy in an annotation: 262144 bytes for all annotations."""
    text = json.dumps(yaml.safe_load(CRD.read_text()), separators=(",", ":"))
    assert len(text) < 64 * 1024


def test_every_field_is_described(root: Schema) -> None:
    silent = [
        path
        for path, schema in walk(root, "")
        if not path.endswith("[]") and not path.startswith(".metadata") and path
        if not schema.get("description", "").strip().endswith((".", ")"))
    ]
    assert silent == []


def test_every_rule_has_a_message_of_one_line(root: Schema) -> None:
    """Without one kubectl shows the CEL expression, which helps nobody."""
    for path, schema in walk(root, ""):
        for rule in schema.get("x-kubernetes-validations", ()):
            assert rule.get("message"), f"{path}: {rule['rule']}"
            assert "\n" not in rule["message"] + rule.get("messageExpression", ""), path


def test_all_numbers_of_the_spec_are_bounded(root: Schema) -> None:
    """A number without bounds would end in an overflow somewhere, or in an endless wait."""
    for path, schema in walk(root["properties"]["spec"], "spec"):
        if schema.get("type") == "integer":
            assert {"minimum", "maximum"} <= schema.keys(), path


def defaulted(schema: Schema, value: dict[str, Any]) -> dict[str, Any]:
    """Return the value as the API server stores it."""
    result = copy.deepcopy(value)
    for name, field in schema.get("properties", {}).items():
        if name not in result and "default" in field:
            result[name] = copy.deepcopy(field["default"])
        if isinstance(result.get(name), dict):
            result[name] = defaulted(field, result[name])
    return result


def test_the_defaults_of_the_contract_are_those_of_the_crd(root: Schema) -> None:
    """All but those of objects; a template has none."""
    there = {
        path.removeprefix("spec."): field["default"]
        for path, field in walk(root["properties"]["spec"], "spec")
        if "default" in field and not isinstance(field["default"], dict)
    }
    assert there == DEFAULTS


def test_the_operators_defaults_are_those_of_the_crd(root: Schema) -> None:
    """A job that was stored by an older definition lacks what is new in this one."""
    volume = {"emptyDir": {}}
    given = ddpjob("job", snapshot={"path": "/snapshots", "volume": volume})["spec"]
    stored = defaulted(root["properties"]["spec"], given)
    in_place = {"enabled": True, "maxWithoutProgress": 3, "drill": "Auto"}
    assert stored["restart"]["inPlace"] == in_place
    assert stored["hang"] == {"startupSeconds": 600, "stepSeconds": 300, "snapshotSeconds": 600}
    assert spec.parse(given) == spec.parse(stored)


def strict(schema: Schema) -> Schema:
    """Return the schema as the API server's strict validation reads it: unknown is refused."""
    result = dict(schema)
    if result.pop("x-kubernetes-int-or-string", False):
        result["type"] = ["integer", "string"]
    if "properties" in result:
        result["properties"] = {k: strict(v) for k, v in result["properties"].items()}
        if not result.get("x-kubernetes-preserve-unknown-fields"):
            result["additionalProperties"] = False
    if "items" in result:
        result["items"] = strict(result["items"])
    return result


@pytest.fixture(scope="module")
def validate(root: Schema) -> Callable[[Any], None]:
    schema = strict(root)
    schema["properties"] = {**schema["properties"], "metadata": {"type": "object"}}
    jsonschema.Draft7Validator.check_schema(schema)

    def run(body: Any) -> None:
        jsonschema.validate(body, schema)

    return run


def jobs() -> list[tuple[str, dict[str, Any]]]:
    return [(f, body) for f in examples() for body in example(f) if body["kind"] == "DDPJob"]


@pytest.mark.parametrize(("file", "body"), jobs(), ids=[file for file, _ in jobs()])
def test_examples_fit_the_schema(
    file: str, body: dict[str, Any], validate: Callable[[Any], None]
) -> None:
    validate(body)
    with pytest.raises(jsonschema.ValidationError, match="replica'"):
        validate(changed(body, "spec.replica", 1))


@pytest.mark.parametrize(("file", "body"), jobs(), ids=[file for file, _ in jobs()])
def test_examples_are_restricted(file: str, body: dict[str, Any]) -> None:
    pod = body["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod["containers"]:
        assert container["image"] in ("ddpjob/trainer:0.1.0", "example/trainer-s3:1")
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert "hostPath" not in json.dumps(body)


def test_digits_snapshots_lie_on_its_claim() -> None:
    claim, job = example("digits.yaml")
    assert claim["kind"] == "PersistentVolumeClaim"
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    volume = job["spec"]["snapshot"]["volume"]
    assert volume == {"persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}}
    assert job["spec"]["replicas"] == 3


def test_example_scripts_exist() -> None:
    for _, body in jobs():
        (container,) = body["spec"]["template"]["spec"]["containers"]
        for word in container["command"]:
            if word.startswith("/workspace/"):
                assert (ROOT / word.removeprefix("/workspace/")).is_file(), word


def test_the_check_of_gpus_is_one_pod_per_node_with_a_command_that_exists() -> None:
    (job,) = example("gpu-check.yaml")
    pod = job["spec"]["template"]["spec"]
    (apart,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart["topologyKey"] == "kubernetes.io/hostname"
    assert apart["labelSelector"] == {"matchLabels": {"ddpjob.dev/job-name": "gpu-check"}}
    program, *words = pod["containers"][0]["command"]
    assert program == "ddpjob-trainer"
    assert cli._parser().parse_args(words).command == "gpu-check"


def test_jobs_that_the_pages_show_fit_the_schema(validate: Callable[[Any], None]) -> None:
    for _, body in [*documented(), ("the smallest", ddpjob())]:
        validate(body)
    text = (ROOT / "README.md").read_text()
    (block,) = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(block.splitlines()) == 15  # as README is asked to show
