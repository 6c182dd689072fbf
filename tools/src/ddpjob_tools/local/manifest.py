"""Read a manifest: the one DDPJob of a file, its ConfigMaps, and the CRD's defaults.

Each value is a Node that knows its path, so that a refusal names the field. What the API server
would refuse is refused here only where it would stand in the way.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ddpjob_contract.crd import API_VERSION, DEFAULTS, GPUS, KIND, TRAINER_CONTAINER
from ddpjob_contract.stock import name_flaw
from ddpjob_trainer.errors import ConfigError

#: What has a meaning here, by level. The rest is said and left out.
_TOP = {"apiVersion", "kind", "metadata", "spec", "status"}
_TEMPLATE = {"metadata", "spec"}
_POD = {"containers", "volumes", "terminationGracePeriodSeconds"}
_CONTAINER = {"name", "command", "args", "env", "envFrom", "workingDir", "volumeMounts"}
_SPEC = {"replicas", "template", "nprocPerNode", "restart", "snapshot", "hang", "output"}
_OBJECTS: Final = ("restart", "restart.backoff", "restart.inPlace", "snapshot", "hang")
_KNOWN: Final = {
    *DEFAULTS, *_OBJECTS,
    "restart.rules", "restart.progressPath", "restart.resumeArgs", "restart.resumeWhen",
    "snapshot.path", "snapshot.volume", "hang.outputSeconds",
}  # fmt: skip
_KINDS: Final = {bool: "true or false", str: "a string"}
#: ../x would be outside of the folder.
_FILE: Final = re.compile(r"(?!\.\.)[-._a-zA-Z0-9]+")


@dataclass(frozen=True, slots=True)
class Node:
    """A value of the manifest, None where there is none, and its path."""

    value: Any
    path: str = ""

    def __getitem__(self, key: str) -> Node:
        return Node(self.fields().get(key), f"{self.path}.{key}".lstrip("."))

    def fields(self) -> Mapping[str, Any]:
        """Return an object's fields. Raises ConfigError, as all of these."""
        if not isinstance(self.value, dict | None):
            raise self.odd("an object with fields")
        return self.value or {}

    def items(self) -> list[Node]:
        """Return a list's items."""
        if not isinstance(self.value, list | None):
            raise self.odd("a list")
        found = [Node(one, f"{self.path}[{n}]") for n, one in enumerate(self.value or [])]
        for one in found:
            if one.value is None:
                raise ConfigError(f"{one.path}: is empty: leave it out, or put it in quotes")
        return found

    def text(self) -> str:
        """Return a string as written, "" for none. A number or a Yes has lost how it was."""
        if not isinstance(self.value, str | None):
            raise self.odd("a string: put it in quotes")
        return self.value or ""

    def whole(self, least: int = 0) -> int:
        """Return a whole number."""
        if type(self.value) is not int or self.value < least:
            raise self.odd(f"a whole number, at least {least}")
        return self.value

    def odd(self, what: str) -> ConfigError:
        """Return the refusal of a value that must be something else."""
        return ConfigError(f"{self.path}: {self.value!r} must be {what}")


@dataclass(frozen=True, slots=True)
class Manifest:
    """A DDPJob as written. ``config_maps``: name -> file -> content."""

    whole: Node
    name: str
    namespace: str
    trainer: Node
    config_maps: Mapping[str, Mapping[str, bytes]]

    @property
    def spec(self) -> Node:
        """Return .spec."""
        return self.whole["spec"]

    @property
    def pod(self) -> Node:
        """Return the spec of the template's pods."""
        return self.spec["template"]["spec"]

    def at(self, path: str) -> Node:
        """Return a field below .spec, named as in restart.backoff."""
        node = self.spec
        for part in path.split("."):
            node = node[part]
        return node

    def setting(self, path: str) -> Any:
        """Return a field below .spec, or the CRD's default. Raises ConfigError."""
        node, default = self.at(path), DEFAULTS[path]
        if node.value is None:
            return default
        if type(default) is int:
            return node.whole()
        if type(node.value) is not type(default):
            raise node.odd(_KINDS[type(default)])
        return node.value

    @property
    def nproc(self) -> int:
        """Return nprocPerNode; auto: the GPUs of the limit, else 1."""
        given = self.spec["nprocPerNode"]
        if given.value not in (None, "auto"):
            return given.whole(1)
        limits = self.trainer["resources"]["limits"].fields()
        gpus = [str(limits.get(name, "")) for name in GPUS]
        return next((int(one) for one in gpus if one.isdecimal() and int(one)), 1)

    def left_out(self) -> list[str]:
        """Return the fields that mean nothing on one machine."""
        levels = (
            ("", self.whole, _TOP),
            ("spec.", self.spec, _SPEC),
            ("spec.template.", self.spec["template"], _TEMPLATE),
            ("", self.pod, _POD),
            ("", self.trainer, _CONTAINER),
        )
        found = {f"{at}{key}" for at, given, used in levels for key in given.fields().keys() - used}
        # A misspelt one, too, would be left out, and the API server would refuse it.
        for path in _OBJECTS:
            given = self.at(path).fields()
            found |= {f"spec.{path}.{key}" for key in given if f"{path}.{key}" not in _KNOWN}
        others = {f"container {one['name'].value}" for one in self.pod["containers"].items()}
        return sorted(found | others - {f"container {self.trainer['name'].value}"})


def read(content: str) -> Manifest:
    """Find the DDPJob in a file of YAML or JSON. Raises ConfigError."""
    objects = _objects(content)
    jobs = [one for one in objects if one.get("kind") == KIND]
    if len(jobs) != 1:
        kinds = ", ".join(sorted({str(one.get("kind")) for one in objects} - {"List"}))
        raise ConfigError(
            f"{len(jobs)} objects of kind DDPJob in the file, which has {kinds or 'no object'}:"
            " there must be one"
        )
    whole = Node(jobs[0])
    if whole["apiVersion"].value not in (None, API_VERSION):
        raise whole["apiVersion"].odd(API_VERSION)
    meta = whole["metadata"]
    given = meta["name"].value or meta["generateName"].text().rstrip("-")
    if why := name_flaw(given, most=61):
        raise ConfigError(f"metadata.name: {why}")
    containers = whole["spec"]["template"]["spec"]["containers"].items()
    if not containers:
        raise ConfigError("spec.template.spec.containers: at least one container is needed")
    named = [one for one in containers if one["name"].value == TRAINER_CONTAINER]
    maps = (Node(one, "ConfigMap") for one in objects if one.get("kind") == "ConfigMap")
    return Manifest(
        whole,
        str(given),
        meta["namespace"].text() or "default",
        (named + containers)[0],
        {one["metadata"]["name"].text(): dict(_files(one)) for one in maps},
    )


def _files(config_map: Node) -> Iterator[tuple[str, bytes]]:
    for field in ("data", "binaryData"):
        for key in config_map[field].fields():
            if not _FILE.fullmatch(str(key)):
                raise ConfigError(
                    f"ConfigMap {field}: {key!r} must be a file's name: letters, digits, - _ ."
                )
            content = config_map[field][key]
            yield str(key), content.text().encode() if field == "data" else _binary(content)


def _binary(content: Node) -> bytes:
    try:
        return base64.b64decode("".join(content.text().split()), validate=True)
    except ValueError:
        raise content.odd("base64") from None


def _objects(content: str) -> list[dict[str, Any]]:
    try:
        found = [json.loads(content)]
    except ValueError:
        import yaml  # here: gpu-check and others run where it is not installed

        class Loader(yaml.SafeLoader):
            """As kubectl reads: a time is a string, a key that comes twice is refused."""

            def compose_mapping_node(self, anchor: Any) -> Any:
                node = super().compose_mapping_node(anchor)
                known: set[str] = set()
                for key, _ in node.value:
                    if str(key.value) in known:
                        at = key.start_mark.line + 1
                        raise ConfigError(f"line {at}: {key.value} is there already: keep one")
                    known.add(str(key.value))
                return node

        Loader.yaml_implicit_resolvers = {
            first: [(tag, pattern) for tag, pattern in known if not tag.endswith(":timestamp")]
            for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }
        try:
            found = list(yaml.load_all(content, Loader))
        except yaml.YAMLError as error:
            raise ConfigError(f"neither YAML nor JSON: {error}") from None
    # `kubectl get -o yaml` of several objects prints one of kind List.
    lists = [one["items"] for one in found if isinstance(one, dict) and one.get("kind") == "List"]
    inner = (each for items in lists if isinstance(items, list) for each in items)
    return [one for one in (*found, *inner) if isinstance(one, dict)]
