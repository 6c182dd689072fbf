"""The chart's folder, and what the fixtures of tests/chart are."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import yaml

from devcluster import binaries
from support.cluster import ROOT

CHART = ROOT / "charts" / "ddpjob"
#: Rendered objects by "Kind/name", or "Kind/namespace/name" outside of the release's.
Objects = dict[str, dict[str, Any]]
Template = Callable[..., Objects]
Helm = Callable[..., subprocess.CompletedProcess[str]]


def operator_rules(*flags: str) -> list[dict[str, Any]]:
    """What the chart gives the operator with these flags of helm, and nothing else."""
    helm = binaries.ensure(["helm"], print)["helm"]
    command = [helm, "template", "ddpjob", CHART, "--set", "rbac.userRoles=false", *flags]
    made = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    roles = [one for one in yaml.safe_load_all(made) if one and one["kind"].endswith("Role")]
    return [rule for role in roles for rule in role["rules"]]


def panels() -> Iterator[dict[str, Any]]:
    """The panels of the dashboard, without the titles between them."""
    for panel in json.loads((CHART / "files" / "dashboard.json").read_text())["panels"]:
        if panel["type"] != "row":
            yield panel
