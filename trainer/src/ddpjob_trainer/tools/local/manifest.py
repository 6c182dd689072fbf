"""Reads a manifest: the one DDPJob of a file, its ConfigMaps, and the CRD's defaults.

What the API server would refuse is refused here only where it would stand in the way.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ddpjob_contract.crd import API_VERSION, DEFAULTS, GPUS, KIND, TRAINER_CONTAINER
from ddpjob_trainer.arguments import job_name
from ddpjob_trainer.errors import ConfigError

#: What has a meaning here, by level. The rest is said and left out.
_TOP = {"apiVersion", "kind", "metadata", "spec", "status"}
_TEMPLATE = {"metadata", "spec"}
_SPEC = {"replicas", "template", "nprocPerNode", "restart", "snapshot", "hang"}
_POD = {"containers", "volumes", "terminationGracePeriodSeconds"}
_CONTAINER = {"name", "command", "args", "env", "envFrom", "workingDir", "volumeMounts"}
_KINDS: Final = {bool: "true or false", int: "a whole number, 0 or more", str: "a string"}
_KEY: Final = re.compile(r"[-._a-zA-Z0-9]+")
#: What is read below them needs them to be of this kind.
_OBJECTS = ("restart", "restart.backoff", "restart.inPlace", "snapshot", "hang")
_KNOWN = {*DEFAULTS, *_OBJECTS, "restart.rules", "restart.progressPath"}
_KNOWN |= {"snapshot.path", "snapshot.volume"}
#: Kinds below spec, the pod and the trainer: str; {field: kind}; [kind of each].
_ITEM: Final = {"key": str, "path": str}
_KEY_REF: Final = {"name": str, "key": str}
_VALUE_FROM: Final = {
    "fieldRef": {"fieldPath": str}, "configMapKeyRef": _KEY_REF, "secretKeyRef": _KEY_REF
}  # fmt: skip
_IN_SPEC: Final = {"restart": {"rules": [{}], "progressPath": str}}
_IN_POD: Final = {"volumes": [{"name": str, "configMap": {"name": str, "items": [_ITEM]}}]}
_IN_TRAINER: Final = {
    "command": [str],
    "args": [str],
    "workingDir": str,
    "resources": {"limits": {}},
    "env": [{"valueFrom": _VALUE_FROM}],
    "envFrom": [{"prefix": str, "configMapRef": {"name": str}}],
    "volumeMounts": [{"name": str, "mountPath": str, "subPath": str}],
}


@dataclass(frozen=True, slots=True)
class Manifest:
    """A DDPJob as written. ``config_maps``: name -> file -> content."""

    whole: Mapping[str, Any]
    name: str
    namespace: str
    spec: Mapping[str, Any]
    pod: Mapping[str, Any]
    trainer: Mapping[str, Any]
    config_maps: Mapping[str, Mapping[str, bytes]]

    def setting(self, path: str) -> Any:
        """Read a field below .spec, or the CRD's default. Raises ConfigError."""
        default = DEFAULTS[path]
        found: Any = self.spec
        for part in path.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        if found is None:
            return default
        if type(found) is not type(default) or (type(found) is int and found < 0):
            raise ConfigError(f"spec.{path}: {found!r} must be {_KINDS[type(default)]}")
        return found

    @property
    def nproc(self) -> int:
        """Processes per replica: nprocPerNode; auto: the GPUs of the limit, else 1."""
        given = self.spec.get("nprocPerNode", DEFAULTS["nprocPerNode"])
        if given == "auto":
            limits = (self.trainer.get("resources") or {}).get("limits") or {}
            gpus = [str(limits.get(name, "")) for name in GPUS]
            return next((int(one) for one in gpus if one.isdecimal() and int(one)), 1)
        return count("spec.nprocPerNode", given)

    def left_out(self) -> list[str]:
        """Fields that mean nothing on one machine."""
        levels = (
            ("", self.whole, _TOP),
            ("spec.", self.spec, _SPEC),
            ("spec.template.", self.spec["template"], _TEMPLATE),
            ("", self.pod, _POD),
            ("", self.trainer, _CONTAINER),
        )
        found = {f"{at}{key}" for at, given, used in levels for key in given.keys() - used}
        # A misspelt one, too, would be left out, and the API server would refuse it.
        for path in _OBJECTS:
            given = self.spec
            for part in path.split("."):
                given = given.get(part) or {}
            found |= {f"spec.{path}.{key}" for key in given if f"{path}.{key}" not in _KNOWN}
        others = {f"container {one.get('name')}" for one in self.pod["containers"]}
        return sorted(found | others - {f"container {self.trainer.get('name')}"})


def count(field: str, value: object) -> int:
    """Read a whole number from 1 on. Raises ConfigError."""
    if type(value) is not int or value < 1:
        raise ConfigError(f"{field}: {value!r} must be a whole number, at least 1")
    return value


def text(field: str, value: object) -> str:
    """Read a string as written. A number or a Yes has lost how it was. Raises ConfigError."""
    if not isinstance(value, str):
        raise ConfigError(f"{field}: {value!r} must be a string: put it in quotes")
    return value


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
    if (api := jobs[0].get("apiVersion", API_VERSION)) != API_VERSION:
        raise ConfigError(f"apiVersion: {api!r} must be {API_VERSION}")
    meta, spec = _object(jobs[0], "metadata"), _object(jobs[0], "spec")
    name = job_name("metadata.name", meta.get("name") or _generated(meta), most=61)
    pod = _object(_object(spec, "spec.template"), "spec.template.spec")
    containers = pod.get("containers")
    if not isinstance(containers, list) or not all(isinstance(c, dict) for c in containers):
        raise ConfigError("spec.template.spec.containers: must be a list of containers")
    named = [one for one in containers if one.get("name") == TRAINER_CONTAINER] + containers
    if not named:
        raise ConfigError("spec.template.spec.containers: at least one container is needed")
    _check(spec, pod, named[0])
    maps = {
        text("ConfigMap metadata.name", _object(one, "metadata").get("name", "")): {
            **{key: text(f"data {key}", v).encode() for key, v in _files(one, "data")},
            **{key: _binary(key, v) for key, v in _files(one, "binaryData")},
        }
        for one in objects
        if one.get("kind") == "ConfigMap"
    }
    namespace = meta.get("namespace") or "default"
    return Manifest(jobs[0], name, namespace, spec, pod, named[0], maps)


def _generated(meta: Mapping[str, Any]) -> str:
    return str(meta.get("generateName") or "").rstrip("-")


def _check(spec: Mapping[str, Any], pod: Mapping[str, Any], trainer: Mapping[str, Any]) -> None:
    for path in _OBJECTS:
        found: Any = spec
        for part in path.split("."):
            found = found.get(part) if found else None
        _of_kind(path, found, {})
    for given, wanted in ((spec, _IN_SPEC), (pod, _IN_POD), (trainer, _IN_TRAINER)):
        for name, kind in wanted.items():
            _of_kind(name, given.get(name), kind)


def _of_kind(path: str, found: object, wanted: Any) -> None:
    """Check a value's kind; none is of every kind, but not in a list. Raises ConfigError."""
    if found is None:
        return
    if wanted is str:
        text(path, found)
    elif isinstance(wanted, dict):
        if not isinstance(found, dict):
            raise ConfigError(f"{path}: {found!r} must be an object with fields")
        for name, kind in wanted.items():
            _of_kind(f"{path}.{name}", found.get(name), kind)
    else:
        [each] = wanted
        what = "strings" if each is str else "objects"
        if not isinstance(found, list):
            raise ConfigError(f"{path}: {found!r} must be a list of {what}")
        for one in found:
            if one is None:
                raise ConfigError(f"{path}: an item is empty: it must be a list of {what}")
            _of_kind(path, one, each)


def _files(config_map: Mapping[str, Any], field: str) -> Iterable[tuple[str, Any]]:
    found = config_map.get(field) or {}
    _of_kind(f"ConfigMap {field}", found, {})
    for key in found:
        if not _KEY.fullmatch(text(f"ConfigMap {field}", key)) or key.startswith(
            ".."
        ):  # ../x would be outside of the folder
            raise ConfigError(
                f"ConfigMap {field}: {key!r} must be a file's name: letters, digits, - _ ."
            )
    return found.items()


def _binary(key: str, value: object) -> bytes:
    try:
        return base64.b64decode("".join(text(f"binaryData {key}", value).split()), validate=True)
    except ValueError:
        raise ConfigError(f"ConfigMap binaryData: {key}: is not base64") from None


def _object(parent: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    found = parent.get(path.rpartition(".")[2])
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: must be there, an object with fields")
    return found


def _objects(content: str) -> list[dict[str, Any]]:
    try:
        found = [json.loads(content)]
    except ValueError:
        import yaml  # here: no other command reads YAML, and pods start without it

        class Loader(yaml.SafeLoader):
            """As kubectl reads: a time is a string, and a key that comes twice is refused."""

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
