"""A ServiceAccount for the operator of a stage, with just the rights that a test gives it."""

from __future__ import annotations

import contextlib
from typing import Any

from support.rest import Object, Rest, RestError

_RBAC = "/apis/rbac.authorization.k8s.io/v1"
_NAME = "operator"


class Rights:
    """``token`` is the account's. Rules are those of a ClusterRole, for nodes are nobody's."""

    def __init__(self, rest: Rest, namespace: str) -> None:
        self._rest, self._namespace = rest, namespace
        self._role = f"{_NAME}-{namespace}"
        accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
        with contextlib.suppress(RestError):
            rest.post(accounts, _object("v1", "ServiceAccount", _NAME))
        body: Object = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
                        "spec": {"expirationSeconds": 3600}}  # fmt: skip
        self.token: str = rest.post(f"{accounts}/{_NAME}/token", body)["status"]["token"]

    def give(self, rules: list[dict[str, Any]]) -> None:
        """From now on these, and no others."""
        path, version = f"{_RBAC}/clusterroles", "rbac.authorization.k8s.io/v1"
        rules = [rule for rule in rules if rule["verbs"]]
        if self._rest.find(f"{path}/{self._role}"):
            self._rest.merge(f"{path}/{self._role}", {"rules": rules})
            return
        self._rest.post(path, {**_object(version, "ClusterRole", self._role), "rules": rules})
        binding = {
            **_object(version, "ClusterRoleBinding", self._role),
            "roleRef": {"kind": "ClusterRole", "name": self._role,
                        "apiGroup": "rbac.authorization.k8s.io"},
            "subjects": [{"kind": "ServiceAccount", "name": _NAME, "namespace": self._namespace}],
        }  # fmt: skip
        self._rest.post(f"{_RBAC}/clusterrolebindings", binding)


def _object(version: str, kind: str, name: str) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}}
