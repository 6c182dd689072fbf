"""Every field of the CRD's spec does something: none is taken and then ignored."""

from __future__ import annotations

from typing import Any

from ddpjob_operator.core.objects import spec
from support.world import crd_schema, job_object

#: Kept as they are, and read when pods are rendered.
WHOLE = ("spec.template", "spec.snapshot.volume")


class Noting(dict[str, Any]):
    """An object that writes down which of its fields are asked for."""

    def __init__(self, path: str, read: set[str], fields: dict[str, Any]) -> None:
        super().__init__(fields)
        self._path, self._read = path, read

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(f"{self._path}.{key}")
        return super().get(key, default)


def fields(schema: dict[str, Any], path: str) -> set[str]:
    """All paths below an object of the schema."""
    found: set[str] = set()
    for name, part in schema.get("properties", {}).items():
        below = f"{path}.{name}"
        found.add(below)
        if below not in WHOLE:
            found |= fields(part.get("items", part), below)
    return found


def example(schema: dict[str, Any], path: str, read: set[str]) -> Noting:
    """An object of the schema with all objects in it; of other values the defaults hold."""
    made: dict[str, Any] = {}
    for name, part in schema.get("properties", {}).items():
        below = f"{path}.{name}"
        if "properties" in part and below not in WHOLE:
            made[name] = example(part, below, read)
        elif "properties" in part.get("items", {}):
            made[name] = [example(part["items"], below, read)]
    return Noting(path, read, made)


def test_every_field_of_the_spec_is_read():
    schema, read = crd_schema()["properties"]["spec"], set[str]()
    raw = example(schema, "spec", read)
    raw["template"] = job_object()["spec"]["template"]
    raw["snapshot"]["volume"] = {"emptyDir": {}}
    raw["nodeLost"]["policy"] = "Fence"  # Wait has no use for afterSeconds
    spec.parse(raw)
    assert fields(schema, "spec") - read == set()
