"""What deployment tools make of an object: kstatus' generic rules, and Argo CD's health script."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

import yaml

from devcluster import host
from support.cluster import ROOT
from support.rest import Object

_KEY = "resource.customizations.health.ddpjob.dev_DDPJob"


def kstatus(obj: Object) -> str:
    """As sigs.k8s.io/cli-utils/pkg/kstatus tells of a kind that it has no rules for."""
    status = obj.get("status") or {}
    seen = status.get("observedGeneration")
    if seen is not None and seen != obj["metadata"]["generation"]:
        return "InProgress"
    told = {c["type"]: c["status"] for c in status.get("conditions") or ()}
    if told.get("Stalled") == "True":
        return "Failed"
    return "Current" if told.get("Ready", "True") == "True" else "InProgress"


def argo_health(obj: Object) -> tuple[str, str]:
    """Status and message, by the script of docs/guides/gitops.md in a Lua of Debian's."""
    host.ensure_packages({"lua5.4": "lua5.4"}, print)
    page = (ROOT / "docs/guides/gitops.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (script,) = (found[_KEY] for found in map(yaml.safe_load, blocks) if _KEY in found)
    told = f"local health = (function()\n{script}\nend)()\n"
    told += 'io.write(health.status, "\\n", health.message)'
    lua = ["lua5.4", "-"]
    said = host.run(lua, "the health script", text=f"local obj = {_literal(obj)}\n{told}")
    status, _, message = said.partition("\n")
    return status, message


def _literal(value: object) -> str:
    """JSON's values as Lua writes them; in a table null is the same as nothing."""
    if isinstance(value, Mapping):
        fields = (f"[{_literal(k)}]={_literal(v)}" for k, v in value.items() if v is not None)
        return "{" + ",".join(fields) + "}"
    if isinstance(value, list):
        return "{" + ",".join(map(_literal, value)) + "}"
    if isinstance(value, str):
        return '"' + "".join(rf"\u{{{ord(c):x}}}" for c in value) + '"'
    return json.dumps(value)
