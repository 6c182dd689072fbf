"""The chart's admission policy about the operator's account, on an API server."""

from __future__ import annotations

import subprocess
from typing import Any

from devcluster import binaries
from support.chart import CHART
from support.cluster import Cluster, wait_for
from support.manifest import as_json

#: Who the operators of tests/api are, but for those with rights of their own (support/rights.py).
ACCOUNT = "system:serviceaccount:ops:ddpjob-operator"
#: For what the account may do by its rights is another matter.
AS_OPERATOR = (f"--as={ACCOUNT}", "--as-group=system:masters")
LEASE = "ddpjob-operator"


def bind(plane: Cluster, namespace: str = "ops", account: str = LEASE, *values: str) -> None:
    """Let the policy hold for that account; return once it does."""
    helm = binaries.ensure(["helm"], print)["helm"]
    own = ["serviceAccount.create=false", f"serviceAccount.name={account}", *values]
    sets = [word for value in own for word in ("--set", value)]
    command = [helm, "template", "ddpjob", str(CHART), "-n", namespace, *sets]
    command += ["-s", "templates/policies.yaml"]
    made = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    plane.kubectl("apply", "-f", "-", input=made, check=True)
    user = f"--as=system:serviceaccount:{namespace}:{account}"
    # The API server takes policies in by and by.
    wait_for(lambda: "no Lease but its own" in refused(plane, lease("other"), user), "the policy")


def refused(plane: Cluster, body: dict[str, Any], user: str, namespace: str = "default") -> str:
    """What the API server says if it does not take it, else an empty string."""
    group = ["--as-group=system:masters"]
    dry = ["create", "--dry-run=server", "-n", namespace, "-f", "-", user, *group]
    done = plane.kubectl(*dry, input=as_json(body))
    return done.stderr if done.returncode else ""


def lease(name: str) -> dict[str, Any]:
    """A Lease that nobody holds."""
    api = "coordination.k8s.io/v1"
    return {"apiVersion": api, "kind": "Lease", "metadata": {"name": name}, "spec": {}}
