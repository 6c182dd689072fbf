"""Writes docs/reference/api.md, every field of a DDPJob, from the CRD's own schema.

Descriptions, defaults, bounds and rules stand in the CRD only, so that `kubectl explain`, the
API server and the page cannot disagree.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

_BOUND: Final = re.compile(r"self >= \d+")
#: What means the same as in any pod or condition.
_PLAIN: Final = re.compile(
    r"spec\.template\.spec\.(volumes\[|containers\[\]\.(name|image|command|args|ports|resources"
    r"|volumeMounts|env\[))|spec\.template\.metadata\.creation|spec\.snapshot\.volume\."
    r"(?!persistentVolumeClaim|ephemeral|emptyDir|hostPath)|status\.conditions\[\]"
)
#: What an operator writes for itself, and for the next one.
_BOOKS: Final = re.compile(
    r"status\.(observedG|stalled|membersS|podGroup|births|holds|serving|templateH|snapshotH|operator"
    r"|succeededR|ledger\.hub|restarts\.(round|consec|snapshotS|fileM)|timings\.(placed|lastRound))"
)

INTRO = """\
# DDPJob: every field

<!-- Written by charts/render.py from the CRD; change charts/ddpjob/templates/_crd_*.tpl. -->

`apiVersion: {api}`, `kind: {kind}`, short name `{short}`. `kubectl explain ddpjob.spec --recursive`
shows the same, and what is left out here: fields as in any pod, and the operator's own records.
`kubectl apply` refuses unknown fields, except in the pod template and `spec.snapshot.volume`, and
what breaks a rule between fields. Durations are in seconds. Words: [glossary.md](glossary.md).
"""

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """One field; ``same_as`` is the path whose fields it shares, else empty."""

    path: str
    schema: Schema
    required: bool
    same_as: str


def render(definition: Schema) -> str:
    """Return the page for a CustomResourceDefinition (one version)."""
    version = definition["spec"]["versions"][0]
    names = definition["spec"]["names"]
    root = version["schema"]["openAPIV3Schema"]
    intro = INTRO.format(
        api=f"{definition['spec']['group']}/{version['name']}",
        kind=names["kind"],
        short=names["shortNames"][0],
    )
    parts = [intro, "## Columns of `kubectl get ddpjobs`\n", _columns(version)]
    for name in ("spec", "status"):
        schema = root["properties"][name]
        parts += [f"## {name}\n", f"{schema['description']}\n", _fields(schema, name)]
    return "\n".join(parts)


def _columns(version: Schema) -> str:
    shown: dict[bool, list[str]] = {False: [], True: []}
    for column in version["additionalPrinterColumns"]:
        shown[bool(column.get("priority"))].append(f"{column['name']} `{column['jsonPath']}`")
    return f"{', '.join(shown[False])}.\n\nWith `-o wide` also {', '.join(shown[True])}.\n"


def _fields(schema: Schema, prefix: str) -> str:
    """Return a line for each field; those of one parent with the same description share one."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for row in _walk(schema, prefix, []):
        said = row.schema["description"].split()
        heading = len(said) <= 8 and "properties" in row.schema  # its fields say more
        if heading or _PLAIN.match(row.path) or _BOOKS.match(row.path):
            continue
        cell = _cell(row.schema) + (
            f" Its fields are those of `{row.same_as}`." * bool(row.same_as)
        )
        parent = row.path.rpartition(".")[0]
        kind = _type(row.schema) + _default(row.schema, row.required)
        rows.setdefault((parent, kind, cell), []).append(row.path)
    named = {row: ", ".join(f"`{path}`" for path in paths) for row, paths in rows.items()}
    kinds = {row: f" ({row[1]})" * (prefix == "spec") for row in rows}
    return "\n".join(f"- {named[row]}{kinds[row]}: {row[2]}" for row in rows) + "\n"


def _walk(schema: Schema, prefix: str, shown: list[tuple[str, Schema]]) -> Iterator[Row]:
    """Yield every field below ``schema``, parents first; equal sets of fields only once."""
    for name, field in schema.get("properties", {}).items():
        path = f"{prefix}.{name}"
        inner = field.get("items", field)
        below = f"{path}[]" if "items" in field else path
        fields = inner.get("properties")
        same_as = next((where for where, seen in shown if fields and seen == fields), "")
        yield Row(path, field, name in schema.get("required", ()), same_as)
        if fields and not same_as:
            shown.append((below, fields))
            yield from _walk(inner, below, shown)


def _type(field: Schema) -> str:
    if field.get("x-kubernetes-int-or-string"):
        return "integer or string"
    if "items" in field:
        return f"array of {_type(field['items'])}"
    if "additionalProperties" in field:
        return "map of string"
    if field.get("format") == "date-time":
        return "time"
    return str(field.get("type", "quantity"))  # the only fields whose type is left open


def _default(field: Schema, required: bool) -> str:
    """Return what follows the type."""
    if required:
        return ", required"
    default = field.get("default")
    if default in (None, "") or isinstance(default, dict):
        return ""
    return f", `{str(default).lower() if isinstance(default, bool) else default}`"


def _cell(field: Schema) -> str:
    """Return the description with what the schema itself adds to it, in one line."""
    bounds = _bounds(field)
    item_bounds = _bounds(field["items"]) if "items" in field else ""
    extra = [bounds, f"each {item_bounds}" if item_bounds else ""]
    said = field["description"]
    text = said + "".join(f" *{part}*" for part in extra if part and part not in said)
    return " ".join(text.split()).replace("<", "&lt;")


def _bounds(field: Schema) -> str:
    parts = []
    if "enum" in field and not all(
        re.search(rf"\b{e}\b", field["description"]) for e in field["enum"]
    ):
        parts.append("one of " + ", ".join(field["enum"]))
    least = _least(field)
    if least is not None and "maximum" in field:
        parts.append(f"{least} to {field['maximum']}")
    elif least is not None:
        parts.append(f"at least {least}")
    return ", ".join(parts)


def _least(field: Schema) -> int | None:
    """Return the minimum; a rule that asks for more does so for the sake of its message."""
    asked = [rule["rule"].strip() for rule in field.get("x-kubernetes-validations", ())]
    more = [int(rule.removeprefix("self >= ")) for rule in asked if _BOUND.fullmatch(rule)]
    return max([field["minimum"], *more]) if "minimum" in field else None
