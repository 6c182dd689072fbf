"""The chart's folder, and what the fixtures of tests/chart are."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

from support.cluster import ROOT

CHART = ROOT / "charts" / "ddpjob"
#: Rendered objects by "Kind/name", or "Kind/namespace/name" outside of the release's.
Objects = dict[str, dict[str, Any]]
Template = Callable[..., Objects]
Helm = Callable[..., subprocess.CompletedProcess[str]]


def panels() -> Iterator[dict[str, Any]]:
    """The panels of the dashboard, without the titles between them."""
    for panel in json.loads((CHART / "files" / "dashboard.json").read_text())["panels"]:
        if panel["type"] != "row":
            yield panel
