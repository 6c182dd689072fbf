"""Every field of the CRD's spec does something: none is taken and then ignored."""

from typing import Any

from ddpjob_operator.core.objects import spec
from support.world import crd_schema, job_object

#: Kept as they are, and read when pods are rendered, or by the launcher.
WHOLE = ("spec.template", "spec.snapshot.volume", "spec.output")


class Noting(dict[str, Any]):
    """An object that writes down which of its fields are asked for."""

    def __init__(self, path: str, read: set[str], fields: dict[str, Any]) -> None:
        super().__init__(fields)
        self._path, self._read = path, read

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(f"{self._path}.{key}")
        return super().get(key, default)


def example(schema: dict[str, Any], path: str, read: set[str], known: set[str]) -> Noting:
    """An object of the schema with all objects in it; of other values the defaults hold."""
    made: dict[str, Any] = {}
    for name, part in schema.get("properties", {}).items():
        below = f"{path}.{name}"
        known.add(below)
        if "properties" in part and below not in WHOLE:
            made[name] = example(part, below, read, known)
        elif "properties" in part.get("items", {}):
            made[name] = [example(part["items"], below, read, known)]
    return Noting(path, read, made)


def test_every_field_of_the_spec_is_read():
    read, known = set[str](), set[str]()
    raw = example(crd_schema()["properties"]["spec"], "spec", read, known)
    raw["template"] = job_object()["spec"]["template"]
    raw["snapshot"]["volume"] = {"emptyDir": {}}
    raw["nodeLost"]["policy"] = "Fence"  # Wait has no use for afterSeconds
    spec.parse(raw)
    assert "spec.restart.rules.exitCodes" in known
    assert known - read == set()
