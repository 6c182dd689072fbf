"""Manifests in tests: a small valid DDPJob, changes to it by dotted path, rights of a role."""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from support.cluster import ROOT

EXAMPLES = ROOT / "manifests" / "examples"
YOUR_SCRIPT = ROOT / "docs" / "start" / "your-script.md"
DELETE = object()


def ddpjob(name: str = "job", **spec: Any) -> dict[str, Any]:
    """Return the smallest valid DDPJob, its spec updated with ``spec``."""
    template = {"spec": {"containers": [{"name": "trainer", "image": "example/train:1"}]}}
    return {
        "apiVersion": "ddpjob.dev/v1alpha1",
        "kind": "DDPJob",
        "metadata": {"name": name},
        "spec": {"replicas": 3, "template": template, **spec},
    }


def changed(body: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return a copy with the field at ``path`` set; parts of digits index lists.

    Missing objects on the way are made; a list index equal to the length appends;
    ``DELETE`` removes the field.
    """
    result = copy.deepcopy(dict(body))
    at: Any = result
    parts = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part, following in itertools.pairwise(parts):
        if isinstance(at, list) and part == len(at):
            at.append({})
        elif isinstance(at, dict) and part not in at:
            at[part] = [] if isinstance(following, int) else {}
        at = at[part]
    last = parts[-1]
    if value is DELETE:
        del at[last]
    elif isinstance(at, list) and last == len(at):
        at.append(value)
    else:
        at[last] = value
    return result


def as_json(body: Mapping[str, Any]) -> str:
    """Return what ``kubectl apply -f -`` reads."""
    return json.dumps(body)


def examples() -> list[str]:
    """Return what example() knows: the files below manifests/examples, folders included."""
    return sorted(str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.yaml"))


def example(name: str) -> list[dict[str, Any]]:
    """Return the objects of manifests/examples/NAME."""
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


def pages() -> list[Path]:
    """Return the pages for people: those of docs/ and those at the root."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def blocks(heading: str) -> list[str]:
    """Return what stands in the fences of a section of YOUR_SCRIPT, in their order."""
    section = YOUR_SCRIPT.read_text().split(f"\n## {heading}\n")[1].partition("\n## ")[0]
    return re.findall(r"^```\w*\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


def documented() -> list[tuple[str, dict[str, Any]]]:
    """Return (page:line, DDPJob) of every whole DDPJob that a page shows."""
    found = []
    for page in pages():
        text = page.read_text()
        for block in re.finditer(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            if "\nkind: DDPJob\n" in f"\n{block[1]}":
                place = f"{page.name}:{text.count(chr(10), 0, block.start()) + 1}"
                bodies = [each for each in yaml.safe_load_all(block[1]) if each]
                found += [(place, body) for body in bodies if body["kind"] == "DDPJob"]
    return found


def rights(role: dict[str, Any]) -> dict[tuple[str, str], set[str]]:
    """Return {(group, resource): verbs} of a Role or ClusterRole."""
    found: dict[tuple[str, str], set[str]] = {}
    for rule in role["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                found.setdefault((group, resource), set()).update(rule["verbs"])
    return found
