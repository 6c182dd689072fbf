"""The chart's rights are the verbs that the operator's code uses: none missing, none to spare."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from ddpjob_operator.shell.api import client as api
from support.cluster import ROOT
from support.manifest import rights

SHELL = ROOT / "operator" / "src" / "ddpjob_operator" / "shell"
#: Methods of the operator's Api, and its one wrapper around get, as RBAC calls them.
VERBS = {
    "get": "get",
    "create": "create",
    "replace": "update",
    "delete": "delete",
    "list_all": "list",
    "watch": "watch",
    "_read_back": "get",
}
#: What is not seen in calls of Api: kopf's own watch, and the check that blockOwnerDeletion in
#: an ownerReference brings (admission plugin OwnerReferencesPermissionEnforcement).
BEYOND = {
    (api.JOBS.group, "ddpjobs"): {"list", "watch"},
    (api.JOBS.group, "ddpjobs/finalizers"): {"update"},
}
#: A variable instead of a constant: executor.py picks from its table of network objects, and
#: informer.py has a class for each kind.
VARIABLE = {
    "resource": (api.SERVICES, api.NETWORK_POLICIES),
    "self.resource": (api.PODS, api.NODES),
}


def used() -> Iterator[tuple[tuple[str, str], str]]:
    """Yield ((group, resource), verb) of every call of the Api in the shell."""
    for path in sorted(SHELL.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr not in VERBS or not _is_api(node.func) or not node.args:
                continue
            sub = [k.value.value for k in node.keywords if k.arg == "sub"]  # type: ignore[attr-defined]
            for resource in _resources(node.args[0]):
                name = "/".join([resource.plural, *sub])
                yield (resource.group, name), VERBS[node.func.attr]


def _is_api(function: ast.Attribute) -> bool:
    """`self._api.get(...)`, `api.get(...)` or `self._read_back(...)`."""
    owner = function.value
    name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
    return name in ("_api", "api") or function.attr == "_read_back"


def _resources(argument: ast.expr) -> tuple[api.Resource, ...]:
    name = ast.unparse(argument)
    if name in VARIABLE:
        return VARIABLE[name]
    found = getattr(api, name, None)
    assert isinstance(found, api.Resource), f"line {argument.lineno}: which resource is this?"
    return (found,)


def test_rights_are_the_verbs_in_use(template: Any) -> None:
    wanted: dict[tuple[str, str], set[str]] = {key: set(verbs) for key, verbs in BEYOND.items()}
    for key, verb in used():
        wanted.setdefault(key, set()).add(verb)
    objects = template()
    given = rights(objects["ClusterRole/ops:ddpjob-operator"])
    given |= rights(objects["Role/ddpjob-operator-lease"])
    assert given == wanted
