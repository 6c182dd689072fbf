"""The kubectl plugin as its user runs it, and users with few rights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddpjob_contract.crd import LABEL_ATTEMPT, LABEL_REPLICA
from devcluster import binaries
from kubectl_ddp.kubectl import Failure, Kubectl
from support.cluster import ROOT, Cluster
from support.patience import PATIENCE

PATHS = f"{ROOT / 'contract/src'}{os.pathsep}{ROOT / 'plugin/src'}"


@dataclass(frozen=True, slots=True)
class Plugin:
    """`kubectl ddp` in a namespace, with the rights of a kubeconfig."""

    kubeconfig: Path
    namespace: str

    def run(self, *args: str, timeout: float = PATIENCE) -> subprocess.CompletedProcess[str]:
        """Run it; what it wrote is text."""
        flags = [f"--kubeconfig={self.kubeconfig}", f"--namespace={self.namespace}"]
        return subprocess.run(
            [sys.executable, "-m", "kubectl_ddp", *args, *flags],
            env=environment(), capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip

    def says(self, *args: str) -> str:
        """Its stdout; it must succeed and have nothing to complain of."""
        done = self.run(*args)
        assert (done.returncode, done.stderr) == (0, ""), (done.stdout, done.stderr)
        return done.stdout

    def refuses(self, *args: str) -> str:
        """Its one line of complaint."""
        done = self.run(*args)
        assert (done.returncode, done.stdout) == (1, ""), (done.stdout, done.stderr)
        (line,) = done.stderr.splitlines()
        return line


def environment(*more: Path) -> dict[str, str]:
    """PATH with kubectl, and the plugin's source. ``more`` directories of programs."""
    path = [str(binaries.toolbox(print)), *map(str, more), os.environ["PATH"]]
    return {**os.environ, "PATH": os.pathsep.join(path), "PYTHONPATH": PATHS}


def user(
    plane: Cluster, namespace: str, name: str, rules: Sequence[dict[str, Any]], folder: Path
) -> Plugin:
    """Make a ServiceAccount with just these rules; the plugin as it would use it."""
    api = "rbac.authorization.k8s.io"
    role = {"apiVersion": f"{api}/v1", "kind": "Role", "metadata": {"name": name}, "rules": rules}
    binding = {
        "apiVersion": f"{api}/v1",
        "kind": "RoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": api, "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
    }
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}}
    objects = json.dumps({"apiVersion": "v1", "kind": "List", "items": [account, role, binding]})
    plane.kubectl("-n", namespace, "apply", "-f", "-", input=objects, check=True)
    token = plane.kubectl("-n", namespace, "create", "token", name, check=True).stdout.strip()
    config = yaml.safe_load(plane.kubectl("config", "view", "--raw", check=True).stdout)
    config["users"] = [{"name": one["name"], "user": {"token": token}} for one in config["users"]]
    path = folder / f"{name}.kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return Plugin(path, namespace)


# --- Without a cluster --------------------------------------------------------------------


def fake_kubectl(folder: Path, script: str) -> dict[str, str]:
    """An environment in which a shell script is kubectl; it finds its files in $HERE."""
    (folder / "kubectl").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "kubectl").chmod(0o755)
    return {"PATH": f"{folder}:/bin:/usr/bin", "PYTHONPATH": PATHS, "HERE": str(folder)}


def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Answers of kubectl by its first two words; a Failure is raised, what is missing is one."""
    found: dict[str, Any] = {"calls": []}

    def read(_: Kubectl, *words: str) -> str:
        found["calls"].append(words)
        key = "exec" if words[0] == "exec" else " ".join(words[:2])
        answer = found.get(key, Failure(f"you may not {key}"))
        if isinstance(answer, Failure):
            raise answer
        return answer if isinstance(answer, str) else json.dumps(answer)

    monkeypatch.setattr(Kubectl, "read", read)
    return found


def job(phase: str = "Running", version: int = 1, uid: str = "u") -> dict[str, Any]:
    """A DDPJob j of two replicas."""
    meta = {"name": "j", "namespace": "n", "uid": uid, "resourceVersion": str(version)}
    restart = {"maxRestarts": 3, "maxDisruptions": 100, "replaceSeconds": 300}
    spec = {"replicas": 2, "metrics": {"port": 9400}, "restart": restart, "template": {}}
    return {"metadata": meta, "spec": spec, "status": {"phase": phase}}


def pod(replica: int, attempt: int, state: str = "running") -> dict[str, Any]:
    """A pod of that job; ``state`` is its container's."""
    return {
        "metadata": {
            "name": f"j-{replica}",
            "uid": f"{attempt}-{replica}",
            "labels": {LABEL_REPLICA: str(replica), LABEL_ATTEMPT: str(attempt)},
            "ownerReferences": [{"controller": True, "uid": "u"}],
        },
        "spec": {"containers": [{"name": "t"}]},
        "status": {"containerStatuses": [{"name": "t", "state": {state: {}}}]},
    }


def wheel(folder: Path, name: str, needs: str = "") -> str:
    """Write a package x = 7 of that name; return it as a requirement."""
    with zipfile.ZipFile(folder / f"{name}-1-py3-none-any.whl", "w") as made:
        made.writestr(f"{name}.py", "x = 7\n")
        about = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n{needs}"
        made.writestr(f"{name}-1.dist-info/METADATA", about)
        made.writestr(f"{name}-1.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        made.writestr(f"{name}-1.dist-info/RECORD", "")
    return f"./{name}-1-py3-none-any.whl"
